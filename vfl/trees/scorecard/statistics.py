"""Statistics of binned columns, computed from counts and sums over rows.

Goods are the rows of the good class, and bads the rows of the bad class. If a bin has rows of only
one class, half a row is added to each class, so that the weight of evidence is finite (Siddiqi
2006).
"""

from __future__ import annotations

import numpy as np
import torch

from vfl.session.drift import population_stability_index


def evidence(
    counts: np.ndarray, totals: np.ndarray, floor: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return each bin's weight of evidence and information-value term; axes (bins,) each.

    The weight is ln(share of all goods / share of all bads) in the bin; the term is this weight
    times the difference of these two shares (Siddiqi 2006).

    Args:
        counts: number of good and of bad rows in each bin, axes (bins, 2).
        totals: number of good and of bad rows in all bins, axes (2,).
        floor: smallest number of rows; a bin with fewer rows gets a weight and a term of 0, so that
            other parties learn nothing about it.

    >>> weights, values = evidence(np.array([[80, 20], [20, 80]]), np.array([100, 100]))
    >>> weights.round(4), values.sum().round(4)
    (array([ 1.3863, -1.3863]), np.float64(1.6636))
    """
    alone = (counts == 0).any(axis=-1, keepdims=True)
    shares = (counts + 0.5 * alone) / np.maximum(totals, 1)
    weights = np.log(shares[:, 0] / shares[:, 1])
    hidden = counts.sum(axis=1) < max(1, floor)
    weights = np.where(hidden, 0.0, weights)
    return weights, weights * (shares[:, 0] - shares[:, 1])


def stability(expected: np.ndarray, counted: np.ndarray) -> float:
    """Return the population stability index of counts per bin, relative to expected counts."""
    return float(population_stability_index(torch.from_numpy(expected), torch.from_numpy(counted)))


def standard(weights: np.ndarray, rows: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation (0 if all are equal) of weights of evidence over rows.

    Args:
        weights: weight of evidence of each bin.
        rows: number of rows in each bin.

    >>> standard(np.array([-1.0, 1.0]), np.array([50, 50]))
    (0.0, 1.0)
    """
    share = rows / max(1, rows.sum())
    mean = float(share @ weights)
    spread = float(np.sqrt(share @ (weights - mean) ** 2))
    return mean, spread if spread > 1e-9 * np.abs(weights).max(initial=0.0) else 0.0


def correlations(columns: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation of each pair of columns; 0 with a constant column.

    Args:
        columns: columns of weights of evidence, axes (rows, columns).
    """
    away = columns - columns.mean(axis=0)
    spread = np.sqrt((away**2).sum(axis=0))
    away /= np.where(spread > 0, spread, 1.0)
    found: np.ndarray = away.T @ away
    np.fill_diagonal(found, 1.0)
    return found


def variance_inflation(correlation: np.ndarray) -> np.ndarray:
    """Return 1 / (1 - R^2) of each column's regression on all other columns; axes (columns,).

    The result is the diagonal of the inverse correlation matrix (Marquardt 1970); it is infinite if
    the other columns determine a column.

    >>> variance_inflation(np.array([[1.0, 0.6], [0.6, 1.0]])).round(4)
    array([1.5625, 1.5625])
    """
    values, vectors = np.linalg.eigh(correlation)
    free = values > 1e-10
    inflation = (vectors[:, free] ** 2 / values[free]).sum(axis=1)
    given = (vectors[:, ~free] ** 2).sum(axis=1) > 1e-10
    return np.where(given, np.inf, inflation)
