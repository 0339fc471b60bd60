"""Inference of column values from bins, given the distribution of each column's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vfl.attacks.base import Attack, scale_by
from vfl.attacks.labels.regression import predicted
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range
from vfl.trees.attacks.columns import categories_of
from vfl.trees.grow import Layout

if TYPE_CHECKING:
    from vfl.trees.attacks.cases import SentBins


class Bins(Attack):
    """Assigns to each cell the expected value of the cells in its bin.

    Given the distribution of a column's values, the attack assigns values to the bins of an ordered
    column by quantiles, and to categories by frequencies. Naveed, Kamara and Wright 2015, sections
    4 and 5, do the same for order-preserving encryption. If the bins of known rows were sent, a
    bin's value is the mean of the known rows in it, shrunk towards the value from the distribution.
    Bayes' rule reverses randomised response; for this, the attack estimates the bin frequencies
    before the response from those after it (Kairouz et al. 2016).

    Args:
        rows: whether the bins of the known rows were also sent; otherwise, the known rows give only
            the distribution of values, as a public table would.
        prior: weight of the value from the distribution, in numbers of known rows in a bin.

    Raises:
        BadOptionError: an option is out of range.

    >>> Bins(rows=False).goal
    'inputs'
    """

    goal = "inputs"
    needs = frozenset({Grant.CUTS, Grant.LEAKED_INPUTS, Grant.PROTOCOL})

    def __init__(self, rows: bool = True, prior: float = 1.0) -> None:
        require_range("prior", prior, 1e-9)
        self.rows, self.prior = rows, prior

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        view.require(Grant.CUTS)  # attacks treat bins as cuts
        return read_bins(view.told, view.leaked.inputs, self.prior, self.rows)


def read_bins(told: SentBins, leaked: Tensor, prior: float, rows: bool) -> Tensor:
    """Return the expected values of the cells of target rows, given their bins; (rows, columns).

    Args:
        told: bins that the party sent for target rows and for known rows.
        leaked: true values of the cells of the known rows.
        prior: see `Bins`.
        rows: see `Bins`.
    """

    def likely(column: int, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sent, own = (
            np.minimum(some[:, column].astype(np.int64), bins)  # the last bin: missing cells
            for some in (told.targets, told.leaked)
        )
        often = np.bincount(sent, minlength=bins + 1) / len(sent)
        shares, chances = before_response(often, told.epsilon)
        return shares, chances[sent], chances[own]

    return values_of_bins(told.layout, leaked, likely, prior, rows)


def values_of_bins(
    layout: Layout,
    leaked: Tensor,
    likely: Callable[[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]],
    prior: float,
    rows: bool,
) -> Tensor:
    """Return the expected cell values of target rows, given bin probabilities; (rows, columns).

    Args:
        layout: number and order of each column's bins.
        leaked: true values of the cells of the known rows.
        likely: function whose arguments are a column and its number of bins. The function returns
            the share of each bin, with missing cells last. The function also returns the bin
            probabilities of each target row and of each known row, axes (rows, bins + 1).
        prior: see `Bins`.
        rows: see `Bins`.
    """
    known, found, at = leaked.double().numpy(), [], 0
    for column, count in enumerate(categories_of(layout)):
        values = known[:, at : at + max(1, count)]
        at += values.shape[1]
        shares, targets, own = likely(column, layout.bins[column])
        stands_for = _by_frequency(shares, values) if count else _by_order(shares, values)
        if rows:
            sums = own.T @ values + prior * stands_for
            stands_for = sums / (own.sum(0)[:, None] + prior)
        found.append(targets @ stands_for)
    return torch.from_numpy(np.concatenate(found, axis=1)).float()


def before_response(often: np.ndarray, epsilon: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return bin shares before randomised response, and P(true bin | sent bin), (sent, true).

    Args:
        often: shares of the bins after randomised response.
        epsilon: epsilon of the randomised response; None means that bins are exact.
    """
    count = len(often)
    channel = np.eye(count)
    if epsilon is not None:
        moves = 1 / (np.exp(epsilon) + count - 1)
        channel = moves + np.eye(count) * (np.exp(epsilon) - 1) * moves
    shares = np.linalg.solve(channel, often).clip(1e-9)
    shares /= shares.sum()
    chances = channel * shares
    return shares, chances / chances.sum(1, keepdims=True).clip(1e-300)


def _by_order(shares: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return, for each bin of an ordered column, the mean of those sorted values that lie in it.

    The bin of missing cells gets the mean of all values.
    """
    ordered = np.sort(values[:, 0])
    ends = np.concatenate([[0.0], shares[:-1].cumsum()]) / max(shares[:-1].sum(), 1e-300)
    # Integral of the quantile function up to each bin edge; differences of these integrals give the
    # mean of each bin.
    steps = np.arange(len(ordered) + 1) / len(ordered)
    integral = np.interp(ends, steps, np.concatenate([[0.0], ordered.cumsum()]) / len(ordered))
    means = np.diff(integral) / np.diff(ends).clip(1e-300)
    found: np.ndarray = np.append(means, ordered.mean())[:, None]
    return found


def _by_frequency(shares: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return each bin's category by frequency rank, one-hot; for missing cells, all frequencies."""
    found = np.zeros((len(shares), values.shape[1]))
    found[np.argsort(shares[:-1]), np.argsort(values.mean(0))] = 1.0
    found[-1] = values.mean(0)
    return found


class OwnColumns(Attack):
    """Predicts another party's columns from the label party's columns, without the trained model.

    Method: kernel ridge regression on the known rows (Saunders et al. 1998), one column at a time.

    Args:
        strength: inverse weight of the squared (L2) penalty.

    Raises:
        BadOptionError: an option is out of range.

    >>> OwnColumns().goal
    'inputs'
    """

    goal = "inputs"
    needs = frozenset({Grant.INPUTS, Grant.LEAKED_INPUTS, Grant.PROTOCOL})

    def __init__(self, strength: float = 1.0) -> None:
        require_range("strength", strength, 1e-9)
        self.strength = strength

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        own, wanted = view.targets.inputs.flatten(1), view.leaked.inputs.flatten(1)
        scale, mean = scale_by("standard", own), wanted.mean(0)
        known = scale(view.told.own_of_leaked)
        return mean + predicted(known, wanted - mean, scale(own), "kernel", self.strength)
