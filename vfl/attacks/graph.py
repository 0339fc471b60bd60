"""The graph of nearest rows that label propagation and spectral clustering walk on."""

from __future__ import annotations

import numpy as np
from scipy import sparse
from torch import Tensor


def neighbour_graph(rows: Tensor, neighbours: int) -> sparse.csr_array:
    """D^-1/2 W D^-1/2 of the symmetric nearest-neighbour graph; float64, axes (rows, rows).

    Two rows are joined if one is among the nearest of the other, by exp(-|x - x'|^2 / (s s')),
    where s is a row's distance to the last of its own nearest (Zelnik-Manor and Perona 2004).

    Args:
        rows: axes (rows, features).
        neighbours: of each row, at most all others.
    """
    from sklearn.neighbors import NearestNeighbors

    count = min(neighbours, len(rows) - 1)
    search = NearestNeighbors(n_neighbors=count, algorithm="brute").fit(rows.numpy())
    distance, near = search.kneighbors()
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
