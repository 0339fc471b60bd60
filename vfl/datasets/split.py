"""Training, validation and test rows, which follow from the run's seed, or from labels as well.

All parties compute a split without labels identically.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vfl.core.errors import BadOptionError, TooFewRowsError
from vfl.core.seeds import permutation
from vfl.datasets.on_disk import DiskArray, OnDisk
from vfl.datasets.table import spaced


def _no_rows() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Split:
    """Positions of the training, validation and test rows; ascending, int64, no row in two parts.

    Attributes:
        train, validation, test: positions among the aligned rows, axes (rows of the part,); a part
            may be empty, and is empty by default.
    """

    train: np.ndarray = field(default_factory=_no_rows)
    validation: np.ndarray = field(default_factory=_no_rows)
    test: np.ndarray = field(default_factory=_no_rows)

    def __repr__(self) -> str:
        return (
            f"Split(train={len(self.train)}, validation={len(self.validation)}, "
            f"test={len(self.test)})"
        )


@dataclass(frozen=True, slots=True)
class Fold:
    """One of several equal parts of the rows; the rows of this fold are the test rows.

    Attributes:
        number: number of this fold, from 1.
        of: number of all folds.
    """

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of or self.of < 2:
            raise BadOptionError(
                "this fold does not exist",
                got=f"fold {self.number} of {self.of}",
                want="a number from 1 to the number of folds, which is at least 2",
            )


def split_rows(
    rows: int,
    seed: int,
    validation: float = 0.1,
    test: float = 0.2,
    strata: np.ndarray | None = None,
    block_rows: int = 0,
    place: OnDisk | None = None,
) -> Split:
    """Split a number of aligned rows at random, by the seed.

    Args:
        rows: number of aligned rows.
        seed: the run's public seed.
        validation: share of all rows that become validation rows; 0 for none.
        test: share of all rows that become test rows; 0 for none. The two shares add up to less
            than 1.
        strata: class of each row, axes (rows,). Every part then has the same share of each class,
            up to two rows. Only a process that has the labels can use strata; None ignores labels.
        block_rows: number of consecutive rows to split at a time, so that every part has the same
            share of each block, up to two rows; 0 splits all rows at once, and so do `strata`.
        place: folder for the positions of a split in blocks; None keeps them in memory.

    >>> split_rows(10, seed=0)
    Split(train=7, validation=1, test=2)
    >>> classes = np.array([0] * 10 + [1] * 90)
    >>> np.bincount(classes[split_rows(100, seed=0, strata=classes).test])
    array([ 2, 18])

    Raises:
        BadOptionError: a share is negative, or the shares add up to 1 or more.
        TooFewRowsError: a requested part would be empty.
    """
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise BadOptionError(
            "the shares of validation and test rows leave no training rows",
            got=f"validation={validation}, test={test}",
            want="two numbers from 0 that add up to less than 1",
        )
    if block_rows and strata is None:
        return _filled(
            _split_in_blocks(rows, seed, validation, test, block_rows, place),
            rows,
            validation,
            test,
        )
    order = permutation(seed, rows, "split")
    test_rows, validation_rows = round(rows * test), round(rows * validation)
    if strata is not None:
        order = _spread(order[np.argsort(strata[order], kind="stable")], test_rows)
        order[test_rows:] = _spread(order[test_rows:], validation_rows)
    split = Split(
        train=np.sort(order[test_rows + validation_rows :]),
        validation=np.sort(order[test_rows : test_rows + validation_rows]),
        test=np.sort(order[:test_rows]),
    )
    return _filled(split, rows, validation, test)


def _split_in_blocks(
    rows: int, seed: int, validation: float, test: float, block_rows: int, place: OnDisk | None
) -> Split:
    share = validation + test

    def held_out(before: int) -> tuple[int, int]:
        """Count the test rows, and the test and validation rows, among the first `before` rows."""
        held = round(before * share)
        return (round(held * test / share) if share else 0), held

    tested, held = held_out(rows)
    sizes = (rows - held, held - tested, tested)
    parts = [_Positions(size, place) for size in sizes]
    for number, start in enumerate(range(0, rows, block_rows)):
        stop = min(start + block_rows, rows)
        before, after = held_out(start), held_out(stop)
        tested, held = after[0] - before[0], after[1] - before[1]
        order = start + permutation(seed, stop - start, "split", number)
        dealt = order[held:], order[tested:held], order[:tested]
        for part, own in zip(parts, dealt, strict=True):
            part.add(np.sort(own))
    return Split(*(part.read() for part in parts))


class _Positions:
    """Ascending positions of rows, which are collected in memory or on disk."""

    def __init__(self, count: int, place: OnDisk | None) -> None:
        self._place, self._start = place, 0
        self._disk = None if place is None else DiskArray(place, (count,), np.int64)
        self._found = np.empty(0 if place else count, dtype=np.int64)

    def add(self, own: np.ndarray) -> None:
        if self._disk is None:
            self._found[self._start : self._start + len(own)] = own
        else:
            self._disk.write(self._start, own)
        self._start += len(own)

    def read(self) -> np.ndarray:
        if self._disk is None or self._place is None:
            return self._found
        return self._disk.read(self._place.share(16))


def _spread(order: np.ndarray, first: int) -> np.ndarray:
    """Move `first` evenly spaced rows of an order to the front."""
    at = ((np.arange(first) + 0.5) * len(order) / max(first, 1)).astype(np.int64)
    return np.concatenate([order[at], np.delete(order, at)])


def split_fixed(
    train_rows: int,
    rows: int,
    seed: int,
    validation: float = 0.1,
    strata: np.ndarray | None = None,
) -> Split:
    """Split a data set whose test rows are fixed: those after the first `train_rows` rows.

    Args:
        train_rows: number of rows before the test rows.
        rows: number of all rows.
        seed: the run's public seed, which draws the validation rows from the rows before the test
            rows.
        validation: share of the first `train_rows` rows that become validation rows.
        strata: see `split_rows`.

    Raises:
        BadOptionError: the share is below 0, or is 1 or more.
        TooFewRowsError: a requested part would be empty.
    """
    strata = None if strata is None else strata[:train_rows]
    inner = split_rows(train_rows, seed, validation, 0.0, strata)
    test = np.arange(train_rows, rows, dtype=np.int64)
    return _filled(Split(inner.train, inner.validation, test), rows, validation, 1.0)


def split_parts(train_rows: int, validation_rows: int, rows: int) -> Split:
    """Split a data set that stores training rows first, then validation rows, then test rows.

    >>> split_parts(5, 2, 10)
    Split(train=5, validation=2, test=3)
    """
    ends = (train_rows, train_rows + validation_rows)
    train, validation, test = np.split(np.arange(rows, dtype=np.int64), ends)
    return _filled(Split(train, validation, test), rows, validation=1.0, test=1.0)


def split_fold(
    labels: np.ndarray, seed: int, fold: Fold, validation: float = 0.1, strata: bool = True
) -> Split:
    """Take the rows of one fold as test rows, and the other rows for training and validation.

    The seed shuffles the rows, and the rows are assigned to the folds class by class. So two folds
    differ by at most one row, in total and in each class. This assignment needs the labels, so only
    a process that has all labels can make such a split.

    Args:
        labels: labels of all rows, axes (rows,).
        seed: the run's public seed.
        fold: fold whose rows are the test rows.
        validation: share of the rows outside this fold that become validation rows.
        strata: whether the labels are classes; rows with numbers as labels are assigned in random
            order.

    >>> split_fold(np.array([0, 0, 0, 1, 1, 1, 1, 1, 1]), 0, Fold(1, of=3), validation=0.2)
    Split(train=5, validation=1, test=3)

    Raises:
        BadOptionError: the share is below 0, or is 1 or more.
        TooFewRowsError: a requested part would be empty.
    """
    order = permutation(seed, len(labels), "folds")
    dealt = order[np.argsort(labels[order], kind="stable")] if strata else order
    test = np.sort(dealt[fold.number - 1 :: fold.of])
    rest = np.setdiff1d(np.arange(len(labels), dtype=np.int64), test)
    inner = split_rows(len(rest), seed, validation, test=0.0)
    split = Split(rest[inner.train], rest[inner.validation], test)
    return _filled(split, len(labels), validation, 1.0)


def split_apart(complete: np.ndarray, split: Callable[[np.ndarray], Split]) -> Split:
    """Split the rows that all parties have, and separately the rows that some party lacks.

    So the test rows that all parties have are the same as in a training that uses only the rows of
    all parties. If the rows that some party lacks are too few to fill every part, all of them
    become training rows.

    Args:
        complete: mask of the rows that all parties have, bool, axes (rows,).
        split: function that splits given rows; it returns positions counted from 0 among these
            rows.

    >>> split_apart(np.arange(30) < 20, lambda rows: split_rows(len(rows), seed=0))
    Split(train=21, validation=3, test=6)

    Raises:
        TooFewRowsError: too few rows belong to all parties.
    """
    rows, others = np.flatnonzero(complete), np.flatnonzero(~complete)
    known = split(rows)
    try:
        more = split(others)
    except TooFewRowsError:
        nothing = others[:0]
        more = Split(np.arange(len(others)), nothing, nothing)
    return Split(
        train=np.union1d(rows[known.train], others[more.train]),
        validation=np.union1d(rows[known.validation], others[more.validation]),
        test=np.union1d(rows[known.test], others[more.test]),
    )


def _filled(split: Split, rows: int, validation: float, test: float) -> Split:
    asked = {"train": 1.0, "validation": validation, "test": test}
    empty = [part for part, share in asked.items() if share and not len(getattr(split, part))]
    if empty:
        raise TooFewRowsError(
            f"no row is left for {' and '.join(empty)}",
            got=f"{spaced(rows)} aligned rows",
            want="at least one row in every requested part",
            fix="provide more rows, or set the part's share to 0",
        )
    return split
