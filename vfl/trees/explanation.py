"""Margins of a forest if some directions at splits are unknown, and Shapley values of players.

If it is unknown whether a row goes left at a split, the row goes to both children, weighted by the
training weight of each: the sum of the second derivatives of its training rows. The margin is then
an expectation over training rows with these weights, as in the game that path-dependent TreeSHAP
uses (Lundberg et al. 2020, algorithm 1). A player of the game owns the answers (left or right) of
some splits: a player is a column, or a party with all of its columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vfl.core.seeds import permutation
from vfl.trees.boosting import Forest
from vfl.trees.grow import LEAST_GAIN, Tree, values_of
from vfl.trees.objectives import Objective

#: Largest number of elements of one array, of 8 bytes each; larger inputs are processed in blocks
#: of rows.
_MOST_NUMBERS = 1 << 22
_PERMUTATIONS = 5


@dataclass(frozen=True)
class Importance:
    """Importance of each player (a party or a column) for a forest; each array has axes (players,).

    Attributes:
        splits: number of splits on the player's columns.
        gain: share of the total gain of all splits that comes from the player's splits.
        permutation: increase of the mean loss if the player's split answers are taken from other
            rows, as if its cells were permuted (Breiman 2001); mean over `_PERMUTATIONS`
            permutations.
        shapley: mean over rows of the absolute Shapley value, added up over the outputs.
    """

    splits: np.ndarray
    gain: np.ndarray
    permutation: np.ndarray
    shapley: np.ndarray


def importance(
    forest: Forest,
    objective: Objective,
    goes_left: np.ndarray,
    labels: np.ndarray,
    players: np.ndarray,
    count: int,
) -> Importance:
    """Return the importance of players, measured on given rows.

    Args:
        forest: a grown forest.
        objective: loss function whose increase is the permutation importance.
        goes_left: whether each row goes left at each split, bool, axes (rows, splits).
        labels: labels of the rows: class numbers, counts or real numbers.
        players: for each split, the number of the player that owns it, axes (splits,).
        count: number of players.
    """
    values = Leaves(forest).contributions(goes_left, players, count)
    margins, grown = forest.margins(goes_left), np.zeros(count)
    before = objective.loss(margins, labels)
    orders = [permutation(number, len(labels), "importance") for number in range(_PERMUTATIONS)]
    trees = [(*one, values_of(one[0], goes_left[:, one[2]])) for one in _placed(forest)]
    for player in np.unique(players):
        for order in orders:
            mixed = np.where(players == player, goes_left[order], goes_left)
            moved = margins.copy()
            for tree, output, part, own in trees:
                if (players[part] == player).any():
                    moved[:, output] += values_of(tree, mixed[:, part]) - own
            grown[player] += objective.loss(moved, labels) - before
    return Importance(
        np.bincount(players, minlength=count),
        gain_shares(forest, players, count),
        grown / _PERMUTATIONS,
        mean_absolute(values),
    )


def mean_absolute(values: np.ndarray) -> np.ndarray:
    """Return each player's mean absolute Shapley value, summed over outputs, axes (players,).

    Args:
        values: Shapley values, axes (rows, players, outputs).

    >>> mean_absolute(np.array([[[1.0, -2.0]], [[-3.0, 0.0]]])).tolist()
    [3.0]
    """
    found: np.ndarray = np.abs(values).mean(axis=0).sum(axis=1)
    return found


def gain_shares(forest: Forest, players: np.ndarray, count: int) -> np.ndarray:
    """Return each player's share of the total gain of all splits, axes (players,).

    Args:
        forest: a grown forest.
        players: for each split, the number of the player that owns it, axes (splits,).
        count: number of players.
    """
    nodes = ((tree, node) for tree in forest.trees for node in range(len(tree.splits)))
    gains = np.array([tree.gains[node] for tree, node in nodes if tree.splits[node] is not None])
    found: np.ndarray = np.bincount(players, gains, count) / max(gains.sum(), LEAST_GAIN)
    return found


class Leaves:
    """The leaves of a forest, each with the path of splits from the root to it.

    Args:
        forest: a grown forest.

    Attributes:
        base: expected margins if the answers of all splits are unknown, axes (outputs,).
    """

    def __init__(self, forest: Forest) -> None:
        placed = list(_placed(forest))
        paths = [path for tree, _, part in placed for path in _paths(tree, part.start)]
        depth = max((len(path) for path in paths), default=0)
        #: For each step on a leaf's path: its split, the direction (left or right) that leads to
        #: the leaf, and the share of the training weight that goes in this direction. Shorter paths
        #: are filled up with splits that all rows pass. The arrays have axes (leaves, depth).
        self._splits = np.full((len(paths), depth), -1)
        self._lefts = np.zeros(self._splits.shape, bool)
        self._shares = np.ones(self._splits.shape)
        for leaf, path in enumerate(paths):
            for place, (split, left, share) in enumerate(path):
                self._splits[leaf, place], self._lefts[leaf, place] = split, left
                self._shares[leaf, place] = share
        self._values = np.array(
            [tree.values[leaf] for tree, _, _ in placed for leaf in tree.leaves]
        )
        self._outputs = np.array([out for tree, out, _ in placed for _ in tree.leaves], np.int64)
        self._start = forest.start
        self.base = self._added(self._shares.prod(axis=1)[None])[0]

    def margins(self, goes_left: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Return expected margins, axes (rows, outputs), which are exact if all answers are known.

        Args:
            goes_left: whether each row goes left at each split, bool, axes (rows, splits).
            known: whether each answer in `goes_left` is known, bool, axes (rows, splits) or
                (splits,).
        """
        known = np.broadcast_to(known, goes_left.shape)
        found = np.empty((len(goes_left), len(self._start)))
        for rows in self._blocks(len(goes_left)):
            reached = np.where(
                self._placed(known[rows]), self._passed(goes_left[rows]), self._shares
            )
            found[rows] = self._added(reached.prod(axis=2))
        return found

    def contributions(self, goes_left: np.ndarray, players: np.ndarray, count: int) -> np.ndarray:
        """Return each player's Shapley value for each output, axes (rows, players, outputs).

        The values of all players add up to the margins minus `base`. Each leaf is a separate game
        of the few players with splits on its path. In this game, the leaf's value is multiplied by
        one factor per player. For a player in the coalition, the factor is 1 if its answers lead to
        the leaf, else 0 (`ones`); for other players, it is the share of training weight that goes
        to the leaf (`zeros`).

        Args:
            goes_left: whether each row goes left at each split, bool, axes (rows, splits).
            players: for each split, the number of the player that owns it, axes (splits,).
            count: number of players.
        """
        slots, here = _slots(np.append(players, -1)[self._splits])
        leaves, width = here.shape
        at, zeros = np.arange(leaves), np.ones((leaves, width + 1))
        for place in range(slots.shape[1]):
            zeros[at, slots[:, place]] *= self._shares[:, place]
        #: For each player on each path, the position of the player's value for the leaf's output in
        #: the flattened result.
        to = np.where(here < 0, -1, here * len(self._start) + self._outputs[:, None]).ravel()
        order = np.argsort(to, kind="stable")[(to < 0).sum() :]
        targets, starts = np.unique(to[order], return_index=True)
        found = np.zeros((len(goes_left), count * len(self._start)))
        for rows in self._blocks(len(goes_left)) if len(order) else ():
            passed = self._passed(goes_left[rows])
            ones = np.ones((len(passed), *zeros.shape))
            for place in range(slots.shape[1]):
                ones[:, at, slots[:, place]] *= passed[..., place]
            added = _shapley(ones[..., :-1], zeros[:, :-1]) * self._values[:, None]
            added = added.reshape(len(added), -1)[:, order]
            found[rows, targets] = np.add.reduceat(added, starts, axis=1)
        return found.reshape(len(goes_left), count, len(self._start))

    def _passed(self, goes_left: np.ndarray) -> np.ndarray:
        """Return whether each row takes each step of a path, bool, axes (rows, leaves, depth)."""
        passed: np.ndarray = self._placed(goes_left) == self._lefts
        return passed

    def _placed(self, of_splits: np.ndarray) -> np.ndarray:
        """Spread values per split to the steps of paths; False after the end of a path.

        The result is bool, with axes (rows, leaves, depth).
        """
        padded = np.concatenate([of_splits, np.zeros((len(of_splits), 1), bool)], axis=1)
        found: np.ndarray = padded[:, self._splits]
        return found

    def _added(self, reached: np.ndarray) -> np.ndarray:
        """Return sums of the leaf values, weighted by `reached`, axes (rows, outputs)."""
        found = np.tile(self._start, (len(reached), 1))
        for output in range(len(self._start)):
            own = self._outputs == output
            # A matrix product is not used, because its last digits would depend on the number of
            # rows.
            found[:, output] += (reached[:, own] * self._values[own]).sum(axis=1)
        return found

    def _blocks(self, rows: int) -> Iterator[slice]:
        size = max(1, _MOST_NUMBERS // max(1, self._splits.size))
        return (slice(start, start + size) for start in range(0, rows, size))


def _placed(forest: Forest) -> Iterator[tuple[Tree, int, slice]]:
    """Yield each tree, with the number of its output and its splits' positions in the forest."""
    first = 0
    for trees in forest.rounds:
        for output, tree in enumerate(trees):
            count = len(tree.splits) - len(tree.leaves)
            yield tree, output, slice(first, first + count)
            first += count


def _paths(tree: Tree, first: int) -> Iterator[list[tuple[int, bool, float]]]:
    """Yield each leaf's path from the root, as a list of (split, goes left, share of weight)."""
    numbers, at = [-1] * len(tree.splits), first
    to: list[list[tuple[int, bool, float]]] = [[] for _ in tree.splits]
    for node, split in enumerate(tree.splits):
        if split is None:
            yield to[node]
            continue
        numbers[node], at = at, at + 1
        left, right = tree.children[node]
        whole = tree.weights[left] + tree.weights[right]
        share = tree.weights[left] / whole if whole > 0 else 0.5
        to[left] = [*to[node], (numbers[node], True, share)]
        to[right] = [*to[node], (numbers[node], False, 1 - share)]


def _slots(of_path: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the distinct players on each path; a player's number is called its slot.

    Args:
        of_path: for each step of a path, the number of its player, -1 after the path's end, axes
            (leaves, depth).

    Returns:
        Two arrays: the slot of each step, axes (leaves, depth), where steps after a path's end have
            the last slot; and the player of each slot except the last, axes (leaves, slots), -1 for
            slots that a path does not use.
    """
    different: list[dict[int, int]] = []
    for path in of_path.tolist():
        own: dict[int, int] = {}
        for player in path:
            if player >= 0:
                own.setdefault(player, len(own))
        different.append(own)
    width = max((len(own) for own in different), default=0)
    slots = np.full(of_path.shape, width)
    here = np.full((len(of_path), width), -1)
    for leaf, (path, own) in enumerate(zip(of_path.tolist(), different, strict=True)):
        slots[leaf] = [own.get(player, width) for player in path]
        here[leaf, : len(own)] = list(own)
    return slots, here


def _shapley(ones: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Return the Shapley values of games whose values are products, axes (rows, leaves, players).

    The value of a coalition is the product of `ones` over its members and `zeros` over all other
    players. A player's Shapley value is the integral over t in [0, 1] of its expected marginal
    contribution if each other player joins with probability t (Owen 1972). The integrand is a
    polynomial in t, so a Gauss-Legendre sum integrates it exactly.

    Args:
        ones: factors of players in the coalition, axes (rows, leaves, players).
        zeros: factors of all other players, axes (leaves, players).
    """
    players = ones.shape[2]
    others = np.zeros_like(ones)
    for node, weight in zip(*np.polynomial.legendre.leggauss(-(-players // 2)), strict=True):
        share = (1 + node) / 2
        factors = share * ones + (1 - share) * zeros
        before, after = np.ones_like(factors), np.ones_like(factors)
        np.cumprod(factors[..., :-1], axis=2, out=before[..., 1:])
        np.cumprod(factors[..., :0:-1], axis=2, out=after[..., -2::-1])
        others += weight / 2 * before * after
    values: np.ndarray = (ones - zeros) * others
    return values
