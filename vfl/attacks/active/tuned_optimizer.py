"""A malicious optimiser that tunes its gain during the training, on leaked labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vfl.attacks.active.base import MOST_WARMUP
from vfl.attacks.active.malicious_optimizer import MaliciousOptimizer
from vfl.attacks.base import key_of, scale_by
from vfl.attacks.labels.adaptive import ordered, stratified_folds
from vfl.attacks.labels.classifiers import fit_logistic
from vfl.attacks.view import Grant, View
from vfl.compression import StepContext
from vfl.core.errors import BadOptionError, DataError
from vfl.core.registry import require, require_range
from vfl.core.seeds import generator


class TunedOptimizer(MaliciousOptimizer):
    """Tries several gains, one for each epoch, and keeps the gain whose cuts disclose most labels.

    The steps are those of `malicious_optimizer`: each weight's part of a step is multiplied by 1 +
    gain * g_t / g_(t-1), clipped between 1 and `most`. After each epoch, the party computes the
    cuts of its leaked rows. The score of the epoch's gain is the `held_out_auc` of these cuts,
    which takes at most three fits of a logistic regression. `next_gain` then chooses the gain of
    the next epoch.

    Scores grow while the network learns, whatever the gain. So the search starts after `warmup`
    epochs, as the first epochs improve the network most. It tries the gains once in the given order
    and once in the reverse order: all gains then have the same mean epoch number, which removes a
    linear trend from the comparison of their mean scores. With n gains, the search takes 2 n
    epochs. A shorter training ends during the search.

    Source: Fu et al. 2022, "Label inference attacks against vertical federated learning" (USENIX
    Security): the malicious local optimiser. The search is vfl's own.

    Args:
        gains: the gains to try, joined by +, at least two different ones; 0 is an honest step.
        most: largest factor by which a weight's step is multiplied.
        warmup: number of epochs without tampering before the search.

    >>> TunedOptimizer("0+2").gains
    (0.0, 2.0)

    Raises:
        BadOptionError: `gains` has fewer than two gains, or a gain that is negative or occurs
            twice; `most` is below 1; or `warmup` is out of range.
    """

    holds = frozenset({Grant.LEAKED, Grant.INPUTS})

    def __init__(self, gains: str = "0+1+3", most: float = 5.0, warmup: int = 1) -> None:
        require_range("warmup", warmup, 0, MOST_WARMUP)
        self.gains = _gains_of(gains)
        self.warmup = warmup
        super().__init__(0.0 if warmup else self.gains[0], most)
        self._tried: list[tuple[int, float]] = []
        self._trained = self._epochs = 0

    def begin(self, view: View, draw: torch.Generator) -> None:
        self._inputs, self._labels = view.leaked.inputs, view.leaked.labels
        self._classes, self._rows = view.classes, view.targets.rows
        fewest = int(self._labels.bincount(minlength=view.classes).min())
        if fewest < 2:
            raise DataError(
                "a class has too few leaked rows to hold one out",
                got=f"{fewest} leaked rows",
                want="at least 2 of each class",
            )
        self._key = key_of(draw)

    def model(self, cuts_of: Callable[[Tensor], Tensor]) -> None:
        self._cuts_of = cuts_of

    def batch(self, inputs: Tensor, context: StepContext) -> Tensor:
        if self._trained >= self._rows:  # as many rows as an epoch has, even if some were skipped
            self._end_epoch()
        self._trained += len(inputs)
        return inputs

    def _end_epoch(self) -> None:
        if self._epochs >= self.warmup:
            draw = generator(self._key, "tuned_optimizer")
            score = held_out_auc(self._cuts_of(self._inputs), self._labels, self._classes, draw)
            self._tried.append((self.gains.index(self.gain), score))
        self._trained, self._epochs = 0, self._epochs + 1
        if self._epochs >= self.warmup:
            self.gain = self.gains[next_gain(self._tried, len(self.gains))]

    def training_state(self) -> dict[str, Any]:
        counts = {"trained": self._trained, "epochs": self._epochs, "gain": self.gain}
        return counts | {"tried": torch.tensor(self._tried, dtype=torch.float64).reshape(-1, 2)}

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        self._trained, self._epochs, self.gain = saved["trained"], saved["epochs"], saved["gain"]
        self._tried = [(int(at), score) for at, score in saved["tried"].tolist()]


def next_gain(tried: Sequence[tuple[int, float]], count: int) -> int:
    """Return the position of the gain for the next epoch.

    The first 2 `count` epochs try the gains in order, and then in reverse order. Then the gain with
    the best mean score is kept. Each epoch with this gain checks it again: its newest score
    replaces its mean, so that a fall below another gain's score changes the gain.

    Args:
        tried: position of the gain and score, for each epoch so far.
        count: number of gains.

    >>> [next_gain([(0, 0.5)] * epochs, 2) for epochs in range(4)]
    [0, 1, 1, 0]
    >>> next_gain([(0, 0.6), (1, 0.8), (1, 0.9), (0, 0.7)], 2)
    1
    >>> next_gain([(0, 0.6), (1, 0.8), (1, 0.9), (0, 0.7), (1, 0.6)], 2)
    0
    """
    if len(tried) < 2 * count:
        return min(len(tried), 2 * count - 1 - len(tried))

    def score(position: int) -> float:
        own = [score for at, score in tried if at == position]
        return own[-1] if len(own) > 2 else sum(own) / len(own)

    return max(range(count), key=score)


def held_out_auc(cuts: Tensor, labels: Tensor, classes: int, draw: torch.Generator) -> float:
    """Return how well a logistic regression on other rows' cuts ranks held-out rows by class.

    The result is the mean over all rows of `ordered`, which for two classes of equal size is the
    AUC. Up to three stratified folds are held out in turn. Cuts that are not finite score 0.

    Args:
        cuts: cuts of rows with known labels, float32, axes (rows, width).
        labels: class numbers of these rows, int64, axes (rows,), at least two rows of each class.
        classes: number of classes.
        draw: generator from which the folds are drawn.

    >>> cuts = torch.tensor([[0.0], [9.0], [1.0], [8.0]])
    >>> held_out_auc(cuts, torch.tensor([0, 1, 0, 1]), 2, torch.Generator().manual_seed(0))
    1.0
    """
    if not torch.isfinite(cuts).all():
        return 0.0
    right = []
    for held in stratified_folds(labels, classes, draw):
        scaled = scale_by("standard", cuts[~held])
        predict = fit_logistic(scaled(cuts[~held]), labels[~held], classes, 1.0)
        right.append(ordered(predict(scaled(cuts[held])), labels[held]))
    return float(torch.cat(right).mean())


def _gains_of(text: str) -> tuple[float, ...]:
    try:
        gains = tuple(float(one) for one in text.split("+"))
    except ValueError:
        raise BadOptionError(
            "not a list of numbers", where="option 'gains'", got=text, want="for example 0+1+3"
        ) from None
    for gain in gains:
        require_range("gains", gain, 0)
    different = len(gains) > 1 and len(set(gains)) == len(gains)
    require("gains", text, "at least two different numbers", different)
    return gains
