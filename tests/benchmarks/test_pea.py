"""The tables of PEA: every kind of row once, small, and what the baselines promise."""

import math
from collections import Counter

import pytest
import torch

from benchmarks.pea import Task, bench_pea, released_rows


def stand_in(rows=400):
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(rows) % 2
    features = torch.randn(rows, 4, generator=draws, dtype=torch.float64)
    features[:, 0] += 3 * labels
    return Task("mnist", features.float(), features, labels, rows * 3 // 4, 2, 40)


def test_every_table_has_its_rows(monkeypatch):
    monkeypatch.setattr("benchmarks.pea.read_task", lambda name, limit: stand_in())
    monkeypatch.setattr("benchmarks.pea._noise", lambda epsilon, *rest: 5 / epsilon)
    monkeypatch.setattr("benchmarks.pea.STEPS", 20)  # on shares
    rows = bench_pea(["mnist"], epsilon=8.0, epsilons=[8.0], seeds=1, networks=False)
    assert Counter(row.table for row in rows) == {"models": 3, "beginnings": 13, "noise": 5}
    accuracy = {row.what: row.accuracy for row in rows if row.table != "beginnings"}
    assert accuracy["linear on features, on shares"] > 0.8
    assert accuracy["one curator"] > 0.85
    assert accuracy["each row"] < accuracy["one curator"]
    assert [row.epsilon for row in rows if row.table == "noise"][-1] is None


def test_rows_given_away_have_the_noise_and_the_labels_of_half_the_budget():
    task = stand_in(20_000)
    inputs, labels = task.features, task.labels
    noisy, given = released_rows(task, (inputs, labels), 2.0)
    kept = float((given == labels).double().mean())
    assert kept == pytest.approx(math.e / (math.e + 1), abs=0.02)
    deviation = (noisy - inputs).std()
    assert deviation == pytest.approx(16 * task.noise_of_release(1.0), rel=0.02)
