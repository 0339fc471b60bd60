"""Points of a scale: conversion of log odds, and reasons for lost points (Siddiqi 2006)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Scale:
    """Linear relation between scores and log odds of the good class.

    Attributes:
        base_score: the score at which there are `odds` good rows per bad row.
        odds: number of good rows per bad row at `base_score`.
        double: number of points that doubles the odds.

    >>> scale = Scale(600, 50, 20)
    >>> float(scale.score(math.log(100)))
    620.0
    """

    base_score: float = 600.0
    odds: float = 50.0
    double: float = 20.0

    @property
    def factor(self) -> float:
        """Number of points per unit of log odds."""
        return self.double / math.log(2)

    @property
    def offset(self) -> float:
        """Score at which there is one good row per bad row."""
        return self.base_score - self.factor * math.log(self.odds)

    def score(self, log_odds: np.ndarray | float) -> np.ndarray | float:
        """Convert log odds of the good class to scores."""
        return self.offset + self.factor * log_odds

    def log_odds(self, scores: np.ndarray) -> np.ndarray:
        """Convert scores to log odds of the good class."""
        return (scores - self.offset) / self.factor


def points_of(
    scale: Scale, intercept: float, effects: Sequence[np.ndarray]
) -> tuple[int, list[np.ndarray]]:
    """Return the points of each bin, and the base points that every row has, as integers.

    The intercept and the scale's offset are divided evenly among the n columns that get points, so
    that a row's points add up to its score. A bin with weight of evidence WoE has offset/n + factor
    (coefficient WoE + intercept/n) points.

    Args:
        scale: scale that converts log odds to scores.
        intercept: log odds of the good class for a row whose weights of evidence are all 0.
        effects: for each bin, the coefficient times the weight of evidence, one array per column; a
            column of zeros gets no points.

    >>> base, points = points_of(Scale(), 2.0, [np.array([0.5, -0.5]), np.zeros(2)])
    >>> base, points
    (0, [array([559, 530]), array([0, 0])])
    """
    count = sum(bool(own.any()) for own in effects)
    whole = scale.offset + scale.factor * intercept
    if not count:
        return round(whole), [np.zeros(len(own), np.int64) for own in effects]
    return 0, [
        np.rint(scale.factor * own + whole / count).astype(np.int64)
        if own.any()
        else np.zeros(len(own), np.int64)
        for own in effects
    ]


def reasons(points: np.ndarray, usual: np.ndarray, most: int) -> list[list[int]]:
    """Return the columns in which each row loses most points, worst first (Siddiqi 2006, ch. 6).

    A column in which a row has at least the mean points is no reason for a low score.

    Args:
        points: points of rows, axes (rows, columns), or axes (rows, parties) with the sum of each
            party.
        usual: mean points over the training rows, axes (columns,) or (parties,).
        most: largest number of reasons per row.

    >>> reasons(np.array([[10, 30, 20]]), np.array([25.0, 20.0, 21.0]), 2)
    [[0, 2]]
    """
    lost = usual - points
    order = np.argsort(-lost, axis=1, kind="stable")[:, :most]
    return [[int(place) for place in own if lost[row, place] > 0] for row, own in enumerate(order)]
