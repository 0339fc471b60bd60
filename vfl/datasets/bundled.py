"""Data sets known by name: two that come with scikit-learn, and picture sets from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from vfl.datasets.cifar import read_cifar
from vfl.datasets.images import read_images
from vfl.datasets.party import Classes
from vfl.datasets.picture_set import Part, PictureSet
from vfl.datasets.tiny_imagenet import read_tiny_imagenet
from vfl.errors import BadOptionError, UnknownNameError, nearest

# Mean and spread of each channel's training pixels on the scale 0..1; tests compute them again.
PIXELS = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "tiny_imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}
SOURCES = ("digits", "breast_cancer", *PIXELS)
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


@dataclass(frozen=True, eq=False)
class Bundled:
    """One data set before it is cut into parties.

    Attributes:
        cells: pictures, axes (rows, channels, height, width), or a table of number columns.
        labels: int64 codes, axes (rows,).
        classes: what the codes stand for.
        mean, scale: ``(pixel - mean) / scale`` standardises a picture, one of each a channel;
            unused for a table.
        train_rows: rows before the set's own test rows; None where it has none of its own.
    """

    cells: np.ndarray | pd.DataFrame
    labels: np.ndarray
    classes: Classes
    mean: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)
    train_rows: int | None = None

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.labels)


def read_bundled(
    source: str, root: Path | None = None, download: bool = False, limit: int | None = None
) -> Bundled:
    """A data set by name.

    Args:
        source: one of `SOURCES`.
        root: folder of the picture files; see `read_images`, `read_cifar`, `read_tiny_imagenet`.
        download: fetch the picture files when they are not there.
        limit: at most so many rows, the first ones; a set with test rows of its own gives training
            and test rows in their proportion.

    Raises:
        UnknownNameError: no such data set.
        BadOptionError: a limit below 1.
        MissingDataError: picture files that are not there.
        DataError: picture files that are damaged.
    """
    if source not in SOURCES:
        raise UnknownNameError(
            f"no data set is called '{source}'",
            want=", ".join(SOURCES),
            fix=nearest(source, SOURCES),
        )
    if limit is not None and limit < 1:
        raise BadOptionError("a limit of rows is at least 1", got=str(limit))
    if source == "digits":
        return _digits(limit)
    if source == "breast_cancer":
        return _breast_cancer(limit)
    return _pictures(source, root, download, limit)


def _digits(limit: int | None) -> Bundled:
    from sklearn.datasets import load_digits

    found = load_digits()
    return Bundled(
        cells=found.images[:limit, None],
        labels=found.target[:limit].astype(np.int64),
        classes=tuple(range(10)),
        scale=(16.0,),
    )


def _breast_cancer(limit: int | None) -> Bundled:
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer(as_frame=True)
    return Bundled(
        cells=found.data[:limit],
        labels=found.target[:limit].to_numpy(dtype=np.int64, copy=True),
        classes=tuple(map(str, found.target_names)),
    )


def _pictures(source: str, root: Path | None, download: bool, limit: int | None) -> Bundled:
    found = _READERS[source](root, download)
    pictures, labels, train_rows = found.read(limit)
    mean, scale = PIXELS[source]
    return Bundled(
        cells=pictures,
        labels=labels,
        classes=found.classes,
        mean=tuple(255 * channel for channel in mean),
        scale=tuple(255 * channel for channel in scale),
        train_rows=train_rows,
    )


def _idx_set(source: str, classes: Classes, root: Path | None, download: bool) -> PictureSet:
    pictures, labels, train_rows = read_images(source, root, download)
    train, test = (
        Part.of(pictures[rows], labels[rows])
        for rows in (slice(train_rows), slice(train_rows, None))
    )
    return PictureSet(train, test, classes)


_READERS: Mapping[str, Callable[[Path | None, bool], PictureSet]] = {
    "mnist": partial(_idx_set, "mnist", tuple(range(10))),
    "fashion_mnist": partial(_idx_set, "fashion_mnist", FASHION),
    "cifar10": partial(read_cifar, "cifar10"),
    "cifar100": partial(read_cifar, "cifar100"),
    "tiny_imagenet": lambda root, download: read_tiny_imagenet(root),
}
