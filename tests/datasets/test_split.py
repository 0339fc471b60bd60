from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfl.datasets.split import split_fixed, split_rows
from vfl.errors import BadOptionError, TooFewRowsError
from vfl.seeds import permutation


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


def test_a_part_that_was_asked_for_may_not_be_empty():
    with pytest.raises(TooFewRowsError, match="validation") as caught:
        split_rows(4, 0, validation=0.1, test=0.3)
    assert "4 aligned rows" in str(caught.value)
    assert len(split_rows(4, 0, validation=0.0, test=0.3).validation) == 0
    with pytest.raises(TooFewRowsError, match="train"):
        split_rows(0, 0, validation=0.0, test=0.0)


@pytest.mark.parametrize(("validation", "test"), [(-0.1, 0.2), (0.5, 0.5), (0.1, float("nan"))])
def test_shares_must_leave_training_rows(validation, test):
    with pytest.raises(BadOptionError, match="nothing to train on"):
        split_rows(100, 0, validation, test)


@given(train_rows=st.integers(20, 200), test_rows=st.integers(1, 50), seed=st.integers(0, 99))
def test_a_fixed_split_keeps_the_last_rows_for_the_test(train_rows, test_rows, seed):
    split = split_fixed(train_rows, train_rows + test_rows, seed)
    assert split.test.tolist() == list(range(train_rows, train_rows + test_rows))
    first = np.concatenate([split.train, split.validation])
    assert sorted(first.tolist()) == list(range(train_rows))


def test_a_fixed_split_without_test_rows_is_refused():
    with pytest.raises(TooFewRowsError, match="test"):
        split_fixed(30, 30, seed=0)
