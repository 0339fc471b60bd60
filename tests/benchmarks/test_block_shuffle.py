import numpy as np
import pandas as pd

from benchmarks import block_shuffle
from benchmarks.block_shuffle import SHUFFLES, bench_block_shuffle


def test_every_order_and_shuffle_has_a_row(monkeypatch):
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(2000, 4)), columns=list("abcd"))
    label = block_shuffle.SOURCES["bank marketing"].label
    frame[label] = np.where(frame.a + frame.d > 0, "yes", "no")
    monkeypatch.setattr(block_shuffle, "_read", lambda source: frame)
    rows = bench_block_shuffle(1, ["bank marketing"], epochs=1)
    assert [(row.block_rows, row.window_blocks) for row in rows] == 2 * list(SHUFFLES)
    full = rows[:1] + rows[len(SHUFFLES) : len(SHUFFLES) + 1]
    assert all(row.auc_apart == 0 for row in full)
    assert all(abs(row.lag_1) < 0.1 for row in full)
    alone = [row for row in rows if row.window_blocks == 1]
    assert all(row.lag_1 > 0.9 for row in alone)  # neighbours of one block of few
