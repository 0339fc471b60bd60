"""Picture sets with separate training and test rows, which decode only the requested pictures.

A set made from other sets also decodes only the requested pictures: a set with fewer classes, with
another picture size, or of several sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vfl.core.errors import BadOptionError, DataError
from vfl.datasets.sources.base import in_proportion, interleaved
from vfl.datasets.table import Classes

_BLOCK_ROWS = 1024


@dataclass(frozen=True, eq=False)
class Part:
    """Training or test rows of a picture set.

    Attributes:
        labels: class codes, int64, axes (rows,).
        take: function that returns the pictures of some rows, uint8, axes (requested rows,
            channels, height, width).
    """

    labels: np.ndarray
    take: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def of(cls, pictures: np.ndarray, labels: np.ndarray) -> Part:
        """Make a part from pictures that are in memory, axes (rows, channels, height, width)."""
        return cls(labels.astype(np.int64), lambda rows: pictures[rows])


@dataclass(frozen=True, eq=False)
class PictureSet:
    """A whole picture set; `classes` lists the names of the classes in the order of their codes."""

    train: Part
    test: Part
    classes: Classes

    def read(self, limit: int | None = None) -> tuple[np.ndarray, np.ndarray, int]:
        """Read pictures and labels; the training rows come first.

        Args:
            limit: largest number of rows; the first rows of both parts are read, in proportion to
                their sizes.

        Returns:
            Pictures, uint8, axes (rows, channels, height, width); labels, int64, axes (rows,); and
            the number of training rows.

        Raises:
            DataError: a label has no class, or a picture cannot be decoded.
        """
        self._check_labels()
        parts = (self.train, self.test)
        counts = in_proportion([len(part.labels) for part in parts], limit)
        chosen = [(part, np.arange(count)) for part, count in zip(parts, counts, strict=True)]
        pictures = np.concatenate([part.take(rows) for part, rows in chosen])
        return pictures, np.concatenate([part.labels[rows] for part, rows in chosen]), counts[0]

    def _check_labels(self) -> None:
        labels = np.concatenate([self.train.labels, self.test.labels])
        if not labels.size or labels.min() < 0 or labels.max() >= len(self.classes):
            raise DataError(
                "the labels of a picture set do not fit its classes",
                got=f"{len(labels)} labels",
                want=f"numbers from 0 to {len(self.classes) - 1}",
            )


def first_classes(found: PictureSet, classes: int) -> PictureSet:
    """Keep only the rows of the first classes, in the order of the rows.

    Raises:
        BadOptionError: the data set has fewer classes.
    """
    if classes > len(found.classes):
        raise BadOptionError(
            "the data set has fewer classes",
            where="data.classes",
            got=str(classes),
            want=f"at most {len(found.classes)}",
        )

    def kept(part: Part) -> Part:
        rows = np.flatnonzero(part.labels < classes)
        return Part(part.labels[rows], lambda wanted: part.take(rows[wanted]))

    return PictureSet(kept(found.train), kept(found.test), found.classes[:classes])


def resized(found: PictureSet, side: int) -> PictureSet:
    """Resize pictures to `side` x `side`; a new pixel is the mean of its area (a box filter)."""

    def smaller(part: Part) -> Part:
        def take(rows: np.ndarray) -> np.ndarray:
            # Take at least one block even if there are no rows, since np.concatenate needs an
            # array.
            starts = range(0, max(len(rows), 1), _BLOCK_ROWS)
            blocks = [rows[start : start + _BLOCK_ROWS] for start in starts]
            return np.concatenate([resize(part.take(block), side) for block in blocks])

        return Part(part.labels, take)

    return PictureSet(smaller(found.train), smaller(found.test), found.classes)


def resize(pictures: np.ndarray, side: int) -> np.ndarray:
    """Resize pictures.

    Args:
        pictures: uint8, axes (rows, channels, height, width).
        side: height and width of the new pictures, which are also uint8.

    >>> resize(np.array([[[[0, 20], [40, 60]]]], dtype=np.uint8), 1).tolist()
    [[[[30]]]]
    """
    from PIL import Image

    rows, channels = pictures.shape[:2]
    result = np.empty((rows, channels, side, side), dtype=np.uint8)
    for row in range(rows):
        for channel in range(channels):
            plane = Image.fromarray(pictures[row, channel])
            result[row, channel] = np.asarray(plane.resize((side, side), Image.Resampling.BOX))
    return result


def stacked(sets: Sequence[PictureSet]) -> PictureSet:
    """Join several picture sets; alternate between their rows, and number all classes in sequence.

    Raises:
        DataError: the pictures of the sets differ in shape; this error is raised when the pictures
            are read.
    """
    if len(sets) == 1:
        return sets[0]
    offsets = np.cumsum([0, *(len(each.classes) for each in sets)])
    train = _joined([each.train for each in sets], offsets)
    test = _joined([each.test for each in sets], offsets)
    return PictureSet(train, test, tuple(name for each in sets for name in each.classes))


def _joined(parts: Sequence[Part], offsets: np.ndarray) -> Part:
    sizes = [len(part.labels) for part in parts]
    owners = np.repeat(np.arange(len(parts)), sizes)
    order = interleaved(owners)
    owner, position = owners[order], (np.arange(sum(sizes)) - np.cumsum([0, *sizes])[owners])[order]
    labels = np.concatenate([part.labels + offsets[n] for n, part in enumerate(parts)])

    def take(rows: np.ndarray) -> np.ndarray:
        wanted, positions = owner[rows], position[rows]
        found = [part.take(positions[wanted == n]) for n, part in enumerate(parts)]
        if len({pictures.shape[1:] for pictures in found}) > 1:
            raise DataError(
                "these picture sets differ in shape",
                where="data.source",
                got=", ".join("x".join(map(str, pictures.shape[1:])) for pictures in found),
                want="the same number of channels; data.side resizes all of them",
            )
        result = np.empty((len(rows), *found[0].shape[1:]), dtype=np.uint8)
        for n, pictures in enumerate(found):
            result[wanted == n] = pictures
        return result

    return Part(labels[order], take)
