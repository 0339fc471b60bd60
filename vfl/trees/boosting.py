"""Boosting: trees one after another, each on the gradients that the earlier ones leave.

Friedman 2001 with second derivatives (Chen and Guestrin 2016). The loop knows histograms, not whose
columns they are of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from vfl.core.seeds import generator
from vfl.trees.grow import Growth, Histograms, Layout, Split, Tree, grow
from vfl.trees.objectives import Objective


@dataclass(frozen=True)
class Boosting:
    """How trees are boosted; names and defaults are XGBoost's.

    Attributes:
        growth: how each tree grows.
        n_estimators: most rounds; a round grows one tree an output.
        subsample: share of the rows that each tree grows on, drawn without replacement.
        colsample_bytree: share of the columns that each tree may split on.
        early_stopping_rounds: rounds without a lower validation loss after which boosting stops,
            and the trees after the best round are dropped; 0 never stops.
        seed: of the draws, which every party may know.
    """

    growth: Growth = field(default_factory=Growth)
    n_estimators: int = 100
    subsample: float = 1.0
    colsample_bytree: float = 1.0
    early_stopping_rounds: int = 0
    seed: int = 0


class Source(Histograms, Protocol):
    """Histograms that can begin a tree; see `vfl.trees.histograms.Local`."""

    def start(self, gradients: np.ndarray, rows: np.ndarray) -> None:
        """Begin a tree; gradients of axes (rows, 2), and the rows that grow it, int64."""
        ...


@dataclass(frozen=True)
class Round:
    """What one round has left: losses are means over rows by weight.

    Attributes:
        train_loss, validation_loss: the latter is None without validation rows.
    """

    number: int
    train_loss: float
    validation_loss: float | None


#: Whether rows go left at each split, bool, axes (rows, splits), in the order of the splits.
Sides = Callable[[Sequence[Split]], np.ndarray]


@dataclass
class Forest:
    """Grown trees and where they start.

    Attributes:
        start: margins before the first tree, axes (outputs,).
        rounds: the trees of each round, one an output.
        history: what each round has left.
    """

    start: np.ndarray
    rounds: list[list[Tree]] = field(default_factory=list)
    history: list[Round] = field(default_factory=list)

    @property
    def trees(self) -> list[Tree]:
        """All trees, round by round."""
        return [tree for one in self.rounds for tree in one]

    @property
    def splits(self) -> list[Split]:
        """The splits of all trees, tree by tree and node by node."""
        return [split for tree in self.trees for split in tree.splits if split is not None]

    def margins(self, goes_left: np.ndarray) -> np.ndarray:
        """Margins of rows, axes (rows, outputs).

        Args:
            goes_left: the answer to each of `splits` for each row, bool, axes (rows, splits).
        """
        margins = np.tile(self.start, (len(goes_left), 1))
        asked = 0
        for trees in self.rounds:
            for output, tree in enumerate(trees):
                count = len(tree.splits) - len(tree.leaves)
                margins[:, output] += values_of(tree, goes_left[:, asked : asked + count])
                asked += count
        return margins


def values_of(tree: Tree, goes_left: np.ndarray) -> np.ndarray:
    """What a tree adds to the margin of each row, axes (rows,).

    Args:
        tree: grown.
        goes_left: the answers of its inner nodes in order, bool, axes (rows, inner nodes).
    """
    inner = [node for node, split in enumerate(tree.splits) if split is not None]
    place = np.zeros(len(tree.splits), np.int64)
    place[inner] = np.arange(len(inner))
    children = np.array(tree.children)
    node = np.zeros(len(goes_left), np.int64)
    rows = np.arange(len(goes_left))
    while len(rows):
        rows = rows[children[node[rows], 0] >= 0]
        at = node[rows]
        node[rows] = np.where(goes_left[rows, place[at]], children[at, 0], children[at, 1])
    values: np.ndarray = np.array(tree.values)[node]
    return values


def boost(
    settings: Boosting,
    objective: Objective,
    source: Source,
    labels: np.ndarray,
    weights: np.ndarray,
    train: np.ndarray,
    validation: np.ndarray,
    sides: Sides,
    on_round: Callable[[Round], None] = lambda round: None,
) -> Forest:
    """Grow a forest.

    Args:
        settings: how.
        objective: what is minimised.
        source: histograms of the training rows' bins.
        labels: codes, counts or numbers, axes (rows,).
        weights: how much each row counts, axes (rows,).
        train: numbers of the rows that trees grow on, int64, increasing.
        validation: numbers of the rows that judge each round, int64; empty for none.
        sides: where all rows go at splits.
        on_round: told each round.
    """
    forest = Forest(objective.start(labels[train], weights[train]))
    margins = np.tile(forest.start, (len(labels), 1))
    best = (np.inf, 0)
    for number in range(1, settings.n_estimators + 1):
        first, second = objective.derivatives(margins, labels)
        trees = []
        for output in range(objective.outputs):
            gradients = np.stack([first[:, output], second[:, output]], axis=1) * weights[:, None]
            rows, columns = _drawn(settings, source.layout, train, number, output)
            # XGBoost keeps gradients in float32, and sums of them in float64.
            source.start(gradients.astype(np.float32).astype(np.float64), rows)
            trees.append(grow(settings.growth, source, columns))
        for output, tree in enumerate(trees):
            splits = [split for split in tree.splits if split is not None]
            margins[:, output] += values_of(tree, sides(splits))
        losses = objective.loss(margins, labels)
        judged = float(np.average(losses[validation])) if len(validation) else None
        one = Round(number, float(np.average(losses[train], weights=weights[train])), judged)
        forest.rounds.append(trees)
        forest.history.append(one)
        on_round(one)
        if judged is not None and judged < best[0]:
            best = (judged, number)
        if 0 < settings.early_stopping_rounds <= number - best[1]:
            break
    if settings.early_stopping_rounds and best[1]:
        return replace(forest, rounds=forest.rounds[: best[1]])
    return forest


def _drawn(
    settings: Boosting, layout: Layout, train: np.ndarray, number: int, output: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """The rows and the columns of one tree."""
    import torch

    def some(count: int, share: float, what: str) -> np.ndarray:
        draw = generator(settings.seed, "trees", what, number, output)
        kept = torch.randperm(count, generator=draw)[: max(1, round(share * count))]
        return np.sort(kept.numpy())

    rows, columns = train, None
    if settings.subsample < 1:
        rows = train[some(len(train), settings.subsample, "rows")]
    if settings.colsample_bytree < 1:
        columns = np.zeros(len(layout.bins), bool)
        columns[some(len(layout.bins), settings.colsample_bytree, "columns")] = True
    return rows, columns
