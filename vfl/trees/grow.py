"""Growth of one tree from histograms of gradients, whichever party computes the histograms.

A tree is grown over bins, so the grower uses only the bin number of a cell. The grower requests,
from a `Histograms` object, gradient sums over bins and the division of a node's rows. The grower
never reads a cell or a threshold, nor, in a protected training, a gradient.

Gains, leaf weights and the choice between splits of equal gain follow Chen and Guestrin 2016
(equations 5 to 7) as XGBoost's `hist` method computes them; this code uses float32 where XGBoost
does. If one party has all columns, this code and XGBoost grow the same trees from the same bins
(`tests/trees/test_grow.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from vfl.core.compiled import COMPILED, compiled

#: A split needs a gain above this number (XGBoost's kRtEps).
LEAST_GAIN = 1e-6
#: Smallest and largest allowed leaf weight: one pair for all nodes, or one pair per node, axes (2,
#: nodes).
_Bounds = tuple[float, float] | np.ndarray
_NO_BOUNDS = (-float("inf"), float("inf"))
_NEVER = np.float32(-np.inf)


@dataclass(frozen=True)
class Growth:
    """Settings for growing one tree; names and defaults are those of XGBoost.

    Attributes:
        max_depth: largest number of levels of splits below the root; 0 sets no limit.
        max_leaves: largest number of leaves; 0 sets no limit.
        grow_policy: order of splits: "depthwise" splits level by level, "lossguide" always splits
            the node with the largest gain.
        learning_rate: factor by which each leaf value is multiplied.
        reg_lambda, reg_alpha: L2 and L1 penalty of leaf weights.
        gamma: smallest gain that a split must have.
        min_child_weight: smallest sum of second derivatives that each child node must have.
        max_delta_step: largest absolute leaf weight before it is multiplied by `learning_rate`; 0
            sets no limit.
        monotone: for each column, -1, 0 or 1: the prediction may only fall (-1) or only rise (1)
            with the column, or change freely (0); an empty sequence means no constraints.
    """

    max_depth: int = 6
    max_leaves: int = 0
    grow_policy: Literal["depthwise", "lossguide"] = "depthwise"
    learning_rate: float = 0.3
    reg_lambda: float = 1.0
    reg_alpha: float = 0.0
    gamma: float = 0.0
    min_child_weight: float = 1.0
    max_delta_step: float = 0.0
    monotone: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The columns of a gradient histogram, whose axes are (columns, `width`, 2).

    In a histogram, the bins of a column's values come first; the last position has the sums of its
    missing cells.

    Attributes:
        bins: number of each column's bins without the bin of missing cells, at least 1.
        categorical: for each column, whether its bins are categories, which have no order.
    """

    bins: tuple[int, ...]
    categorical: tuple[bool, ...]

    @property
    def width(self) -> int:
        """Number of positions that each column has in a histogram."""
        return max(self.bins, default=1) + 1


@dataclass(frozen=True)
class Split:
    """The test at a node on one column, which sends each row left or right.

    Attributes:
        column: number of the column in the `Layout`.
        left: the bins whose rows go left; for an ordered column, a range that begins at 0.
        missing_left: whether rows with a missing cell go left.
    """

    column: int
    left: range | tuple[int, ...]
    missing_left: bool


@dataclass(frozen=True, slots=True)
class Division:
    """A node that is split, its split, and the two child nodes that receive its rows."""

    node: int
    split: Split
    left: int
    right: int


class Histograms(Protocol):
    """Source of gradient sums over bins: a party with all bins, or several parties and a helper."""

    layout: Layout

    def total(self) -> np.ndarray:
        """Return the gradient sums over all rows that grow this tree.

        The result holds the sums of first and of second derivatives, float64, axes (2,).
        """
        ...

    def of(self, nodes: Sequence[int]) -> np.ndarray:
        """Return sums over each node's rows per bin; float64, axes (nodes, columns, width, 2)."""
        ...

    def smaller(self, left: int, right: int) -> int:
        """Return the sibling whose sums cost less; the parent minus these gives the other's."""
        ...

    def divide(self, divisions: Sequence[Division]) -> None:
        """Move the rows of each split node to its two child nodes, for all given nodes at once."""
        ...


@dataclass
class Tree:
    """A grown tree as lists with one entry per node; the root is node 0.

    Attributes:
        splits: the split of each node; None at a leaf.
        children: numbers of the left and the right child of each node; (-1, -1) at a leaf.
        values: value that a leaf adds to the margin of its rows; an inner node has the value that
            it would have as a leaf.
        gains: gain of the split of each node; 0 at a leaf.
        weights: for each node, the sum of the second derivatives of its rows.
    """

    splits: list[Split | None] = field(default_factory=list)
    children: list[tuple[int, int]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @property
    def leaves(self) -> list[int]:
        """Numbers of the nodes that are leaves."""
        return [node for node, split in enumerate(self.splits) if split is None]

    def add(self, value: float, weight: float) -> int:
        """Add a leaf and return its node number."""
        self.splits.append(None)
        self.children.append((-1, -1))
        self.values.append(value)
        self.gains.append(0.0)
        self.weights.append(weight)
        return len(self.splits) - 1


def values_of(tree: Tree, goes_left: np.ndarray) -> np.ndarray:
    """Return, for each row, the leaf value that a tree adds to its margin, axes (rows,).

    Args:
        tree: a grown tree.
        goes_left: for each row and each inner node in order, whether the row goes left there, bool,
            axes (rows, inner nodes).
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


@dataclass(frozen=True)
class _Found:
    """The best split of a node: its gain, and the gradient sums of the two children."""

    gain: float
    split: Split
    left: np.ndarray
    right: np.ndarray


@dataclass
class _Open:
    """A node that may still be split.

    Attributes:
        node, depth: number of the node, and its level below the root.
        sums: sums of the first and of the second derivatives of its rows, axes (2,).
        bounds: smallest and largest leaf weight that the monotone constraints at ancestor nodes
            allow.
        histogram: gradient sums of the node's rows over bins, axes (columns, width, 2).
        best: the node's best split; None if no split has a sufficient gain.
    """

    node: int
    depth: int
    sums: np.ndarray
    bounds: tuple[float, float]
    histogram: np.ndarray | None = None
    best: _Found | None = None


def grow(growth: Growth, histograms: Histograms, columns: np.ndarray | None = None) -> Tree:
    """Grow one tree.

    Args:
        growth: settings of the tree.
        histograms: source of gradient sums, which already received the gradients for this tree.
        columns: for each column, whether the tree may split on it, bool, axes (columns,); None
            allows all columns.
    """
    return _Grower(growth, histograms, columns).run()


class _Grower:
    def __init__(self, growth: Growth, histograms: Histograms, columns: np.ndarray | None) -> None:
        self._growth, self._histograms, self._tree = growth, histograms, Tree()
        self._search = Search(growth, histograms.layout, columns)
        self._queue: list[tuple[float, int, _Open]] = []
        self._leaves = 1

    def run(self) -> Tree:
        self._enqueue(self._opened(0, self._histograms.total()[None], [_NO_BOUNDS]), self._of_root)
        while self._queue:
            self._expand(self._next())
        return self._tree

    def _opened(
        self, depth: int, sums: np.ndarray, bounds: Sequence[tuple[float, float]]
    ) -> list[_Open]:
        """Add the new nodes of a level to the tree; `sums`: gradient sums, axes (nodes, 2)."""
        weights = self._search.weights(sums, bounds).astype(np.float32)
        values = weights * np.float32(self._growth.learning_rate)
        return [
            _Open(self._tree.add(value, float(own[1])), depth, own, bound)
            for value, own, bound in zip(values.tolist(), sums, bounds, strict=True)
        ]

    def _of_root(self) -> np.ndarray:
        return self._histograms.of([0])

    def _enqueue(self, opened: Sequence[_Open], histograms: Callable[[], np.ndarray]) -> None:
        """Find each new node's best split, unless the nodes are on the deepest allowed level."""
        growth = self._growth
        if growth.max_depth and opened[0].depth >= growth.max_depth:
            return
        found = histograms()
        sums, bounds = np.stack([one.sums for one in opened]), [one.bounds for one in opened]
        for one, histogram, best in zip(
            opened, found, self._search.best(found, sums, bounds), strict=True
        ):
            if best is not None:
                one.histogram, one.best = histogram, best
                by_gain = growth.grow_policy == "lossguide"
                key = -best.gain if by_gain else float(one.depth)
                heapq.heappush(self._queue, (key, one.node, one))

    def _next(self) -> list[_Open]:
        """Return the nodes to split next: all of a level, or the one with the largest gain."""
        key, _, first = heapq.heappop(self._queue)
        batch, bound = [first], self._growth.max_leaves
        if self._growth.grow_policy == "depthwise":
            while self._queue and self._queue[0][0] == key:
                batch.append(heapq.heappop(self._queue)[2])
        if bound:
            batch = batch[: max(0, bound - self._leaves)]
        self._leaves += len(batch)
        return batch

    def _expand(self, batch: Sequence[_Open]) -> None:
        """Split given nodes of one level, and then find the best splits of their children."""
        if not batch:
            return
        tree, sums, bounds = self._tree, list[np.ndarray](), list[tuple[float, float]]()
        for one in batch:
            assert one.best is not None
            sums += [one.best.left, one.best.right]
            bounds += self._search.child_bounds(one.best, one.bounds)
        children = self._opened(batch[0].depth + 1, np.stack(sums), bounds)
        pairs = list(zip(children[::2], children[1::2], strict=True))
        divisions = []
        for one, (left, right) in zip(batch, pairs, strict=True):
            assert one.best is not None
            split, tree.gains[one.node] = one.best.split, one.best.gain
            tree.splits[one.node], tree.children[one.node] = split, (left.node, right.node)
            divisions.append(Division(one.node, split, left.node, right.node))
        self._histograms.divide(divisions)
        self._enqueue(children, lambda: self._of_children(batch, pairs))

    def _of_children(
        self, batch: Sequence[_Open], pairs: Sequence[tuple[_Open, _Open]]
    ) -> np.ndarray:
        """Return the histograms of both children of each split node.

        The source returns the histogram of one child; the histogram of the other child is the
        parent's histogram minus this one.
        """
        asked = [self._histograms.smaller(left.node, right.node) for left, right in pairs]
        sums = self._histograms.of(asked)
        found = np.empty((len(sums), 2, *sums.shape[1:]))
        for own, one, (left, _), node, few in zip(found, batch, pairs, asked, sums, strict=True):
            here, there = (0, 1) if node == left.node else (1, 0)
            assert one.histogram is not None
            own[here] = few
            np.subtract(one.histogram, few, out=own[there])
            one.histogram = None
        return found.reshape(-1, *sums.shape[1:])


@compiled
def scan(
    histogram: Any,
    sums: Any,
    own: Any,
    places: Any,
    reg_lambda: float,
    reg_alpha: float,
    least: float,
) -> Any:
    """Find the best split on ordered columns in one compiled loop; as `Search`, without bounds.

    Args:
        histogram: gradient sums of the node's rows over bins, axes (columns, width, 2).
        sums: sums of the first and of the second derivatives of the node's rows, axes (2,).
        own: gain of the node as a leaf, without a split.
        places: for each column and position, whether a split may be there, bool, axes (columns,
            width).
        reg_lambda: L2 penalty.
        reg_alpha: L1 penalty.
        least: smallest sum of second derivatives that each child node must have.

    Returns:
        The split's gain, its column, its position, 1 if missing cells go left (0 if right), and the
        gradient sums of the child node that receives no missing cells.
    """
    columns, width = histogram.shape[0], histogram.shape[1]
    best, at, sides = _NEVER, (0, 0, 0), (0.0, 0.0)
    for column in range(columns):
        for way in range(1 if histogram[column, width - 1, 1] == 0 else 2):
            first = second = 0.0
            for number in range(width - 1):
                place = width - 2 - number if way else number
                first += histogram[column, place, 0]
                second += histogram[column, place, 1]
                other_first, other_second = sums[0] - first, sums[1] - second
                if not places[column, place] or second < least or other_second < least:
                    continue
                if second <= 0 or other_second <= 0:
                    continue
                one, two = first, other_first
                if reg_alpha:
                    one = np.sign(one) * max(abs(one) - reg_alpha, 0.0)
                    two = np.sign(two) * max(abs(two) - reg_alpha, 0.0)
                here = np.float32(one * one / (second + reg_lambda))
                there = np.float32(two * two / (other_second + reg_lambda))
                gain = (here + there) - own
                if gain > best:
                    best, at, sides = gain, (column, place, way), (first, second)
    return best, at[0], at[1], at[2], sides[0], sides[1]


class Search:
    """Finds the best split of a node from its histogram.

    Args:
        growth: settings of the tree's growth, with penalties and limits.
        layout: number and order of each column's bins.
        columns: for each column, whether splits on it are allowed, bool, axes (columns,); None
            allows all columns.
    """

    def __init__(self, growth: Growth, layout: Layout, columns: np.ndarray | None) -> None:
        self._growth, self._layout = growth, layout
        count = len(layout.bins)
        allowed = np.ones(count, bool) if columns is None else columns
        categorical = np.asarray(layout.categorical, bool)
        self._nominal = np.flatnonzero(allowed & categorical)
        #: For each position of each ordered column, whether a split may be there, axes (columns,
        #: width).
        inside = np.arange(layout.width) < np.asarray(layout.bins)[:, None]
        self._places = inside & (allowed & ~categorical)[:, None]
        self._monotone = np.asarray(growth.monotone or (0,) * count)[:, None]
        self._bounded = any(growth.monotone)

    def weights(self, sums: np.ndarray, bounds: Sequence[tuple[float, float]]) -> np.ndarray:
        """Return leaf weights of nodes (Chen and Guestrin 2016, eq 5), before the learning rate.

        Args:
            sums: gradient sums over the rows of each node, axes (nodes, 2).
            bounds: smallest and largest allowed weight of each node.
        """
        return self._weights(sums, np.array(bounds).T)

    def best(
        self, histograms: np.ndarray, sums: np.ndarray, bounds: Sequence[tuple[float, float]]
    ) -> list[_Found | None]:
        """Return, for each node, the split with the largest gain; None if no gain is sufficient.

        Among splits of equal gain, the one on the column with the lower number wins; then the split
        that sends missing cells right. Then the lower bin wins (the higher bin if missing cells go
        left).

        Args:
            histograms: gradient sums over bins, axes (nodes, columns, width, 2).
            sums: gradient sums over the rows of each node, axes (nodes, 2).
            bounds: smallest and largest allowed leaf weight of each node.
        """
        own = self._gain(sums, np.array(bounds).T)
        found = []
        for histogram, total, bound, gain in zip(histograms, sums, bounds, own, strict=True):
            every = [self._ordered(histogram, total, bound, gain)]
            every += [
                self._of_categories(int(column), histogram, total, bound, gain)
                for column in self._nominal
            ]
            enough = [
                one
                for one in every
                if one is not None and one.gain > LEAST_GAIN and one.gain >= self._growth.gamma
            ]
            best = max(enough, key=lambda one: (one.gain, -one.split.column), default=None)
            found.append(best)
        return found

    def child_bounds(
        self, found: _Found, bounds: tuple[float, float]
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return both children's bounds of leaf weights; disjoint if the column is monotone."""
        sign = self._growth.monotone[found.split.column] if self._bounded else 0
        if not sign:
            return bounds, bounds
        left, right = self.weights(np.stack([found.left, found.right]), [bounds, bounds])
        middle = float(left + right) / 2
        low, high = (bounds[0], middle), (middle, bounds[1])
        return (low, high) if sign > 0 else (high, low)

    def _ordered(
        self, histogram: np.ndarray, sums: np.ndarray, bounds: tuple[float, float], own: np.float32
    ) -> _Found | None:
        """Find the best split of a node among those on columns with ordered bins."""
        if not self._places.any():
            return None
        growth = self._growth
        if COMPILED and not self._bounded and not growth.max_delta_step:
            penalties = growth.reg_lambda, growth.reg_alpha, growth.min_child_weight
            gain, column, place, way, *side = scan(histogram, sums, own, self._places, *penalties)
            if not gain > LEAST_GAIN:
                return None
            one, split = np.array(side), Split(column, range(place + 1 - way), bool(way))
            one, other = (sums - one, one) if way else (one, sums - one)
            return _Found(float(gain), split, one, other)
        values, missing = histogram.copy(), histogram[:, -1:]
        values[:, -1] = 0
        left = np.cumsum(values, axis=1)
        right = np.cumsum(values[:, ::-1], axis=1)[:, ::-1]
        # If missing cells go right, a position stands for the last bin that goes left; otherwise it
        # stands for the first bin that goes right.
        sides = [(left, sums - left), (sums - right, right)]
        # If no row of the node has a missing cell, both directions for missing cells give the same
        # split; missing cells of later rows then go right, as in XGBoost.
        allowed = [self._places, self._places & (missing[..., 1] != 0)]
        gains = [
            np.where(able, self._split_gain(*side, bounds, own, self._monotone), _NEVER)
            for able, side in zip(allowed, sides, strict=True)
        ]
        column = int(np.argmax(np.maximum(*gains).max(axis=1)))
        here = [one[column] for one in gains]
        top = max(one.max() for one in here)
        if not top > LEAST_GAIN:
            return None
        missing_left = bool(here[0].max() < top)
        # For splits that send missing cells left, the search scans from the last bin down.
        place = int(np.flatnonzero(here[missing_left] == top)[-1 if missing_left else 0])
        lower, upper = (side[column, place] for side in sides[missing_left])
        bins = range(place if missing_left else place + 1)
        return _Found(float(top), Split(column, bins, missing_left), lower, upper)

    def _of_categories(
        self,
        column: int,
        histogram: np.ndarray,
        sums: np.ndarray,
        bounds: tuple[float, float],
        own: np.float32,
    ) -> _Found | None:
        """Find the best division of one column's categories, which are sorted by leaf weight.

        Among all divisions of the categories into two groups, the best one is a prefix and the rest
        of this sorted list (Fisher 1958).
        """
        part, missing = histogram[column, :-1], histogram[column, -1]
        present = np.flatnonzero(part[:, 1] > 0)
        order = present[np.argsort(self._weights(part[present], bounds), kind="stable")]
        left = np.cumsum(part[order], axis=0)[:-1]
        if not len(left):
            return None
        found: _Found | None = None
        for missing_left in (False, True) if missing[1] else (False,):
            side = left + missing if missing_left else left
            gain = self._split_gain(side, sums - side, bounds, own, np.zeros(len(side)))
            place = int(gain.argmax())
            if found is None or gain[place] > found.gain:
                bins = tuple(sorted(int(one) for one in order[: place + 1]))
                split = Split(column, bins, missing_left)
                found = _Found(float(gain[place]), split, side[place], sums - side[place])
        return found

    def _split_gain(
        self,
        left: np.ndarray,
        right: np.ndarray,
        bounds: tuple[float, float],
        own: np.float32,
        monotone: np.ndarray,
    ) -> np.ndarray:
        """Return gains of splits (Chen and Guestrin 2016, equation 7), float32, axes (splits,)."""
        gain = self._gain(left, bounds) + self._gain(right, bounds) - own
        least = self._growth.min_child_weight
        allowed = (left[..., 1] >= least) & (right[..., 1] >= least)
        allowed &= (left[..., 1] > 0) & (right[..., 1] > 0)
        if self._bounded:
            rise = self._weights(right, bounds) - self._weights(left, bounds)
            allowed &= monotone * rise >= 0
        result: np.ndarray = np.where(allowed, gain, _NEVER)
        return result

    def _gain(self, sums: np.ndarray, bounds: _Bounds) -> np.ndarray:
        """Return the gains of nodes over a leaf with weight 0, float32, axes (nodes,)."""
        growth, first, second = self._growth, sums[..., 0], sums[..., 1]
        safe = np.where(second > 0, second + growth.reg_lambda, 1.0)
        if not self._bounded and not growth.max_delta_step:
            gain = np.square(self._past_l1(first)) / safe
        else:
            # All steps use float32, so that two gains are equal in this code exactly when they are
            # equal in XGBoost.
            weight = self._weights(sums, bounds).astype(np.float32)
            first, second = first.astype(np.float32), second.astype(np.float32)
            squared = (second + np.float32(growth.reg_lambda)) * np.square(weight)
            gain = -(np.float32(2) * first * weight + squared)
        return np.where(second > 0, gain, 0.0).astype(np.float32)

    def _weights(self, sums: np.ndarray, bounds: _Bounds) -> np.ndarray:
        growth, first, second = self._growth, sums[..., 0], sums[..., 1]
        safe = np.where(second > 0, second + growth.reg_lambda, 1.0)
        weight = np.where(second > 0, -self._past_l1(first) / safe, 0.0)
        if growth.max_delta_step:
            weight = np.clip(weight, -growth.max_delta_step, growth.max_delta_step)
        return np.clip(weight, *bounds) if self._bounded else weight

    def _past_l1(self, first: np.ndarray) -> np.ndarray:
        """Move the sums of first derivatives towards 0 by the L1 penalty (soft threshold)."""
        alpha = self._growth.reg_alpha
        shrunk: np.ndarray = np.sign(first) * np.maximum(np.abs(first) - alpha, 0.0)
        return shrunk if alpha else first
