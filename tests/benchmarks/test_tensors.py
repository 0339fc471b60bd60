"""The benchmark of tensors at workers: every place once, small."""

import pytest

from benchmarks.tensors import EPSILON, bench_tensors


def test_every_place_learns_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("VFL_DATA", str(tmp_path))  # so the diabetes rows stand in
    rows = bench_tensors(["square", "relu"], data=["housing"], steps=2)
    places = ["plain", "pointer", "shares", "mac"]
    assert [row.where for row in rows] == ["plain", "pointer"] * 2 + places * 2 + ["noise"]
    plain, pointer, shares = rows[4:7]
    assert pointer.error == pytest.approx(plain.error)
    assert shares.error == pytest.approx(plain.error, rel=0.01)
    assert 0 < rows[-1].epsilon <= EPSILON
    assert all(row.ms > 0 for row in rows)
