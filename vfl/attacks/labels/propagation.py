"""Label propagation over a graph of nearest neighbours."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import cg
from torch import Tensor
from torch.nn.functional import one_hot

from vfl.attacks.labels.composed import Composed, Predict, Task
from vfl.attacks.view import Grant
from vfl.core.registry import require_range

_Found = tuple[np.ndarray, np.ndarray]

#: Cached nearest neighbours of the rows that are not leaked; attacks on the same layer share this
#: cache.
_KEPT: dict[tuple[bytes, int, int], _Found] = {}
_KEPT_MOST = 24
_LEAST = 1e-12  # smallest score, before its logarithm


def neighbour_graph(rows: Tensor, neighbours: int, known: int = 0) -> sparse.csr_array:
    """Return D^-1/2 W D^-1/2 of a nearest-neighbour graph with edge weights W; (rows, rows).

    Two rows have an edge if one is among the nearest neighbours of the other. The edge's weight is
    exp(-|x - x'|^2 / (s s')), where s is a row's distance to its furthest neighbour (Zelnik-Manor
    and Perona 2004).

    Args:
        rows: features of the rows, axes (rows, features).
        neighbours: number of nearest neighbours of each row; the function uses fewer if there are
            fewer other rows.
        known: number of leaked rows, which come first. The function caches the neighbours of the
            rows that are not leaked, for later calls with other leaked rows.
    """
    count = min(neighbours, len(rows) - 1)
    distance, near = _nearest(np.ascontiguousarray(rows.numpy()), count, known)
    reach = np.maximum(distance[:, -1], 1e-12)
    weights = np.exp(-((distance / reach[:, None]) * (distance / reach[near])))
    starts = np.arange(0, near.size + 1, count)
    graph = sparse.csr_array(
        (weights.ravel().astype(np.float64), near.ravel(), starts), shape=(len(rows), len(rows))
    )
    graph = graph.maximum(graph.T)
    # If all neighbours of a row are copies of each other, all edge weights of the row are zero, and
    # the row gets no label from other rows.
    root = sparse.diags_array(1 / np.sqrt(np.maximum(graph.sum(axis=1), np.finfo(float).tiny)))
    return sparse.csr_array(root @ graph @ root)


def _nearest(rows: np.ndarray, count: int, known: int) -> _Found:
    """Return distances and positions of each row's nearest other rows, axes (rows, count)."""
    leaked, others = rows[:known], rows[known:]
    if not known or not len(others):
        return _among(rows, count)
    within, across = _among_kept(others, count), _among(leaked, count, others)
    found = _merged([across, (within[0], within[1] + known)], count)
    inside, outside = _among(leaked, count), _among(others, count, leaked)
    first = _merged([inside, (outside[0], outside[1] + known)], count)
    distance, near = (np.concatenate(both) for both in zip(first, found, strict=True))
    return distance, near


def _merged(parts: list[_Found], count: int) -> _Found:
    distance, near = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    order = np.lexsort((near, distance), axis=1)[:, :count]  # first of equally near rows
    return np.take_along_axis(distance, order, 1), np.take_along_axis(near, order, 1)


def _among_kept(rows: np.ndarray, count: int) -> _Found:
    key = (hashlib.blake2b(rows.data).digest(), rows.shape[1], count)
    if key not in _KEPT:
        found = _among(rows, count)
        while len(_KEPT) >= _KEPT_MOST:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[key] = found
    return _KEPT[key]


def forget_neighbours() -> None:
    """Delete the cached neighbours; then the next attack's measured time includes their search."""
    _KEPT.clear()


def _among(rows: np.ndarray, count: int, of: np.ndarray | None = None) -> _Found:
    """Find each row's nearest rows in the same or in another group; fewer if the group is small."""
    from sklearn.neighbors import NearestNeighbors

    count, asked = min(count, len(rows) - (of is None)), rows if of is None else of
    if not count:
        return np.empty((len(asked), 0), rows.dtype), np.empty((len(asked), 0), np.int64)
    search = NearestNeighbors(n_neighbors=count, algorithm="brute").fit(rows)
    found: _Found = search.kneighbors(of)
    return found


def propagate(
    rows: Tensor,
    labels: Tensor,
    classes: int,
    neighbours: int,
    spread: float,
    weights: Tensor | None = None,
) -> Tensor:
    """Return (I - spread S)^-1 Y for the graph S of all rows and labels Y; axes (rows, classes).

    Args:
        rows: features of the rows, axes (rows, features); rows with a known label come first.
        labels: known labels of the first rows, int64.
        classes: number of classes.
        neighbours: number of neighbours of each row in the graph.
        spread: total weight of a row's neighbours relative to its known label, from 0 to below 1.
        weights: weight of each known label; None gives all the same weight.
    """
    graph = neighbour_graph(rows, neighbours, len(labels))
    system = sparse.eye_array(len(rows)) - spread * graph
    start = np.zeros((len(rows), classes))
    start[: len(labels)] = one_hot(labels, classes).numpy()
    if weights is not None:
        start[: len(labels)] *= weights.numpy()[:, None]
    found = [cg(system, column, rtol=1e-6, maxiter=500)[0] for column in start.T]
    return torch.from_numpy(np.stack(found, axis=1)).float()


class LabelPropagation(Composed):
    """Spreads the leaked labels over a graph of leaked, unlabelled and target rows.

    The attack needs no classifier; it assumes that neighbours share a class. With ``at=inputs``,
    this attack is the strongest baseline that does not use the bottom. With ``at=cut+inputs``,
    distances between rows combine cuts and inputs.

    Source: Zhou et al. 2004 (local and global consistency), in closed form.

    Args:
        neighbours: number of neighbours of each row in the graph.
        spread: total weight of a row's neighbours relative to its known label, from 0 to below 1
            (alpha in the paper).
        options: options that all composed attacks have; see `Composed`.

    Raises:
        BadOptionError: an option is out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.UNLABELLED})

    def __init__(self, neighbours: int = 10, spread: float = 0.99, **options: Any) -> None:
        require_range("neighbours", neighbours, 1)
        require_range("spread", spread, 0, 0.9999)
        super().__init__(**self.defaults | options)
        self.neighbours = neighbours
        self.spread = spread

    def learn(self, task: Task) -> Predict:
        rows, further = task.rows, task.further()

        def predict(some: Tensor) -> Tensor:
            groups = [rows, some] if torch.equal(further, some) else [rows, further, some]
            found = propagate(
                torch.cat(groups), task.labels, task.classes,
                self.neighbours, self.spread, task.weights,
            )[-len(some) :].clamp_min(_LEAST)  # fmt: skip
            return (found / found.sum(1, keepdim=True)).log()

        return predict


class JoinedPropagation(LabelPropagation):
    """`LabelPropagation` with distances that combine the inputs and another layer.

    With inputs alone, an adversary without any cut can make the same guesses. A layer that alone
    gives worse guesses than the inputs may still separate classes that overlap in the inputs.

    Args:
        at: the layer whose distances are added to the inputs' distances.
        share: share of the layer in the mean squared distance, 0 to 1 (`mix` of `Composed`).
        options: options of `LabelPropagation`.

    Raises:
        BadOptionError: an option is out of range.
    """

    defaults: ClassVar[dict[str, Any]] = {"scaler": "whiten"}

    def __init__(self, at: str = "cut", share: float = 0.2, **options: Any) -> None:
        require_range("share", share, 0, 1)
        both: dict[str, Any] = {"at": f"{at}+inputs", "mix": share}
        super().__init__(**both | options)
