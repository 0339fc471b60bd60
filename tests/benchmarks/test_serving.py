"""Load on a served model: what the figures are of, and what clients meet while parties die."""

import os
import signal
import subprocess

import numpy as np
import pytest

from benchmarks.serving import (
    Load,
    _row,
    _start,
    bench_faults,
    bench_serving,
)


def load(seconds, lasted, failures=0):
    one = Load("", "", [], seconds=list(seconds), lasted_s=lasted, cpu_s=[0.01, 0.002, 0.004])
    one.statuses.update({200: len(seconds), 503: failures})
    return one


def test_ratios_are_of_the_monolith():
    base, split = load([0.001] * 100, 1.0), load(np.linspace(0.002, 0.004, 50), 1.0, failures=3)
    row = _row("split", 8, split, base)
    assert (row.requests_per_second, row.throughput_ratio, row.failed) == (50, 0.5, 3)
    assert row.p50_ms == pytest.approx(3.0)
    assert (row.cpu_us, row.party_cpu_us) == pytest.approx((200.0, 60.0))
    assert row.p99_ratio == pytest.approx(np.percentile(split.seconds, 99) / 0.001)
    assert _row("monolith", 8, base, base).throughput_ratio == 1


def test_a_server_ends_with_the_benchmark_that_was_killed(tmp_path, monkeypatch):
    """The server waits for a message at a pipe that stays open."""
    with subprocess.Popen(["sleep", "60"]) as benchmark:
        monkeypatch.setattr(os, "getpid", lambda: benchmark.pid)
        server = _start("party", tmp_path, "bank")
        try:
            assert not server.ends_within(1.0)
            benchmark.kill()
            assert server.ends_within(60.0)
        finally:
            server.stop()
    assert server.exit_code == -signal.SIGTERM


@pytest.mark.net
@pytest.mark.parametrize(
    ("asked", "servers"),
    [("drift", ["uncounted", "counted"]), ("middle", ["plain", "middle"])],
)
def test_two_services_take_turns(asked, servers):
    rows = bench_serving([2], seconds=1.0, rounds=1, **{asked: True})
    assert [(row.server, row.failed) for row in rows] == [(server, 0) for server in servers]


@pytest.mark.net
def test_both_servers_answer_every_request():
    rows = bench_serving([1], seconds=1.0, rounds=1)
    found = [(row.server, row.failed) for row in rows]
    assert found == [("monolith", 0), ("split", 0), ("floor", 0)]
    assert rows[2].p50_ms < rows[1].p50_ms


@pytest.mark.net
@pytest.mark.parametrize("stop_s", [None, 12.0], ids=["killed", "stopped"])
def test_parties_that_are_killed_or_stop_cost_no_wrong_answer(stop_s):
    (row,) = bench_faults(seconds=45.0, every_s=20.0, stop_s=stop_s)
    assert row.kills >= 1
    assert row.answered > 100
    assert row.unavailable > 0
    assert (row.wrong, row.other) == (0, 0)
    assert row.rss_last_mb < row.rss_first_mb + 50
