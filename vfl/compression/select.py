"""Which k places of a row travel: the largest, or the largest with random replacements.

Both random laws replace a random number m of the top k by as many of the others. Given m, every
choice of places is equally likely, so a law is the distribution of m alone:

- sequential: m = min(Binomial(k, alpha), d - k), which is exactly thesis equation (3-19);
- multinomial: k draws without replacement with fixed weights (1 - alpha)/k and alpha/(d - k), what
  the authors' released program does.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.index_set import Places
from vfl.errors import NonFiniteError

Law = Literal["sequential", "multinomial"]
Draws = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def top_places(cut: Tensor, k: int) -> Places:
    """The k places of largest magnitude of each row, increasing; the lower place wins a tie.

    Args:
        cut: axes (rows, width), float32.
        k: places a row, at most `width`.

    Raises:
        NonFiniteError: a row holds NaN or Inf.
    """
    magnitude = cut.abs()
    largest, found = torch.topk(magnitude, k, dim=1)
    if not torch.isfinite(largest[:, 0]).all():  # NaN sorts above Inf and both above all others
        raise NonFiniteError("a cut holds NaN or Inf", fix="lower the learning rate")
    places: Places = found.numpy()
    size, least = magnitude.numpy(), largest[:, -1:].numpy()
    enough = size >= least
    if np.count_nonzero(enough) > places.size:
        tied = enough.sum(axis=1) > k
        places[tied] = _lower_of_tied(size[tied], least[tied], k)
    return np.sort(places, axis=1)


def _lower_of_tied(size: np.ndarray, least: np.ndarray, k: int) -> Places:
    """All places above `least` (axes (rows, 1)) and the lowest places equal to it, k a row."""
    above, level = size > least, size == least
    room = k - above.sum(axis=1, keepdims=True)
    kept = above | (level & (level.cumsum(axis=1) <= room))
    places: Places = kept.nonzero()[1].reshape(-1, k)
    return places


def random_places(top: Places, width: int, alpha: float, law: Law, draws: Draws) -> Places:
    """The top places with some of them replaced at random, increasing.

    Args:
        top: axes (rows, k), increasing.
        width: width of the cut.
        alpha: weight of the places outside the top k, in [0, 1].
        law: distribution of the number of replacements.
        draws: uniform on [0, 1), axes (rows, 3 k); row r of the result uses row r alone.
    """
    k = top.shape[1]
    count_draws, order_draws, place_draws = np.split(draws, 3, axis=1)
    counts = _COUNTS[law](count_draws, width - k, alpha)
    order = np.argsort(order_draws, axis=1)
    others = _other_places(_distinct(place_draws, width - k), top)
    replaced = np.arange(k) < counts[:, None]
    return np.sort(np.where(replaced, others, np.take_along_axis(top, order, axis=1)), axis=1)


def sequential_counts(draws: Draws, others: int, alpha: float) -> Counts:
    """Replacements a row under equation (3-19): min(Binomial(k, alpha), others).

    A pool that is empty passes its mass to the other pool, hence the minimum.
    """
    counts: Counts = np.minimum((draws < alpha).sum(axis=1), others)
    return counts


def multinomial_counts(draws: Draws, others: int, alpha: float) -> Counts:
    """Replacements a row when k places are drawn one after another with fixed weights.

    A draw falls outside the top k with probability proportional to the weight left there.
    """
    k = draws.shape[1]
    counts = np.zeros(len(draws), np.int64)
    for drawn in range(k):
        outside = alpha * (others - counts) / max(others, 1)
        inside = (1 - alpha) * (k - drawn + counts) / k
        counts += draws[:, drawn] * (outside + inside) < outside
    return counts


_COUNTS = {"sequential": sequential_counts, "multinomial": multinomial_counts}


def _distinct(draws: Draws, count: int) -> Places:
    """A uniform sequence of distinct numbers below `count`; axes as `draws`.

    Draw t becomes a rank among the `count` - t numbers still free (a Lehmer code), and ranks become
    numbers from the last to the first. Columns from `count` on mean nothing and are never used.
    """
    k = draws.shape[1]
    numbers = (draws * np.maximum(count - np.arange(k), 0)).astype(np.int64)
    for t in reversed(range(k - 1)):
        numbers[:, t + 1 :] += numbers[:, t + 1 :] >= numbers[:, t : t + 1]
    return numbers


def _other_places(ranks: Places, top: Places) -> Places:
    """The places with the given ranks among those outside `top`, which is increasing."""
    places = ranks.copy()
    for t in range(top.shape[1]):
        places += places >= top[:, t : t + 1]
    return places
