"""Load on a served model: what the figures are of, and what clients meet while parties die."""

import numpy as np
import pytest

from benchmarks.serving import (
    FaultRow,
    Load,
    ServingRow,
    _row,
    bench_drift,
    bench_faults,
    bench_middle,
    bench_serving,
    format_faults,
    format_serving,
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


def test_what_is_printed():
    row = ServingRow("split", 8, 812.5, 9.1, 20.4, 0.61, 2.1, 310.4, 75.6, 0)
    head, line = format_serving([row]).splitlines()
    assert head.split()[:2] == ["server", "clients"]
    assert line.split() == [
        "split",
        "8",
        "812.5",
        "9.10",
        "20.40",
        "0.61",
        "2.10",
        "310",
        "76",
        "0",
    ]
    faults = FaultRow(60.0, 1, 900, 20, 0, 0, 6.25, 300.0, 301.0)
    assert "900 answered as predicted, 0 wrong, 20 times a 503" in format_faults([faults])


@pytest.mark.net
def test_both_servers_answer_every_request():
    rows = bench_serving([1], seconds=1.0, rounds=1)
    found = [(row.server, row.failed) for row in rows]
    assert found == [("monolith", 0), ("split", 0), ("floor", 0)]
    assert rows[2].p50_ms < rows[1].p50_ms


@pytest.mark.net
def test_counters_of_drift_can_be_left_out():
    rows = bench_drift([2], seconds=1.0, rounds=1)
    assert [(row.server, row.failed) for row in rows] == [("uncounted", 0), ("counted", 0)]


@pytest.mark.net
def test_a_party_in_the_middle_answers_every_request():
    rows = bench_middle([2], seconds=1.0, rounds=1)
    assert [(row.server, row.failed) for row in rows] == [("plain", 0), ("middle", 0)]


@pytest.mark.net
@pytest.mark.parametrize("stop_s", [None, 12.0], ids=["killed", "stopped"])
def test_parties_that_are_killed_or_stop_cost_no_wrong_answer(stop_s):
    (row,) = bench_faults(seconds=45.0, every_s=20.0, stop_s=stop_s)
    assert row.kills >= 1
    assert row.answered > 100
    assert row.unavailable > 0
    assert (row.wrong, row.other) == (0, 0)
    assert row.rss_last_mb < row.rss_first_mb + 50
