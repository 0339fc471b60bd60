"""What a run gains over each of its parties alone, on its page."""

import numpy as np
import pandas as pd
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import roc_auc_score

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError
from vfl.experiments import GridFolder
from vfl.experiments.pages import build_report, glance
from vfl.experiments.scheduler import rows_of
from vfl.experiments.study import plan_study, run_study, train_alone
from vfl.experiments.training import DataCache, about_rows
from vfl.experiments.value import alone_scores
from vfl.training.run import load_data, train

ABOUT = {
    "data": {"source": "breast_cancer", "rows": 300},
    "parties": {"clinic": {"width": 4}, "laboratory": {"width": 4}},
    "codec": "topk:k=2",
    "train": {"epochs": 4},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    train(Experiment.model_validate(ABOUT), root, "joined")
    return root / "joined"


def test_a_run_stands_beside_each_party_alone(run, tmp_path):
    before = glance(run).sentence
    assert "alone" not in before
    said = []
    train_alone(run, on_end=lambda ended: said.append(ended.cell.about["what"]))
    assert said == ["clinic alone", "laboratory alone"]
    scores = {party: own["0"] for party, own in alone_scores(run).items()}
    reached = RunFolder(run).summary()["test_auc"]
    gains = [100 * (reached - scores[name]["test_auc"]) for name in ("clinic", "laboratory")]
    words = f"({gains[0]:+.1f} points over clinic alone, {gains[1]:+.1f} points over laboratory"
    assert words in glance(run).sentence
    assert words in build_report(run).read_text(encoding="utf-8")
    # The same as a training of that party's columns and nobody else's on the same rows.
    assert scores["clinic"]["bytes_up"].keys() == {"alone"}
    assert scores["clinic"]["codec"] == "none"
    assert scores["clinic"]["test_auc"] != scores["laboratory"]["test_auc"]


def test_a_run_that_did_not_end_has_nothing_to_stand_beside(tmp_path):
    experiment = Experiment.model_validate(ABOUT)
    folder = RunFolder.create(tmp_path / "half", experiment, "in-process", "vfl train")
    with pytest.raises(RunFolderError):
        train_alone(folder.path)


def test_rows_of_a_federation_are_nobodys(run, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "mode", "federated")
    with pytest.raises(RunFolderError, match="rows of all parties") as caught:
        train_alone(run)
    assert "vfl value" in caught.value.fix


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("compare", {"codecs": ["none", "topk:k=2"], "folds": 2}),
        ("grid", {"attacks": ["kmeans"], "baselines": ["raw"], "leaks": [1], "draws": 1,
                  "seeds": [0, 1], "pictures": 0}),
    ],
)  # fmt: skip
def test_a_study_says_what_joining_gains_over_each_party(kind, table, tmp_path):
    study = plan_study(kind, Experiment.model_validate(ABOUT | {"codec": "none", kind: table}))
    found = run_study(study, tmp_path / "study", f"vfl {kind}", study.cells)
    frame, scores = found.table, alone_scores(found.path)["clinic"]
    joined = frame[(frame.subject == "test rows") & (frame.measure == "auc")]
    joined = joined[(joined.defense == "none") & (joined.codec == "none")].set_index("repeat").value
    assert set(scores) == set(joined.index) == ({"0", "1"} if kind == "grid" else set(scores))
    assert len(scores) == 2
    gain = np.mean([joined[repeat] - own["test_auc"] for repeat, own in scores.items()])
    assert f"({100 * gain:+.1f} ± " in found.sentence
    assert "points over clinic alone, " in found.sentence


@pytest.fixture
def two_tables(tmp_path):
    """A bank whose own column tells a little, and a shop whose columns tell the rest."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(600, 3)), columns=["own", "a", "b"])
    truth = frame["own"] * 0.5 + frame["a"] - frame["b"] + draw.normal(0, 0.3, 600)
    frame.insert(0, "id", range(600))
    frame["paid"] = (truth > 0).astype(int)
    frame["amount"] = truth
    frame.to_csv(tmp_path / "rows.csv", index=False)
    return tmp_path / "rows.csv"


@pytest.mark.parametrize(("column", "task"), [("paid", "classification"), ("amount", "regression")])
def test_a_training_says_what_joining_gained_over_the_label_party(vfl, two_tables, column, task):
    (two_tables.parent / "x.toml").write_text(
        f'name = "x"\ndata = {{ source = "{two_tables}", id = "id" }}\n'
        f'label = {{ party = "bank", column = "{column}", task = "{task}" }}\n'
        'parties.bank = { columns = ["own"] }\nparties.shop = { columns = ["a", "b"] }\n'
        "train = { epochs = 15, learning_rate = 0.01 }\n"
    )
    done = vfl("train", "x.toml")
    assert done.code == 0, done.err
    (folder,) = (two_tables.parent / "runs").iterdir()
    run = RunFolder(folder)
    measure = "auc" if task == "classification" else "rmse"
    joined, alone = (one[f"test_{measure}"] for one in (run.summary(), run.label_alone()))

    # The same learner on the same rows, without a party or a run.
    data = load_data(run.experiment())["bank"]
    inputs, truth, split = data.inputs.numpy(), data.labels.numpy(), data.split
    kind = HistGradientBoostingClassifier if measure == "auc" else HistGradientBoostingRegressor
    trees = kind(max_iter=int(run.label_alone()["epochs"]), learning_rate=0.05,
                 early_stopping=False, random_state=0)  # fmt: skip
    trees.fit(inputs[split.train], truth[split.train])
    if measure == "auc":
        chances = trees.predict_proba(inputs[split.test])[:, 1]
        assert alone == pytest.approx(roc_auc_score(truth[split.test], chances))
        assert joined > alone + 0.1
        gain = f"{100 * (joined - alone):+.1f} points of AUC over bank alone"
    else:
        error = trees.predict(inputs[split.test]) - truth[split.test]
        assert alone == pytest.approx(np.sqrt(np.mean(error**2)))
        assert joined < alone - 0.1
        gain = f"{joined - alone:+.4g} RMSE over bank alone"
    assert f"gain of joining  {gain}" in done.out
    assert gain in glance(folder).sentence


def test_a_label_party_without_columns_has_no_model_alone(vfl, tmp_path):
    (tmp_path / "x.toml").write_text(
        'name = "x"\ndata = { source = "breast_cancer" }\nparties.clinic = { width = 4 }\n'
        "train = { epochs = 1 }\n"
    )
    done = vfl("train", "x.toml")
    assert done.code == 0, done.err
    assert "joining" not in done.out


def test_networks_beside_trees_are_trained_on_standardised_columns(tmp_path):
    income = np.random.default_rng(0).normal(50_000, 20_000, 200).round()
    frame = pd.DataFrame({"income": income, "debt": income[::-1], "label": income > 50_000})
    frame.to_csv(tmp_path / "loans.csv", index=False)
    about = {
        "data": {"source": str(tmp_path / "loans.csv")},
        "label": {"column": "label"},
        "parties": {"bank": {"columns": ["income"]}, "shop": {"columns": ["debt"]}},
        "secure": "trees",
    }
    study = plan_study("value", Experiment.model_validate(about))
    folder, cache = GridFolder(tmp_path / "study"), DataCache()
    folder.write(study.experiment, study.cells, "vfl value")
    for cell in study.cells:
        mean = cache.of(rows_of(folder, cell))["bank"].inputs.mean()
        assert bool(mean > 10_000) is (cell.experiment.secure == "trees"), cell.title


def test_data_of_another_split_are_loaded_anew():
    whole = Experiment.model_validate(ABOUT | {"data": {"source": "table.csv"}})
    train = whole.train.model_copy(update={"shuffle": "blocks"})
    assert about_rows(whole) != about_rows(whole.model_copy(update={"train": train}))
