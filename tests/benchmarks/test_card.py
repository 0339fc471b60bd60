"""The benchmark of a graphics card, where the processor alone may have to do."""

import pytest
import torch

from benchmarks.card import CardRow, bench_card, bench_products, shown


def test_a_step_is_the_same_in_one_piece_and_in_parties():
    rows = bench_card(["mlp_small"], steps=3, repeats=1)
    per_device = {
        device: [row for row in rows if row.device == device] for device in ("cpu", "cuda")
    }
    assert [row.codec for row in per_device["cpu"]][:2] == [None, "none"]
    loop, parties, *_ = per_device["cpu"]
    assert parties.final_loss == pytest.approx(loop.final_loss, rel=1e-5)
    assert loop.of_loop == 1


def test_products_and_codecs_are_timed_where_they_can_be(monkeypatch):
    monkeypatch.setattr("benchmarks.card.SIDES", (64,))
    monkeypatch.setattr("benchmarks.card.CUTS", ((16, 100),))
    rows = bench_products(1)
    assert not any(isinstance(row, CardRow) for row in rows)
    assert all(row.here_ms > 0 for row in rows)
    assert all((row.there_ms is not None) == torch.cuda.is_available() for row in rows)
    assert "ring product, 64 x 64" in shown(rows)
