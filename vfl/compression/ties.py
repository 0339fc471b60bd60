"""Which of equal magnitudes count as the largest, where a rule would tell what is random."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from vfl.compression.base import Moment
from vfl.compression.index_set import Places
from vfl.compression.select import Top


def broken_at_random(cut: Tensor, top: Top, moment: Moment) -> Places:
    """The top places, those that equal the least of their row chosen anew among all that do.

    If the lower place always counted as top, a higher one of the same magnitude would have to be a
    random replacement, and whoever reads the frame would know it.

    Args:
        cut: axes (rows, width), float32.
        top: its k largest places; axes (rows, k).
        moment: whose secret decides; a row's choice follows from it, the step and its position.
    """
    assert moment.secret is not None, "ties are broken by a party's own secret"
    tied = top.tied.nonzero()[0]
    if not len(tied):
        return top.places
    size, chosen = np.abs(cut.numpy()[tied]), top.places.copy()
    least = np.take_along_axis(size, chosen[tied], axis=1).min(axis=1, keepdims=True)
    draws = moment.secret.uniform_rows(tied, size.shape[1], "ties", moment.step)
    order = np.where(size == least, draws, np.where(size > least, -1.0, 2.0))
    k = chosen.shape[1]
    chosen[tied] = np.sort(np.argpartition(order, k - 1, axis=1)[:, :k], axis=1)
    return chosen
