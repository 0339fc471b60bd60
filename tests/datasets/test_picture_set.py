from __future__ import annotations

import numpy as np
import pytest

from vfl.datasets.picture_set import Part, PictureSet, data_folder, interleaved
from vfl.errors import DataError


def part(labels):
    labels = np.array(labels)
    return Part.of(labels.astype(np.uint8).reshape(-1, 1, 1, 1), labels)


def test_every_class_comes_in_turn_in_the_order_of_the_file():
    labels = np.random.default_rng(0).integers(0, 5, 100)
    order = interleaved(labels)
    waiting = {label: np.flatnonzero(labels == label).tolist() for label in range(5)}
    want = []
    while any(waiting.values()):
        want += [rows.pop(0) for rows in waiting.values() if rows]
    assert order.tolist() == want


@pytest.mark.parametrize(
    ("limit", "train", "test"), [(None, 8, 4), (50, 8, 4), (6, 4, 2), (1, 1, 0)]
)
def test_rows_in_proportion(limit, train, test):
    pictures, labels, train_rows = PictureSet(part(range(8)), part(range(4)), (*range(8),)).read(
        limit
    )
    assert train_rows == train
    assert labels.tolist() == [*range(train), *range(test)]
    assert pictures[:, 0, 0, 0].tolist() == labels.tolist()


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0], []])
def test_labels_without_a_class_are_refused(labels):
    other = [] if not labels else [0]
    with pytest.raises(DataError, match="do not fit its classes"):
        PictureSet(part(labels), part(other), ("a", "b", "c")).read()


def test_where_data_sets_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("VFL_DATA", "/some/where")
    assert data_folder(tmp_path) == tmp_path
    assert str(data_folder(None)) == "/some/where"
    monkeypatch.setenv("VFL_DATA", "")
    assert data_folder(None).parts[-2:] == (".cache", "vfl")
