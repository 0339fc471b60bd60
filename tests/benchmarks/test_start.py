"""Sessions of standing parties, timed; tests/federation has what they compute."""

import pytest

from benchmarks.start import bench_start


@pytest.mark.net
def test_sessions_begin_and_processes_are_counted():
    rows = bench_start(turns=1, idle_s=1.0)
    commands = {row.what: row for row in rows if row.joined_s is not None}
    assert set(commands) == {"vfl train", "vfl evaluate", "vfl predict"}
    assert all(0 < row.joined_s < row.end_s for row in commands.values())
    idle = [row for row in rows if row.joined_s is None]
    assert sum(row.what.endswith("its worker") for row in idle) == 3
    assert len(idle) == 9
    assert all(0 < row.own_mb <= row.resident_mb for row in idle)
