"""Clustering of targets without labels; the score matches clusters to classes optimally."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import numpy as np
import torch
from scipy.sparse.linalg import lobpcg
from torch import Tensor
from torch.nn.functional import normalize

from vfl.attacks.base import EmbeddingAttack, Layer, key_of, require_at_least
from vfl.attacks.labels.propagation import neighbour_graph
from vfl.attacks.view import View
from vfl.core.registry import require_choice, require_range
from vfl.defenses.components import principal


class KMeans(EmbeddingAttack):
    """Divides the targets into one cluster per class.

    Source: thesis section 4.4.2; the score uses the best matching of clusters and classes (eq
    4-26).

    Args:
        starts: number of independent starts; the attack keeps the clustering with the smallest
            squared distances to the cluster means.
        at: the layer whose outputs the attack clusters.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "clusters"

    def __init__(self, starts: int = 10, at: Layer = "cut") -> None:
        require_range("starts", starts, 1)
        super().__init__(at)
        self.starts = starts

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        from sklearn.cluster import KMeans as Clustering

        rows = self.rows(view, view.targets).numpy()
        state = key_of(draw) % 2**32
        model = Clustering(view.classes, n_init=self.starts, random_state=state)
        return torch.from_numpy(model.fit_predict(rows)).long()


Covariance = Literal["full", "tied", "diag", "spherical"]


class GaussianMixture(EmbeddingAttack):
    """Fits one Gaussian per class to the targets; each target gets its most likely Gaussian.

    Source: Dempster et al. 1977 (finite mixtures); scored like `KMeans`, as clusters.

    Args:
        covariance: form of the covariance matrices: "tied": one matrix for all classes; "full": one
            matrix per class; "diag": one diagonal matrix per class; "spherical": one variance per
            class.
        starts: number of independent starts; the attack keeps the result with the highest
            likelihood.
        columns: largest number of features; rows with more features are reduced to this many
            principal components. A step of the fit takes columns^2 operations for each row and
            class.
        at: the layer whose outputs the attack clusters.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "clusters"

    def __init__(
        self,
        covariance: Covariance = "tied",
        starts: int = 5,
        columns: int = 64,
        at: Layer = "cut",
    ) -> None:
        require_choice("covariance", covariance, get_args(Covariance))
        require_at_least(1, starts=starts, columns=columns)
        super().__init__(at)
        self.covariance: Covariance = covariance
        self.starts = starts
        self.columns = columns

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture as Mixture

        rows = _strongest(self.rows(view, view.targets).double(), self.columns)
        spread = float(rows.var(0).mean().clamp_min(1e-12))
        model = Mixture(
            view.classes,
            covariance_type=self.covariance,
            n_init=self.starts,
            reg_covar=1e-3 * spread,  # lower limit of variances, also for equal rows
            random_state=key_of(draw) % 2**32,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # uses the best step's result
            return torch.from_numpy(model.fit_predict(rows.numpy())).long()


def _strongest(rows: Tensor, columns: int) -> Tensor:
    """Return the first principal components of rows that have more than `columns` features."""
    if rows.shape[1] <= columns:
        return rows
    centred, _, directions = principal(rows)
    projected: Tensor = centred @ directions[:, :columns]
    return projected


_SPARE = 5  # extra vectors speed up convergence


class Spectral(EmbeddingAttack):
    """Clusters the targets by the leading eigenvectors of a graph of their nearest neighbours.

    Source: Ng, Jordan and Weiss 2001; k-means clusters the rows by their entries in the
    eigenvectors.

    Args:
        neighbours: number of neighbours of each row in the graph.
        most: largest number of rows in the graph, drawn at random; every other target gets the
            cluster of the row in the graph that is nearest to it.
        at: the layer whose outputs the attack clusters.

    Raises:
        BadOptionError: an option is out of range.
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
    """Return the cluster of each row; int64, axes (rows,).

    Args:
        rows: features of the rows, axes (rows, features).
        count: number of clusters.
        neighbours: number of neighbours of each row in the graph.
        draw: generator of the start vectors for eigenvectors and k-means.
    """
    from sklearn.cluster import KMeans as Clustering

    graph = neighbour_graph(rows, neighbours)
    start = torch.randn(len(rows), count + _SPARE, generator=draw, dtype=torch.float64).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few digits are enough.
        # `lobpcg` finds a block of eigenvectors at once, because a graph with several components
        # has the eigenvalue 1 several times.
        _, vectors = lobpcg(graph, start, largest=True, tol=1e-4, maxiter=200)
    leading = np.ascontiguousarray(vectors[:, :count])
    places = normalize(torch.from_numpy(leading), dim=1).numpy()
    model = Clustering(count, n_init=10, random_state=key_of(draw) % 2**32)
    return torch.from_numpy(model.fit_predict(places)).long()


def _nearest(rows: Tensor, chosen: Tensor) -> Tensor:
    """Return, for each row, the position of the nearest chosen row; int64, axes (rows,)."""
    return torch.cat([torch.cdist(part, chosen).argmin(1) for part in torch.split(rows, 1024)])
