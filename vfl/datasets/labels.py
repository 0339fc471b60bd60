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
    found, codes = np.unique(_class_values(column), return_inverse=True)
    classes: Classes = tuple(found.tolist())
    if len(classes) < 2:
        raise DataError(
            f"the label column '{column.name}' has nothing to tell apart",
            got=f"{spaced(len(classes))} classes",
            want="at least 2 classes",
        )
    return codes.astype(np.int64, copy=False).reshape(-1), classes


def _check_complete(column: pd.Series) -> None:
    missing = int(column.isna().sum())
    if missing:
        raise DataError(
            f"the label column '{column.name}' has missing cells",
            got=f"{spaced(missing)} of {spaced(len(column))} rows",
            fix="leave those rows out of the table",
        )


def _class_values(column: pd.Series) -> np.ndarray:
    """int64 or text, so that classes are written to JSON and read back unchanged."""
    if kind_of(column) == "text":
        return texts(column)
    values = numbers(column)
    if (values != np.round(values)).any():
        raise DataError(
            f"the label column '{column.name}' holds real numbers, not classes",
            fix='set task = "regression"',
        )
    return values.astype(np.int64)
