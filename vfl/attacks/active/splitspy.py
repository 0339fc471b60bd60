"""SplitSpy: hijacking whose gradients look honest for batches that test the label party."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from vfl.attacks.active.hijacking import Hijacking
from vfl.attacks.base import key_of
from vfl.attacks.view import Grant, View
from vfl.compression import StepContext
from vfl.core.registry import require_range
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend

_SPAN = 0.9


class SplitSpy(Hijacking):
    """FSHA that evades SplitGuard: it detects test batches and answers them with honest gradients.

    A false batch is a batch whose rows the victim shuffled, to test the label party. A shadow model
    (the attacker's own network for the task) learns from the received cuts and the true labels. If
    the shadow model predicts the labels of a batch less often than in earlier batches, the
    adversary treats the batch as false. For a false batch, the adversary sends the gradient of the
    task, which it computes with its own top. For all other batches, it sends the gradient of
    `hijacking`. So false and regular batches get different gradients, as they would from an honest
    party, and `split_guard` detects nothing.

    Source: Fu, Ma, Zhu, Hu, Zhao, Jia, Xu, Jin, Zhang 2023, "Focusing on Pinocchio's nose: a
    gradients scrutinizer to thwart split-learning hijacking attacks using intrinsic attributes"
    (NDSS), the attack SplitSpy. In the paper, the victim tests by changing the labels of a batch;
    in vfl, it shuffles the batch's rows.

    Args:
        victim, learning_rate, penalty, critic_steps: see `Hijacking`.
        agreement: a batch counts as false if the shadow model's agreement with its labels, relative
            to the usual agreement, is below this threshold. Agreement is the share of rows whose
            label the shadow model predicts.

    >>> SplitSpy(agreement=0.5).who
    'label party'

    Raises:
        BadOptionError: an option is out of range.
    """

    holds = Hijacking.holds | {Grant.TOP_RECIPE}

    def __init__(
        self,
        victim: str = "all",
        learning_rate: float = 0.001,
        penalty: float = 10.0,
        critic_steps: int = 1,
        agreement: float = 0.7,
    ) -> None:
        super().__init__(victim, learning_rate, penalty, critic_steps)
        require_range("agreement", agreement, 0, 1)
        self.agreement = agreement
        self._usual = torch.zeros(())
        self._false: dict[str, bool] = {}

    def begin(self, view: View, draw: torch.Generator) -> None:
        super().begin(view, draw)
        with scoped(key_of(draw)):
            self._shadow = view.new_top(self._width)
        self._learning = self._adam(self._shadow)

    def labels(self, labels: Tensor, context: StepContext) -> Tensor:
        self._labels = labels
        return labels

    def received(self, party: str, values: Tensor, context: StepContext) -> None:
        super().received(party, values, context)
        if context.training and self.victim in ("all", party):
            self._false[party] = self._looks_false(values)

    def gradient(self, party: str, grad: Tensor, context: StepContext) -> Tensor:
        return grad if self._false.get(party) else super().gradient(party, grad, context)

    def training_state(self) -> dict[str, Any]:
        return super().training_state() | {"usual": self._usual}

    def load_training_state(self, saved: Any) -> None:
        super().load_training_state(saved)
        self._usual = saved["usual"]

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | {"shadow": self._shadow, "learning": self._learning}

    def _looks_false(self, cuts: Tensor) -> bool:
        """Return whether a batch looks false to the shadow model; if not, train it on the batch."""
        with scoped(key_of(self._draw)):
            answers = self._shadow(cuts)
            agreed = (answers.detach().argmax(1) == self._labels).float().mean()
            if agreed < self.agreement * self._usual:
                return True
            self._usual = torch.lerp(agreed, self._usual, _SPAN)
            descend(self._learning, cross_entropy(answers, self._labels))
        return False
