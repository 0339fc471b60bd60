"""Sections of a run's page: the importance of a forest's columns, and a regression's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vfl.experiments.loaded_run import finite
from vfl.experiments.pages.sections import Section
from vfl.experiments.tables import Table, number_text, p_value_text, percent_text
from vfl.trees.command import column_name, importance_of

_OF_REGRESSION = (
    "Coefficients are for columns with mean 0 and standard deviation 1 in the training rows. The "
    "columns of a feature party have numbers here; card.json in the party's own part of the run "
    "has their names."
)


_OF_IMPORTANCE = (
    "Measured on {rows} test rows of the last evaluation. Gain: share of the total gain of all "
    "splits. Permutation: increase of the mean loss if the cells of the column or party are "
    "permuted among rows. Shapley: mean absolute Shapley value. The columns of a feature party "
    "have numbers instead of names if the party's files are on another host."
)


def importance(found: Mapping[str, Any], run: Path) -> Section:
    """Return the section of a run's page about the importance of parties and of columns.

    Args:
        found: the entry "importance" in the results of an evaluation.
        run: folder of the run; it contains the names of columns, where available.
    """
    table = importance_of(run)
    return Section(
        title="Importance",
        tables=[_figures(table["parties"], "Party"), _figures(table["columns"], "Party", "Column")],
        below=_OF_IMPORTANCE.format(rows=found["rows"]),
        roomy=True,
    )


def _figures(players: Sequence[Mapping[str, Any]], *words: str) -> Table:
    """Return a table with one line per party, or with one line per column."""
    rows = [
        [one["party"], *([column_name(one)] if len(words) > 1 else [])]
        + [f"{one['splits']:,}", percent_text(one["gain"])]
        + [number_text(one[name]) for name in ("permutation", "shapley")]
        for one in players
    ]
    return Table([*words, "Splits", "Gain", "Permutation", "Shapley"], rows, words=len(words))


def regression(fitted: Mapping[str, Any], run: Path) -> Section:
    """Return the section of a run's page about its regression.

    Args:
        fitted: the entry "regression" of the run's summary.
        run: folder of the run.
    """
    return Section(
        title="Regression",
        tables=[_coefficients(fitted)],
        pairs=_fit_of(fitted),
        below=_OF_REGRESSION,
        roomy=True,
    )


def _coefficients(fitted: Mapping[str, Any]) -> Table:
    """Return a table of a regression's coefficients."""
    rows = []
    for one in fitted["columns"]:
        known = finite(one)
        row = [
            str(one["party"]),
            str(one["column"]),
            number_text(known.get("coefficient")),
            number_text(known.get("standard_error")),
            p_value_text(known.get("p_value")),
            number_text(known.get("lower")),
            number_text(known.get("upper")),
        ]
        rows.append(row)
    head = ["Party", "Column", "Coefficient", "Standard error", "p", "95 % from", "to"]
    return Table(head, rows, words=2)


def _fit_of(fitted: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the metrics of the whole regression."""
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
