"""Label propagation over a graph of nearest rows, by one layer or by a layer and the inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import get_args

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import cg
from torch import Tensor
from torch.nn.functional import one_hot

from vfl.attacks.base import EmbeddingAttack, Layer, Scale, Scaler, features, scale_by
from vfl.attacks.view import Grant, GrantedRows, View
from vfl.core.registry import require_choice, require_range
from vfl.defenses.components import principal

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
    within, across = _among_kept(others, count), _among(leaked, count, others)
    found = _merged([across, (within[0], within[1] + known)], count)
    inside, outside = _among(leaked, count), _among(others, count, leaked)
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


def _among(rows: np.ndarray, count: int, of: np.ndarray | None = None) -> _Found:
    """The nearest rows of each other row, or of each row of another group; as many as there are."""
    from sklearn.neighbors import NearestNeighbors

    count, asked = min(count, len(rows) - (of is None)), rows if of is None else of
    if not count:
        return np.empty((len(asked), 0), rows.dtype), np.empty((len(asked), 0), np.int64)
    search = NearestNeighbors(n_neighbors=count, algorithm="brute").fit(rows)
    found: _Found = search.kneighbors(of)
    return found


class LabelPropagation(EmbeddingAttack):
    """Spreads the leaked labels over a graph of leaked, unlabelled and target rows.

    It needs no classifier, only that neighbours share a class: with ``at=inputs`` it is the
    strongest reference without the bottom.

    Source: Zhou et al. 2004 (local and global consistency), its closed form.

    Args:
        neighbours: of each row in the graph.
        spread: how much a row believes its neighbours, 0 to below 1 (alpha).
        scaler: see `scale_by`; fitted on the unlabelled rows.
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.UNLABELLED})

    def __init__(
        self,
        neighbours: int = 10,
        spread: float = 0.99,
        scaler: Scaler = "none",
        at: Layer = "cut",
    ) -> None:
        require_range("neighbours", neighbours, 1)
        require_range("spread", spread, 0, 0.9999)
        super().__init__(at)
        require_choice("scaler", scaler, get_args(Scaler))
        self.neighbours = neighbours
        self.spread = spread
        self.scaler: Scaler = scaler

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        features_of = self.feature_map(view)
        known, further, targets = map(features_of, (view.leaked, view.unlabelled, view.targets))
        groups = [known, targets] if torch.equal(further, targets) else [known, further, targets]
        labels, classes = view.leaked.labels, view.classes
        found = propagate(torch.cat(groups), labels, classes, self.neighbours, self.spread)
        return found[-len(targets) :]

    def feature_map(self, view: View) -> Callable[[GrantedRows], Tensor]:
        """What tells the features of a group of rows among which neighbours are looked for."""
        scale = scale_by(self.scaler, self.rows(view, view.unlabelled))
        return lambda seen: scale(self.rows(view, seen))


def propagate(rows: Tensor, labels: Tensor, classes: int, neighbours: int, spread: float) -> Tensor:
    """(I - spread S)^-1 Y over the graph S of all rows; float32, axes (rows, classes).

    Args:
        rows: axes (rows, features); those with a known label first.
        labels: of the first rows, int64.
        classes: how many there are.
        neighbours: of each row in the graph.
        spread: 0 to below 1.
    """
    graph = neighbour_graph(rows, neighbours, len(labels))
    system = sparse.eye_array(len(rows)) - spread * graph
    start = np.zeros((len(rows), classes))
    start[: len(labels)] = one_hot(labels, classes).numpy()
    found = [cg(system, column, rtol=1e-6, maxiter=500)[0] for column in start.T]
    return torch.from_numpy(np.stack(found, axis=1)).float()


class JoinedPropagation(LabelPropagation):
    """Spreads the leaked labels over neighbours by inputs and a layer at once.

    Inputs alone give what anybody gets who has them. A layer that is read worse than those may
    still tell apart what they do not.

    Args:
        neighbours: of each row in the graph.
        spread: how much a row believes its neighbours, 0 to below 1.
        scaler: of the layer; see `scale_by`.
        at: the layer beside the inputs.
        share: of the layer in a mean squared distance, 0 to 1.
        components: of the inputs; 0 takes inputs as they are.

    Raises:
        BadOptionError: an option out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.UNLABELLED, Grant.INPUTS})

    def __init__(
        self,
        neighbours: int = 10,
        spread: float = 0.99,
        scaler: Scaler = "whiten",
        at: Layer = "cut",
        share: float = 0.2,
        components: int = 32,
    ) -> None:
        require_range("share", share, 0, 1)
        require_range("components", components, 0)
        super().__init__(neighbours, spread, scaler, at)
        self.share = share
        self.components = components

    def feature_map(self, view: View) -> Callable[[GrantedRows], Tensor]:
        layer, turn = super().feature_map(view), self._turn(view)
        further = view.unlabelled
        alike = alike_by(layer(further)), alike_by(turn(features(view, further, "inputs")))

        def read(seen: GrantedRows) -> Tensor:
            looks = alike[0](layer(seen)), alike[1](turn(features(view, seen, "inputs")))
            return torch.cat([self.share**0.5 * looks[0], (1 - self.share) ** 0.5 * looks[1]], 1)

        return read

    def _turn(self, view: View) -> Scale:
        if not self.components:
            return lambda rows: rows
        _, _, directions = principal(features(view, view.unlabelled, "inputs"))
        kept = directions[:, : self.components].float()
        return lambda rows: rows @ kept


def alike_by(reference: Tensor) -> Scale:
    """Centres rows and divides them by one number, so that the reference's mean square is 1."""
    mean = reference.mean(0)
    length = (reference - mean).square().sum(1).mean().sqrt().clamp_min(1e-12)
    return lambda rows: (rows - mean) / length
