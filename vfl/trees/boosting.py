"""Gradient boosting: each tree fits the gradients of the loss at the margins of earlier trees.

The algorithm follows Friedman 2001, with second derivatives (Chen and Guestrin 2016). The boosting
loop reads columns only through histograms. Only `own_rounds` depends on the columns' owners: these
rounds split on the label party's columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vfl.core.seeds import generator
from vfl.trees.grow import Growth, Histograms, Split, Tree, grow
from vfl.trees.objectives import Objective


@dataclass(frozen=True)
class Boosting:
    """Settings of gradient boosting; names and defaults are those of XGBoost.

    Attributes:
        growth: settings of each tree.
        subsample: share of the training rows on which each tree is grown; they are drawn without
            replacement.
        colsample_bytree: share of the columns that each tree may split on.
        seed: seed of the random choices of rows and columns; all parties may know it.
        own_rounds: number of boosting rounds, from the first one, whose trees split only on the
            first `own_columns` columns.
        own_columns: number of the label party's columns, which come before all other columns.
    """

    growth: Growth = field(default_factory=Growth)
    subsample: float = 1.0
    colsample_bytree: float = 1.0
    seed: int = 0
    own_rounds: int = 0
    own_columns: int = 0


class Source(Histograms, Protocol):
    """A source of histograms for several trees in turn; see `vfl.trees.histograms.Local`."""

    def start(self, gradients: np.ndarray, rows: np.ndarray, columns: np.ndarray | None) -> None:
        """Prepare the histograms of a new tree for the given gradients, rows and columns.

        Args:
            gradients: first and second derivatives, float32, axes (rows, 2).
            rows: the rows on which the tree is grown, int64, increasing.
            columns: for each column, whether the tree may split on it, bool, axes (columns,); None
                allows all columns.
        """
        ...

    def values(self, tree: Tree) -> np.ndarray:
        """Return the leaf value that a tree adds to the margin of each row, axes (all rows,).

        Args:
            tree: the tree that has just been grown, or an earlier tree if no tree is being grown.
        """
        ...


#: Number of rows for which a forest is evaluated at once.
_WALKED_ROWS = 1 << 12


class _Walk:
    """All trees in one structure, so that a block of rows is evaluated on all of them together.

    Args:
        trees: the trees, in the order in which their splits are numbered.
        rounds: number of boosting rounds of these trees.
    """

    def __init__(self, trees: Sequence[Tree], rounds: int) -> None:
        self.rounds = rounds
        counts = [len(tree.splits) for tree in trees]
        self._roots = np.cumsum([0, *counts])[:-1]
        first = np.repeat(self._roots, counts)
        pairs = [pair for tree in trees for pair in tree.children]
        children = np.array(pairs, np.int64).reshape(-1, 2)
        self._values = np.array([value for tree in trees for value in tree.values])
        inner = children[:, 0] >= 0
        #: A leaf is its own left and right child, so the split answer that is looked up for a leaf
        #: has no effect.
        nodes = np.arange(len(children))[:, None]
        self._children = np.where(inner[:, None], children + first[:, None], nodes)
        self._asked = np.where(inner, np.cumsum(inner) - 1, 0)
        self._inner = inner

    def values(self, goes_left: np.ndarray) -> np.ndarray:
        """Return the leaf value of each tree, axes (rows, trees)."""
        at, rows = np.tile(self._roots, (len(goes_left), 1)), np.arange(len(goes_left))[:, None]
        while self._inner[at].any():
            left = goes_left[rows, self._asked[at]]
            at = self._children[at, np.where(left, 0, 1)]
        values: np.ndarray = self._values[at]
        return values


@dataclass
class Forest:
    """The trees of a model, and the margins before the first tree.

    Attributes:
        start: margins before the first tree, axes (outputs,), one for each output (class) of the
            model.
        rounds: the trees of each boosting round, one tree per output.
    """

    start: np.ndarray
    rounds: list[list[Tree]] = field(default_factory=list)
    _walk: _Walk | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def trees(self) -> list[Tree]:
        """All trees, ordered by boosting round."""
        return [tree for one in self.rounds for tree in one]

    @property
    def splits(self) -> list[Split]:
        """The splits of all trees, ordered by tree and then by node."""
        return splits_of(self.trees)

    def margins(self, goes_left: np.ndarray) -> np.ndarray:
        """Return the margins of rows, axes (rows, outputs).

        Args:
            goes_left: for each row and each of `splits`, whether the row goes left, bool, axes
                (rows, splits).
        """
        margins = np.tile(self.start, (len(goes_left), 1))
        if self._walk is None or self._walk.rounds != len(self.rounds):
            self._walk = _Walk(self.trees, len(self.rounds))
        for begin in range(0, len(margins), _WALKED_ROWS):
            rows = slice(begin, begin + _WALKED_ROWS)
            values = self._walk.values(goes_left[rows])
            # added in training order, for bitwise equal sums
            for place in range(values.shape[1]):
                margins[rows, place % len(self.start)] += values[:, place]
        return margins

    def state_dict(self) -> dict[str, Tensor]:
        """Return the forest as tensors, from which `of_state` restores it."""
        trees = self.trees
        children = [pair for tree in trees for pair in tree.children]
        return {
            "start": torch.from_numpy(self.start),
            "nodes": torch.tensor([len(tree.splits) for tree in trees], dtype=torch.int64),
            "children": torch.tensor(children, dtype=torch.int64).reshape(-1, 2),
            **{
                name: torch.tensor(
                    [one for tree in trees for one in getattr(tree, name)], dtype=torch.float64
                )
                for name in _OF_NODES
            },
            **splits_state(self.splits),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor]) -> Forest:
        """Restore a forest from the result of `state_dict`."""
        forest, splits, begin = cls(state["start"].numpy()), iter(splits_of_state(state)), 0
        outputs = len(forest.start)
        for number, count in enumerate(state["nodes"].tolist()):
            part = slice(begin, begin := begin + count)
            children = [(left, right) for left, right in state["children"][part].tolist()]
            own = {name: state[name][part].tolist() for name in _OF_NODES}
            tests = [None if left < 0 else next(splits) for left, _ in children]
            if number % outputs == 0:
                forest.rounds.append([])
            forest.rounds[-1].append(Tree(tests, children, **own))
        return forest


#: Number of rows for which derivatives are computed at once.
_BLOCK_ROWS = 1 << 14
_OF_NODES = ("values", "gains", "weights")


def blocks(rows: int) -> Iterator[slice]:
    """Yield consecutive slices of the rows; computing one slice after another limits memory."""
    starts = range(0, max(1, rows), _BLOCK_ROWS)
    return (slice(start, min(rows, start + _BLOCK_ROWS)) for start in starts)


def splits_of(trees: Iterable[Tree]) -> list[Split]:
    """Return the splits of trees, ordered by tree and then by node."""
    return [split for tree in trees for split in tree.splits if split is not None]


def owned(splits: Sequence[Split], columns: slice) -> Iterator[tuple[int, Split]]:
    """Yield the splits on some columns, which are then numbered from 0, and their positions."""
    for place, one in enumerate(splits):
        if columns.start <= one.column < columns.stop:
            yield place, replace(one, column=one.column - columns.start)


def splits_state(splits: Sequence[Split]) -> dict[str, Tensor]:
    """Return splits as tensors, from which `splits_of_state` restores them.

    A split of an ordered column is stored as the number of bins that go left.
    """
    left = [[one.left.stop] if isinstance(one.left, range) else list(one.left) for one in splits]

    def whole(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    return {
        "columns": whole([one.column for one in splits]),
        "ordered": torch.tensor([isinstance(one.left, range) for one in splits], dtype=torch.bool),
        "missing_left": torch.tensor([one.missing_left for one in splits], dtype=torch.bool),
        "left": whole([one for own in left for one in own]),
        "left_counts": whole([len(own) for own in left]),
    }


def splits_of_state(state: Mapping[str, Tensor]) -> list[Split]:
    """Restore the splits from the result of `splits_state`."""
    left, begin, found = state["left"].tolist(), 0, []
    for column, ordered, missing_left, count in zip(
        *(state[name].tolist() for name in ("columns", "ordered", "missing_left", "left_counts")),
        strict=True,
    ):
        own = left[begin : begin + count]
        begin += count
        found.append(Split(column, range(own[0]) if ordered else tuple(own), missing_left))
    return found


class Booster:
    """Grows a forest, one boosting round at a time.

    Args:
        settings: settings of gradient boosting.
        objective: loss to minimise.
        source: source of the gradient histograms.
        labels: labels of the training rows (class numbers, counts or real numbers), axes (training
            rows,).
        weights: weight of each training row, axes (training rows,).
        rows: number of all rows; the training rows come first.

    Attributes:
        forest: the forest grown so far.
        margins: margins of all rows after the trees grown so far, axes (rows, outputs).
    """

    def __init__(
        self,
        settings: Boosting,
        objective: Objective,
        source: Source,
        labels: np.ndarray,
        weights: np.ndarray,
        rows: int,
    ) -> None:
        self._settings, self._objective, self._source = settings, objective, source
        self._labels, self._weights = labels, weights
        self.forest = Forest(objective.start(labels, weights))
        self.margins = np.tile(self.forest.start, (rows, 1))

    def go_on(self, forest: Forest) -> None:
        """Continue a training from a forest that was grown on the same rows."""
        self.forest = forest
        self.margins = np.tile(forest.start, (len(self.margins), 1))
        for trees in forest.rounds:
            for output, tree in enumerate(trees):
                self.margins[:, output] += self._source.values(tree)

    def add_round(self) -> list[Tree]:
        """Grow the trees of one boosting round: one for each output of the model."""
        number, trees = 1 + len(self.forest.rounds), []
        gradients = self._gradients()
        for output in range(len(gradients)):
            columns = self._start(gradients.pop(0), number, output)
            tree = grow(self._settings.growth, self._source, columns)
            self.margins[:, output] += self._source.values(tree)
            trees.append(tree)
        self.forest.rounds.append(trees)
        return trees

    def _start(self, gradients: np.ndarray, number: int, output: int) -> np.ndarray | None:
        """Start a tree: draw its rows and columns, and pass the gradients to the source.

        Return the columns that the tree may split on.
        """
        rows, columns = self._drawn(number, output)
        self._source.start(gradients, rows, columns)
        return columns

    def _gradients(self) -> list[np.ndarray]:
        """Return, for each output, the weighted derivatives of the loss, float32; axes (rows, 2).

        XGBoost uses float32 too.

        There is one array per output, so that the memory of an array is freed after its tree has
        grown.
        """
        labels, weights = self._labels, self._weights
        found = [np.empty((len(labels), 2), np.float32) for _ in range(self._objective.outputs)]
        for part in blocks(len(labels)):
            derivatives = self._objective.derivatives(self.margins[part], labels[part])
            for which, derivative in enumerate(derivatives):
                for output, own in enumerate((derivative * weights[part, None]).T):
                    found[output][part, which] = own
        return found

    def _drawn(self, number: int, output: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Draw the rows on which one tree is grown, and the columns on which it may split."""
        settings, layout = self._settings, self._source.layout

        def some(count: int, share: float, what: str) -> np.ndarray:
            draw = generator(settings.seed, "trees", what, number, output)
            kept = torch.randperm(count, generator=draw)[: max(1, round(share * count))]
            return np.sort(kept.numpy())

        rows, columns = np.arange(len(self._labels)), None
        if settings.subsample < 1:
            rows = some(len(rows), settings.subsample, "rows")
        own = number <= settings.own_rounds
        if own or settings.colsample_bytree < 1:
            count = settings.own_columns if own else len(layout.bins)
            columns = np.zeros(len(layout.bins), bool)
            columns[some(count, settings.colsample_bytree, "columns")] = True
        return rows, columns
