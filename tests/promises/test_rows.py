"""A table that changes after a training, and the figures and answers of the run on it."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from promise import BrokenPromiseError

from vfl.config import read_experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import VFLError
from vfl.training.run import evaluate, load_data, predict, train

EXPERIMENT = """\
[data]
id = "key"
source = "label.csv"
[parties.bank]
source = "bank.csv"
bottom = "mlp:hidden=128"
[label]
column = "bad"
top = "mlp:hidden=128"
[train]
epochs = 60
batch_size = 32
learning_rate = 0.01
"""
MEMORISED = 0.15  # above what labels that nobody can learn leave to chance


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def tables(folder):
    """Writes the rows of some people, whose labels no column tells."""
    draw = np.random.default_rng(0)
    cells = pd.DataFrame(draw.normal(size=(900, 12))).add_prefix("x")
    cells.insert(0, "key", np.arange(900))
    labels = pd.DataFrame({"key": np.arange(900), "bad": draw.integers(0, 2, 900)})

    def write(people):
        cells.iloc[people].to_csv(folder / "bank.csv", index=False)
        labels.iloc[people].to_csv(folder / "label.csv", index=False)

    (folder / "experiment.toml").write_text(EXPERIMENT)
    return write


@pytest.fixture(scope="module")
def trained(tables, folder):
    """The summary of a training, and the ids that it has trained on; it is kept aside."""
    tables(np.arange(600))
    experiment = read_experiment(folder / "experiment.toml")
    lender = load_data(experiment)["label"]
    summary = train(experiment, folder / "runs", "one")
    shutil.copytree(folder / "runs", folder / "kept")
    return summary, set(lender.ids[lender.split.train])


@pytest.fixture
def run(trained, tables, folder):
    """The run and the tables as they were after the training."""
    tables(np.arange(600))
    shutil.rmtree(folder / "runs")
    shutil.copytree(folder / "kept", folder / "runs")
    return RunFolder.open(folder / "runs" / "one"), *trained


def test_rows_that_a_run_trained_on_are_in_no_test_figure(run, tables):
    """A figure of a run's test rows holds no row that the run has trained on."""
    folder, summary, _ = run
    tables(np.arange(50, 700))
    try:
        again = evaluate(folder)
    except VFLError:
        return
    honest = max(0.5, summary["test_accuracy"])
    flattered = {
        name: value
        for name, value in again.items()
        if name.endswith("_accuracy") and value > honest + MEMORISED
    }
    if flattered:
        raise BrokenPromiseError(
            f"test accuracy {summary['test_accuracy']:.3f} became {max(flattered.values()):.3f}, "
            "on random labels: most of the rows had been trained on"
        )


def test_a_table_of_trained_rows_alone_gives_no_figure(run, tables):
    """A run is not tested where every row is one that it has trained on."""
    folder, _, trained = run
    tables(np.array(sorted(int(one) for one in trained)))
    try:
        again = evaluate(folder)
    except VFLError:
        return
    raise BrokenPromiseError(
        f"test accuracy {again['test_accuracy']:.3f} of rows that were all trained on"
    )


def test_an_evaluation_stays_beside_a_later_one(run, tables):
    """An evaluation is never overwritten."""
    folder, _, _ = run
    first = evaluate(folder)["test_loss"]
    tables(np.arange(50, 700))
    try:
        evaluate(folder)
    except VFLError:
        return
    kept = [
        json.loads(path.read_text()).get("test_loss")
        for path in folder.path.rglob("*.json")
        if "evaluation" in str(path.relative_to(folder.path))
    ]
    if first not in kept:
        raise BrokenPromiseError(f"of 2 evaluations {len(kept)} is left, and not the first")


def test_no_answer_for_a_trained_row_passes_for_that_of_a_new_one(run, tables):
    """Predictions of trained rows say so, or are left out, whatever happened to the table."""
    folder, _, trained = run
    tables(np.arange(50, 700))
    try:
        table = pd.read_csv(predict(folder))
    except VFLError:
        return
    known = table["id"].astype(str).isin({str(one) for one in trained})
    if "trained" in table:
        known &= table["trained"] == "no"
    if known.any():
        raise BrokenPromiseError(
            f"{known.sum()} of {len(table)} predictions are of trained rows, and none says so"
        )


def test_the_setting_of_rows_is_obeyed_for_tables_of_parties(tables, folder):
    """`data.rows` limits the rows of tables as it limits those of a data set by name."""
    tables(np.arange(600))
    experiment = read_experiment(folder / "experiment.toml", ["data.rows=100"])
    try:
        rows = load_data(experiment)["label"].rows
    except VFLError:
        return
    if rows > 100:
        raise BrokenPromiseError(f"data.rows = 100 trained and tested on {rows} rows")
