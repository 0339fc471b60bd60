"""The graph of nearest rows that label propagation and spectral clustering walk on."""

from __future__ import annotations

import hashlib

import numpy as np
from scipy import sparse
from torch import Tensor

_Found = tuple[np.ndarray, np.ndarray]

#: What attacks on one layer have in common: the nearest of rows that are the same for every leak.
_KEPT: dict[tuple[bytes, int, int], _Found] = {}
_KEPT_MOST = 24


def neighbour_graph(rows: Tensor, neighbours: int, known: int = 0) -> sparse.csr_array:
    """D^-1/2 W D^-1/2 of the symmetric nearest-neighbour graph; float64, axes (rows, rows).

    Two rows are joined if one is among the nearest of the other, by exp(-|x - x'|^2 / (s s')),
    where s is a row's distance to the last of its own nearest (Zelnik-Manor and Perona 2004).

    Args:
        rows: axes (rows, features).
        neighbours: of each row, at most all others.
        known: so many first rows are a leak. What is found of the others is kept for the next one.
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
    # A row beside twins of each other has no edge that is not 0, and stays alone.
    root = sparse.diags_array(1 / np.sqrt(np.maximum(graph.sum(axis=1), np.finfo(float).tiny)))
    return sparse.csr_array(root @ graph @ root)


def _nearest(rows: np.ndarray, count: int, known: int) -> _Found:
    """Distances and places of each row's nearest others, axes (rows, count), near to far."""
    leaked, others = rows[:known], rows[known:]
    if not known or not len(others):
        return _among(rows, count)
    within, across = _among_kept(others, count), _of(others, leaked, count)
    found = _merged([across, (within[0], within[1] + known)], count)
    inside, outside = _among(leaked, count), _of(leaked, others, count)
    first = _merged([inside, (outside[0], outside[1] + known)], count)
    distance, near = (np.concatenate(both) for both in zip(first, found, strict=True))
    return distance, near


def _merged(parts: list[_Found], count: int) -> _Found:
    distance, near = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    order = np.lexsort((near, distance), axis=1)[:, :count]  # of equals the first row
    return np.take_along_axis(distance, order, 1), np.take_along_axis(near, order, 1)


def _among_kept(rows: np.ndarray, count: int) -> _Found:
    key = (hashlib.blake2b(rows.data).digest(), rows.shape[1], count)
    if key not in _KEPT:
        found = _among(rows, count)
        while len(_KEPT) >= _KEPT_MOST:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[key] = found
    return _KEPT[key]


def _among(rows: np.ndarray, count: int) -> _Found:
    """The nearest others of each row, as many as there are."""
    from sklearn.neighbors import NearestNeighbors

    count = min(count, len(rows) - 1)
    if not count:
        return np.empty((len(rows), 0), rows.dtype), np.empty((len(rows), 0), np.int64)
    found: _Found = NearestNeighbors(n_neighbors=count, algorithm="brute").fit(rows).kneighbors()
    return found


def _of(rows: np.ndarray, others: np.ndarray, count: int) -> _Found:
    """The nearest of others to each row, as many as there are."""
    from sklearn.neighbors import NearestNeighbors

    search = NearestNeighbors(n_neighbors=min(count, len(others)), algorithm="brute")
    found: _Found = search.fit(others).kneighbors(rows)
    return found
