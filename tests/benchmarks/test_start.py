"""Sessions of standing parties, timed; tests/federation has what they compute."""

import subprocess
import sys

import pytest

from benchmarks import start
from benchmarks.start import bench_start


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
def test_a_process_that_has_ended_gets_no_row(monkeypatch):
    """A row of zeros would claim that the process is idle and needs no memory."""
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(start, "_REST_S", 0.0)
    try:
        rows = start._idle({"living": living.pid, "ended": ended.pid}, 0.01)
    finally:
        living.communicate(b"\n")
    assert [row.what for row in rows] == ["living"]
    assert rows[0].resident_mb > 0


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
