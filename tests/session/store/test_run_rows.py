"""The record of a run's rows recognises them in any order, and among any others."""

import numpy as np
import pytest

from vfl.core.errors import RunFolderError
from vfl.core.storage import Seal
from vfl.datasets import PartyData, Split
from vfl.session.store.run_rows import NEW, RunRows, keyed_ids

KEY = bytes(range(32))
IDS = np.array([f"person-{number}" for number in range(20)], dtype=object)
SPLIT = Split(np.arange(0, 20, 2), np.array([1, 5, 9]), np.array([3, 7, 11, 13, 15, 17, 19]))


@pytest.fixture
def record():
    data = PartyData("label", None, None, None, SPLIT, b"order", IDS)
    return RunRows.of(data, "people", KEY)


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_recognised_in_any_order_and_new_ones_are_new(record, seed):
    draw = np.random.default_rng(seed)
    everybody = np.concatenate([IDS, [f"stranger-{number}" for number in range(5)]])
    asked = draw.permutation(everybody)[:15]
    want = []
    for name in asked:
        kind, _, number = name.partition("-")
        parts = (SPLIT.train, SPLIT.validation, SPLIT.test)
        known = [code for code, part in enumerate(parts) if int(number) in part]
        want.append(known[0] if kind == "person" else NEW)
    assert record.parts(keyed_ids(asked, KEY)).tolist() == want


def test_under_another_key_no_row_is_recognised(record):
    assert (record.parts(keyed_ids(IDS, bytes(32))) == NEW).all()


def test_a_record_is_read_as_it_was_written_and_holds_no_id(record, tmp_path):
    path, seal = tmp_path / "rows.sealed", Seal("rows", "label", "one")
    record.save(path, seal)
    found = RunRows.load(path, seal)
    assert (found.alignment, found.order) == ("people", record.order)
    for name in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(found.split, name), getattr(SPLIT, name))
    np.testing.assert_array_equal(found.ids, record.ids)
    assert b"person" not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(RunFolderError):
        RunRows.load(path, Seal("rows", "label", "two"))
