"""`vfl value`: each party alone, split, in one place, and the price of codecs and defenses."""

import json

import numpy as np
import pandas as pd
import pytest

from vfl.core.seeds import generator
from vfl.experiments import value

FILE = """\
name = "joined"
data = { source = "table.csv", validation = 0.1, test = 0.3 }
label = { party = "lender", column = "label", top = "mlp:hidden=16" }
train = { epochs = 5, batch_size = 64, learning_rate = 3e-2 }

[parties.bank]
width = 8
bottom = "mlp:hidden=16"
columns = ["b*"]

[parties.lender]
width = 8
bottom = "periodic:hidden=16,frequencies=4,size=4"
columns = ["l*"]
"""


@pytest.fixture(autouse=True)
def few_trees(monkeypatch):
    """Forty steps of gradient boosting that are each larger, for a table of so few rows."""
    monkeypatch.setattr(value, "_TREES", 40)
    monkeypatch.setattr(value, "_TREE_RATE", 0.3)


@pytest.fixture
def file(tmp_path):
    """The label is the sign of a sum of one column of each party: neither knows it alone."""
    import torch

    numbers = torch.randn(600, 4, generator=generator(0, "value")).numpy()
    table = pd.DataFrame(numbers, columns=["b1", "b2", "l1", "l2"])
    table["label"] = np.where(table.b1 + table.l1 > 0, "yes", "no")
    table.to_csv(tmp_path / "table.csv", index=False)
    path = tmp_path / "joined.toml"
    path.write_text(FILE)
    return path


def test_joining_is_worth_what_the_columns_say(vfl, well, file, tmp_path):
    options = ("--seeds", "0,1,2", "--codec", "topk:k=2")
    plan = well("value", file, *options, "--dry-run")
    one_seed = [line.removesuffix(" seed=0") for line in plan.out.splitlines()[:7]]
    assert one_seed == [
        "lender alone",
        "lender alone, gradient boosting",
        "bank alone",
        "gradient boosting, all columns",
        "the same network, in one place",
        "split",
        "codec topk:k=2",
    ]
    done = well("value", file, *options, "--json")
    content = json.loads(done.out)
    auc = {one["training"]: one["auc"]["mean"] for one in content["trainings"]}
    assert auc["split"] > 0.97
    # Of two equal normal parts, the sign of the sum is known by one with an AUC of 0.75 + 1/12.
    for alone in ("bank alone", "lender alone", "lender alone, gradient boosting"):
        assert 0.7 < auc[alone] < 0.9
    assert abs(auc["split"] - auc["the same network, in one place"]) < 0.02
    assert auc["gradient boosting, all columns"] > 0.94
    said = content["sentences"]
    assert any(one.startswith("split minus bank alone") and "buys" in one for one in said)
    by_name = {one["training"]: one for one in content["trainings"]}
    assert by_name["bank alone"]["bytes"] == 0 < by_name["codec topk:k=2"]["bytes"]
    assert by_name["codec topk:k=2"]["bytes"] < by_name["split"]["bytes"]

    page = (tmp_path / "runs/joined/report.html").read_text()
    assert '<th scope="row">bank alone</th>' in page
    assert page.count("<script") == 1  # it sorts tables
    again = vfl("value", file, *options, "--json")
    assert json.loads(again.out)["trainings"] == content["trainings"]
    assert "of 21" not in again.err  # nothing was trained anew
    well("report", tmp_path / "runs/joined")


def test_figures_of_gradient_boosting_are_scikit_learns(well, file, tmp_path):
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import roc_auc_score

    from vfl.config import read_experiment
    from vfl.training.run import load_data

    done = well("value", file, "--seeds", "3", "-s", "data.validation=0", "--json")
    found = {one["training"]: one["scores"]["3"] for one in json.loads(done.out)["trainings"]}
    data = load_data(
        read_experiment(file, ["seed=3", "data.validation=0", "data.split=stratified"])
    )
    columns = np.hstack([data["bank"].inputs.numpy(), data["lender"].inputs.numpy()])
    truth, split = data["lender"].labels.numpy(), data["lender"].split
    options = {"max_iter": 40, "learning_rate": 0.3, "early_stopping": False}
    trees = HistGradientBoostingClassifier(**options, random_state=3)
    trees.fit(columns[split.train], truth[split.train])
    chances = trees.predict_proba(columns[split.test])[:, 1]
    expected = roc_auc_score(truth[split.test], chances)
    assert found["gradient boosting, all columns"] == pytest.approx(expected, abs=1e-9)


def test_a_regression_is_compared_by_its_error(well, file, tmp_path):
    table = pd.read_csv(tmp_path / "table.csv")
    table["label"] = table.b1 + table.l1
    table.to_csv(tmp_path / "table.csv", index=False)
    options = ("-s", "label.task=regression", "--seeds", "0,1,2", "--defense", "layer_norm")
    done = well("value", file, *options, "--json")
    content = json.loads(done.out)
    rmse = {one["training"]: one["rmse"]["mean"] for one in content["trainings"]}
    assert rmse["split"] < 0.5 < rmse["bank alone"]
    assert any("split minus bank alone: -" in one and "buys" in one for one in content["sentences"])


def test_a_wrong_codec_is_told_before_anything_is_trained(refused, file, tmp_path):
    done = refused("value", file, "--codec", "topkk")
    assert "did you mean 'topk'?" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("merge", ["concat", "sum"])
def test_the_network_in_one_place_is_the_one_that_is_split(file, tmp_path, merge):
    """From the same first weights both trainings give the same answers, up to rounding."""
    import copy

    from vfl import models
    from vfl.config import read_experiment
    from vfl.core.seeds import scoped
    from vfl.experiments.value import CENTRAL, gathered, value_cells
    from vfl.training.run import load_data, train

    experiment = read_experiment(file, [f"merge={merge}", "train.epochs=3", "seed=0"])
    data = load_data(experiment)
    (cell,) = (
        one
        for one in value_cells(experiment)
        if one.about["what"] == CENTRAL and one.about["repeat"] == "0"
    )
    with scoped(5):
        built = {
            name: models.make_bottom(experiment.parties[name].bottom).build((2,), 8)
            for name in data
        }
    merger = models.make_merger(merge).build([8, 8])
    apart = [copy.deepcopy(built[name]) for name in data]
    whole = models.JointBottom(apart, [(2,), (2,)], merger)
    (stand_in,) = cell.experiment.parties
    split = train(experiment, tmp_path, "split", data=data, bottoms=built)
    rows = gathered(cell, data)
    central = train(cell.experiment, tmp_path, "central", data=rows, bottoms={stand_in: whole})
    assert central["test_loss"] == pytest.approx(split["test_loss"], rel=1e-4)
    assert central["test_auc"] == pytest.approx(split["test_auc"], abs=1e-4)
    assert split["test_auc"] > 0.6


def test_boosting_has_a_number_in_bins_as_one_column(tmp_path):
    """Trees ask which of two rows has more of it, so the order is all that must stay."""
    from vfl.datasets import Dealing, OwnTable, TableFormat, load_own
    from vfl.experiments.value import for_trees

    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=200), "y": rng.random(200), "t": ["a", "b"] * 100})
    table.loc[::9, "y"] = np.nan
    plain, binned = (
        load_own("bank", OwnTable(table, form=TableFormat(bins=bins)), None, Dealing(0))
        for bins in (0, 8)
    )
    assert binned.inputs.shape[1] > plain.inputs.shape[1] == 5
    assert for_trees(plain) is plain.inputs
    found, train = for_trees(binned)[plain.split.train], plain.inputs[plain.split.train]
    assert (found[:, 2:] == train[:, 2:]).all()  # whether y is missing, and the texts
    assert found[:, 0].argsort().tolist() == train[:, 0].argsort().tolist()
    there = train[:, 2] == 0
    assert found[there, 1].argsort().tolist() == train[there, 1].argsort().tolist()
