from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks import harness
from benchmarks.memory import CASES, TABLE, bench_memory


def test_a_party_loads_60_000_rows_within_the_limit():
    (row,) = bench_memory(60_000, 20, ids="text", role="label")
    assert row.limit_mb == 1.5 * 60_000 * 20 * 4 / 1e6 + 64
    assert row.kept, TABLE([row])
    assert row.peak_mb > 60_000 * 20 * 4 / 1e6  # the inputs themselves


@pytest.mark.parametrize("role", ["mixed", "describe"])
def test_categories_and_dates_stay_within_the_limit(role):
    (row,) = bench_memory(30_000, 5, "parquet", ids="number", role=role)
    assert row.kept, TABLE([row])
    assert row.peak_mb > 1


@pytest.mark.parametrize("rows", [100_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
def test_a_table_on_disk_stays_within_the_setting(rows):
    (row,) = bench_memory(rows, 20, "parquet", "64MiB", "number", "label")
    assert row.limit_mb == pytest.approx((64 * 2**20 + rows + 20 * 1_500_000 + 64_000_000) / 1e6)
    assert row.kept, TABLE([row])
    assert row.peak_mb > 1
    assert row.peak_mb < rows * 20 * 4 / 1e6 or rows < 2_000_000  # the inputs alone
    assert row.rows_per_cpu_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_every_party_loads_a_million_rows_within_the_limit(form):
    rows = bench_memory(format=form)
    assert [(row.role, row.ids) for row in rows] == list(CASES)
    limits = {"mixed": 340, "describe": 184}
    assert all(row.limit_mb == limits.get(row.role, 184) for row in rows)
    assert all(row.kept for row in rows), TABLE(rows)


def test_a_process_that_has_ended_has_no_memory():
    """Until its parent waits for it, the process is listed, but its memory cannot be read."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    for file, field in (("smaps_rollup", "Rss"), ("status", "VmRSS")) * 2:
        with pytest.raises(ProcessLookupError):
            harness.resident_bytes(field, process.pid, file)
        process.wait()
