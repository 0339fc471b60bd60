"""How good the model became, measure by measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vfl.report.records import Epoch, last_of
from vfl.report.units import number_text, percent_text

#: Measures by their names in the records, in the order of the table.
_MEASURES = {
    "accuracy": "Accuracy",
    "hit_rate": "Hit rate",
    "auc": "AUC",
    "f1": "F1",
    "log_loss": "Log loss",
    "rmse": "RMSE",
    "mae": "Mean absolute error",
    "r2": "R²",
}


@dataclass(frozen=True, slots=True)
class Score:
    """One row of the table, in words; empty where it was not measured."""

    name: str
    validation: str
    test: str


def scores(epochs: Sequence[Epoch]) -> list[Score]:
    """The last value of every measure, of validation and of test rows, as far as measured."""
    rows = [
        Score(name, _text(epochs, f"validation_{measure}"), _text(epochs, f"test_{measure}"))
        for measure, name in _MEASURES.items()
    ]
    return [row for row in rows if row.validation or row.test]


def _text(epochs: Sequence[Epoch], measure: str) -> str:
    value = last_of(epochs, measure)
    if value is None:
        return ""
    share = measure.endswith(("accuracy", "hit_rate"))
    return percent_text(value) if share else number_text(value)
