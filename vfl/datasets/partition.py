"""Columns and pictures cut into one piece a party, in order and as even as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vfl.errors import DataError


def partition_columns(columns: Sequence[str], parties: Sequence[str]) -> dict[str, list[str]]:
    """Blocks of neighbouring columns; the first parties get one more where it does not divide.

    >>> partition_columns(["a", "b", "c"], ["bank", "shop"])
    {'bank': ['a', 'b'], 'shop': ['c']}

    Raises:
        DataError: more parties than columns, none, or one named twice.
    """
    return {
        party: [columns[position] for position in block]
        for party, block in zip(parties, blocks(len(columns), parties), strict=True)
    }


def partition_image(pictures: np.ndarray, parties: Sequence[str]) -> dict[str, np.ndarray]:
    """Vertical strips from left to right, as views; with two parties the halves.

    Args:
        pictures: axes (rows, ..., height, width).
        parties: in the order of their strips.

    Raises:
        DataError: more parties than columns of pixels, none, or one named twice.
    """
    return {
        party: pictures[..., block[0] : block[-1] + 1]
        for party, block in zip(parties, blocks(pictures.shape[-1], parties), strict=True)
    }


def blocks(columns: int, parties: Sequence[str]) -> list[np.ndarray]:
    """The positions of each party's columns; int64, in order.

    Raises:
        DataError: more parties than columns, none, or one named twice.
    """
    if not 1 <= len(parties) <= columns or len(set(parties)) != len(parties):
        raise DataError(
            "these parties cannot share these columns",
            got=f"{len(parties)} parties ({len(set(parties))} different), {columns} columns",
            want="at least one party, each named once, and a column for every one",
        )
    return list(np.array_split(np.arange(columns), len(parties)))
