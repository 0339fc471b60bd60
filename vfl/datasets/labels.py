"""Label columns as codes or numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from vfl.datasets.party import Classes
from vfl.datasets.values import kind_of, numbers, spaced, texts
from vfl.errors import BadOptionError, DataError, nearest

TASKS = ("classification", "regression")


def encode_labels(column: pd.Series, task: str) -> tuple[np.ndarray, Classes | None]:
    """Labels and what they stand for.

    Args:
        column: one label a row.
        task: "classification" or "regression".

    Returns:
        int64 codes 0..C-1 of shape (rows,) and the C classes in sorted order; for a regression the
        numbers themselves as float32, and None.

    >>> encode_labels(pd.Series(["no", "yes", "no"], name="paid"), "classification")
    (array([0, 1, 0]), ('no', 'yes'))

    Raises:
        BadOptionError: an unknown task.
        DataError: a missing label, or labels that do not fit the task.
    """
    if task not in TASKS:
        raise BadOptionError(
            f"no task is called '{task}'", want=", ".join(TASKS), fix=nearest(task, TASKS)
        )
    _check_complete(column)
    if task == "regression":
        return numbers(column).astype(np.float32), None
    codes, classes = _codes(column)
    if len(classes) < 2:
        raise DataError(
            f"the label column '{column.name}' has nothing to tell apart",
            got=f"{spaced(len(classes))} classes",
            want="at least 2 classes",
        )
    return codes, classes


def _check_complete(column: pd.Series) -> None:
    missing = int(column.isna().sum())
    if missing:
        raise DataError(
            f"the label column '{column.name}' has missing cells",
            got=f"{spaced(missing)} of {spaced(len(column))} rows",
            fix="leave those rows out of the table",
        )


def _codes(column: pd.Series) -> tuple[np.ndarray, Classes]:
    """Codes of the sorted classes; each different cell is read once."""
    text = kind_of(column) == "text"
    cells, different = pd.factorize(column if text else numbers(column))
    read = texts(pd.Series(different)) if text else _whole(np.asarray(different), str(column.name))
    found, places = np.unique(read, return_inverse=True)
    return places[cells], tuple(found.tolist())


def _whole(values: np.ndarray, name: str) -> np.ndarray:
    """As int64, so that classes are written to JSON and read back unchanged."""
    if (values != np.round(values)).any():
        raise DataError(
            f"the label column '{name}' holds real numbers, not classes",
            fix='set task = "regression"',
        )
    return values.astype(np.int64)
