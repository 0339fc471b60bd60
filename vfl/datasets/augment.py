"""Augmentations: random changes of a party's rows, drawn anew each time the party trains on them.

Other parties do not notice augmentations, because a message contains only the cut of the changed
rows. To add an augmentation, write a subclass of `Augmentation`, and register it by an entry point
in the group ``vfl.augmentations``, by `--plugin` or by `AUGMENTATIONS.register`. The party's own
file may also name any function of rows by its path.

>>> augment = augmentation_of("flip+noise:sigma=0.1", (1, 8, 8))
>>> augment(torch.zeros(2, 1, 8, 8)).shape
torch.Size([2, 1, 8, 8])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from vfl.core.errors import DataError, SpecError
from vfl.core.registry import Registry, imported, parts, require_range
from vfl.core.sources import is_loader

Change = Callable[[Tensor], Tensor]


class Augmentation(ABC):
    """Base class: changes each training row independently, with torch's global generator.

    The session seeds this generator for each step, from the party's secret.
    """

    def check(self, shape: Sequence[int]) -> None:
        """Refuse rows whose axes the augmentation cannot handle.

        Raises:
            SpecError: the augmentation cannot handle these axes; the error names axes that it can
                handle.
        """

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """Return changed rows in a new tensor, with the same axes (rows, ...), type and device."""


class OfPictures(Augmentation):
    """Base class of augmentations for rows with axes (channels, height, width)."""

    def check(self, shape: Sequence[int]) -> None:
        if len(shape) != 3:
            raise SpecError(
                f"'{type(self).__name__.lower()}' is for pictures",
                got=f"rows of axes {tuple(shape)}",
                want="axes (channels, height, width)",
                fix="a bottom that takes pictures, such as cnn, or shape in the party's own file",
            )


class Flip(OfPictures):
    """Mirrors each picture horizontally with probability 1/2 (He et al. 2016, section 4.2)."""

    def __call__(self, rows: Tensor) -> Tensor:
        mirrored = torch.rand(len(rows)) < 0.5
        return torch.where(mirrored[:, None, None, None], rows.flip(3), rows)


class Crop(OfPictures):
    """Adds a margin of zeros to each picture, and crops it at random (He et al. 2016, section 4.2).

    Args:
        padding: width of the margin in pixels, on each side, 1 to 64.
    """

    def __init__(self, padding: int = 4) -> None:
        require_range("padding", padding, 1, 64)
        self.padding = padding

    def __call__(self, rows: Tensor) -> Tensor:
        count, _, height, width = rows.shape
        wide = pad(rows, [self.padding] * 4)
        top, left = torch.randint(2 * self.padding + 1, (2, count, 1))
        at = torch.arange(count)[:, None, None]
        y, x = top + torch.arange(height), left + torch.arange(width)
        return wide.permute(0, 2, 3, 1)[at, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


class Noise(Augmentation):
    """Adds Gaussian noise to every number (Bishop 1995).

    Args:
        sigma: standard deviation of the noise, in the units of the encoded columns.
    """

    def __init__(self, sigma: float = 0.1) -> None:
        require_range("sigma", sigma, 0, 1e3)
        self.sigma = sigma

    def __call__(self, rows: Tensor) -> Tensor:
        return rows + self.sigma * torch.randn(rows.shape)


class Mask(Augmentation):
    """Sets random numbers to 0, a standardised column's mean (Vincent et al. 2008, section 2.3).

    Args:
        share: fraction of the numbers in each row that are set to 0, on average.
    """

    def __init__(self, share: float = 0.1) -> None:
        require_range("share", share, 0, 1)
        self.share = share

    def __call__(self, rows: Tensor) -> Tensor:
        return rows * (torch.rand(rows.shape) >= self.share)


AUGMENTATIONS: Registry[Augmentation] = Registry(
    kind="augmentation",
    contract=Augmentation,  # type: ignore[type-abstract]
    members={
        "flip": "vfl.datasets.augment:Flip",
        "crop": "vfl.datasets.augment:Crop",
        "noise": "vfl.datasets.augment:Noise",
        "mask": "vfl.datasets.augment:Mask",
    },
    group="vfl.augmentations",
)


@dataclass(frozen=True, slots=True)
class Augment:
    """Applies several changes to rows, one after another.

    Attributes:
        changes: functions of rows, axes (rows, ...).
        rows_apart: whether every change is known to treat each row independently of other rows.
    """

    changes: tuple[Change, ...]
    rows_apart: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the rows after all changes.

        Raises:
            DataError: a user's function changes the axes or the type of the rows.
        """
        given = rows
        for change in self.changes:
            rows = change(rows)
        if not isinstance(rows, Tensor) or (rows.shape, rows.dtype) != (given.shape, given.dtype):
            raise DataError(
                "an augmentation changes the shape or the type of rows",
                where="augment",
                got=_axes(rows),
                want=_axes(given),
            )
        return rows


def _axes(rows: object) -> str:
    if not isinstance(rows, Tensor):
        return f"a {type(rows).__name__}"
    return f"{rows.dtype}, axes {tuple(rows.shape)}"


def augmentation_of(text: str, shape: Sequence[int], *, own: bool = False) -> Augment | None:
    """Build the augmentation that a setting names; return None for "none".

    Args:
        text: augmentation specs joined by plus signs, or "none".
        shape: axes of one row.
        own: whether the text comes from the party's own file, which may name code to import.

    Raises:
        SpecError: the augmentation or function does not exist, or cannot handle such rows.
    """
    if text == "none":
        return None
    changes: list[Change] = []
    for spec in parts(text):
        if own and is_loader(spec):
            changes.append(imported(spec, "a function of rows"))
            continue
        made = AUGMENTATIONS.make(spec)
        made.check(shape)
        changes.append(made)
    return Augment(tuple(changes), all(isinstance(one, Augmentation) for one in changes))
