"""The standing leaderboard on one small task; its real ones have more of everything."""

import csv

import pytest

from benchmarks import leaderboard
from vfl.core.text import csv_text

TINY = """
name = "tiny"
data = { source = "digits", rows = 600 }
label.top = "linear"
train = { epochs = 2, learning_rate = 0.02 }
[parties.client]
width = 8
bottom = "mlp:hidden=8"
[grid]
adversaries = ["none", "malicious_optimizer"]
attacks = ["light", "gradient_similarity"]
baselines = ["scratch", "raw", "pca"]
leaks = [5, 20]
draws = 2
pictures = 0
defenses = ["layer_norm"]
"""


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Runs the command with one task of its own; what it writes lies in a temporary folder."""
    (tmp_path / "tiny.toml").write_text(TINY)
    for name, value in {"FOLDER": tmp_path, "TASKS": ("tiny",), "SECONDS": {"tiny": 1}}.items():
        monkeypatch.setattr(leaderboard, name, value)

    def run(**more):
        runs, page = tmp_path / "runs", tmp_path / "page.md"
        return leaderboard.bench_leaderboard(
            ["tiny"], seeds=[0], jobs=1, out=runs, page=page, **more
        )

    return run


def test_time_and_memory_are_told_before_anything_is_trained(ask, tmp_path, capsys):
    assert ask(plan=True) == []
    said = capsys.readouterr().err
    assert said.startswith("tiny: 5 cells, about ")
    assert "GB of memory" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_page_says_what_each_defense_holds_against(ask, tmp_path, capsys):
    folder = tmp_path
    ask()
    page = (folder / "page.md").read_text()
    assert "## tiny" in page
    assert "| `layer_norm` " in page
    (line,) = [line for line in page.splitlines() if line.startswith("| tiny ")]
    assert [cell.strip() for cell in line.split("|")][4:6] == ["0 of 1", "`layer_norm`"]
    assert "and tampering" in (folder / "page_access.csv").read_text()
    assert "600 rows, 4 of 4 victims, 1 seeds, 2 draws" in page
    rows = list(csv.DictReader((folder / "page.csv").read_text().splitlines()))
    assert {(row["defense"], row["k"]) for row in rows} == {
        (defense, k) for defense in ("none", "layer_norm") for k in ("5", "20")
    }
    assert {row["verdict"] for row in rows} == {"undecided"}  # by one victim
    capsys.readouterr()
    ask()  # goes on where it was
    assert "failed" not in capsys.readouterr().err
    assert (folder / "page.md").read_text() == page
    ask(redraw=True)
    assert (folder / "page.md").read_text() == page
    file = folder / "page.csv"
    file.write_text(csv_text(list(rows[0]), [row | {"not_run": "kmeans"} for row in rows]))
    ask(redraw=True)
    short = (folder / "page.md").read_text()
    assert "Not all attacks were run on `layer_norm` on tiny." in short
    assert "On 1 defense, not run: kmeans." in short
    ask(defenses=["layer_norm"])
    assert (folder / "page.md").read_text() == page


@pytest.mark.parametrize("task", ["review_polarity", "bank_marketing"])
def test_the_real_tasks_are_experiments(task, monkeypatch):
    monkeypatch.setenv("VFL_DATA", "data")
    study = leaderboard.grid_of(task, "heavy", [0])
    settings = study.experiment.grid
    assert len(study.cells) == 1 + 2 * (1 + len(settings.defenses))
    assert "heavy" in settings.attacks
    assert "light" not in settings.attacks
