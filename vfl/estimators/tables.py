"""Tables, owners of columns and weights, as an estimator's arguments give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import column_or_1d, validate_data

from vfl.datasets.partition import partition_columns
from vfl.datasets.table import check_owners, pick_columns

Columns = Sequence[str] | Sequence[int]


def frame_of(
    estimator: BaseEstimator, X: Any, y: Any = None, *, reset: bool, training: bool | None = None
) -> pd.DataFrame:
    """X as a frame; scikit-learn checks arrays, our encoders check frames.

    Args:
        estimator: it learns the names and the number of columns, or is held to them.
        X: a frame, or an array of axes (rows, columns).
        y: checked with X in training.
        reset: learn the columns anew.
        training: whether there must be a y; by default where columns are learned.
    """
    training = reset if training is None else training
    if isinstance(X, pd.DataFrame):
        validate_data(estimator, X, skip_check_array=True, reset=reset)
        if training:
            check_consistent_length(X, y)
        return X.reset_index(drop=True).set_axis([str(name) for name in X.columns], axis=1)
    if training:
        checked, _ = validate_data(estimator, X, y, dtype=np.float64, reset=reset)
    else:
        checked = validate_data(estimator, X, dtype=np.float64, reset=reset)
    return pd.DataFrame(checked, columns=[f"x{i}" for i in range(checked.shape[1])])


def owners_of(parties: Mapping[str, Columns] | int, columns: list[str]) -> dict[str, list[str]]:
    """Names of columns by party.

    Args:
        parties: names, globs or positions by party, or a number of parties that share evenly.
        columns: all names, in the table's order.

    Raises:
        MissingColumnError, SharedColumnError, DataError: see `vfl.datasets.table`.
    """
    if isinstance(parties, int):
        return partition_columns(columns, [f"party{number}" for number in range(1, parties + 1)])
    owners = {}
    for name, own in parties.items():
        names = [columns[c] if isinstance(c, int | np.integer) else c for c in own]
        owners[name] = pick_columns(pd.Index(columns), names, f"party '{name}'")
    check_owners(owners)
    return owners


def weights_of(sample_weight: Any, frame: pd.DataFrame) -> np.ndarray | None:
    """One weight a row as float64, axes (rows,); None stays None."""
    if sample_weight is None:
        return None
    weights = column_or_1d(sample_weight, dtype=np.float64)
    check_consistent_length(frame, weights)
    return np.array(weights)
