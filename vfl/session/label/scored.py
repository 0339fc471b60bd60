"""Counts of evaluated rows, from which tables of scores, classes and residuals are made.

For two classes, rows are counted by their score: the probability of the second class, or the points
of a scorecard. For more classes, rows are counted by true class and predicted class. For a
regression, residuals (label minus prediction) are averaged over rows with similar predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import DataError
from vfl.session.drift import population_stability_index

#: Largest number of groups into which rows are sorted by probability; with fewer rows, each row may
#: form its own group.
GROUPS = 1000
_BANDS = 10


@dataclass(frozen=True)
class Scored:
    """Counts of rows in groups of equal or similar scores.

    Attributes:
        values: score of each group (the mean if scores differ), ascending, axes (groups,).
        counts: number of rows of the first class and of the second class in each group, int64, axes
            (groups, 2).
    """

    values: np.ndarray
    counts: np.ndarray

    @classmethod
    def counted(cls, values: np.ndarray, second: np.ndarray) -> Scored:
        """Count rows; rows with equal scores form one group.

        Args:
            values: the score of each row, axes (rows,).
            second: whether the row belongs to the second class, axes (rows,).
        """
        found, places = np.unique(values, return_inverse=True)
        cells = np.bincount(2 * places + second, minlength=2 * len(found))
        return cls(found, cells.reshape(-1, 2))

    @classmethod
    def of(cls, logits: Tensor, codes: Tensor) -> Scored | None:
        """Count rows by the second class's probability, in groups with similar row counts.

        Rows with equal probabilities are in the same group. The result is None if an output is not
        finite.

        Args:
            logits: logits, axes (rows, 2).
            codes: class of each row, 0 or 1, axes (rows,).

        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 9.0]])
        >>> Scored.of(logits, torch.tensor([0, 1, 1])).counts.tolist()
        [[1, 1], [0, 1]]
        """
        if not torch.isfinite(logits).all():
            return None
        chances = torch.softmax(logits.double(), dim=1)[:, 1].numpy()
        _, place, rows = np.unique(chances, return_inverse=True, return_counts=True)
        step = max(1.0, len(chances) / GROUPS)
        groups = ((np.cumsum(rows) - rows) / step).astype(np.int64)[place]
        _, groups = np.unique(groups, return_inverse=True)
        counts = np.zeros((int(groups.max()) + 1, 2), np.int64)
        np.add.at(counts, (groups, codes.numpy()), 1)
        return cls(np.bincount(groups, chances) / counts.sum(axis=1), counts)

    @classmethod
    def read(cls, record: Any) -> Scored:
        """Parse a record that the method `record` returned.

        Raises:
            DataError: the record has a different form.
        """
        try:
            found = cls(np.array(record["probability"], float), np.array(record["counts"], int))
        except (KeyError, TypeError, ValueError):
            raise DataError("this is not a record of scored rows") from None
        if found.counts.shape != (len(found.values), 2) or not len(found.values):
            raise DataError("this is not a record of scored rows")
        return found

    def record(self) -> Mapping[str, Any]:
        """Return the counts as a record for JSON."""
        return {"probability": self.values.tolist(), "counts": self.counts.tolist()}

    @property
    def rows(self) -> int:
        """Number of all counted rows."""
        return int(self.counts.sum())

    @property
    def positives(self) -> int:
        """Number of rows of the second class."""
        return int(self.counts[:, 1].sum())

    def __add__(self, other: Scored) -> Scored:
        values, places = np.unique(np.concatenate([self.values, other.values]), return_inverse=True)
        counts = np.zeros((len(values), 2), np.int64)
        np.add.at(counts, places, np.concatenate([self.counts, other.counts]))
        return Scored(values, counts)

    def auc(self, of: int = 1) -> float:
        """Return the probability that a row of class `of` has a larger score than other rows.

        Only pairs with one row of each class count, and pairs with equal scores count half. The
        result is NaN if a class has no rows.

        Args:
            of: class (0 or 1) whose rows should have the larger scores.
        """
        above, below = self.counts[:, of], self.counts[:, 1 - of]
        if not above.any() or not below.any():
            return float("nan")
        passed = np.cumsum(below) - below / 2
        return float((passed * above).sum() / (above.sum() * below.sum()))

    def gini(self, of: int = 1) -> float:
        """Return the Gini coefficient, 2 AUC - 1."""
        return 2 * self.auc(of) - 1

    def kolmogorov_smirnov(self) -> float:
        """Return the largest distance between the two classes' score distributions.

        The result is NaN if one class has no rows.

        >>> Scored.counted(np.array([1, 2, 3, 4]), np.array([1, 1, 0, 1])).kolmogorov_smirnov()
        0.6666666666666666
        """
        totals = self.counts.sum(axis=0)
        if not totals.all():
            return float("nan")
        apart = np.cumsum(self.counts / totals, axis=0)
        return float(np.abs(apart[:, 0] - apart[:, 1]).max())

    def bands(self, most: int = _BANDS, *, highest_first: bool = False) -> list[Scored]:
        """Divide the rows by score into bands with nearly equal numbers of rows.

        Args:
            most: largest number of bands.
            highest_first: whether the band with the highest scores comes first. In this case, a
                group of equal scores belongs to the band of its first row. Otherwise the band with
                the lowest scores comes first, and a group belongs to the band of its middle row.
        """
        rows = self.counts.sum(axis=1)
        if highest_first:
            band = (self.rows - np.cumsum(rows)) * most // max(1, self.rows)
        else:
            band = (most * (np.cumsum(rows) - rows / 2) / max(1, self.rows)).astype(np.int64)
        band = np.minimum(band, most - 1)
        order = np.unique(band)
        return [Scored(self.values[band == one], self.counts[band == one]) for one in order]

    def stability(self, other: Scored, most: int = _BANDS) -> float:
        """Return the population stability index of `other`'s rows against these rows.

        Both sets of rows are counted in this object's score bands.
        """
        starts = [band.values[0] for band in self.bands(most)][1:]

        def counted(scored: Scored) -> Tensor:
            places = np.searchsorted(starts, scored.values, side="right")
            rows = scored.counts.sum(axis=1)
            found = np.bincount(places, weights=rows, minlength=len(starts) + 1)
            return torch.from_numpy(found.astype(np.int64))

        return float(population_stability_index(counted(self), counted(other)))


@dataclass(frozen=True)
class Guessed:
    """Counts of rows by true and predicted class, and by the probability of the predicted class.

    Attributes:
        counts: number of rows by true class and predicted class, int64, axes (classes, classes).
        sure: counts of rows by the probability of their predicted class; here a correct prediction
            counts as the second class.
    """

    counts: np.ndarray
    sure: Scored

    @classmethod
    def of(cls, logits: Tensor, codes: Tensor) -> Guessed | None:
        """Count rows by their logits; return None if an output is not finite.

        Args:
            logits: logits, axes (rows, classes).
            codes: classes as 0..C-1, axes (rows,).

        >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
        >>> Guessed.of(logits, torch.tensor([0, 1, 2])).counts.tolist()
        [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
        """
        if not torch.isfinite(logits).all():
            return None
        chances, guess = torch.softmax(logits.double(), dim=1).max(dim=1)
        classes = logits.shape[1]
        counts = torch.bincount(codes * classes + guess, minlength=classes**2)
        logit = torch.stack([torch.zeros_like(chances), torch.logit(chances, 1e-15)], dim=1)
        sure = Scored.of(logit, (guess == codes).long())
        assert sure is not None, "all outputs are finite"
        return cls(counts.reshape(classes, classes).numpy(), sure)

    @classmethod
    def read(cls, record: Any) -> Guessed:
        """Parse a record that the method `record` returned.

        Raises:
            DataError: the record has a different form.
        """
        try:
            found = cls(np.array(record["guesses"], int), Scored.read(record["sure"]))
        except (KeyError, TypeError, ValueError):
            raise DataError("this is not a record of guessed rows") from None
        if found.counts.ndim != 2 or len(set(found.counts.shape)) > 1:
            raise DataError("this is not a record of guessed rows")
        return found

    def record(self) -> Mapping[str, Any]:
        """Return the counts as a record for JSON."""
        return {"guesses": self.counts.tolist(), "sure": self.sure.record()}

    def precision(self) -> np.ndarray:
        """Return each class's precision; NaN for a class that is never predicted, axes (C,)."""
        return _shares(np.diag(self.counts), self.counts.sum(axis=0))

    def recall(self) -> np.ndarray:
        """Return each class's recall; NaN for a class without rows, axes (C,)."""
        return _shares(np.diag(self.counts), self.counts.sum(axis=1))

    def f1(self) -> np.ndarray:
        """Return each class's F1 against all others.

        The result has the axes (C,), with NaN for a class that never occurs.
        """
        either = self.counts.sum(axis=0) + self.counts.sum(axis=1)
        return _shares(2 * np.diag(self.counts), either)


def _shares(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.where(whole > 0, part / np.maximum(whole, 1), np.nan)
    return found


@dataclass(frozen=True)
class Residuals:
    """Residuals of a regression (label minus prediction), in bands of similar predictions.

    Attributes:
        bands: for each band: number of rows, mean prediction, mean label, mean absolute residual,
            and root mean squared residual; the band with the lowest predictions comes first, axes
            (bands, 5).
    """

    bands: np.ndarray

    @classmethod
    def of(cls, answers: Tensor, labels: Tensor, most: int = _BANDS) -> Residuals | None:
        """Compute the bands from predictions and labels; return None if a prediction is not finite.

        Args:
            answers: predictions, axes (rows, 1).
            labels: labels, axes (rows,).
            most: largest number of bands; rows with equal predictions are in one band.

        >>> found = Residuals.of(torch.tensor([[1.0], [3.0]]), torch.tensor([2.0, 2.0]), 2)
        >>> found.bands.tolist()
        [[1.0, 1.0, 2.0, 1.0, 1.0], [1.0, 3.0, 2.0, 1.0, 1.0]]
        """
        if not torch.isfinite(answers).all():
            return None
        guess, truth = answers[:, 0].double().numpy(), labels.double().numpy()
        _, place, rows = np.unique(guess, return_inverse=True, return_counts=True)
        band = ((np.cumsum(rows) - rows) * most // len(guess))[place]
        apart = truth - guess
        lines = [
            [own.sum(), guess[own].mean(), truth[own].mean(), np.abs(apart[own]).mean(),
             np.sqrt((apart[own] ** 2).mean())]
            for one in np.unique(band)
            for own in [band == one]
        ]  # fmt: skip
        return cls(np.array(lines, float))

    @classmethod
    def read(cls, record: Any) -> Residuals:
        """Parse a record that the method `record` returned.

        Raises:
            DataError: the record has a different form.
        """
        try:
            found = cls(np.array(record["residuals"], float))
        except (KeyError, TypeError, ValueError):
            raise DataError("this is not a record of residuals") from None
        if found.bands.ndim != 2 or found.bands.shape[1] != 5:
            raise DataError("this is not a record of residuals")
        return found

    def record(self) -> Mapping[str, Any]:
        """Return the bands as a record for JSON."""
        return {"residuals": self.bands.tolist()}
