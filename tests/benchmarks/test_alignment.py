import re

import pytest

from benchmarks.alignment import TABLE, bench_alignment
from vfl.core.errors import BadOptionError


def test_parties_in_processes_of_their_own_find_half_of_the_ids():
    rows = bench_alignment([300], "server_aided", "64MiB")
    assert [(row.role, row.common) for row in rows] == [
        ("bank", 150),
        ("label", 150),
        ("helper", None),
    ]
    assert all(row.peak_mb >= 0 and row.cpu_s > 0 for row in rows)
    assert "WRONG" not in TABLE(rows)


def test_a_second_alignment_with_reused_keys_sends_only_the_new_ids():
    rows = bench_alignment([300], "ecdh:reuse=true", "64MiB", small=20, times=2)
    assert [(row.role, row.turn, row.common) for row in rows] == [
        ("bank", 1, 10),
        ("label", 1, 10),
        ("bank", 2, 10),
        ("label", 2, 10),
    ]
    assert sum(row.sent_mb for row in rows[2:]) < sum(row.sent_mb for row in rows[:2]) / 5


def test_equal_sets_have_new_common_ids_twice_and_no_more():
    rows = bench_alignment([20], "ecdh", "64MiB", times=2)
    assert all(row.right for row in rows)
    with pytest.raises(BadOptionError, match=re.escape("--times 3")):
        bench_alignment([20], "ecdh", "64MiB", times=3)
