"""A label party that harms the network for all parties: it trains on wrong labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vfl.attacks.active.base import ActiveAdversary
from vfl.attacks.view import View
from vfl.compression import StepContext
from vfl.core.registry import require_range


class NoisyLabels(ActiveAdversary):
    """Replaces a share of each batch's labels by random other classes; each batch has new draws.

    Source: the non-targeted attacks of Zou et al. 2023 (VFLAIR).

    Args:
        share: share of the rows of a batch that get a wrong label.

    Raises:
        BadOptionError: the share is not between 0 and 1.
    """

    who = "label party"
    spoils = True

    def __init__(self, share: float = 0.2) -> None:
        require_range("share", share, 0, 1)
        self.share = share

    def begin(self, view: View, draw: torch.Generator) -> None:
        self._classes, self._draw = view.classes, draw

    def labels(self, labels: Tensor, context: StepContext) -> Tensor:
        wrong = torch.rand(labels.shape, generator=self._draw) < self.share
        by = torch.randint(1, self._classes, labels.shape, generator=self._draw)
        return torch.where(wrong, (labels + by) % self._classes, labels)

    def training_state(self) -> dict[str, Any]:
        return {"draw": self._draw.get_state()}

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        self._draw.set_state(saved["draw"])
