"""Statistics of a column's merged bins, and the whole scorecard, stored as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from vfl.session.label.scored import Scored
from vfl.trees.scorecard.points import Scale
from vfl.trees.scorecard.statistics import evidence, variance_inflation

#: Splits of the rows (such as training rows) for which the scorecard counts the scores.
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class OwnColumn:
    """The part of a column's scorecard entry that the column's owner stores.

    Attributes:
        groups: for each fine bin, the number of the merged bin that contains it, int64, axes (fine
            bins,); the last fine bin holds missing values.
        weights: weight of evidence of each merged bin, axes (merged bins,).
        points: points of each merged bin, int64, axes (merged bins,).
    """

    groups: np.ndarray
    weights: np.ndarray
    points: np.ndarray


@dataclass(frozen=True)
class CardColumn(OwnColumn):
    """The label party's scorecard entry of a column.

    Attributes:
        counts: number of good and of bad training rows in each merged bin, int64, axes (merged
            bins, 2); good and bad are the two labels.
        shift: population stability index of later rows (validation rows, on shares also test rows)
            relative to the training rows; NaN if there are no later rows.
        coefficient, error, p_value: the column's regression coefficient, its standard error and its
            p-value; NaN if the column is not on the scorecard.
    """

    counts: np.ndarray
    shift: float
    coefficient: float = np.nan
    error: float = np.nan
    p_value: float = np.nan

    @property
    def on_card(self) -> bool:
        return bool(np.isfinite(self.coefficient))

    def information_value(self, totals: np.ndarray, floor: int) -> float:
        """See `evidence`."""
        return float(evidence(self.counts, totals, floor)[1].sum())

    @property
    def usual(self) -> float:
        """Mean of the column's points over the training rows."""
        rows = self.counts.sum(axis=1)
        return float((self.points * rows).sum() / max(1, rows.sum()))


@dataclass(frozen=True)
class Card:
    """The label party's result of a training: the whole scorecard.

    Attributes:
        scale: scale that converts log odds to the scorecard's points.
        columns: entries of all columns of all parties, ordered by party.
        base: points that every row has before the points of its columns are added.
        intercept, error: intercept of the regression, and its standard error.
        correlation: correlation between columns' weights of evidence, axes (columns, columns).
        scores: for each split (by its name), the number of good and of bad rows at each score.
    """

    scale: Scale
    columns: Sequence[CardColumn]
    base: int
    intercept: float
    error: float
    correlation: np.ndarray = field(repr=False)
    scores: Mapping[str, Scored] = field(default_factory=dict)

    @property
    def totals(self) -> np.ndarray:
        """Number of good training rows and number of bad training rows."""
        found: np.ndarray = self.columns[0].counts.sum(axis=0)
        return found

    def inflation(self, *, on_card: bool = True) -> np.ndarray:
        """Return variance inflation factors of selected columns, axes (columns,); NaN for others.

        Args:
            on_card: True selects only the columns on the scorecard; False selects all columns whose
                weights of evidence differ between bins.
        """
        on = np.array([one.on_card if on_card else one.weights.any() for one in self.columns])
        found = np.full(len(on), np.nan)
        if on.any():
            found[on] = variance_inflation(self.correlation[np.ix_(on, on)])
        return found

    def with_scores(self, part: str, scores: Scored) -> Card:
        """Return the scorecard with the scores of further rows of a split added."""
        before = self.scores.get(part)
        return replace(
            self, scores={**self.scores, part: scores if before is None else before + scores}
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the scorecard as tensors, from which `of_state` restores it."""
        numbers = [[one.shift, one.coefficient, one.error, one.p_value] for one in self.columns]
        scale = [self.scale.base_score, self.scale.odds, self.scale.double]
        state = own_state(self.columns) | {
            "scale": torch.tensor(scale, dtype=torch.float64),
            "of_columns": torch.tensor(numbers, dtype=torch.float64),
            "intercept": torch.tensor([self.intercept, self.error], dtype=torch.float64),
            "base": torch.tensor(self.base),
            "counts": torch.from_numpy(np.concatenate([one.counts for one in self.columns])),
            "correlation": torch.from_numpy(self.correlation),
        }
        for part, scores in self.scores.items():
            state[f"scores.{part}"] = torch.from_numpy(scores.values)
            state[f"score_counts.{part}"] = torch.from_numpy(scores.counts)
        return state

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor]) -> Card:
        """Restore a scorecard from the result of `state_dict`."""
        own = own_of_state(state)
        ends = np.cumsum([len(one.points) for one in own])[:-1]
        columns = [
            CardColumn(one.groups, one.weights, one.points, counts, *numbers)
            for one, counts, numbers in zip(
                own,
                np.split(state["counts"].numpy(), ends),
                state["of_columns"].tolist(),
                strict=True,
            )
        ]
        scores = {
            part: Scored(state[f"scores.{part}"].numpy(), state[f"score_counts.{part}"].numpy())
            for part in PARTS
            if f"scores.{part}" in state
        }
        intercept, error = state["intercept"].tolist()
        return cls(
            Scale(*state["scale"].tolist()), columns, int(state["base"]), intercept, error,
            state["correlation"].numpy(), scores,
        )  # fmt: skip


def own_state(columns: Sequence[OwnColumn]) -> dict[str, Tensor]:
    """Return the entries of columns as tensors, from which `own_of_state` restores them."""
    sizes = [[len(one.groups), len(one.points)] for one in columns]

    def joined(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(one, name) for one in columns]))

    return {
        "sizes": torch.tensor(sizes, dtype=torch.int64),
        **{name: joined(name) for name in ("groups", "weights", "points")},
    }


def own_of_state(state: Mapping[str, Tensor]) -> list[OwnColumn]:
    """Restore the columns from the result of `own_state`."""
    fine, merged = np.cumsum(state["sizes"].numpy(), axis=0)[:-1].T
    return [
        OwnColumn(*parts)
        for parts in zip(
            np.split(state["groups"].numpy(), fine),
            np.split(state["weights"].numpy(), merged),
            np.split(state["points"].numpy(), merged),
            strict=True,
        )
    ]
