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
from vfl.experiments import GridFolder, Line, write_results
from vfl.experiments.cells import CODEC
from vfl.experiments.pages import glance
from vfl.experiments.pages.comparison_page import beside_method
from vfl.experiments.results import LoadedGrid, records_of, usage_of
from vfl.experiments.study import Results
from vfl.experiments.training import unit_usage
from vfl.training.run import load_data
from vfl.training.run import trained as session_of_run


def figures_of(folder):
    """Of every cell: its run folder, and its figures by subject and measure."""
    found = {}
    for one in records_of(folder.path):
        found.setdefault(one.cell, {})[one.subject, one.measure] = one.value
    return [(folder.cells_path / cell.name, found[cell.name]) for cell in folder.cells()]


@pytest.fixture(scope="module")
def results(trained):
    return figures_of(trained)


@pytest.fixture(scope="module")
def lines(trained):
    grid = LoadedGrid(trained)
    return beside_method(grid.lines(grid.current), "none")


def test_scores_and_losses_are_those_of_the_run(results):
    for path, found in results:
        summary = read_json(path / "summary.json")
        last = list(read_lines(path / "metrics.jsonl"))[-1]
        assert found["test rows", "accuracy"] == summary["test_accuracy"]
        assert found["training", "loss"] == last["train_loss"]
        assert found["test rows", "loss"] == summary["test_loss"]
        sent = sum([*summary["bytes_up"].values(), *summary["bytes_down"].values()])
        assert found["training", "bytes"] == sent


def test_a_measure_of_which_less_is_better(trained, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(trained.path, path)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(
        text.replace("[compare]\n", '[compare]\nmeasure = "log_loss"\n')
    )
    for run, found in figures_of(GridFolder(path)):
        records = list(read_lines(run / "metrics.jsonl"))
        assert 0 < found["training rows", "log_loss"] < found["test rows", "log_loss"]
        good = [each for each in records if each["validation_log_loss"] <= 2.0]
        assert found.get(("training", "bytes_to_2")) == (
            good[0]["bytes_up"] + good[0]["bytes_down"] if good else None
        )


def test_the_measure_fits_the_labels_unless_it_is_named(trained, tmp_path, monkeypatch):
    """Guesses that summaries might hold stand in for other labels."""
    path = tmp_path / "copy"
    shutil.copytree(trained.path, path)
    assert LoadedGrid(GridFolder(path)).compared == "accuracy"
    summary = RunFolder.summary
    for guess, measure in (
        ({"classes": 10, "accuracy": 0.6, "auc": 0.5}, "accuracy"),
        ({"classes": 10, "accuracy": 0.7, "auc": 0.5}, "auc"),
        ({"rmse": 3.0}, "rmse"),
        ({"classes": 2, "accuracy": 0.5, "auc": 0.5}, "auc"),
    ):
        monkeypatch.setattr(
            RunFolder, "summary", lambda run, known=guess: summary(run) | {"guess": known}
        )
        assert LoadedGrid(GridFolder(path)).compared == measure
    table, content = write_results(GridFolder(path))
    assert content["measure"] == "auc"
    assert "less none, points" in table
    assert glance(path).cards[0].title == "Test AUC"


def test_ratios_are_those_of_the_ledger(results):
    """280 training rows in five batches, three epochs, sixteen float32 each way."""
    for path, found in results:
        rows = list(csv.DictReader(io.StringIO((path / "traffic.csv").read_text())))
        sent = {row["direction"]: int(row["wire_bytes"]) for row in rows if row["phase"] == "train"}
        dense_bytes = 3 * 280 * 16 * 4
        up, down = (found["training", f"wire_ratio_{way}"] for way in ("up", "down"))
        assert (up, down) == pytest.approx((sent["up"] / dense_bytes, sent["down"] / dense_bytes))
        assert found["all parties", "frame_ratio"] == pytest.approx(up, rel=0.02)


def test_bytes_to_an_accuracy(results):
    for path, found in results:
        records = list(read_lines(path / "metrics.jsonl"))
        good = [record for record in records if record["validation_accuracy"] >= 0.15]
        expected = good[0]["bytes_up"] + good[0]["bytes_down"] if good else None
        assert found.get(("training", "bytes_to_0.15")) == expected
        assert ("training", "bytes_to_2") not in found
    assert any(("training", "bytes_to_0.15") in found for _, found in results)


def test_how_often_each_unit_is_in_the_top_k(trained, results):
    """Thesis equation (3-21), by sorting every row of the test rows' cut."""
    cell, (path, found) = trained.cells()[1], results[1]
    folder = RunFolder(path)
    data = load_data(cell.experiment)
    bottom = trained_bottom(folder, data)
    with torch.no_grad():
        cut = bottom(data["client"].inputs[data["label"].split.test]).numpy()
    order = np.argsort(-np.abs(cut), axis=1, kind="stable")[:, :2]
    kept = np.zeros(cut.shape, bool)
    np.put_along_axis(kept, order, True, axis=1)
    expected = (kept & (cut != 0)).sum(axis=0)
    assert usage_of(list(read_json(path / CODEC)["parties"].values())) == expected.tolist()
    assert found["all parties", "never_sent"] == int((expected == 0).sum())
    assert found["all parties", "dead_units"] == int((cut == 0).all(axis=0).sum())
    assert found["client", "rows"] == len(cut) == 80


def trained_bottom(folder, data):
    return session_of_run(folder, data, "evaluate").clients[0].end.model["bottom"].eval()


def test_a_codec_without_a_k_shows_what_arrives():
    cut = torch.tensor([[0.0, 2.0, 0.0], [0.0, 1.0, 3.0]])
    found = unit_usage(compression.make("relu:values=4,packer=dense"), cut)
    assert found == {"usage": [0, 2, 1], "dead_units": 1, "nonzeros": 1.5}


def test_lines_of_the_table(results, lines):
    none, topk = lines
    assert none.about["codec"] == "none"
    assert [topk.about[key] for key in ("method", "codec", "level")] == [
        "topk:k=?", "topk:k=2", "20",
    ]  # fmt: skip
    scores = [found["test rows", "accuracy"] for _, found in results]
    assert none.mean("accuracy") == pytest.approx(statistics.mean([scores[0], scores[2]]))
    paired = [scores[1] - scores[0], scores[3] - scores[2]]
    less = topk.difference("accuracy")
    assert (less.mean, less.count) == (pytest.approx(statistics.mean(paired)), 2)
    assert none.difference("accuracy") is None


def test_a_reference_with_levels_is_that_of_the_same_level():
    def line(method, level):
        return Line({"variant": "", "method": method, "codec": "", "level": level})

    def references(*lines):
        found = beside_method(lines, "size:k=?")
        return [one.reference and one.reference.about["level"] for one in found]

    five, ten, plain = line("size:k=?", "5"), line("size:k=?", "10"), line("none", "")
    assert references(plain, line("topk:k=?", "20"), five, ten) == [None] * 4
    assert references(plain, line("topk:k=?", "5"), five) == ["5", "5", None]
    assert references(plain, line("topk:k=?", "5"), five, ten) == [None, "5", None, None]


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
    assert scores.value.mean() == pytest.approx(
        statistics.mean(one["accuracy"]["mean"] for one in content["codecs"])
    )
    kept = pd.read_csv(trained.path / "results.csv")
    assert kept.value.tolist() == pytest.approx(table.value.tolist())
    reached = table[table.measure == "bytes_to_0.15"]
    counts = [one["bytes_to"]["0.15"]["repeats"] for one in content["codecs"]]
    assert len(reached) == sum(counts) > 0
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
    assert content["failed"] == {cell.title: "no room"}
    assert content["codecs"][0]["accuracy"] is None
