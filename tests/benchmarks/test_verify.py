"""Rows of pages again: what is drawn, what holds, and once from end to end."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import frontier, verify
from benchmarks.pages import records
from benchmarks.studies import played, store, study_of
from vfl.core.text import csv_text
from vfl.experiments.cells import HONEST, grid_settings_of
from vfl.experiments.results import TEST, LoadedGrid
from vfl.experiments.statistics import Estimate

RESULTS = Path(__file__).parents[2] / "docs" / "results"
AGAIN = Estimate(0.6, 0.02, 3)


def figure(mean, half=0.02, again=AGAIN):
    return verify.Figure("frontier", "tiny", "mixup", "reaches", Estimate(mean, half, 3), again)


@pytest.mark.parametrize(
    ("made", "holds"),
    [
        (figure(0.6), True),
        (figure(0.63), True),
        (figure(0.65), False),
        (figure(0.609, None, Estimate(0.6, None, 1)), True),
        (figure(0.62, None, Estimate(0.6, None, 1)), False),
        (figure(float("nan")), False),
        (figure(0.6, again=None), False),
    ],
)
def test_a_figure_holds_within_both_intervals(made, holds):
    assert made.holds is holds
    assert ("FALLEN" in str(made)) is not holds


def test_a_draw_is_a_share_of_all_and_another_number_draws_others():
    known = [(task, f"defense-{n}") for task in ("a", "b") for n in range(50)]
    found = [verify.drawn(known, 0.1, draw) for draw in range(3)]
    assert [sum(map(len, one.values())) for one in found] == [10, 10, 10]
    assert found[0] == verify.drawn(known[::-1], 0.1, 0) != found[1]
    assert all(
        (task, one) in known for each in found for task, some in each.items() for one in some
    )


def test_a_plan_lists_what_is_drawn_and_trains_nothing(tmp_path, capsys):
    pages = [page for page in verify.PAGES if page != "published"]
    assert verify.bench_verify(pages, out=tmp_path / "runs", results=RESULTS, plan=True) == []
    said = capsys.readouterr().err
    rows = [row for row in records(RESULTS / "frontier.csv") if row["family"] != "no model"]
    defenses = {(row["task"], row["defense"]) for row in rows}
    drawn = re.search(rf"^frontier: (\d+) of {len(defenses)} drawn, (\d+) trainings$", said, re.M)
    assert drawn is not None
    listed = said[drawn.end() :].split("columns: ")[0].split("\n")[1:-1]
    named = {tuple(line.split()) for line in listed}
    assert named < defenses
    assert len(named) == int(drawn[1])
    trained = {(row["task"], row["defense"], row["seed"]) for row in rows}
    assert int(drawn[2]) == sum(one[:2] in named for one in trained)
    assert not (tmp_path / "runs").exists()


def test_the_end_says_how_many_figures_of_each_page_hold():
    found = [figure(0.6), figure(0.65), replace(figure(0.6), page="trees")]
    *fallen, frontier, trees, whole = verify.shown(found).split("\n")
    assert fallen == [str(found[1])]
    assert frontier == "frontier: 1 of 2 figures hold"
    assert trees == "trees: 1 of 1 figures hold"
    assert whole == "2 of 3 repeated figures hold"
    assert verify.shown([]) == "no figure was repeated"


def test_bytes_of_a_command_are_compared_and_times_are_not(monkeypatch, tmp_path):
    stored = {"bench": "mpc", "command": "benchmarks.mpc --workload relu-100k", "system": "fast"}
    shaped = {**stored, "command": "benchmarks.mpc --network tun"}
    rows = [stored | {"bytes_online": 100, "ms": 1.0}, shaped | {"bytes_online": 1}]
    (tmp_path / "published_runs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = [{"system": "fast", "bytes_online": 102, "ms": 9.0}]

    def run(command, **_):
        assert command[2:] == ["benchmarks.mpc", "--workload", "relu-100k", "--json"]
        return subprocess.CompletedProcess(command, 0, json.dumps(given))

    monkeypatch.setattr(subprocess, "run", run)
    (found,) = verify.bench_verify(["published"], share=1.0, out=tmp_path, results=tmp_path)
    assert (found.what, found.again.mean, found.holds) == ("bytes_online", 1.02, False)


def test_rows_of_a_command_are_compared_by_name_in_any_order(monkeypatch, tmp_path):
    """A command may print other rows, or the stored rows in another order."""
    stored = {"bench": "decoder", "command": "benchmarks.decoder", "line": "100mbps,20ms"}
    names = [("gelu 1000", "thesis"), ("gelu 1000", "fast"), ("argmax 1000", "fast")]
    rows = [
        {"what": what, "mode": mode, "messages": at} for at, (what, mode) in enumerate(names, 2)
    ]
    (tmp_path / "published_runs.jsonl").write_text(
        "\n".join(json.dumps(stored | row | {"day": "2026-11-29"}) for row in rows)
    )
    printed = [rows[1], {"what": "layer 64", "mode": "fast", "messages": 10}, rows[0]]
    answer = subprocess.CompletedProcess([], 0, json.dumps(printed))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    found = verify.bench_verify(["published"], share=1.0, out=tmp_path, results=tmp_path)
    assert [one.defense for one in found] == [" ".join(name) for name in names]
    assert [one.holds for one in found] == [True, True, False]
    assert found[2].again is None


TINY = """
name = "tiny"
data = { source = "digits", rows = 400, split = "shuffled" }
label.top = "linear"
train = { epochs = 2, learning_rate = 0.02 }
[parties.client]
width = 8
bottom = "mlp:hidden=8"
[grid]
measure = "accuracy"
attacks = ["logistic"]
baselines = ["scratch"]
leaks = [5]
draws = 1
pictures = 0
seeds = [0]
defenses = ["none", "label_free:features=0"]
"""


@pytest.mark.slow
def test_a_frontier_that_was_just_measured_holds_and_another_does_not(
    monkeypatch, tmp_path, capsys
):
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.setattr(frontier, "FOLDER", tmp_path)
    monkeypatch.setattr(frontier, "TASKS", ("tiny",))
    page = tmp_path / "frontier.md"
    frontier.bench_frontier("tiny", 1, out=tmp_path / "runs", page=page)
    # The stored attacks are repeated, also after they have left the task's file.
    (tmp_path / "tiny.toml").write_text(TINY.replace("logistic", "kmeans"))

    def again(out):
        return verify.bench_verify(
            ["frontier"], share=1.0, jobs=1, out=tmp_path / out, results=tmp_path
        )

    found = again("once")
    assert {one.defense for one in found} == {"none", "label_free:features=0"}
    assert {one.what for one in found} == {"utility", "reaches, logistic"}
    assert all(one.holds for one in found)
    file = page.with_suffix(".csv")
    rows = pd.read_csv(file, dtype=str, keep_default_na=False)
    store(file, rows.assign(reaches="0.01"))
    assert {one.what for one in again("once") if not one.holds} == {"reaches, logistic"}


@pytest.mark.slow
def test_a_row_of_labels_and_a_training_of_a_comparison_come_again(monkeypatch, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "tiny.toml").write_text(TINY)
    compared = TINY.partition("[grid]")[0] + '[compare]\ncodecs = ["none", "sign"]\nseeds = [0]\n'
    (tmp_path / "thesis" / "codecs.toml").write_text(compared)
    monkeypatch.setattr(verify, "EXAMPLES", tmp_path)
    monkeypatch.setattr(verify, "GRIDS", {"tiny": ("tiny", ())})
    monkeypatch.setattr(verify, "COMPARISONS", ("codecs",))
    study = study_of(tmp_path / "tiny.toml", pictures=0)
    grid = LoadedGrid(played(study, tmp_path / "runs", 1))
    rows = [
        {
            "defense": one.training, "adversary": one.adversary, "attack": one.subject,
            "k": one.k, "measure": one.measure, "mean": one.value, "half_width": "", "victims": 1,
        }
        for one in grid.attacks
    ]  # fmt: skip
    (tmp_path / "tiny.csv").write_text(csv_text(list(rows[0]), rows))
    row = {"variant": "", "codec": "sign", "repeat": "seed=0", "test_accuracy": 2, "failure": ""}
    (tmp_path / "codecs.csv").write_text(csv_text(list(row), [row]))

    def again(page):
        return verify.bench_verify(
            [page], share=1.0, jobs=1, out=tmp_path / "again", results=tmp_path
        )

    labels = again("labels")
    assert {one.defense for one in labels} == {"none", "label_free:features=0"}
    assert all(one.holds for one in labels)
    (codec,) = again("codecs")
    assert 0 < codec.again.mean <= 1
    assert not codec.holds


def test_rows_of_training_attacks_name_trainings_of_their_files(data_root, monkeypatch):
    monkeypatch.setenv("VFL_DATA", str(data_root))
    rows = [row for name in verify.TRAININGS for row in records(RESULTS / f"{name}.csv")]
    named = {(row["file"], row["overrides"]) for row in rows} - {("", "")}
    assert len(named) > 6
    for file, overrides in named:
        study = study_of(verify.EXAMPLES / f"{file}.toml", *shlex.split(overrides))
        trained = {(cell.victim, cell.about.get("adversary", HONEST)) for cell in study.cells}
        attacks = {*grid_settings_of(study.experiment).attacks, TEST}
        for row in rows:
            if (row["file"], row["overrides"]) == (file, overrides):
                assert (row["training"], row["adversary"]) in trained
                assert row["attack"] in {*attacks, row["adversary"]}


@pytest.mark.slow
def test_a_row_of_training_attacks_comes_again(monkeypatch, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.setattr(verify, "EXAMPLES", tmp_path)
    monkeypatch.setattr(verify, "TRAININGS", ("training_attacks",))
    grid = LoadedGrid(played(study_of(tmp_path / "tiny.toml"), tmp_path / "runs", 1))
    wanted = [*grid.attacks, next(one for one in grid.records if one.measure == "accuracy")]
    rows = [
        {
            "task": "digits", "file": "tiny", "overrides": "", "training": one.training,
            "adversary": one.adversary, "attack": one.subject, "k": one.k,
            "measure": one.measure, "mean": one.value, "half_width": "", "victims": 1,
        }
        for one in wanted
    ]  # fmt: skip
    rows.append({**rows[0], "file": ""})
    (tmp_path / "training_attacks.csv").write_text(csv_text(list(rows[0]), rows))
    found = verify.bench_verify(["training"], share=1.0, jobs=1, out=tmp_path, results=tmp_path)
    assert len(found) == len(rows) - 1
    assert all(one.holds for one in found)
