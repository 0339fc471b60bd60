"""Attacks from outside beside the adaptive attacker: which rows count, and what is printed."""

import sys
from pathlib import Path

import pytest

import vfl
from benchmarks.outside import OutsideRow, differences, measure, rows_of
from benchmarks.studies import read_rows
from vfl.attacks import ATTACKS
from vfl.core.registry import PLUGINS
from vfl.testing import add_attack

EXAMPLE = Path(__file__).parents[2] / "examples" / "outside_pipeline.py"
ADAPTIVE = "adaptive:at=cut,candidates=2"


def row(seed: str, attack: str, value: float) -> OutsideRow:
    author = "" if attack.startswith("adaptive") else "somebody"
    return OutsideRow("digits", "dcor", seed, 5, attack, author, "accuracy", value)


ROWS = [
    row("0", ADAPTIVE, 0.80), row("1", ADAPTIVE, 0.90),
    row("0", "svm", 0.85), row("1", "svm", 0.91),
    row("0", "mlp", 0.60), row("1", "mlp", 0.70),
]  # fmt: skip


def test_what_is_above_is_counted_on_the_same_victim():
    apart = differences(ROWS)
    assert apart["svm"] == pytest.approx([0.05, 0.01])
    assert apart["mlp"] == pytest.approx([-0.20, -0.20])


@pytest.fixture
def forget(monkeypatch):
    monkeypatch.setattr(ATTACKS, "_members", dict(ATTACKS._members))
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("outside_pipeline", None)


def test_rows_come_from_what_a_grid_stored(tmp_path, forget):
    content = {
        "name": "small", "data": {"source": "digits", "rows": 400},
        "parties": {"client": {"width": 8, "bottom": "mlp:hidden=16"}},
        "label": {"top": "linear"}, "train": {"epochs": 2, "learning_rate": 0.02},
        "grid": {"baselines": ["raw"], "draws": 2, "pictures": 0},
    }  # fmt: skip
    folder = tmp_path / "run"
    vfl.grid(content, attacks=[ADAPTIVE, "logistic"], leaks=[3], seeds=[0], out=folder)
    add_attack(folder, EXAMPLE, ["pipeline:learner=logistic"])
    found = rows_of(folder)
    assert [(one.attack, bool(one.author)) for one in found] == [
        (ADAPTIVE, False), ("pipeline:learner=logistic", True),
    ]  # fmt: skip
    assert all(one.k == 3 and 0 < one.value <= 1 for one in found)
    out = tmp_path / "rows.csv"
    assert measure([folder], out) == found
    for one, again in zip(found, read_rows(out, OutsideRow), strict=True):
        assert again.value == pytest.approx(one.value, abs=1e-4)
        assert (again.attack, again.seed, again.k) == (one.attack, one.seed, one.k)
