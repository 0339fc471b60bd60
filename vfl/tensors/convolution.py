"""Convolutions as matrix products, for elements of any ring and with any leading axes.

A convolution and its two gradients (for images and filters) are bilinear maps. Parties open the
images and filters under masks first; each party then extracts the windows of its own arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from vfl.core.errors import UserError
from vfl.mpc.ring import Composed
from vfl.tensors.base import axes

Kind = Literal["conv2d", "conv2d_input", "conv2d_weight"]
KINDS: tuple[Kind, ...] = ("conv2d", "conv2d_input", "conv2d_weight")
#: Number of integers that describe the shapes and options of a convolution in a request; see
#: `Geometry.numbers`.
NUMBERS = 15


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shapes and options of a convolution.

    Attributes:
        images: shape of the images (rows, channels, height, width).
        filters: shape of the filters (output channels, input channels of a group, height, width).
        stride, padding, dilation: values of these options along (height, width).
        groups: number of channel groups.
    """

    images: tuple[int, ...]
    filters: tuple[int, ...]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        fits = len(self.images) == len(self.filters) == 4 and min(*self.stride, self.groups) > 0
        fits = fits and self.images[1] == self.filters[1] * self.groups
        if not fits or self.filters[0] % self.groups or min(self.size) < 1:
            raise UserError(
                "a convolution cannot have these axes",
                got=f"images {axes(self.images)}, filters {axes(self.filters)}",
                want="(rows, channels, height, width) and (outputs, channels, height, width)",
                fix="compare channels, groups and the size of the filters",
            )

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the convolution's result."""
        high, wide = (
            (self.images[at + 2] + 2 * self.padding[at] - self._reach(at)) // self.stride[at] + 1
            for at in (0, 1)
        )
        return high, wide

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the convolution's result."""
        return (self.images[0], self.filters[0], *self.size)

    def numbers(self) -> list[int]:
        """Return the geometry as a list of integers, in the form of a request."""
        pairs = (*self.stride, *self.padding, *self.dilation)
        return [*self.images, *self.filters, *pairs, self.groups]

    @staticmethod
    def of(numbers: Sequence[int]) -> Geometry:
        """Restore the geometry from the integers of a request.

        Raises:
            UserError: the integers do not describe a convolution.
        """
        if len(numbers) != NUMBERS:
            raise UserError("these numbers do not describe a convolution", got=str(len(numbers)))
        one, two, *rest = numbers[:4], numbers[4:8], *numbers[8:]
        return Geometry(
            tuple(one), tuple(two), (rest[0], rest[1]), (rest[2], rest[3]), (rest[4], rest[5]),
            rest[6],
        )  # fmt: skip

    def windows(self, images: Tensor) -> Tensor:
        """Return all windows of the images, each window as a vector.

        The axes are (*, groups, rows x positions, elements of one window).
        """
        front, (rows, channels, *_) = images.shape[:-4], self.images
        down, right = self.padding
        padded = functional.pad(images, (right, right, down, down))
        cut = padded.unfold(-2, self._reach(0), self.stride[0])
        cut = cut.unfold(-2, self._reach(1), self.stride[1])
        cut = cut[..., :: self.dilation[0], :: self.dilation[1]]
        cut = cut.reshape(*front, rows, self.groups, channels // self.groups, *cut.shape[-4:])
        at = len(front)
        order = [at + each for each in (1, 0, 3, 4, 2, 5, 6)]
        return cut.permute(*range(at), *order).reshape(
            *front, self.groups, rows * self.size[0] * self.size[1], -1
        )

    def images_of(self, windows: Tensor) -> Tensor:
        """Add windows to the images at the windows' positions.

        Adding windows in this way is the transpose of `windows`.
        """
        front, (rows, channels, high, wide) = windows.shape[:-3], self.images
        down, right = self.padding
        places = windows.reshape(
            *front, self.groups, rows, *self.size, channels // self.groups, *self.filters[2:]
        )
        total = torch.zeros(
            *front, self.groups, rows, channels // self.groups, high + 2 * down, wide + 2 * right,
            dtype=windows.dtype,
        )  # fmt: skip
        at = len(front)
        moved = places.permute(*range(at), *(at + each for each in (5, 6, 0, 1, 4, 2, 3)))
        moved = moved.movedim((at, at + 1), (0, 1))
        ends = [self.stride[each] * (self.size[each] - 1) + 1 for each in (0, 1)]
        for row in range(self.filters[2]):
            for column in range(self.filters[3]):
                up, left = row * self.dilation[0], column * self.dilation[1]
                total[
                    ..., up : up + ends[0] : self.stride[0], left : left + ends[1] : self.stride[1]
                ] += moved[row, column]
        total = total[..., down : down + high, right : right + wide]
        return total.movedim(-5, -4).reshape(*front, *self.images)

    def rows_of(self, results: Tensor) -> Tensor:
        """Convert the result of a convolution to one matrix for each channel group.

        The axes are (*, groups, rows x positions, output channels of a group).
        """
        front, at = results.shape[:-4], results.dim() - 4
        parts = results.reshape(*front, self.images[0], self.groups, -1, *self.size)
        order = [at + each for each in (1, 0, 3, 4, 2)]
        moved = parts.permute(*range(at), *order)
        return moved.reshape(*front, self.groups, -1, self.filters[0] // self.groups)

    def result_of(self, matrices: Tensor) -> Tensor:
        """Invert `rows_of`."""
        front, at = matrices.shape[:-3], matrices.dim() - 3
        parts = matrices.reshape(*front, self.groups, self.images[0], *self.size, -1)
        order = [at + each for each in (1, 0, 4, 2, 3)]
        return parts.permute(*range(at), *order).reshape(*front, *self.result)

    def columns_of(self, filters: Tensor) -> Tensor:
        """Convert filters to one matrix for each group.

        The axes are (*, groups, elements of one window, output channels of a group).
        """
        front = filters.shape[:-4]
        parts = filters.reshape(*front, self.groups, self.filters[0] // self.groups, -1)
        return parts.mT

    def filters_of(self, matrices: Tensor) -> Tensor:
        """Invert `columns_of`."""
        return matrices.mT.reshape(*matrices.shape[:-3], *self.filters)

    def _reach(self, at: int) -> int:
        return self.dilation[at] * (self.filters[at + 2] - 1) + 1


@lru_cache(maxsize=256)
def convolution(kind: Kind, geometry: Geometry) -> Composed:
    """Return one of the three bilinear maps of a convolution.

    Args:
        kind: "conv2d" maps images and filters to the result; "conv2d_input" maps a result's
            gradient and filters to the images' gradient; "conv2d_weight" maps images and a result's
            gradient to the filters' gradient.
        geometry: shapes and options of the convolution.
    """
    one = geometry
    if kind == "conv2d":
        return Composed(one.windows, one.columns_of, one.result_of)
    if kind == "conv2d_input":
        return Composed(one.rows_of, lambda filters: one.columns_of(filters).mT, one.images_of)
    return Composed(lambda images: one.windows(images).mT, one.rows_of, one.filters_of)
