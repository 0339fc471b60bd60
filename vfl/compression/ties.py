"""Which of equal magnitudes count as the largest, where a rule would tell what is random."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from vfl.compression.base import Moment
from vfl.compression.index_set import Places


def broken_at_random(cut: Tensor, top: Places, moment: Moment) -> Places:
    """The top places, those that equal the least of their row chosen anew among all that do.

    If the lower place always counted as top, a higher one of the same magnitude would have to be a
    random replacement, and whoever reads the frame would know it.

    Args:
        cut: axes (rows, width), float32.
        top: its k largest places, increasing; axes (rows, k).
        moment: whose secret decides; a row's choice follows from it, the step and its position.
    """
    assert moment.secret is not None, "ties are broken by a party's own secret"
    k, size = top.shape[1], cut.abs().numpy()
    least = np.take_along_axis(size, top, axis=1).min(axis=1, keepdims=True)
    tied = np.count_nonzero(size >= least, axis=1) > k
    if not tied.any():
        return top
    draws = moment.secret.uniform(size.shape, "ties", moment.step)[tied]
    size, least, chosen = size[tied], least[tied], top.copy()
    order = np.where(size == least, draws, np.where(size > least, -1.0, 2.0))
    chosen[tied] = np.sort(np.argsort(order, axis=1)[:, :k], axis=1)
    return chosen
