"""`python -m benchmarks.trees`: both contenders learn the same table, in processes of their own."""

import pytest

from benchmarks.trees import OURS, PEER, TABLE, bench_trees


def test_trees_of_two_parties_stand_beside_xgboost():
    pytest.importorskip("xgboost")
    rows = bench_trees(1500, columns=6, rounds=3, depth=3, bins=16, repeats=1)
    ours, theirs = rows
    assert (ours.who, theirs.who) == (OURS, PEER)
    assert theirs.cpu_ratio == 1
    assert abs(ours.auc - theirs.auc) < 0.05
    assert 1 <= ours.bytes_ratio < 1.2, "a byte a cell, and little more"
    assert theirs.bytes_ratio is None
    assert len(TABLE(rows).splitlines()) == 3
