"""Sessions of standing parties, timed; tests/federation has what they compute."""

import pytest

from benchmarks.start import StartRow, bench_start, format_rows


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


def test_what_was_not_measured_is_a_dash():
    table = format_rows(
        [StartRow("vfl train", 1.25, 3.5), StartRow("a", resident_mb=80, own_mb=7, cpu_percent=0.5)]
    )
    assert [line.split()[-5:] for line in table.splitlines()[1:]] == [
        ["1.25", "3.50", "-", "-", "-"],
        ["-", "-", "80", "7", "0.5"],
    ]
