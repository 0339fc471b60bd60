"""What cells say, against the same figures from the files and the rows themselves."""

import csv
import io
import shutil
import statistics

import numpy as np
import pandas as pd
import pytest
import torch

from vfl import compression
from vfl.config.run_folder import RunFolder
from vfl.core.storage import read_json, read_lines
from vfl.experiments import GridFolder, grouped, read_results, write_results
from vfl.experiments.study import Results
from vfl.experiments.training import unit_usage
from vfl.training.run import load_data
from vfl.training.run import trained as session_of_run


@pytest.fixture(scope="module")
def results(trained):
    return read_results(trained)


@pytest.fixture(scope="module")
def groups(results):
    return grouped(results, "none")


def file_of(folder, result, name):
    return folder.cells_path / result.name / name


def test_scores_and_losses_are_those_of_the_run(trained, results):
    for one in results:
        summary = read_json(file_of(trained, one, "summary.json"))
        last = list(read_lines(file_of(trained, one, "metrics.jsonl")))[-1]
        assert one.measured.score == summary["test_accuracy"]
        assert one.measured.train_loss == last["train_loss"]
        assert one.measured.test_loss == summary["test_loss"]
        sent = sum([*summary["bytes_up"].values(), *summary["bytes_down"].values()])
        assert one.measured.total_bytes <= sent  # those of the last epoch, without the test rows


def test_a_measure_of_which_less_is_better(trained, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(trained.path, path)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace('"accuracy"', '"log_loss"'))
    for one in read_results(GridFolder(path)):
        summary = read_json(path / "cells" / one.name / "summary.json")
        records = list(read_lines(path / "cells" / one.name / "metrics.jsonl"))
        assert one.measured.score == summary["test_log_loss"]
        assert 0 < one.measured.train_score < one.measured.score
        good = [each for each in records if each["validation_log_loss"] <= 2.0]
        assert one.measured.reached[1] == (
            good[0]["bytes_up"] + good[0]["bytes_down"] if good else None
        )


def test_ratios_are_those_of_the_ledger(trained, results):
    """280 training rows in five batches, three epochs, sixteen float32 each way."""
    for one in results:
        text = file_of(trained, one, "traffic.csv").read_text()
        rows = list(csv.DictReader(io.StringIO(text)))
        sent = {row["direction"]: int(row["wire_bytes"]) for row in rows if row["phase"] == "train"}
        dense_bytes = 3 * 280 * 16 * 4
        assert one.measured.forward_ratio == pytest.approx(sent["up"] / dense_bytes)
        assert one.measured.backward_ratio == pytest.approx(sent["down"] / dense_bytes)
        assert one.measured.frame_ratio == pytest.approx(one.measured.forward_ratio, rel=0.02)


def test_formula_and_bound_of_top_k(results):
    found = results[1].measured
    assert found.formula_ratio == pytest.approx(2 / 16 * (1 + 4 / 32))
    assert 0 < found.bound_ratio < found.frame_ratio


def test_bytes_to_an_accuracy(trained, results):
    for one in results:
        records = list(read_lines(file_of(trained, one, "metrics.jsonl")))
        good = [record for record in records if record["validation_accuracy"] >= 0.15]
        expected = good[0]["bytes_up"] + good[0]["bytes_down"] if good else None
        assert one.measured.reached == (expected, None)
    assert any(one.measured.reached[0] for one in results)


def test_how_often_each_unit_is_in_the_top_k(trained, results):
    """Thesis equation (3-21), by sorting every row of the test rows' cut."""
    cell, one = trained.cells()[1], results[1]
    folder = RunFolder(trained.cells_path / cell.name)
    data = load_data(cell.experiment)
    bottom = trained_bottom(folder, data)
    with torch.no_grad():
        cut = bottom(data["client"].inputs[data["label"].split.test]).numpy()
    order = np.argsort(-np.abs(cut), axis=1, kind="stable")[:, :2]
    kept = np.zeros(cut.shape, bool)
    np.put_along_axis(kept, order, True, axis=1)
    expected = (kept & (cut != 0)).sum(axis=0)
    assert one.measured.usage == tuple(expected)
    assert one.measured.never_sent == int((expected == 0).sum())
    assert one.measured.dead_units == int((cut == 0).all(axis=0).sum())
    assert one.measured.test_rows == len(cut) == 80


def test_training_rows_are_scored_without_draws(trained, results):
    cell, one = trained.cells()[1], results[1]
    data = load_data(cell.experiment)
    session = session_of_run(RunFolder(trained.cells_path / cell.name), data, "evaluate")
    rows = data["label"].split.train
    with torch.no_grad():
        cut = session.clients[0].end.model["bottom"].eval()(data["client"].inputs[rows])
        kept = cut * (cut >= cut.topk(2, dim=1).values[:, -1:])
        guess = session.label.model["top"].eval()(kept).argmax(dim=1)
    right = (guess == data["label"].labels[rows]).float().mean().item()
    assert one.measured.train_score == pytest.approx(right, abs=1e-6)


def trained_bottom(folder, data):
    return session_of_run(folder, data, "evaluate").clients[0].end.model["bottom"].eval()


def test_a_codec_without_a_k_shows_what_arrives():
    cut = torch.tensor([[0.0, 2.0, 0.0], [0.0, 1.0, 3.0]])
    found = unit_usage(compression.make("relu:values=4,packer=dense"), cut)
    assert found == {"usage": [0, 2, 1], "dead_units": 1, "nonzeros": 1.5}


def test_a_zero_that_fills_up_the_k_is_not_counted():
    cut = torch.tensor([[0.0, 0.0, 3.0], [0.0, 0.0, 5.0]])
    assert unit_usage(compression.make("topk:k=2"), cut)["usage"] == [0, 0, 2]


def test_lines_of_the_table(results, groups):
    none, topk = groups
    assert (none.codec, topk.method, topk.codec, topk.level) == (
        "none",
        "topk:k=?",
        "topk:k=2",
        "20",
    )
    scores = [one.measured.score for one in results]
    assert none.score.mean == pytest.approx(statistics.mean([scores[0], scores[2]]))
    paired = [scores[1] - scores[0], scores[3] - scores[2]]
    assert topk.difference.mean == pytest.approx(statistics.mean(paired))
    assert topk.difference.count == 2
    assert none.difference is None


def test_a_reference_with_levels_is_that_of_the_same_level(results):
    from dataclasses import replace

    moved = [
        replace(one, method="size:k=?", level=level, codec=f"size:k={level}")
        for one, level in zip(results, ["5", "10", "5", "10"], strict=True)
    ]
    both = grouped([*results, *moved], "size:k=?")
    assert [len(group.reference) for group in both] == [0, 0, 0, 0]
    levels = [replace(one, level="5") if one.level else one for one in results]
    only = grouped([*levels, moved[0]], "size:k=?")
    assert [{one.codec for one in group.reference} for group in only] == [
        {"size:k=5"},
        {"size:k=5"},
        set(),
    ]
    five = grouped([*levels, *moved], "size:k=?")
    assert [{one.codec for one in group.reference} for group in five] == [
        set(),
        {"size:k=5"},
        set(),
        set(),
    ]


def test_files_of_results(trained):
    table, content = write_results(trained)
    assert (trained.path / "table.md").read_text() == table
    lines, work = (part.splitlines() for part in table.split("\n\n"))
    assert len(lines) == len(work) == 4
    assert len({len(line) for line in lines}) == len({len(line) for line in work}) == 1
    assert "| encode ms | decode ms | values a row | units | never sent | dead |" in work[0]
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert head[:3] == ["codec", "level", "formula"]
    assert {"accuracy", "less none, points", "bytes to >= 0.15", "bytes to >= 2"} <= set(head)
    row = dict(zip(head, (c.strip() for c in lines[3].strip("|").split("|")), strict=True))
    assert row["codec"] == "topk:k=2"
    assert row["formula"] == "14.06 %"
    assert row["bytes to >= 2"] == "never"
    assert row["repeats"] == "2 of 2"
    table = Results.of(trained.path).table
    assert table.drop_duplicates("cell").codec.tolist() == ["none", "topk:k=2"] * 2
    scores = table[(table.subject == "test rows") & (table.measure == "accuracy")]
    assert scores.value.iloc[0] == content["cells"][0]["measured"]["score"]
    kept = pd.read_csv(trained.path / "results.csv")
    assert kept.value.tolist() == pytest.approx(table.value.tolist())
    reached = table[table.measure == "bytes_to_0.15"].value.tolist()
    assert reached == [sent for one in content["cells"] if (sent := one["measured"]["reached"][0])]
    assert read_json(trained.path / "results.json")["codecs"][1]["repeats"] == 2


def test_cells_that_are_not_trained_are_told(tiny, written, tmp_path):
    folder, (cell, *_) = written(tmp_path / "grid", tiny(seeds=[0]))
    path = folder.cells_path / cell.name
    path.mkdir(parents=True)
    (path / "failure.json").write_text('{"what": "no room", "exit": 2}')
    table, content = write_results(GridFolder(folder.path))
    assert table.splitlines()[-3:] == [
        "1 of 2 cells failed and are left out",
        "",
        "1 of 2 cells are not trained yet",
    ]
    assert [one["failure"] for one in content["cells"]] == ["no room", None]
    assert content["codecs"][0]["accuracy"] is None
