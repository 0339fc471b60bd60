"""`python -m benchmarks.trees`: both contenders learn the same table, in processes of their own."""

import gzip

import numpy as np
import pytest

from benchmarks import trees
from benchmarks.emulation import Wan
from benchmarks.trees import OURS, PEER, bench_trees, shown


def test_trees_of_two_parties_stand_beside_xgboost():
    pytest.importorskip("xgboost")
    rows = bench_trees(
        1500, columns=6, rounds=3, depth=3, bins=16, repeats=1, protect=("order", "known", "hidden")
    )
    *ours, theirs = rows
    assert [one.who for one in rows] == [OURS, "vfl, known", "vfl, hidden", PEER]
    assert theirs.cpu_ratio == 1
    for one in ours:
        assert abs(one.auc - theirs.auc) < 0.05
        assert 1 <= one.bytes_ratio < 1.2, "what the protocol needs, and little more"
    assert theirs.bytes_ratio is None
    assert len(shown(rows).splitlines()) == 5


def test_a_tree_over_lines_takes_two_round_trips_a_level_on_shares_and_none_with_order():
    depth, columns, bins, rows = 3, 6, 16, 1500
    order, known = bench_trees(
        rows, columns=columns, rounds=3, depth=depth, bins=bins, protect=("order", "known"),
        wan=Wan(80, 40),
    )  # fmt: skip
    assert (order.round_trips, known.round_trips) == (0, 2 * depth)
    assert order.tree_s == 0
    sums = 2 * 8 * columns * (bins + 1)  # of a node, by two holders of shares
    assert known.tree_bytes > 2 * 8 * rows + 4 * sums
    assert known.tree_s > known.round_trips * 0.04
    assert order.auc == pytest.approx(known.auc, abs=0.02)
    assert len(shown([order, known]).splitlines()) == 3


def test_seeds_of_real_tables_are_written_as_they_come(monkeypatch, tmp_path):
    pytest.importorskip("xgboost")
    draw = np.random.default_rng(0)
    cells, kinds = draw.normal(size=(400, 2)).round(3), draw.choice(["a", "b"], 400)
    lines = [
        f"{one},{two},{kind},{one + (kind == 'a')}"
        for (one, two), kind in zip(cells, kinds, strict=True)
    ]
    with gzip.open(tmp_path / "made.csv.gz", "wt") as file:
        file.write("\n".join(["one,two,kind,sum", *lines]))
    monkeypatch.setenv("VFL_DATA", str(tmp_path))
    made = trees._Source(("made.csv.gz",), "sum", None, {})
    monkeypatch.setattr(trees, "_SOURCES", {"made": made})
    out = tmp_path / "rows.csv"
    rows = bench_trees(tables=True, rounds=20, depth=3, bins=64, repeats=2, out=out)
    assert [(row.table, row.measure, row.seed) for row in rows] == [
        ("made", "RMSE", 0),
        ("made", "RMSE", 1),
    ]
    for row in rows:
        assert row.ours == pytest.approx(row.xgboost_on_our_bins, rel=0.02)
        assert row.ours < 0.3 < np.std(cells[:, 0])
        assert row.xgboost_reordered == pytest.approx(row.xgboost, rel=0.1)
    assert out.read_text().splitlines()[1].startswith("made,RMSE,0,")
    assert "made" in shown(rows)
