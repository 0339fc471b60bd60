from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfl.core.errors import BadOptionError, TooFewRowsError
from vfl.core.seeds import permutation
from vfl.datasets.split import Fold, split_fixed, split_fold, split_rows


@given(
    rows=st.integers(20, 400),
    seed=st.integers(0, 2**40),
    validation=st.sampled_from([0.0, 0.1, 0.25]),
    test=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_parts_are_disjoint_and_complete(rows, seed, validation, test):
    split = split_rows(rows, seed, validation, test)
    parts = [split.train, split.validation, split.test]
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    assert [part.dtype for part in parts] == [np.int64] * 3
    assert len(split.test) == round(rows * test)
    assert len(split.validation) == round(rows * validation)


def test_a_split_follows_from_the_seed_alone():
    order = permutation(7, 50, "split")  # another process draws the same: tests of the seeds
    split = split_rows(50, 7)
    assert split.test.tolist() == sorted(order[:10])
    assert split.validation.tolist() == sorted(order[10:15])
    assert split.train.tolist() == sorted(order[15:])
    assert split.test.tolist() != split_rows(50, 8).test.tolist()


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    seed=st.integers(0, 2**40),
    validation=st.sampled_from([0.0, 0.1, 0.25]),
    test=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_every_part_has_its_share_of_every_class(counts, seed, validation, test):
    rows = sum(counts)
    if rows < 20:
        return
    classes = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    split = split_rows(rows, seed, validation, test, classes)
    shuffled = split_rows(rows, seed, validation, test)
    for name, part in vars(split).items():
        assert len(part) == len(getattr(shuffled, name))
        found = np.bincount(classes[part], minlength=len(counts))
        assert (abs(found - np.array(counts) * len(part) / rows) <= 2).all()
    assert sorted(np.concatenate(list(vars(split).values())).tolist()) == list(range(rows))


def test_a_fixed_split_takes_validation_rows_of_every_class():
    classes = np.repeat([0, 1, 0], [90, 10, 20])
    split = split_fixed(100, 120, 3, validation=0.1, strata=classes)
    assert np.bincount(classes[split.validation]).tolist() == [9, 1]
    assert split.test.tolist() == list(range(100, 120))


def test_a_part_that_was_asked_for_may_not_be_empty():
    with pytest.raises(TooFewRowsError, match="validation") as caught:
        split_rows(4, 0, validation=0.1, test=0.3)
    assert "4 aligned rows" in str(caught.value)
    assert len(split_rows(4, 0, validation=0.0, test=0.3).validation) == 0
    with pytest.raises(TooFewRowsError, match="train"):
        split_rows(0, 0, validation=0.0, test=0.0)


@pytest.mark.parametrize(("validation", "test"), [(-0.1, 0.2), (0.5, 0.5), (0.1, float("nan"))])
def test_shares_must_leave_training_rows(validation, test):
    with pytest.raises(BadOptionError, match="no training rows"):
        split_rows(100, 0, validation, test)


@given(train_rows=st.integers(20, 200), test_rows=st.integers(1, 50), seed=st.integers(0, 99))
def test_a_fixed_split_keeps_the_last_rows_for_the_test(train_rows, test_rows, seed):
    split = split_fixed(train_rows, train_rows + test_rows, seed)
    assert split.test.tolist() == list(range(train_rows, train_rows + test_rows))
    first = np.concatenate([split.train, split.validation])
    assert sorted(first.tolist()) == list(range(train_rows))


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    seed=st.integers(0, 2**40),
    folds=st.integers(2, 10),
)
def test_folds_are_equal_in_all_and_in_each_class(counts, seed, folds):
    labels = np.repeat(np.arange(len(counts)), counts)
    if len(labels) < 2 * folds:
        return
    splits = [split_fold(labels, seed, Fold(n, folds), 0.0) for n in range(1, folds + 1)]
    tested = np.concatenate([split.test for split in splits])
    assert sorted(tested.tolist()) == list(range(len(labels)))
    per_class = [np.bincount(labels[split.test], minlength=len(counts)) for split in splits]
    assert np.ptp([len(split.test) for split in splits]) <= 1
    assert (np.ptp(per_class, axis=0) <= 1).all()
    for split in splits:
        assert sorted([*split.train, *split.test]) == list(range(len(labels)))


def test_validation_is_a_share_of_the_other_rows():
    labels = np.arange(100) % 2
    split = split_fold(labels, 0, Fold(2, 5), validation=0.25)
    assert (len(split.train), len(split.validation), len(split.test)) == (60, 20, 20)
    assert sorted(np.concatenate(list(vars(split).values())).tolist()) == list(range(100))
    again = split_fold(labels, 0, Fold(2, 5), validation=0.25)
    assert [part.tolist() for part in vars(again).values()] == [
        part.tolist() for part in vars(split).values()
    ]
    other = split_fold(labels, 1, Fold(2, 5), validation=0.25)
    assert split.test.tolist() != other.test.tolist()
