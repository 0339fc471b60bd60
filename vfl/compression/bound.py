"""The least a cut's symbols need: computed from how often they occur, with no packer involved.

A bound says what the kept places and codes of a whole cut cost an ideal coder. Headers, scales and
the history byte of an adaptive packer are no part of it, so a frame's share above it is all that
packing costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

#: What a packer may know of the codes: nothing, how often each occurs, or how often in each unit.
Counts = Literal["none", "pooled", "by unit"]


@dataclass(frozen=True, slots=True)
class Symbols:
    """What a payload says of a cut, before it is packed.

    Attributes:
        kept: which values travel, bool of axes (rows, width).
        codes: a whole number for each of those, in row order; axes (values,).
        choices: the codes are below it.
        counts: what the packer may know of the codes in advance.
    """

    kept: npt.NDArray[np.bool_]
    codes: np.ndarray
    choices: int
    counts: Counts = "none"


def entropy_bound_bits(batches: Iterable[Symbols]) -> float:
    """Bits that an ideal coder needs for the symbols of a cut.

    With n values kept in a row of d, its places are one of C(d, n) sets, so all rows take

        places = sum of log2 C(d, n) + the entropy of n (0 where n never changes)

    and codes that a packer knows nothing of take log2(choices) each. Where it may learn how often
    something occurs, the bound is an order-0 entropy over all rows:

        pooled   min(places, entropy of each unit's being kept) + entropy of the codes
        by unit  min(places + log2(choices) a code, entropy of each unit's codes, absent being one)

    The entropy of symbols with counts c is the sum of c log2(total / c), as if the frequencies
    were known beforehand. A coder that also knows what came before a symbol may go below it.

    Args:
        batches: the symbols of the cut, batch after batch, of one codec; NaN without any.

    >>> kept = np.zeros((256, 128), bool)
    >>> kept[:, :3] = True
    >>> f"{entropy_bound_bits([Symbols(kept, np.zeros(768, int), choices=256)]) / 8:.1f} bytes"
    '1356.2 bytes'
    """
    sizes: Counter[int] = Counter()
    table: np.ndarray | None = None
    symbols: Symbols | None = None
    for symbols in batches:
        sizes.update(symbols.kept.sum(axis=1).tolist())
        if symbols.counts != "none":
            counted = _table(symbols)
            table = counted if table is None else table + counted
    if symbols is None:
        return math.nan
    places = _places_bits(sizes, symbols.kept.shape[1])
    plain = places + math.log2(symbols.choices) * sum(kept * n for kept, n in sizes.items())
    if table is None:
        return plain
    present = table.sum(axis=1)
    absent = sizes.total() - present
    if symbols.counts == "pooled":
        by_unit = sum(map(entropy_bits, np.stack([present, absent], axis=1)))
        return min(places, by_unit) + entropy_bits(table.sum(axis=0))
    return min(plain, sum(map(entropy_bits, np.column_stack([table, absent]))))


def entropy_bits(counts: npt.ArrayLike) -> float:
    """Bits of all symbols that occur so often each, at their order-0 entropy.

    >>> entropy_bits([1, 1, 2])
    6.0
    """
    found = np.asarray(counts, np.float64)
    occurring = found[found > 0]
    return float((occurring * np.log2(occurring.sum() / occurring)).sum())


def _places_bits(sizes: Counter[int], width: int) -> float:
    sets = sum(rows * math.log2(math.comb(width, kept)) for kept, rows in sizes.items())
    return sets + entropy_bits(list(sizes.values()))


def _table(symbols: Symbols) -> np.ndarray:
    """How often each code occurs in each unit, axes (width, choices)."""
    width = symbols.kept.shape[1]
    cells = symbols.kept.nonzero()[1] * symbols.choices + symbols.codes
    found = np.bincount(cells, minlength=width * symbols.choices)
    return found.reshape(width, symbols.choices)
