"""Picture sets made from others: fewer classes, another size, several sets as one.

Each works on sets that are not decoded yet, and decodes nothing that is not wanted later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vfl.datasets.picture_set import Part, PictureSet, interleaved
from vfl.errors import BadOptionError, DataError

_BLOCK_ROWS = 1024


def first_classes(found: PictureSet, classes: int) -> PictureSet:
    """The rows of the first so many classes, in their order.

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
    """Pictures of `side` x `side` pixels, each the mean of those it covers (a box filter)."""

    def smaller(part: Part) -> Part:
        def take(rows: np.ndarray) -> np.ndarray:
            blocks = [rows[start : start + _BLOCK_ROWS] for start in _starts(len(rows))]
            return np.concatenate([resize(part.take(block), side) for block in blocks])

        return Part(part.labels, take)

    return PictureSet(smaller(found.train), smaller(found.test), found.classes)


def resize(pictures: np.ndarray, side: int) -> np.ndarray:
    """Pictures at another size.

    Args:
        pictures: uint8, axes (rows, channels, height, width).
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
    """Several sets as one: their rows in turn, their classes one after another.

    Raises:
        DataError: their pictures differ in shape; told when they are read.
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
    owner, place = owners[order], (np.arange(sum(sizes)) - np.cumsum([0, *sizes])[owners])[order]
    labels = np.concatenate([part.labels + offsets[n] for n, part in enumerate(parts)])
    return Part(labels[order], _taker(parts, owner, place))


def _taker(
    parts: Sequence[Part], owner: np.ndarray, place: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    def take(rows: np.ndarray) -> np.ndarray:
        owners, places = owner[rows], place[rows]
        found = [part.take(places[owners == n]) for n, part in enumerate(parts)]
        if len({pictures.shape[1:] for pictures in found}) > 1:
            raise DataError(
                "these picture sets differ in shape",
                where="data.source",
                got=", ".join("x".join(map(str, pictures.shape[1:])) for pictures in found),
                want="as many channels; data.side gives all of them one size",
            )
        result = np.empty((len(rows), *found[0].shape[1:]), dtype=np.uint8)
        for n, pictures in enumerate(found):
            result[owners == n] = pictures
        return result

    return take


def _starts(rows: int) -> range:
    """Where blocks start; one for no rows at all, so that there is something to join."""
    return range(0, max(rows, 1), _BLOCK_ROWS)
