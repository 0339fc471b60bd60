"""Counters of what is asked, against numpy's own count and a table that was shifted."""

import json

import numpy as np
import pytest
import torch

from vfl.datasets import PartyData, Split
from vfl.session.drift import DRIFTED, Bins, Drift, population_stability_index, scores_of


def draw(seed, rows=4000, shift=0.0):
    """A number, a flag that few rows have, and a flag that few rows lack."""
    generator = np.random.default_rng(seed)
    number = generator.normal(shift, size=rows)
    rare, common = generator.random((2, rows)) < np.array([[0.05], [0.95]])
    return torch.from_numpy(np.stack([number, rare, common], axis=1)).float()


def test_the_index_is_that_of_a_loop():
    expected, counted = torch.tensor([10, 0, 40, 50, 0]), torch.tensor([0, 5, 20, 15, 0])
    e = (np.array([10, 0, 40, 50]) + 0.5) / 102
    a = (np.array([0, 5, 20, 15]) + 0.5) / 42
    want = sum((y - x) * np.log(y / x) for x, y in zip(e, a, strict=True))
    assert float(population_stability_index(expected, counted)) == pytest.approx(want)
    assert float(population_stability_index(expected, torch.zeros(5, dtype=torch.int64))) == 0.0


def test_every_row_falls_into_one_bin_and_deciles_hold_a_tenth():
    bins = Bins.of(draw(0), ["number", "rare", "common"])
    bins.add(draw(0))
    assert bins.counts.sum(dim=1).tolist() == [4000] * 3
    assert (bins.counts[0, ::2] - 400).abs().max() <= 2
    rare = int((draw(0)[:, 1] == 1).sum())
    assert sorted(bins.counts[1][bins.counts[1] > 0].tolist()) == sorted([rare, 4000 - rare])
    assert bins.stability().abs().max() < 1e-6


def test_scores_and_a_file_that_gives_the_same_counters():
    rows = draw(0)
    split = Split(*np.split(np.arange(4000), [2000, 2500]))
    data = PartyData("lender", rows, None, (0, 1), split, b"")
    answers = torch.randn(1500, 2, generator=torch.Generator().manual_seed(0))
    first = Drift.of(data, answers)
    again = Drift.restored(json.loads(json.dumps(first.record())))
    for one in (first, again):
        one.add(rows[2500:], answers + torch.tensor([0.0, 2.0]))
    assert first.summary() == again.summary()
    told = first.summary()
    assert told["score"]["population_stability_index"] > DRIFTED
    assert told["input 0"]["population_stability_index"] < 0.1
    assert sum(told["score"]["rows"]) == 1500
    text = json.dumps(first.summary())
    edges = [f"{edge:.4f}" for edge in first.record()["inputs"]["edges"][0]]
    assert not [edge for edge in edges if edge in text]


@pytest.mark.parametrize(("shift", "drifted"), [(0.0, 0), (1.0, 1)])
def test_a_sample_of_a_large_table_shows_the_same_shift(monkeypatch, shift, drifted):
    monkeypatch.setattr("vfl.session.drift._SAMPLE_ROWS", 500)
    split = Split(np.arange(4000), np.arange(0), np.arange(0))
    drift = Drift.of(PartyData("shop", draw(0), None, (), split, b""))
    assert {sum(counts) for counts in drift.record()["inputs"]["expected"]} == {500}
    drift.add(draw(1, shift=shift))
    assert drift.drifted() == drifted


def test_a_score_is_the_number_the_second_class_or_the_largest():
    answers = torch.tensor([[0.0, 0.0], [0.0, np.log(3)]])
    assert scores_of(answers, True)[:, 0].tolist() == pytest.approx([0.5, 0.75])
    assert scores_of(answers[:, 1:], False)[:, 0].tolist() == pytest.approx([0.0, np.log(3)])
    three = torch.tensor([[0.0, 0.0, np.log(2)]])
    assert scores_of(three, True).tolist() == [[pytest.approx(0.5)]]
