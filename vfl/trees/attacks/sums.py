"""Feature reconstruction by a label party that received gradient sums over bins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import sparse
from scipy.linalg import cho_factor, cho_solve
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range
from vfl.trees.attacks.bins import before_response, read_bins, values_of_bins
from vfl.trees.attacks.cases import SentBins


class Sums(Attack):
    """Estimates each cell's bin from gradient sums over bins, and then the value of each bin.

    The label party knows each row's gradient, and which rows are in each node. A gradient sum over
    a bin is linear in the indicators of its rows, so every node gives two equations for each bin.
    Ridge regression solves the equations of all nodes of all trees together; it penalises the
    distance from each bin's share of the rows. Nodes with few rows disclose most about single rows.
    If the label party received the bins themselves, the attack reads them, as the attack `bins`
    does.

    Args:
        nodes: number of nodes whose sums the attack uses; it takes the nodes with the fewest rows.
        noise: weight of the penalty on the squared distance from the bins' shares of the rows.
        rows, prior: see `vfl.trees.attacks.bins.Bins`.

    Raises:
        BadOptionError: an option is out of range.

    >>> Sums(nodes=100).goal
    'inputs'
    """

    goal = "inputs"
    needs = frozenset({Grant.LEAKED_INPUTS, Grant.PROTOCOL})

    def __init__(
        self, nodes: int = 2000, noise: float = 1e-6, rows: bool = True, prior: float = 1.0
    ) -> None:
        require_range("nodes", nodes, 1, 1 << 14)
        require_range("noise", noise, 1e-12)
        require_range("prior", prior, 1e-9)
        self.nodes, self.noise, self.rows, self.prior = nodes, noise, rows, prior

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        told = view.told
        if isinstance(told, SentBins):
            return read_bins(told, view.leaked.inputs, self.prior, self.rows)
        nodes = sorted(told.nodes, key=lambda one: len(one.rows))[: self.nodes]
        solve = solver([(one.rows, one.gradients) for one in nodes], told.training, self.noise)
        # In the root of the first tree, all second derivatives are equal, so their sums give each
        # bin's share of rows.
        first = told.nodes[0].sums[..., 1]

        def likely(column: int, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            places = [*range(bins), first.shape[1] - 1]  # the last bin is that of missing cells
            often = first[column, places] / first[column].sum()
            found = solve(np.concatenate([one.sums[column, places].T for one in nodes]), often)
            shares, chances = before_response(often, told.epsilon)
            return shares, found[told.targets] @ chances, found[told.leaked] @ chances

        return values_of_bins(told.layout, view.leaked.inputs, likely, self.prior, self.rows)


def solver(
    nodes: Sequence[tuple[np.ndarray, np.ndarray]], rows: int, noise: float
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function that maps sums over bins to the probability of each bin for each row.

    The function takes sums with axes (2 x nodes, bins) and each bin's share of the rows, axes
    (bins,), and returns axes (rows, bins).

    Args:
        nodes: for each node, its rows, and the gradients of these rows, axes (rows of the node, 2).
        rows: number of rows.
        noise: weight of the penalty on the squared distance from the bins' shares of the rows.
    """
    at = np.concatenate([np.tile(own, 2) for own, _ in nodes])
    values = np.concatenate([gradients.T.ravel() for _, gradients in nodes]).astype(np.float64)
    ends = np.cumsum([0, *(len(own) for own, _ in nodes for _ in range(2))])
    equations = sparse.csr_matrix((values, at, ends), (len(ends) - 1, rows))
    norms = sparse.linalg.norm(equations, axis=1).clip(1e-300)
    equations = sparse.diags_array(1 / norms) @ equations
    products = (equations @ equations.T).toarray()
    factor = cho_factor(products + noise * np.eye(len(products)), overwrite_a=True)

    def solve(sums: np.ndarray, shares: np.ndarray) -> np.ndarray:
        expected = equations.sum(axis=1).reshape(-1, 1) * shares
        found = shares + equations.T @ cho_solve(factor, sums / norms[:, None] - expected)
        chances: np.ndarray = found.clip(1e-9)
        chances /= chances.sum(axis=1, keepdims=True)
        return chances

    return solve
