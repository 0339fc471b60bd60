"""Which k places of a row travel: the largest, or the largest with random replacements.

Both random laws replace a random number m of the top k by as many of the others. Given m, every
choice of places is equally likely, so a law is the distribution of m alone:

- sequential: m = min(Binomial(k, alpha), d - k), which is exactly thesis equation (3-19);
- multinomial: k draws without replacement with fixed weights (1 - alpha)/k and alpha/(d - k), what
  the authors' released program does.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression import compiled, top_loops
from vfl.compression.index_set import Places
from vfl.errors import NonFiniteError

Law = Literal["sequential", "multinomial"]
Draws = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Drops = npt.NDArray[np.bool_]


class Top(NamedTuple):
    """The largest places of each row, axes (rows, k), and which rows have others just as large."""

    places: Places
    tied: npt.NDArray[np.bool_]


def find_top(cut: Tensor, k: int) -> Top:
    """The k places of largest magnitude of each row, increasing; the lower place wins a tie.

    Args:
        cut: axes (rows, width), float32.
        k: places a row, at most `width`.

    Raises:
        NonFiniteError: a row holds NaN or Inf.
    """
    tied = np.zeros(len(cut), np.bool_)
    if compiled.COMPILED and k <= top_loops.MOST_PLACES:
        found = np.empty((len(cut), k), np.int64)
        if not top_loops.find_top(cut.contiguous().view(torch.int32).numpy(), found, tied):
            raise _not_finite()
        return Top(found, tied)
    magnitude = cut.abs()
    largest, places = (each.numpy() for each in torch.topk(magnitude, k, dim=1))
    if not largest.max(initial=0) < np.inf:  # NaN sorts above Inf and both above all others
        raise _not_finite()
    size, least = magnitude.numpy(), largest[:, -1:]
    enough = size >= least
    if np.count_nonzero(enough) > places.size:
        tied = enough.sum(axis=1) > k
        places[tied] = _lower_of_tied(size[tied], least[tied], k)
    places.sort(axis=1)
    return Top(places, tied)


def _not_finite() -> NonFiniteError:
    return NonFiniteError("a cut holds NaN or Inf", fix="lower the learning rate")


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
        draws: uniform on [0, 1), axes (rows, `DRAWS[law]` k); row r of the result uses row r alone.
    """
    k, others = top.shape[1], width - top.shape[1]
    if law == "sequential":
        # Below alpha a draw is uniform again. A row with more of those has all others in any case.
        drops, unit = sequential_drops(draws, others, alpha), float(alpha)
    else:
        drops, unit = multinomial_drops(draws[:, k:], others, alpha), 1.0
    places = top.copy()
    replace = top_loops.replace if compiled.COMPILED else _replace
    replace(places, drops, draws, unit, others)
    return places


def sequential_drops(draws: Draws, others: int, alpha: float) -> Drops:
    """Which of the top places give way under equation (3-19): each with probability alpha.

    There are no more than `others`: a pool that is empty passes its mass to the other pool.

    Args:
        draws: uniform on [0, 1), axes (rows, k).
        others: places outside the top k.
        alpha: weight of those.
    """
    drops: Drops = draws < alpha
    if others < draws.shape[1]:
        drops = _smallest(draws, np.minimum(drops.sum(axis=1), others))
    return drops


def multinomial_drops(draws: Draws, others: int, alpha: float) -> Drops:
    """Which of the top places give way when k are drawn one by one with fixed weights.

    Args:
        draws: uniform on [0, 1), axes (rows, 2 k).
        others: places outside the top k.
        alpha: weight of those.
    """
    count_draws, order_draws = np.split(draws, 2, axis=1)
    k = count_draws.shape[1]
    counts = np.zeros(len(draws), np.int64)
    for drawn in range(k):  # one falls outside in proportion to the weight that is left there
        outside = alpha * (others - counts) / max(others, 1)
        inside = (1 - alpha) * (k - drawn + counts) / k
        counts += count_draws[:, drawn] * (outside + inside) < outside
    return _smallest(order_draws, counts)


#: Draws for each of the k places of a row.
DRAWS = {"sequential": 1, "multinomial": 3}


def _smallest(draws: Draws, counts: Counts) -> Drops:
    """Marks as many of the smallest draws of each row as `counts` says."""
    ends = np.sort(np.pad(draws, ((0, 0), (0, 1)), constant_values=1.0), axis=1)
    smallest: Drops = draws < np.take_along_axis(ends, counts[:, None], axis=1)
    return smallest


def _replace(places: Places, drops: Drops, draws: Draws, unit: float, others: int) -> None:
    """Gives every marked place of a row to one outside the row; see `top_loops.replace`."""
    row, slot = drops.nonzero()
    first = row.searchsorted(row)
    turn = np.arange(len(row)) - first  # 0 for the first that gives way in its row
    numbers = (draws[row, slot] / unit * (others - turn)).astype(np.int64)
    for t in reversed(range(turn.max(initial=0))):  # a Lehmer code becomes distinct numbers
        later = (turn > t).nonzero()[0]
        numbers[later] += numbers[later] >= numbers[first[later] + t]
    # A number stands behind every place of its row that has at most so many others before it.
    before = places[row] - np.arange(places.shape[1])
    places[row, slot] = numbers + (before <= numbers[:, None]).sum(axis=1)
    places.sort(axis=1)
