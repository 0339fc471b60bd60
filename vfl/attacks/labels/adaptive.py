"""An attacker that compares attacks on held-out leaked labels; the best attacks vote on guesses.

The search is successive halving (Jamieson and Talwalkar 2016); a candidate is one attack. First, it
runs every candidate with one fold (a part) of the leaked rows held out, on a sample of the
unlabelled rows. The best third of the candidates, but at least nine, continues with the next fold;
there are at most three folds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from vfl.attacks.base import LAYER_NEEDS, Attack, key_of
from vfl.attacks.labels.composed import Composed, Seen, layers_of
from vfl.attacks.view import Grant, View
from vfl.core.registry import require, require_range

_FOLDS = 3
_SAMPLE = 1500  # unlabelled rows on which a candidate is tried
_VOTES = 9
_UNEVEN = 1.5  # with more uneven class counts, guessing the frequent class is often right
_MANY = 100  # leaked rows
_TRUST = 8  # exponent: the weight of a vote is (share of right guesses)^8
_UNKNOWN = 0.8  # assumed share of right guesses if no row is held out
_SEARCH = 0.6  # share of the time budget for the first fold
_KEPT = 3  # one in this many candidates continues with the next fold
_MARGIN = 1.3  # safety factor for an expected time
_NEW = 4  # safety factor for the expected time of a learner that was not tried before
_SPENT = 0.85  # share of the time budget to plan with, because times are estimates
_SCALERS = ("none", "standard", "whiten", "shrink", "cosine", "rank", "batch", "zca")
#: Names of attacks that always read all rows, and not a sample.
_OF_ALL_ROWS = ("gradient_mixture", "gradient_teacher", "batch_sums")
_LEARNERS = (
    "label_propagation", "label_propagation:neighbours=5", "label_propagation:neighbours=20",
    "label_propagation:spread=0.9", "logistic", "logistic:strength=0.1", "nearest_mean", "knn",
    "svm", "svm:strength=10", "ridge", "discriminant", "mlp", "mlp:loss=robust", "trees",
)  # fmt: skip


@dataclass(eq=False)
class Trial:
    """One candidate, composed of layers, scaler, learner and teacher, with its results so far.

    Attributes:
        spec: spec of the candidate.
        right: score of each leaked row that was held out: 1 for a right guess, 0 for a wrong guess;
            see `ordered` for classes of unequal size.
        guesses: guessed classes of the sample of unlabelled rows.
        seconds: processor time of all folds, in seconds.
        folds: number of folds that the candidate has completed.
        agreement: mean share of the guesses that agree with the guesses of another candidate.
    """

    spec: str
    right: list[float] = field(default_factory=list)
    guesses: Tensor | None = None
    seconds: float = 0.0
    folds: int = 0
    agreement: float = 0.0

    @property
    def validation(self) -> float:
        """Return the mean of `right`: share of right guesses, or AUC; 0 if no row was held out."""
        return sum(self.right) / len(self.right) if self.right else 0.0


@dataclass(frozen=True, eq=False)
class Report:
    """The result of one search for the best candidates.

    Attributes:
        best: specs of the candidates that voted, the best one first.
        seconds: processor time of the whole search, in seconds.
        trials: all candidates that were tried, the best one first.
    """

    best: Sequence[str]
    seconds: float
    trials: Sequence[Trial]


class Adaptive(Attack):
    """Searches combinations of layers, scalers, learners and teachers; the nine best vote.

    If the attack reads the layer "accumulated" of a recorded training, the candidates include
    attacks on the gradients of all epochs, on sums of gradients, and on randomised labels
    (`accumulating`). The labels of the target rows cannot influence the choice, because they are
    not in the attacker's view.

    To compare the candidates, the attack holds out some of the leaked labels. The attack counts
    right guesses on the held-out rows, or computes the AUC if one class has more than 1.5 times as
    many leaked rows as another. If a class has only one leaked label, the attack cannot hold out
    any label. Then the best candidates are those whose guesses about unlabelled rows agree most
    with the guesses of the other candidates. With `at=inputs`, the same attack runs without the
    trained model, which makes it a baseline.

    Attributes:
        report: report of the last run; None before the first run.

    Args:
        at: layers that the candidates may read, joined by +; see `features`.
        budget_s: limit of processor time in seconds. If it is too short to compare candidates, the
            guesses are those of the cheapest candidate.
        candidates: number of candidates to try, in place of a time limit; the guesses are then
            repeatable. 0 uses the time limit `budget_s`.

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, at: str = "cut+inputs", budget_s: float = 60.0, candidates: int = 0) -> None:
        require_range("candidates", candidates, 0)
        require_range("budget_s", budget_s, 0)
        require("budget_s", budget_s, "more than 0", budget_s > 0 or candidates > 0)
        self.layers = layers_of(at)
        self.needs = frozenset({Grant.LEAKED, Grant.UNLABELLED}).union(
            *(LAYER_NEEDS[one] for one in self.layers)
        )
        if "accumulated" in self.layers:
            self.needs |= {Grant.PRIOR}
        self.budget_s, self.candidates = budget_s, candidates
        self.report: Report | None = None

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        search = _Search(self, view, draw)
        trials = search.trials()
        found, voted = search.vote(trials)
        self.report = Report(voted, search.spent, trials)
        return found

    def last_report(self) -> dict[str, Any] | None:
        if self.report is None:
            return None
        compositions = [
            {
                "spec": one.spec,
                "folds": one.folds,
                "held_out": round(one.validation, 4) if one.right else None,
                "agreement": round(one.agreement, 4),
                "seconds": round(one.seconds, 3),
            }
            for one in self.report.trials
        ]
        return {
            "budget_s": None if self.candidates else self.budget_s,
            "seconds": round(self.report.seconds, 3),
            "chosen": list(self.report.best),
            "compositions": compositions,
        }


class _Search:
    """One search; every candidate starts from the same seed, so their order has no effect."""

    def __init__(self, attack: Adaptive, view: View, draw: torch.Generator) -> None:
        self._started = time.process_time()
        self._budget = None if attack.candidates else _SPENT * attack.budget_s
        self._most = attack.candidates
        self._view, self._key = view, key_of(draw)
        self._layers = attack.layers
        self._seen = Seen.of(view, attack.layers)
        self._rows = view.unlabelled.rows
        drawn = torch.randperm(self._rows, generator=draw)
        self._sample = drawn[:_SAMPLE]
        self._folds = stratified_folds(self._seen.labels, self._seen.classes, draw)
        counts = self._seen.labels.bincount()
        self._even = int(counts.max()) <= _UNEVEN * int(counts[counts > 0].min())
        self._many = not self._even or int(counts.max()) >= _MANY
        self._draw = draw

    @property
    def spent(self) -> float:
        """Return the processor time that the search has used so far, in seconds."""
        return time.process_time() - self._started

    def trials(self) -> list[Trial]:
        """Return all tried candidates, the best one first."""
        points = compositions(self._layers, self._draw, self._many)
        if self._budget is None:
            points = islice(points, self._most)
        tried: list[Trial] = []
        for spec in points:
            if self._budget is not None and self.spent > _SEARCH * self._budget:
                break
            if self._budget is not None and tried and not self._fits(spec, tried):
                continue
            tried.append(Trial(spec))
            self._try(tried[-1], 0)
        going = tried
        for fold in range(1, len(self._folds)):
            going = _ranked(going)[: max(_VOTES, len(going) // _KEPT)]
            for one in going:
                once, rest = one.seconds / fold, 2 * min(self._cost(each) for each in going)
                if self._budget is not None and self.spent + 2 * once + rest > self._budget:
                    break
                self._try(one, fold)
        return _ranked(going) + [one for one in _ranked(tried) if one not in going]

    def _fits(self, spec: str, tried: Sequence[Trial]) -> bool:
        """Return whether another trial leaves time for the vote, by times of similar candidates."""
        assert self._budget is not None
        alike = [one for one in tried if _learner(one.spec) == _learner(spec)]
        likely = max(one.seconds for one in alike or tried)
        left = self._budget - self.spent - min(self._cost(one) for one in tried)
        return (_MARGIN if alike else _NEW) * likely < left

    def vote(self, trials: Sequence[Trial]) -> tuple[Tensor, list[str]]:
        """Vote within the time budget: return log class shares, and the specs of the voters."""
        found: list[Tensor] = []
        voted: list[str] = []
        for one in trials:
            late = self._budget is not None and self.spent + self._cost(one) > self._budget
            if not late and len(voted) < _VOTES:
                found.append(_trust(one) * self._answered(one))
                voted.append(one.spec)
        if not voted:  # the time budget is too short for any vote
            cheapest = min(trials, key=self._cost)
            found, voted = [self._answered(cheapest)], [cheapest.spec]
        total = torch.stack(found).sum(0)
        return (total / total.sum(1, keepdim=True)).clamp_min(1e-12).log(), voted

    def _answered(self, trial: Trial) -> Tensor:
        """Return one candidate's class shares for all targets, axes (targets, classes)."""
        made = self._made(trial.spec)
        if isinstance(made, Composed):
            scores = made.answer(self._seen, self._view, self._fresh())
        else:
            scores = self._whole(made, self._view)
        return calibrated(scores, trial.validation if trial.right else _UNKNOWN)

    def _try(self, trial: Trial, fold: int) -> None:
        started = time.process_time()
        hidden = torch.zeros(len(self._seen.labels), dtype=torch.bool)
        if self._folds:
            hidden = self._folds[fold]
        made, held = self._made(trial.spec), int(hidden.sum())
        if isinstance(made, Composed):
            seen = self._seen.hiding(hidden, self._sample)
            scores = made.answer(seen, self._view, self._fresh())
        else:
            scores = self._whole(made, self._view.withholding(hidden))
            scores = torch.cat([scores[len(scores) - held :], scores[self._sample]])
        guesses = scores.argmax(1)
        truth = self._seen.labels[hidden]
        right = (guesses[:held] == truth).float()
        trial.right += (right if self._even else ordered(scores[:held], truth)).tolist()
        trial.guesses = guesses[held:]
        trial.seconds += time.process_time() - started
        trial.folds += 1

    def _whole(self, made: Attack, view: View) -> Tensor:
        """Return an attack's scores of all rows, corrected for the shares of the classes.

        The leaked rows contain equally many rows of each class. So the scores of an attack that
        uses the class shares are divided by these shares.
        """
        scores = made.run(view.only(made.needs), self._fresh())
        if Grant.PRIOR in made.needs:
            scores = scores - view.prior.clamp_min(1e-6).log()
        return scores

    def _made(self, spec: str) -> Attack:
        from vfl.attacks import make  # imported here, because `vfl.attacks` imports this module

        return make(spec)

    def _fresh(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._key % 2**63)

    def _cost(self, trial: Trial) -> float:
        """Return an upper estimate, in seconds, for all rows, from the time for the sample."""
        grown = max(1.0, self._rows / max(1, len(self._sample)))
        if trial.spec.startswith(_OF_ALL_ROWS):
            grown = 1.0
        growth = 2 if "propagation" in trial.spec else 1
        return _MARGIN * trial.seconds / trial.folds * grown**growth


def _trust(trial: Trial) -> float:
    """Return the weight of a candidate's vote; all weights are 1 if no row is held out."""
    power = _TRUST * max(1.0, len(trial.right) / _MANY)  # more held-out rows count more
    return max(trial.validation, 1e-3) ** power if trial.right else 1.0


def _learner(spec: str) -> tuple[str, bool]:
    """Return the kind of a candidate by its cost: its learner, and whether it trains only once."""
    once = "unlabelled=" not in spec or "unlabelled=none" in spec
    return spec.partition(":")[0], once and "teacher=" not in spec


def compositions(layers: Sequence[str], draw: torch.Generator, many: bool = False) -> Iterator[str]:
    """Yield different candidates for some layers; first those that often won earlier searches.

    Args:
        layers: layers that the candidates read.
        draw: generator from which the candidates after the first ones are drawn.
        many: whether many rows leaked, or many more rows of one class than of another; then
            candidates of `shrunken` alternate with the others.
    """
    given: set[str] = set()
    alternating = chain.from_iterable(zip_longest(shrunken(layers) if many else [], _first(layers)))
    for spec in [
        *accumulating(layers),
        *filter(None, alternating),
        *(_drawn(layers, draw) for _ in range(5000)),
    ]:
        if spec not in given:
            given.add(spec)
            yield spec


def accumulating(layers: Sequence[str]) -> list[str]:
    """Return attacks that read the gradients of all epochs, or their sums, if layers allow it.

    >>> accumulating(["cut", "inputs"])
    []
    """
    if "accumulated" not in layers:
        return []
    alone = ["gradient_mixture:steps=0", "gradient_mixture:steps=0,epochs=2"]
    if "inputs" not in layers:
        return alone
    taught = "gradient_teacher:epochs=8,steps=300"
    return ["batch_sums", "gradient_mixture", taught, *alone, "batch_sums:penalty=10"]


def shrunken(layers: Sequence[str]) -> list[str]:
    """Return candidates for many leaked rows of overlapping classes, as noisy columns give.

    >>> shrunken(["cut"])[0]
    'discriminant:at=cut,scaler=standard,weight=0,shrink=0.1'
    """
    whole = "+".join(layers)
    found = [
        f"discriminant:at={whole},scaler=standard,weight={weight},shrink={shrink}"
        for shrink in ("0.1", "0.3")
        for weight in ("0", "0.1", "0.3")
    ]
    return [*found, f"logistic:at={whole},scaler=standard,strength=0.01"]


def _first(layers: Sequence[str]) -> Iterator[str]:
    """Yield frequent winners of searches on digit pictures that are not in published results."""
    models, whole = [one for one in layers if one != "inputs"], "+".join(layers)
    if "inputs" in layers:
        yield "label_propagation:at=inputs,neighbours=5"
    if len(layers) > 1:
        yield f"label_propagation:at={whole},neighbours=5,scaler=whiten,mix=0.5"
    for layer in models or layers:
        yield f"discriminant:at={layer}"
    if "inputs" in layers:
        for layer in models:
            yield f"label_propagation:at={layer}+inputs,neighbours=5,scaler=rank,mix=0.5"
    if len(layers) > 1:
        taught = "mix=0.5,unlabelled=co_training"
        yield f"label_propagation:at={whole},spread=0.9,scaler=shrink,{taught}"
    for layer in models or layers:
        yield f"logistic:at={layer}"
        yield f"label_propagation:at={layer}"
        yield f"label_propagation:at={layer},scaler=whiten"
        yield f"logistic:at={layer},scaler=whiten,unlabelled=self_training,rounds=6"
    if "inputs" in layers:
        teacher = "label_propagation:at=inputs"
        yield teacher
        for layer in models or layers:
            yield f"logistic:at={layer},teacher={teacher},unlabelled=self_training"
            yield f"mlp:at={layer},scaler=whiten,teacher={teacher}"
    if len(layers) > 1:
        yield f"ridge:at={whole},scaler=shrink,mix=0.5"
        yield f"discriminant:at={whole},mix=0.5"
        yield f"logistic:at={whole},scaler=whiten,unlabelled=self_training,rounds=6"
        yield f"logistic:at={whole},unlabelled=co_training"


def _drawn(layers: Sequence[str], draw: torch.Generator) -> str:
    def one(among: Sequence[str]) -> str:
        return among[int(torch.randint(len(among), (), generator=draw))]

    joined = "+".join(sorted({one(layers) for _ in range(len(layers) + 1)}))
    learner = one(_LEARNERS)
    name, _, options = learner.partition(":")
    chosen = [f"at={joined}", *([options] if options else []), f"scaler={one(_SCALERS)}"]
    if "+" in joined and "inputs" in joined:
        chosen.append(f"mix={one(('0.1', '0.2', '0.35', '0.5', '0.8'))}")
    if name not in ("trees", "ridge", "svm"):  # slow with thousands of rows
        uses = ["none", "none", "self_training"]
        uses += ["co_training"] if "+" in joined else []
        uses += ["mixmatch"] if name == "mlp" else []
        chosen.append(f"unlabelled={one(uses)}")
    if name in ("logistic", "mlp", "nearest_mean") and "mixmatch" not in chosen[-1]:
        scaled = f"label_propagation:at={one(layers)}/scaler={one(_SCALERS)}"
        chosen.append(f"teacher={one(('none', scaled))}")
    return f"{name}:{','.join(chosen)}"


def stratified_folds(labels: Tensor, classes: int, draw: torch.Generator) -> list[Tensor]:
    """Return masks of leaked rows to hold out, stratified; none if a class has only one row.

    Classes without leaked rows do not count.
    """
    counts = labels.bincount(minlength=classes)
    number = min(_FOLDS, int(counts[counts > 0].min()))
    if number < 2:
        return []
    place = torch.zeros(len(labels), dtype=torch.int64)
    for code in range(classes):
        own = (labels == code).nonzero()[:, 0]
        place[own[torch.randperm(len(own), generator=draw)]] = torch.arange(len(own)) % number
    return [place == fold for fold in range(number)]


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Return candidates sorted by validation, then by agreement with other candidates."""
    guesses = [one.guesses for one in trials if one.guesses is not None]
    for one in trials:
        assert one.guesses is not None
        same = [float(torch.eq(one.guesses, other).double().mean()) for other in guesses]
        one.agreement = sum(same) / max(1, len(same))
    return sorted(trials, key=lambda one: (-one.validation, -one.agreement))


def ordered(scores: Tensor, labels: Tensor) -> Tensor:
    """Return, per row, the share of rows of other classes with a lower score for the row's class.

    The mean over the rows of a class is the AUC of this class against the rest. A learner that
    always guesses the frequent class has a high share of right guesses, but a low AUC.

    >>> ordered(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]), torch.tensor([0, 0, 1]))
    tensor([1.0000, 0.0000, 0.5000])

    Args:
        scores: scores of the rows, axes (rows, classes).
        labels: class numbers of the rows.
    """
    found = torch.full((len(labels),), 0.5)
    for code in sorted(set(labels.tolist())):
        own = labels == code
        others = scores[~own, code].sort().values
        if len(others):
            marks = scores[own, code].contiguous()
            lower = torch.searchsorted(others, marks) + torch.searchsorted(
                others, marks, right=True
            )
            found[own] = lower / (2 * len(others))
    return found


def calibrated(scores: Tensor, share: float) -> Tensor:
    """Return class probabilities whose mean confidence is a given number.

    The probabilities are softmax(s z), where z are the standardised scores and s is a factor.
    Bisection finds the s for which the mean of each row's largest probability is `share` (Guo et
    al. 2017, temperature scaling).

    Args:
        scores: scores of the rows, axes (rows, classes).
        share: the wanted mean confidence, which should be the expected share of right guesses.

    >>> round(float(calibrated(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 0.9).max()), 2)
    0.9
    """
    share = min(max(share, 1.05 / scores.shape[1]), 0.99)
    z = (scores - scores.mean(1, keepdim=True)) / scores.std().clamp_min(1e-12)
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        sure = float((middle * z).softmax(1).max(1).values.mean())
        low, high = (middle, high) if sure < share else (low, middle)
    return (high * z).softmax(1)
