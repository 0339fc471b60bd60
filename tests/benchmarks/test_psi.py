import sys

import pytest

from benchmarks import psi
from benchmarks.psi import TABLE, bench_psi, measure


@pytest.fixture
def small(monkeypatch):
    """Sizes that take no time; processes of ours are left out."""
    monkeypatch.setattr(psi, "SIZES", dict.fromkeys(psi.SIZES, (100,)))
    monkeypatch.setattr(psi, "_ours", measure)


def test_every_system_has_a_row_and_ours_are_right(small):
    rows = bench_psi()
    assert [row.system for row in rows] == list(psi.SIZES)
    ours = [row for row in rows if row.skipped is None]
    assert [row.system for row in ours] == ["server_aided", "ecdh"]
    assert all(row.common == 50 for row in ours)
    assert ours[0].party_bytes == 16 + 8 + 16 * 100 + 1 + 1 + 13 + 1
    assert ours[1].party_bytes == 100 * (32 + 32 + 16) + 4 * 50 + 3
    table = TABLE(rows)
    assert "skipped: no --peer spu=PYTHON" in table
    assert "WRONG" not in table


def test_a_peer_that_is_not_there_is_skipped_with_the_reason(small, tmp_path):
    rows = bench_psi(peer=[f"spu={sys.executable}", f"openmined={tmp_path / 'python'}"])
    reasons = {row.system: row.skipped for row in rows if row.skipped}
    assert reasons["openmined"] == "it failed: FileNotFoundError"
    assert reasons["spu-rr22"].startswith("it failed: ")
