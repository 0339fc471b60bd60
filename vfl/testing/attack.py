"""Tests that every attack must pass; an author of a plug-in subclasses `AttackContract`.

    class TestMine(AttackContract):
        specs = ["mine:steps=50"]

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vfl.attacks import (
    Attack,
    Evidence,
    Grant,
    Holdings,
    RecordedExchange,
    SentCuts,
    ThreatModel,
    View,
    make,
)
from vfl.attacks.base import before_last, fit, rarest, through
from vfl.attacks.cases import draw_leak
from vfl.attacks.scoring import Case, Score, attempt, guess_of, scores_of
from vfl.attacks.view import IN_TRAINING
from vfl.core.errors import NotGrantedError
from vfl.core.seeds import generator, scoped
from vfl.models import make_top
from vfl.testing.base import Contract, differing, draw_from_all, global_states, require_still


class AttackContract(Contract):
    """Properties of every attack: it succeeds if the victim leaks labels, and else guesses.

    In both test cases (with and without a leak), the attacker is a feature party in the inference
    phase. An attack that needs other test cases overrides `case`.

    Attributes:
        specs: specs of the attacks under test, at least one.
        wins: smallest score that an attack must reach when the victim's cuts separate the classes
            well.
        rows, classes, width: numbers of rows and classes, and width of the cut, in both test cases.
        leaks: number of rows of each class whose labels the attacker knows.
    """

    family = "attack"
    wins: ClassVar[float] = 0.9
    rows: ClassVar[int] = 300
    classes: ClassVar[int] = 3
    width: ClassVar[int] = 8
    leaks: ClassVar[int] = 5

    def case(self, leaking: bool, grants: frozenset[Grant]) -> Case:
        """Make a victim whose cuts separate the classes, or do not depend on the labels.

        Args:
            leaking: whether the victim's cuts leak the labels.
            grants: grants that the attacker has.
        """
        draw = generator(0, "contract", int(leaking))
        labels = torch.arange(self.rows) % self.classes
        means = 6 * torch.eye(self.classes, self.width)[labels] if leaking else 0
        inputs = means + torch.randn(self.rows, self.width, generator=draw)
        bottom = _bottom(self.width)
        cuts = through(bottom, inputs)
        leaked = draw_leak(labels, self.leaks, draw)
        rest = torch.ones(self.rows, dtype=torch.bool)
        rest[leaked] = False
        kept = cache(lambda: before_last(copy.deepcopy(bottom), inputs[rest]))
        holdings = Holdings(
            targets=Evidence(inputs[rest], cuts[rest], before=kept),
            leaked=Evidence(inputs[leaked], cuts[leaked], labels[leaked]),
            unlabelled=Evidence(inputs[rest], cuts[rest], before=kept),
            prior=torch.full((self.classes,), 1 / self.classes),
            bottom=lambda: copy.deepcopy(bottom),
            new_bottom=lambda: nn.Sequential(nn.Linear(self.width, 9), nn.ReLU(), nn.Linear(9, 6)),
            new_top=lambda width: nn.Linear(width, self.classes),
        )
        threat = ThreatModel("feature party", "inference", grants)
        return Case(View(threat, self.classes, holdings), labels[rest])

    def test_attack_succeeds_on_a_leaking_victim_without_side_effects(self, spec: str) -> None:
        attack = make(spec)
        case = self.case(True, attack.needs)
        # The import of an attack's modules may draw random numbers.
        found = guess_of(case, attack, generator(0, "draw"))
        assert case.labels is not None
        inputs = None if case.inputs is None else case.inputs.shape
        require_form(found, attack, len(case.labels), self.classes, inputs)
        self.require_win(scores_of(case, attack.goal, found)[0])

        draw_from_all()
        whole = self.case(True, frozenset(Grant) - IN_TRAINING | attack.needs).view
        view, states = without_the_rest(whole.only(attack.needs)), global_states()
        evidence = contents(view)
        again = make(spec).run(view, generator(0, "draw"))
        require_still(states)
        changed = differing(evidence, contents(view))
        assert not changed, f"the evidence was changed in place: {changed}"
        if not torch.equal(found, again):
            same = make(spec).run(self.case(True, attack.needs).view, generator(0, "draw"))
            assert torch.equal(found, same), "not repeatable"
            raise AssertionError("evidence that the attack was not granted changes its guess")

    def test_attack_only_guesses_if_nothing_leaks(self, spec: str) -> None:
        self.require_guess(self._attempt(make(spec), leaking=False))

    def test_every_declared_grant_is_used(self, spec: str) -> None:
        attack = make(spec)
        for grant in attack.needs:
            less = self.case(True, attack.needs - {grant})
            with pytest.raises(NotGrantedError):
                attack.run(less.view, generator(0, "draw"))

    def require_win(self, score: Score) -> None:
        """Require the score that an attack must reach if the victim's cuts leak labels."""
        assert score.value >= self.wins, f"{score.measure} {score.value:.3f}"

    def require_guess(self, score: Score) -> None:
        """Require about the score of guessing if the victim's cuts do not leak labels."""
        deviation = (score.guess * (1 - score.guess) / self.rows) ** 0.5
        # Even random clusters match the classes better than chance does, because the score uses the
        # best assignment of clusters to classes.
        margin = 6 if score.measure == "matched_accuracy" else 4
        assert score.value <= score.guess + margin * deviation, "it beats its guess"

    def _attempt(self, attack: Attack, leaking: bool) -> Score:
        return attempt(self.case(leaking, attack.needs), attack, generator(0, "draw"))


def require_form(
    found: Tensor, attack: Attack, rows: int, classes: int, inputs: torch.Size | None
) -> None:
    """Require the shape and type that the attack's goal defines; see `Attack.goal`."""
    wanted = {"labels": (rows, classes)} | dict.fromkeys(("values", "clusters", "scores"), (rows,))
    assert found.shape == wanted.get(attack.goal, inputs), "a guess has an unexpected shape"
    wanted_type = torch.int64 if attack.goal in ("clusters", "tokens") else torch.float32
    assert found.dtype == wanted_type, "a guess has an unexpected type"
    assert torch.isfinite(found).all(), "a guess is not finite"


def _bottom(width: int) -> nn.Module:
    """Return two rotations, which lose no information, in place of a trained bottom model."""
    with scoped(1):
        layers = [nn.Linear(width, width), nn.Linear(width, width)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


def _linear(weight: Tensor) -> nn.Module:
    """Return a linear layer with this weight and without a bias."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight.data.copy_(weight)
    return made


class GradientAttackContract(AttackContract):
    """`AttackContract` for attacks on a training whose messages a feature party recorded.

    In the test case without a leak, the label party has trained on labels that belong to other
    rows.

    Attributes:
        top: spec of the label party's top model.
        positive: fraction of rows in class 1 if there are two classes; with None, all classes have
            the same number of rows.
        epochs, batch_size: number of epochs of the training, and of rows in a batch.
    """

    leaks: ClassVar[int] = 1
    top: ClassVar[str] = "linear"
    positive: ClassVar[float | None] = None
    epochs: ClassVar[int] = 2
    batch_size: ClassVar[int] = 30

    def case(self, leaking: bool, grants: frozenset[Grant]) -> Case:
        draw = generator(0, "gradients", int(leaking))
        labels = self._labels(draw)
        means = 2 * torch.eye(self.classes, self.width)[labels]
        inputs = means + torch.randn(self.rows, self.width, generator=draw)
        leaked = draw_leak(labels, self.leaks, draw)
        rest = torch.ones(self.rows, dtype=torch.bool)
        rest[leaked] = False
        order = torch.cat([torch.nonzero(rest)[:, 0], leaked])
        trained = labels if leaking else labels[torch.randperm(self.rows, generator=draw)]
        prior = labels.bincount(minlength=self.classes) / self.rows
        exchanges, top = self._train(inputs[order], trained[order], draw)
        holdings = Holdings(
            targets=Evidence(inputs[rest]),
            leaked=Evidence(inputs[leaked], labels=labels[leaked]),
            exchanges=exchanges,
            prior=prior,
            others_top=lambda: copy.deepcopy(top),
            new_top=lambda width: make_top(self.top).build(width, self.classes),
        )
        threat = ThreatModel("feature party", "training", grants)
        view = View(threat, self.classes, holdings)
        return Case(view, labels[rest], positive=labels[rest] == rarest(prior))

    def _labels(self, draw: torch.Generator) -> Tensor:
        if self.positive is None:
            return torch.arange(self.rows) % self.classes
        return (torch.rand(self.rows, generator=draw) < self.positive).long()

    def _train(
        self, inputs: Tensor, labels: Tensor, draw: torch.Generator
    ) -> tuple[list[RecordedExchange], nn.Module]:
        """Train by gradient descent; return the recorded exchanges, and the top model."""
        with scoped(2):
            bottom = nn.Linear(self.width, self.width)
            top = make_top(self.top).build(self.width, self.classes)
        optimizer = torch.optim.SGD([*bottom.parameters(), *top.parameters()], lr=0.5)
        exchanges: list[RecordedExchange] = []
        for epoch in range(1, self.epochs + 1):
            order = torch.randperm(self.rows, generator=draw)
            for rows in torch.split(order, self.batch_size):
                cuts: Tensor = bottom(inputs[rows])
                cuts.retain_grad()
                optimizer.zero_grad()
                cross_entropy(top(cuts), labels[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                assert cuts.grad is not None
                up = SentCuts(len(exchanges), epoch, rows, cuts.detach())
                exchanges.append(RecordedExchange.of(up, cuts.grad))
        return exchanges, top


class InputAttackContract(AttackContract):
    """`AttackContract` for attacks on cuts that a label party received from one feature party.

    In the test case without a leak, the cuts and predictions belong to other rows. In a U-shape,
    three models follow the bottom model: the middle model, the top model, and a last layer, which
    the label party does not have.

    Attributes:
        joint: whether the label party has two columns of its own, which are further inputs of its
            top model.
        wins: largest squared error that an attack may have, as a fraction of the error of an attack
            that guesses the mean row for every row.
        leaks: number of rows whose columns the attacker knows.
    """

    joint: ClassVar[bool] = False
    wins: ClassVar[float] = 0.5
    classes: ClassVar[int] = 4
    width: ClassVar[int] = 4
    leaks: ClassVar[int] = 150

    def recipe(self) -> nn.Module:
        """Return an untrained bottom model with the victim's architecture."""
        return nn.Sequential(nn.Flatten(), nn.Linear(self.width, 2 * self.width), nn.Tanh())

    def case(self, leaking: bool, grants: frozenset[Grant]) -> Case:
        draw = generator(0, "inputs", int(leaking))
        inputs, labels = self._rows(draw)
        own = inputs.flatten(1)[:, :2] + 0.1 * torch.randn(self.rows, 2, generator=draw)
        with scoped(3):
            bottom, own_bottom = self.recipe(), nn.Linear(2, 2)
            cuts = through(bottom, inputs)
            merged = torch.cat([cuts, through(own_bottom, own)], 1) if self.joint else cuts
            top = nn.Linear(merged.shape[1], self.classes)
            middle = nn.init.orthogonal_(torch.empty(cuts.shape[1], cuts.shape[1]))
        fit(top, merged, labels, 200, 0.05, draw)
        outputs = through(top, merged)
        order = torch.arange(self.rows)
        if not leaking:
            order = torch.randperm(self.rows, generator=draw)
            own = own[torch.randperm(self.rows, generator=draw)]
        known, rest = slice(self.leaks), slice(self.leaks, None)
        cuts, outputs = cuts[order], outputs[order]
        holdings = Holdings(
            targets=Evidence(own[rest], cuts[rest], labels[rest], outputs[rest]),
            leaked=Evidence(inputs[known], cuts[known], labels[known]),
            prior=labels.bincount() / self.rows,
            bottom=lambda: copy.deepcopy(own_bottom),
            new_bottom=self.recipe,
            top=lambda: copy.deepcopy(top),
            merge=(lambda victims, own: torch.cat([victims, own], 1)) if self.joint else None,
            others_bottom=lambda: copy.deepcopy(bottom),
            shape=tuple(inputs.shape[1:]),
            middle=lambda: _linear(middle),
            new_top=lambda width: nn.Linear(width, self.classes),
        )
        view = View(ThreatModel("label party", "inference", grants), self.classes, holdings)
        return Case(view, labels[rest], inputs[rest])

    def _rows(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Make columns of rows that lie around one centre for each class."""
        labels = torch.randint(self.classes, (self.rows,), generator=draw)
        inputs = 1.5 * torch.eye(self.classes, self.width)[labels]
        return inputs + 0.5 * torch.randn(self.rows, self.width, generator=draw), labels

    def require_win(self, score: Score) -> None:
        assert score.value <= self.wins * score.guess, f"{score.value:.3f} of {score.guess:.3f}"

    def require_guess(self, score: Score) -> None:
        assert score.value >= 0.9 * score.guess, "it beats its guess"


def contents(view: View) -> dict[str, tuple[bytes, bool]]:
    """Return all evidence in a view by name: a tensor's bytes, and whether it has a graph."""
    return {
        name: (values.detach().numpy().tobytes(), values.requires_grad)
        for name, values in _tensors("view", view._holdings)
    }


def without_the_rest(view: View) -> View:
    """Return a view with the same grants, but without evidence that these grants do not cover.

    The number of rows stays the same.
    """

    def kept(name: str, value: object) -> object:
        if isinstance(value, Evidence):
            return _opened(view, name, value)
        if name == "partners" and _opens(lambda: view.partners):
            return [without_the_rest(one) for one in view.partners]
        return value if _opens(lambda: getattr(view, name)) else _blank(value)

    held = vars(view._holdings).items()
    return view.instead(**{name: kept(name, value) for name, value in held})


def _opened(view: View, name: str, rows: Evidence) -> Evidence:
    """Return a group of rows without the fields that the view's grants do not cover."""

    def kept(column: str, value: Any) -> Any:
        return value if _opens(lambda: getattr(getattr(view, name), column)) else _blank(value)

    return Evidence(**{column: kept(column, value) for column, value in vars(rows).items()})


def _blank(value: object) -> Tensor | None:
    return torch.zeros_like(value) if isinstance(value, Tensor) else None


def _opens(reach: Callable[[], object]) -> bool:
    try:
        reach()
    except NotGrantedError:
        return False
    return True


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in some evidence with its name; functions are called for their tensors."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _tensors(f"{name}[{number}]", one)
    elif isinstance(value, View):
        yield from _tensors(name, value._holdings)
    elif isinstance(value, Holdings | Evidence | SentCuts | RecordedExchange):
        for part, held in vars(value).items():
            yield from _tensors(f"{name}.{part}", held)
    elif name.endswith((".before", ".sent", ".cuts")) and callable(value):
        yield from _tensors(name, value())
