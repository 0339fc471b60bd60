"""Augmentations by name: random changes of a party's rows each time they are trained on.

No other party learns of them, because a message contains only the cut of the augmented rows. A
further augmentation is a subclass of `Augmentation`, which an entry point in the group
``vfl.augmentations``, `--plugin` or `AUGMENTATIONS.register` adds. It may also be any function of
rows whose path the party's own file contains.

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
from vfl.core.storage import is_loader

Change = Callable[[Tensor], Tensor]


class Augmentation(ABC):
    """Changes each training row independently, with draws of torch's own generator."""

    def check(self, shape: Sequence[int]) -> None:
        """Refuse rows with axes that the augmentation does not support.

        Raises:
            SpecError: the axes are not supported; the error names the supported axes.
        """

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """Augmented rows with the same axes (rows, ...), type and device, as a new tensor."""


class OfPictures(Augmentation):
    """An augmentation of rows with axes (channels, height, width)."""

    def check(self, shape: Sequence[int]) -> None:
        if len(shape) != 3:
            raise SpecError(
                f"'{type(self).__name__.lower()}' is for pictures",
                got=f"rows of axes {tuple(shape)}",
                want="axes (channels, height, width)",
                fix="a bottom that takes pictures, such as cnn, or shape in the party's own file",
            )


class Flip(OfPictures):
    """Mirrors half of the pictures horizontally (He et al. 2016, section 4.2)."""

    def __call__(self, rows: Tensor) -> Tensor:
        mirrored = torch.rand(len(rows)) < 0.5
        return torch.where(mirrored[:, None, None, None], rows.flip(3), rows)


class Crop(OfPictures):
    """Adds a margin of zeros to each picture and crops it at random (He et al. 2016, section 4.2).

    Args:
        padding: pixels of the margin on each side, 1 to 64.
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
        sigma: standard deviation of the noise, in units of the encoded columns.
    """

    def __init__(self, sigma: float = 0.1) -> None:
        require_range("sigma", sigma, 0, 1e3)
        self.sigma = sigma

    def __call__(self, rows: Tensor) -> Tensor:
        return rows + self.sigma * torch.randn(rows.shape)


class Mask(Augmentation):
    """Sets numbers to 0, the mean of a standardised column (Vincent et al. 2008, section 2.3).

    Args:
        share: mean share of the numbers of each row that are set to 0.
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
    """Applies several changes of rows, one after the other.

    Attributes:
        changes: functions of rows of axes (rows, ...).
        rows_apart: whether each change is known to treat every row independently.
    """

    changes: tuple[Change, ...]
    rows_apart: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """The changed rows.

        Raises:
            DataError: a function of the user changes the axes or the type of the rows.
        """
        given = rows
        for change in self.changes:
            rows = change(rows)
        if not isinstance(rows, Tensor) or (rows.shape, rows.dtype) != (given.shape, given.dtype):
            raise DataError(
                "an augmentation changes the shape of rows",
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
        text: specs joined with a plus, or "none".
        shape: axes of one row.
        own: whether the text comes from the party's own file, which may name code to import.

    Raises:
        SpecError: the augmentation or function does not exist, or does not support such rows.
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
