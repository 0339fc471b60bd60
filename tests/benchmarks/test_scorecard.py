"""`python -m benchmarks.scorecard`: cards of made rows, from a CSV to a page."""

from benchmarks.scorecard import TABLE, bench_scorecard


def test_a_card_of_made_rows_tells_goods_from_bads():
    (row,) = bench_scorecard(("made",), seeds=2, rows=2000, columns=12)
    assert row.auc > 0.6
    assert 0 < row.ks < 1
    assert 1 <= row.on_card <= 12
    assert row.cpu_s > 0
    assert row.sent_bytes > 2000
    assert len(TABLE([row]).splitlines()) == 2
