"""Data sets known by name: two that come with scikit-learn, two picture sets from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from vfl.datasets.images import read_images
from vfl.datasets.party import Classes
from vfl.errors import BadOptionError, UnknownNameError, nearest

SOURCES = ("digits", "breast_cancer", "mnist", "fashion_mnist")
# Mean and spread of the training pixels on the scale 0..1; a test computes them again.
PIXELS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}
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
        cells: pictures, axes (rows, 1, height, width), or a table of number columns.
        labels: int64 codes, axes (rows,).
        classes: what the codes stand for.
        mean, scale: ``(pixel - mean) / scale`` standardises a picture; unused for a table.
        train_rows: rows before the set's own test rows; None where it has none of its own.
    """

    cells: np.ndarray | pd.DataFrame
    labels: np.ndarray
    classes: Classes
    mean: float = 0.0
    scale: float = 1.0
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
        root: folder of the picture files; see `read_images`.
        download: fetch the picture files when they are not there.
        limit: at most so many rows, the first ones; a set with test rows of its own gives training
            and test rows in their proportion.

    Raises:
        UnknownNameError: no such data set.
        BadOptionError: a limit below 1.
        MissingDataError: picture files that are not there.
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
    return _images(source, root, download, limit)


def _digits(limit: int | None) -> Bundled:
    from sklearn.datasets import load_digits

    found = load_digits()
    return Bundled(
        cells=found.images[:limit, None],
        labels=found.target[:limit].astype(np.int64),
        classes=tuple(range(10)),
        scale=16.0,
    )


def _breast_cancer(limit: int | None) -> Bundled:
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer(as_frame=True)
    return Bundled(
        cells=found.data[:limit],
        labels=found.target[:limit].to_numpy(dtype=np.int64, copy=True),
        classes=tuple(map(str, found.target_names)),
    )


def _images(source: str, root: Path | None, download: bool, limit: int | None) -> Bundled:
    pictures, labels, train_rows = read_images(source, root, download)
    rows = min(limit or len(labels), len(labels))
    first = round(rows * train_rows / len(labels))
    if rows < len(labels):
        kept = np.r_[:first, train_rows : train_rows + rows - first]
        pictures, labels, train_rows = pictures[kept], labels[kept], first
    mean, scale = PIXELS[source]
    return Bundled(
        cells=pictures,
        labels=labels,
        classes=tuple(range(10)) if source == "mnist" else FASHION,
        mean=mean * 255,
        scale=scale * 255,
        train_rows=train_rows,
    )
