"""The benchmark of private steps measures what it says."""

from benchmarks.private import TABLE, WAYS, bench_private


def test_every_way_is_measured_beside_the_plain_one():
    rows = bench_private(["mlp:hidden=8"], repeats=1, rows=400, epochs=1)
    assert [row.way for row in rows] == list(WAYS)
    assert rows[0].cpu_ratio == 1
    assert all(row.cpu_ms > 0 and row.steps == 2 for row in rows)
    assert "by layer" in TABLE(rows)
