"""Picture sets with separate test rows; only the requested pictures are decoded.

Sets made from others, with fewer classes, another size, or several sets as one, do not decode more
either.
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
    """Training or test rows of a set.

    Attributes:
        labels: labels, int64, axes (rows,).
        take: returns the pictures of some rows, uint8, axes (requested rows, channels, height,
            width).
    """

    labels: np.ndarray
    take: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def of(cls, pictures: np.ndarray, labels: np.ndarray) -> Part:
        """Make a part from pictures in memory, axes (rows, channels, height, width)."""
        return cls(labels.astype(np.int64), lambda rows: pictures[rows])


@dataclass(frozen=True, eq=False)
class PictureSet:
    """A whole set; `classes` has the names of the labels."""

    train: Part
    test: Part
    classes: Classes

    def read(self, limit: int | None = None) -> tuple[np.ndarray, np.ndarray, int]:
        """Read pictures and labels, training rows first.

        Args:
            limit: largest number of rows, the first of both parts in proportion.

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
    """Select the rows of the first classes, in their order.

    Raises:
        BadOptionError: the set has fewer classes.
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
    """Resize pictures to `side` x `side` pixels, each the mean of its area (a box filter)."""

    def smaller(part: Part) -> Part:
        def take(rows: np.ndarray) -> np.ndarray:
            # At least one block, even without rows, so that there is an array to join.
            starts = range(0, max(len(rows), 1), _BLOCK_ROWS)
            blocks = [rows[start : start + _BLOCK_ROWS] for start in starts]
            return np.concatenate([resize(part.take(block), side) for block in blocks])

        return Part(part.labels, take)

    return PictureSet(smaller(found.train), smaller(found.test), found.classes)


def resize(pictures: np.ndarray, side: int) -> np.ndarray:
    """Resize pictures.

    Args:
        pictures: pictures, uint8, axes (rows, channels, height, width).
        side: height and width of the result, uint8.

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
    """Join several sets: alternate their rows, and number their classes consecutively.

    Raises:
        DataError: their pictures differ in shape; raised on reading.
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
