"""What a forest says of rows whose splits are not all answered, and what each answer adds to it.

A split without an answer sends a row to both sides, in the shares of the training weight that went
there. The margins are then an expectation over the splits' training rows, which is the game of
path-dependent TreeSHAP (Lundberg et al. 2020, algorithm 1). A player is whoever answers: a column,
or a party with all of its columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from vfl.trees.boosting import Forest
from vfl.trees.grow import Tree

#: Numbers of one array, 8 bytes each, that rows are taken in blocks for.
_MOST_NUMBERS = 1 << 22


class Leaves:
    """The leaves of a forest and the answers that lead to each.

    Args:
        forest: grown.

    Attributes:
        base: margins of a row of which nothing is known, axes (outputs,).
    """

    def __init__(self, forest: Forest) -> None:
        paths = [path for tree, first in _placed(forest) for path in _paths(tree, first)]
        depth = max((len(path) for path in paths), default=0)
        #: The split, the side that leads to the leaf, and the share of weight that goes there; a
        #: path that is shorter ends in splits that everything passes. Axes (leaves, depth).
        self._splits = np.full((len(paths), depth), -1)
        self._lefts = np.zeros(self._splits.shape, bool)
        self._shares = np.ones(self._splits.shape)
        for leaf, path in enumerate(paths):
            for place, (split, left, share) in enumerate(path):
                self._splits[leaf, place], self._lefts[leaf, place] = split, left
                self._shares[leaf, place] = share
        trees = [(tree, output) for one in forest.rounds for output, tree in enumerate(one)]
        self._values = np.array([tree.values[leaf] for tree, _ in trees for leaf in tree.leaves])
        self._outputs = np.array([out for tree, out in trees for _ in tree.leaves], np.int64)
        self._start = forest.start
        self.base = self._added(self._shares.prod(axis=1)[None])[0]

    def margins(self, goes_left: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Expected margins, axes (rows, outputs); with all splits known those of `Forest.margins`.

        Args:
            goes_left: the answer to each split for each row, bool, axes (rows, splits).
            known: which answers count, bool, axes (splits,).
        """
        taken = np.append(known, True)[self._splits]
        found = np.empty((len(goes_left), len(self._start)))
        for rows in self._blocks(len(goes_left)):
            reached = np.where(taken, self._passed(goes_left[rows]), self._shares)
            found[rows] = self._added(reached.prod(axis=2))
        return found

    def contributions(self, goes_left: np.ndarray, players: np.ndarray, count: int) -> np.ndarray:
        """The Shapley value of each player for each margin, axes (rows, players, outputs).

        They add up to the margins less `base`. A leaf is a game of the few players on its path: it
        counts with the product of what each player passes (`ones`), or of its shares (`zeros`).

        Args:
            goes_left: the answer to each split for each row, bool, axes (rows, splits).
            players: who answers each split, by number, axes (splits,).
            count: how many players there are.
        """
        of_path = np.append(players, -1)[self._splits]
        slots, here = _slots(of_path)
        leaves, width = slots.shape[0], here.shape[1]
        zeros = np.ones((leaves, width + 1))
        at = np.arange(leaves)
        for place in range(slots.shape[1]):
            zeros[at, slots[:, place]] *= self._shares[:, place]
        weights = [
            math.factorial(size) * math.factorial(width - 1 - size) / math.factorial(width)
            for size in range(width)
        ]
        found = np.zeros((len(goes_left), count, len(self._start)))
        for rows in self._blocks(len(goes_left)):
            passed = self._passed(goes_left[rows])
            ones = np.ones((len(passed), *zeros.shape))
            for place in range(slots.shape[1]):
                ones[:, at, slots[:, place]] *= passed[..., place]
            for one in range(width):
                others = [other for other in range(width) if other != one]
                sizes = _by_size(ones[..., others], zeros[:, others])
                added = (ones[..., one] - zeros[:, one]) * (sizes @ np.array(weights))
                real = here[:, one] >= 0
                to = here[real, one], self._outputs[real]
                for row, values in zip(found[rows], added[:, real] * self._values[real],
                                       strict=True):  # fmt: skip
                    np.add.at(row, to, values)
        return found

    def _passed(self, goes_left: np.ndarray) -> np.ndarray:
        """Whether rows take each side of each path, bool, axes (rows, leaves, depth)."""
        padded = np.concatenate([goes_left, np.zeros((len(goes_left), 1), bool)], axis=1)
        passed: np.ndarray = padded[:, self._splits] == self._lefts
        return passed

    def _added(self, reached: np.ndarray) -> np.ndarray:
        """Margins where each leaf counts so much, axes (rows, outputs)."""
        found = np.tile(self._start, (len(reached), 1))
        for output in range(len(self._start)):
            own = self._outputs == output
            # Not a matrix product, whose last digits depend on how many rows there are.
            found[:, output] += (reached[:, own] * self._values[own]).sum(axis=1)
        return found

    def _blocks(self, rows: int) -> Iterator[slice]:
        size = max(1, _MOST_NUMBERS // max(1, self._splits.size))
        return (slice(start, start + size) for start in range(0, rows, size))


def _placed(forest: Forest) -> Iterator[tuple[Tree, int]]:
    """Each tree and the number of its first split among those of the forest."""
    first = 0
    for tree in forest.trees:
        yield tree, first
        first += len(tree.splits) - len(tree.leaves)


def _paths(tree: Tree, first: int) -> Iterator[list[tuple[int, bool, float]]]:
    """What leads to each leaf in order: splits, sides, and the shares that go there."""
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
    """A slot for each different player on a path.

    Args:
        of_path: the player at each place, -1 behind the end, axes (leaves, depth).

    Returns:
        The slot of each place, the last one behind the end, axes (leaves, depth); and the player of
        each slot but the last, -1 where a path has fewer, axes (leaves, slots).
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


def _by_size(ones: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """What coalitions of each size pass together, axes (rows, leaves, players + 1).

    The coefficients of the product over players of (zero + one t).

    Args:
        ones: axes (rows, leaves, players).
        zeros: axes (leaves, players).
    """
    sizes = np.zeros((*ones.shape[:2], ones.shape[2] + 1))
    sizes[..., 0] = 1
    for player in range(ones.shape[2]):
        with_it = sizes[..., :-1] * ones[..., player, None]
        sizes *= zeros[:, player, None]
        sizes[..., 1:] += with_it
    return sizes
