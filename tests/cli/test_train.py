"""`vfl train`, `evaluate`, `predict` and `report` of one experiment in this process."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from vfl.core.traffic import size

COUNTS = {"bytes_up", "bytes_down"}
FIGURES = COUNTS | {"test_accuracy", "steps_per_second", "weights_sha256", "run"}


def figures_of(done):
    """The one JSON object on standard output."""
    assert done.code == 0, done.err
    found, end = json.JSONDecoder().raw_decode(done.out)
    assert done.out[end:] == "\n"
    assert isinstance(found, dict)
    return found


@pytest.fixture
def trained(vfl, breast_cancer):
    done = vfl("train", breast_cancer, "--json", "-s", "train.epochs=8")
    return done, figures_of(done)


def test_one_object_for_machines_and_a_line_an_epoch_for_people(trained):
    done, figures = trained
    assert set(figures) >= FIGURES
    assert all(isinstance(figures[count], int) for count in COUNTS)
    assert figures["bytes_by_party"] == {
        "radiology": {"up": figures["bytes_up"], "down": figures["bytes_down"]}
    }
    assert figures["test_accuracy"] > 0.9
    assert figures["steps_per_second"] > 0
    assert re.fullmatch("[0-9a-f]{64}", figures["weights_sha256"])
    assert Path(figures["report"]).is_file()
    assert Path(figures["run"]).parent == Path("runs")
    lines = [line for line in done.err.splitlines() if line.startswith("epoch")]
    assert [line.split()[:2] for line in lines] == [["epoch", str(n)] for n in range(1, 9)]
    assert all("train loss" in line and "validation accuracy" in line for line in lines)
    assert f"test accuracy {figures['test_accuracy']:.4f}" in lines[-1]
    assert size(figures["bytes_up"] + figures["bytes_down"]) in lines[-1]
    about = json.loads((Path(figures["run"]) / "run.json").read_text())
    assert about["mode"] == "in-process"
    assert about["command"].startswith("vfl train ")
    assert about["command"].endswith("breast_cancer.toml -s train.epochs=8")


def test_the_same_seed_gives_the_same_weights(vfl, breast_cancer):
    def digest(seed):
        settings = ["-s", "train.epochs=1", "-s", f"seed={seed}"]
        return figures_of(vfl("train", breast_cancer, "--json", *settings))["weights_sha256"]

    assert digest(3) == digest(3) != digest(4)


def test_evaluation_prediction_and_report(vfl, trained):
    _, figures = trained
    again = figures_of(vfl("evaluate", figures["run"], "--json"))
    assert again["test_accuracy"] == figures["test_accuracy"]
    assert again["weights_sha256"] == figures["weights_sha256"]
    assert f"test accuracy    {figures['test_accuracy']:.4f}" in vfl("evaluate", figures["run"]).out
    found = figures_of(vfl("predict", figures["run"], "--json"))
    assert found == {
        "predictions": f"{figures['run']}/predictions.csv",
        "rows": 114,
        "run": figures["run"],
        "unfamiliar": {},
    }
    assert len(pd.read_csv(found["predictions"])) == 114
    assert vfl("predict", figures["run"]).out == f"114 rows in {found['predictions']}\n"
    page = Path(figures["report"])
    page.unlink()
    done = vfl("report", figures["run"])
    assert Path(done.out.strip()) == page
    assert "<svg" in page.read_text()


def test_tables_lie_beside_the_experiment_wherever_a_command_starts(vfl, loans, monkeypatch):
    elsewhere = loans.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    figures = figures_of(vfl("train", loans, "--json"))
    monkeypatch.chdir(loans.parent)
    again = figures_of(vfl("evaluate", elsewhere / figures["run"], "--json"))
    assert again["test_loss"] == figures["test_loss"]


def test_a_half_is_exported_and_another_is_told_what_is_wrong(
    vfl, well, refused, breast_cancer, tmp_path
):
    vfl("train", breast_cancer, "-s", "train.epochs=1")
    (run,) = (tmp_path / "runs").iterdir()
    party = next(one.name for one in (run / "parties").iterdir())
    done = well("export", run, "--party", party, "--to", "torch", "--out", tmp_path / "out")
    assert str(tmp_path / "out" / "card.json") in done.out
    refused("export", run, "--party", "nobody", "--to", "torch")
