"""Spectral clustering: clusters of any shape that the graph of nearest rows holds together."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from scipy.sparse.linalg import lobpcg
from torch import Tensor
from torch.nn.functional import normalize

from vfl.attacks.features import EmbeddingAttack, Layer
from vfl.attacks.fit import key_of
from vfl.attacks.graph import neighbour_graph
from vfl.attacks.view import View
from vfl.options import require_range

_SPARE = 5  # vectors that make the block find the leading ones sooner


class Spectral(EmbeddingAttack):
    """Clusters the targets by the leading eigenvectors of their neighbour graph.

    Source: Ng, Jordan and Weiss 2001; k-means on the eigenvectors' rows.

    Args:
        neighbours: of each row in the graph.
        most: the graph has at most so many rows, drawn at random; every other target joins the
            cluster of the nearest of them.
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    goal = "clusters"

    def __init__(self, neighbours: int = 10, most: int = 5000, at: Layer = "cut") -> None:
        require_range("neighbours", neighbours, 1)
        require_range("most", most, 2)
        super().__init__(at)
        self.neighbours = neighbours
        self.most = most

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        rows = self.rows(view, view.targets)
        chosen = torch.randperm(len(rows), generator=draw)[: self.most]
        codes = clusters(rows[chosen], view.classes, self.neighbours, draw)
        return codes[_nearest(rows, rows[chosen])]


def clusters(rows: Tensor, count: int, neighbours: int, draw: torch.Generator) -> Tensor:
    """The cluster of each row; int64, axes (rows,).

    Args:
        rows: axes (rows, features).
        count: how many clusters.
        neighbours: of each row in the graph.
        draw: where the search starts.
    """
    from sklearn.cluster import KMeans as Clustering

    graph = neighbour_graph(rows, neighbours)
    start = torch.randn(len(rows), count + _SPARE, generator=draw, dtype=torch.float64).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the last digits are of no use here
        # Whole blocks: a graph in pieces has the eigenvalue 1 several times over.
        _, vectors = lobpcg(graph, start, largest=True, tol=1e-4, maxiter=200)
    leading = np.ascontiguousarray(vectors[:, :count])
    places = normalize(torch.from_numpy(leading), dim=1).numpy()
    model = Clustering(count, n_init=10, random_state=key_of(draw) % 2**32)
    return torch.from_numpy(model.fit_predict(places)).long()


def _nearest(rows: Tensor, chosen: Tensor) -> Tensor:
    """Position of the nearest chosen row of each row; int64, axes (rows,)."""
    return torch.cat([torch.cdist(part, chosen).argmin(1) for part in torch.split(rows, 1024)])
