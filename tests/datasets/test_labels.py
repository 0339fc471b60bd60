from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfl.datasets.labels import encode_labels
from vfl.errors import BadOptionError, DataError


@given(
    st.lists(st.sampled_from(["no", "yes", "perhaps"]), min_size=2).filter(
        lambda cells: len(set(cells)) > 1
    )
)
def test_codes_lead_back_to_the_labels(cells):
    codes, classes = encode_labels(pd.Series(cells, name="y"), "classification")
    assert [classes[code] for code in codes] == cells
    assert list(classes) == sorted(set(cells))
    assert codes.dtype == np.int64


@pytest.mark.parametrize(
    ("column", "classes"),
    [
        (pd.Series([4, 2, 4]), (2, 4)),
        (pd.Series([4.0, 2.0, 4.0]), (2, 4)),
        (pd.Series([True, False, True]), (0, 1)),
        (pd.Series(["b", "a", "b"], dtype="category"), ("a", "b")),
        (pd.Series([10, 9, 10], dtype="Int64"), (9, 10)),
    ],
)
def test_classes_are_text_or_whole_numbers(column, classes):
    codes, found = encode_labels(column.rename("y"), "classification")
    assert found == classes
    assert codes.tolist() == [1, 0, 1]
    assert tuple(json.loads(json.dumps(found))) == classes


def test_a_regression_keeps_the_numbers():
    values, classes = encode_labels(pd.Series([1.5, -2.0], name="y"), "regression")
    assert values.tolist() == [1.5, -2.0]
    assert values.dtype == np.float32
    assert classes is None


@pytest.mark.parametrize(
    ("column", "task", "message"),
    [
        (["a", None], "classification", "missing cells"),
        (["a", "a"], "classification", "nothing to tell apart"),
        ([0.5, 1.0], "classification", "real numbers, not classes"),
        (["a", "b"], "regression", "finite numbers"),
    ],
)
def test_labels_that_do_not_fit_the_task(column, task, message):
    with pytest.raises(DataError, match=message) as caught:
        encode_labels(pd.Series(column, name="paid"), task)
    assert "'paid'" in str(caught.value)


def test_an_unknown_task_comes_with_the_nearest():
    with pytest.raises(BadOptionError, match="no task is called 'regresion'") as caught:
        encode_labels(pd.Series([1.0]), "regresion")
    assert "did you mean 'regression'?" in str(caught.value)
