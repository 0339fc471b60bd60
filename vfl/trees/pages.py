"""What the page of a run shows of a regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vfl.experiments.loaded_run import finite
from vfl.experiments.pages.sections import Section
from vfl.experiments.tables import Table, number_text

_OF_REGRESSION = (
    "Of columns with mean 0 and standard deviation 1 in the training rows; a feature party's "
    "columns have numbers here, and their names on that party's card."
)


def regression(fitted: Mapping[str, Any]) -> Section:
    """The section of a run's page about its regression.

    Args:
        fitted: the entry "regression" of the run's summary.
    """
    return Section(
        title="Regression",
        tables=[_coefficients(fitted)],
        pairs=_fit_of(fitted),
        below=_OF_REGRESSION,
        roomy=True,
    )


def _coefficients(fitted: Mapping[str, Any]) -> Table:
    """The coefficients of a regression."""
    rows = []
    for one in fitted["columns"]:
        known = finite(one)
        p_value = known.get("p_value")
        row = [
            str(one["party"]),
            str(one["column"]),
            number_text(known.get("coefficient")),
            number_text(known.get("standard_error")),
            "< 0.001" if p_value is not None and p_value < 0.001 else number_text(p_value),
            number_text(known.get("lower")),
            number_text(known.get("upper")),
        ]
        rows.append(row)
    head = ["Party", "Column", "Coefficient", "Standard error", "p", "95 % from", "to"]
    return Table(head, rows, words=2)


def _fit_of(fitted: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Figures of a whole regression."""
    names = {
        "rows": "Training rows",
        "log_likelihood": "Log-likelihood",
        "deviance": "Deviance",
        "null_deviance": "Null deviance",
        "explained": "Explained share of the null deviance",
        "aic": "AIC",
        "bic": "BIC",
    }
    known = finite(fitted)
    return [(shown, number_text(known.get(name))) for name, shown in names.items()]
