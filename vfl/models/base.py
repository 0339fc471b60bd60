"""The contract of the two halves of a split network.

Hyper-parameters are the constructor's arguments; sizes that follow from the data come to `build`.
Initial weights are drawn from torch's global generator, so callers build inside `seeds.scoped`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

Shape = tuple[int, ...]


class Bottom(ABC):
    """A recipe for the half a feature party owns."""

    @abstractmethod
    def build(self, shape: Shape, width: int) -> nn.Module:
        """A new bottom with fresh weights.

        Args:
            shape: axes of one row without the rows axis: (columns,) or (channels, height, width).
            width: columns of the cut.

        Returns:
            A module from axes (rows, *shape), float32, to axes (rows, width).

        Raises:
            SpecError: this bottom cannot take rows of that shape, or cannot give that width.
        """


class Top(ABC):
    """A recipe for the half the label party owns."""

    @abstractmethod
    def build(self, width: int, outputs: int) -> nn.Module:
        """A new top with fresh weights.

        Args:
            width: columns of the merged cut.
            outputs: columns of the result: classes, or 1 for a single logit or a regression.

        Returns:
            A module from axes (rows, width) to axes (rows, outputs), without a final activation.
        """
