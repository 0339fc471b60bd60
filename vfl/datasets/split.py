"""Train, validation and test rows, computed alike at every party from the run's seed."""

from __future__ import annotations

import numpy as np

from vfl.datasets.party import Split
from vfl.datasets.values import spaced
from vfl.errors import BadOptionError, TooFewRowsError
from vfl.seeds import permutation


def split_rows(rows: int, seed: int, validation: float = 0.1, test: float = 0.2) -> Split:
    """Split `rows` aligned rows by the seed.

    Args:
        rows: how many rows are aligned.
        seed: the run's public seed.
        validation: share of all rows, 0 for none.
        test: share of all rows, 0 for none; together with the other below 1.

    >>> split_rows(10, seed=0)
    Split(train=7, validation=1, test=2)

    Raises:
        BadOptionError: shares outside 0..1.
        TooFewRowsError: a part that was asked for would be empty.
    """
    _check_shares(validation, test)
    order = permutation(seed, rows, "split")
    test_rows, validation_rows = round(rows * test), round(rows * validation)
    split = Split(
        train=np.sort(order[test_rows + validation_rows :]),
        validation=np.sort(order[test_rows : test_rows + validation_rows]),
        test=np.sort(order[:test_rows]),
    )
    return _filled(split, rows, validation, test)


def split_fixed(train_rows: int, rows: int, seed: int, validation: float = 0.1) -> Split:
    """Keep a data set's own test rows: those after the first `train_rows`.

    Args:
        train_rows: rows that come before the test rows.
        rows: all rows.
        seed: the run's public seed; it picks the validation rows among the first ones.
        validation: share of the first `train_rows` rows.

    Raises:
        BadOptionError: a share outside 0..1.
        TooFewRowsError: a part that was asked for would be empty.
    """
    inner = split_rows(train_rows, seed, validation, test=0.0)
    test = np.arange(train_rows, rows, dtype=np.int64)
    return _filled(Split(inner.train, inner.validation, test), rows, validation, 1.0)


def _check_shares(validation: float, test: float) -> None:
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise BadOptionError(
            "the shares of validation and test rows leave nothing to train on",
            got=f"validation={validation}, test={test}",
            want="two numbers from 0 that add up to less than 1",
        )


def _filled(split: Split, rows: int, validation: float, test: float) -> Split:
    asked = {"train": 1.0, "validation": validation, "test": test}
    empty = [part for part, share in asked.items() if share and not len(getattr(split, part))]
    if empty:
        raise TooFewRowsError(
            f"no row is left for {' and '.join(empty)}",
            got=f"{spaced(rows)} aligned rows",
            want="at least one row in every part that was asked for",
            fix="give more rows, or set the part's share to 0",
        )
    return split
