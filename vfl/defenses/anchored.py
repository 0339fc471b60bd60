"""Bottoms near their principal components: a large part that never learns, and a small one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from vfl.defenses.base import Defense, Side
from vfl.defenses.components import Components
from vfl.defenses.label_free import LabelFree
from vfl.errors import SpecError
from vfl.options import require_range
from vfl.seeds import Secret


class AnchoredBottom(nn.Module):
    """components(x) + rate * learned(x).

    Args:
        components: principal components of the inputs; nothing trains them.
        learned: a bottom.
        rate: of what it adds. Optimisers that scale a step by the size of its gradients (Adam) take
            steps of the same size whatever the rate, so the cut moves by `rate` as much.
    """

    def __init__(self, components: Components, learned: nn.Module, rate: float) -> None:
        super().__init__()
        self.components = components
        self.learned = learned
        self.rate = rate

    def forward(self, inputs: Tensor) -> Tensor:
        """Axes (rows, ...) in, (rows, width) out."""
        cut: Tensor = self.components(inputs) + self.rate * self.learned(inputs)
        return cut


class Anchored(Defense):
    """Cuts are principal components of the inputs, and a little of what the bottom learns.

    Components are a label-free bottom: whoever has the inputs has them, too. What they are short of
    in accuracy is little, and a linear bottom (``bottom = "mlp:hidden=none"``) that adds little
    makes up for it: each step moves the cut by `rate` of what it would. `potential:norm=no` joined
    to it keeps what is added from telling labels.
    Our own; the idea is that of fine-tuning kept near its start (Li et al. 2018, L2-SP), with the
    start at components that saw no label. Only feature parties run it. Components come from the
    party's own training rows before the first step and are saved with its weights. What it tells
    is measured, not bounded: it states no promise.

    Args:
        rate: of the learned part, beside components of a mean variance of 1.

    >>> bottom = Anchored(rate=0.5).wrap_bottom(nn.Identity(), width=2)
    >>> Anchored().fit(bottom, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), Secret(bytes(32)))
    >>> [[round(value, 3) for value in row] for row in bottom(torch.tensor([[1.0, 0.0]])).tolist()]
    [[1.914, 0.0]]
    """

    side: ClassVar[Side] = "feature"
    once: ClassVar[bool] = True

    def __init__(self, rate: float = 0.02) -> None:
        require_range("rate", rate, 0, 1)
        self.rate = rate

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        if any(isinstance(member, LabelFree) for member in (*before, *after)):
            raise SpecError(
                "'anchored' adds a learned part to a label-free bottom, which LabelFree takes away",
                fix="one of the two; anchored:rate=0 is label_free:kind=pca,features=0",
            )

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return AnchoredBottom(Components(width, features=0), bottom, self.rate)

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        anchored = next(part for part in bottom.modules() if isinstance(part, AnchoredBottom))
        anchored.components.fit(inputs, torch.Generator())  # components of no features draw nothing
