"""The benchmark of private steps measures what it says."""

import pytest

from benchmarks.private import WAYS, bench_private, format_private
from vfl.core.errors import BadOptionError


def test_every_way_is_measured_beside_the_plain_one():
    said = []
    rows = bench_private(["mlp:hidden=8"], repeats=1, rows=400, epochs=1, say=said.append)
    assert [row.way for row in rows] == list(WAYS)
    assert rows[0].cpu_ratio == 1
    assert all(row.cpu_ms > 0 and row.steps == 2 for row in rows)
    assert said == ["mlp:hidden=8: 1 turns"]
    assert "by layer" in format_private(rows)
    with pytest.raises(BadOptionError):
        bench_private([])
