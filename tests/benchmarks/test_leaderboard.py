"""The standing leaderboard on one small task; its real ones have more of everything."""

import csv
import sys

import pytest

from benchmarks import leaderboard
from vfl.experiments.study import plan_study
from vfl.training.specs import read_checked

TINY = """
name = "tiny"
data = { source = "digits", rows = 600 }
label.top = "linear"
train = { epochs = 2, learning_rate = 0.02 }
[parties.client]
width = 8
bottom = "mlp:hidden=8"
"""


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Runs the command with one task of its own; what it writes lies in a temporary folder."""
    (tmp_path / "tiny.toml").write_text(TINY)
    for name, value in {
        "EXAMPLES": tmp_path, "TASKS": ("tiny",), "DEFENSES": ("layer_norm", "marvell"),
        "MANY_CLASSES": {"tiny"}, "SECONDS": {"tiny": 1},
    }.items():  # fmt: skip
        monkeypatch.setattr(leaderboard, name, value)

    def run(*words):
        options = ["--tasks", "tiny", "--seeds", "0", "--jobs", "1"]
        options += ["--out", str(tmp_path / "runs"), "--page", str(tmp_path / "page.md")]
        monkeypatch.setattr(sys, "argv", ["leaderboard", *options, *words])
        leaderboard.main()
        return tmp_path

    return run


def test_time_and_memory_are_told_before_anything_is_trained(ask, capsys):
    folder = ask("--plan")
    said = capsys.readouterr().out
    assert said.startswith("tiny: 5 cells, about ")
    assert "GB of memory" in said
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_a_page_says_what_each_defense_holds_against(ask, capsys):
    folder = ask()
    page = (folder / "page.md").read_text()
    assert "## tiny" in page
    assert "| layer_norm " in page
    assert (
        "- **tiny**: 0 of 1 defenses are shown to give labels away; not shown to: layer_norm."
        in page
    )
    assert "and tampering" in page
    assert "4 of 4 victims, 1 seeds, 2 draws" in page
    rows = list(csv.DictReader((folder / "page.csv").read_text().splitlines()))
    assert {(row["defense"], row["k"]) for row in rows} == {
        (defense, k) for defense in ("none", "layer_norm") for k in ("5", "20")
    }
    assert {row["verdict"] for row in rows} == {"undecided"}  # by one victim
    capsys.readouterr()
    ask()  # goes on where it was
    assert "failed" not in capsys.readouterr().out
    assert (folder / "page.md").read_text() == page


@pytest.mark.parametrize("task", ["fashion_mnist", "review_polarity", "bank_marketing"])
def test_the_real_tasks_are_experiments(task, monkeypatch):
    monkeypatch.setenv("VFL_DATA", "data")
    study = leaderboard.study_of(task, "light", [0])
    assert len(study.cells) == 1 + 2 * (1 + len(leaderboard.defenses_of(task)))
    assert plan_study(
        "grid", *read_checked(leaderboard.EXAMPLES / f"{task}.toml", ["grid.draws=1"])
    )
