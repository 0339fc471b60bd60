"""The benchmark of tensors at workers: every place once, small."""

import pytest

from benchmarks.tensors import bench_tensors, format_tensors


def test_every_place_learns_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("VFL_DATA", str(tmp_path))  # so the diabetes rows stand in
    said = []
    rows = bench_tensors(["square"], steps=6, say=said.append)
    assert [row.where for row in rows] == ["plain", "pointer"] * 2 + ["plain", "pointer", "shares"]
    plain, pointer, shares = rows[-3:]
    assert pointer.mse == pytest.approx(plain.mse)
    assert shares.mse == pytest.approx(plain.mse, rel=0.01)
    assert all(row.ms > 0 for row in rows)
    assert len(said) == 5
    assert len(format_tensors(rows).splitlines()) == 8
