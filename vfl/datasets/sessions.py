"""Sessions of clicks as rows: everything up to a click, and the item that was clicked next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def next_items(
    sessions: Sequence[Sequence[int]], length: int, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Every beginning of every session, and what came next.

    Args:
        sessions: items as whole numbers from 0, each session in the order of its clicks.
        length: items a row; of a longer beginning the last ones.
        limit: at most so many rows, the first ones.

    Returns:
        rows, float32, axes (rows, length): items counted from 1, then zeros as padding; next items
        as they are, int64, axes (rows,). A float32 holds whole numbers below 2**24 exactly.

    >>> rows, following = next_items([[7, 4, 9]], length=2)
    >>> rows.tolist(), following.tolist()
    ([[8.0, 0.0], [8.0, 5.0]], [4, 9])
    """
    every = sum(max(len(items) - 1, 0) for items in sessions)
    count = min(limit if limit is not None else every, every)
    rows, following = np.zeros((count, length), np.float32), np.empty(count, np.int64)
    row = 0
    for items in sessions:
        known = np.array(items, dtype=np.int64) + 1
        for end in range(1, min(len(items), count - row + 1)):
            kept = known[max(0, end - length) : end]
            rows[row, : len(kept)] = kept
            following[row] = items[end]
            row += 1
    return rows, following
