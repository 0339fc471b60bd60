"""The adversary contract: a party that tampers on its own side while it takes part.

An adversary sees what its own party sees and changes what its own party does; nothing else is in
reach. The victim trains against it, so an active attack costs one training run per adversary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, optim

from vfl.compression import Moment


class Adversary:
    """A dishonest party. Every hook defaults to honest behaviour."""

    def batch(self, inputs: Tensor, moment: Moment) -> Tensor:
        """The inputs its bottom is really fed; axes (rows, ...)."""
        return inputs

    def labels(self, labels: Tensor, moment: Moment) -> Tensor:
        """The labels of a batch that it really trains on (label party); axes (rows,)."""
        return labels

    def optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        """The optimiser it really uses for its own half."""
        return optimizer

    def cut(self, cut: Tensor, moment: Moment) -> Tensor:
        """The cut it really sends (feature party); detached, axes (rows, width)."""
        return cut

    def gradient(self, party: str, grad: Tensor, moment: Moment) -> Tensor:
        """The gradient it really sends to `party` (label party); axes (rows, width)."""
        return grad

    def received(self, party: str, values: Tensor, moment: Moment) -> None:
        """What just arrived: a gradient (feature party) or a party's cut (label party)."""

    def training_state(self) -> dict[str, Any]:
        """What it needs to go on exactly, and to use afterwards: tensors, numbers and texts.

        What it draws for an exchange follows from the exchange's number at a feature party, whose
        batches in flight are made again after a resume.
        """
        return {}

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        """Restore what `training_state` gave."""


HONEST = Adversary()
