"""A training in this process and its run folder; evaluation and prediction from that folder."""

import csv

import numpy as np
import pandas as pd
import pytest
import torch
from sealed import reseal_json, weights_at
from sklearn.datasets import load_diabetes

from vfl.config import DataSettings, Experiment, read_experiment, read_party_file
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConfigError, MissingDataError, NonFiniteError, RunFolderError
from vfl.core.storage import joint_digest, read_json, weights_digest
from vfl.core.version import VERSION
from vfl.datasets import load_for_prediction
from vfl.session import PartyFolder, Terms
from vfl.session.store.party_folder import own_data
from vfl.training.run import evaluate, load_data, predict, sources_read, train

OWN_FILES = (
    *("weights.safetensors", "party.json", "encoder.json", "card.json", "bins.json"),
    "rows.sealed",
)
PARTIES = {"bank": {"width": 8, "bottom": "mlp:hidden=16"}, "shop": {"width": 8}}


def experiment_of(**changes):
    settings = {
        "name": "trial",
        "data": {"source": "breast_cancer"},
        "parties": PARTIES,
        "label": {"party": "lender"},
        "train": {"epochs": 4, "batch_size": 32, "learning_rate": 0.01},
    }
    return Experiment.model_validate(settings | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    records = []
    summary = train(experiment_of(), root, "one", command="vfl train x", on_epoch=records.append)
    return RunFolder.open(root / "one"), summary, records


def test_what_a_run_leaves_behind(trained):
    folder, _, _ = trained
    found = {
        str(path.relative_to(folder.path)) for path in folder.path.rglob("*") if path.is_file()
    }
    own = {f"parties/{name}/{file}" for name in ("bank", "shop") for file in OWN_FILES}
    assert found == own | {
        *(".lock", "run.json", "config.toml", "environment.json"),
        *("metrics.jsonl", "progress.json", "traffic.csv", "summary.json", "scored.json"),
        *("parties/lender/weights.safetensors", "parties/lender/party.json"),
        *("parties/lender/card.json", "parties/lender/bins.json", "parties/lender/rows.sealed"),
    }


def test_folds_of_a_table(tmp_path):
    rows = pd.DataFrame({"key": range(50), "x": range(50), "paid": ["no", "yes"] * 25})
    rows.to_csv(tmp_path / "rows.csv", index=False)
    data = {"source": str(tmp_path / "rows.csv"), "id": "key", "folds": 5}
    parties, label = {"bank": {"columns": ["x"]}}, {"party": "lender", "column": "paid"}
    tested = []
    for fold in range(1, 6):
        found = load_data(experiment_of(data=data | {"fold": fold}, parties=parties, label=label))
        test = found["lender"].split.test
        assert found["lender"].labels[test].bincount().tolist() == [5, 5]
        tested += test.tolist()
    assert sorted(tested) == list(range(50))


def test_traffic_adds_up_to_the_summary(trained):
    folder, summary, _ = trained
    with (folder.path / "traffic.csv").open() as file:
        rows = list(csv.DictReader(file))
    for way in ("up", "down"):
        for party in PARTIES:
            sent = [row for row in rows if (row["party"], row["direction"]) == (party, way)]
            assert sum(int(row["wire_bytes"]) for row in sent) == summary[f"bytes_{way}"][party]


def test_each_partys_weights_lie_in_its_own_folder(trained):
    folder, summary, _ = trained
    digests = []
    for name in ("bank", "shop", "lender"):
        weights = weights_at(folder.party(name) / "weights.safetensors")
        digests.append((name, weights_digest(weights)))
        assert read_json(folder.party(name) / "party.json")["party"] == name
    assert summary["weights_sha256"] == joint_digest(digests)
    assert len({digest for _, digest in digests}) == 3
    shapes = {
        name: {tuple(value.shape) for value in weights_at(path).values()}
        for name, path in ((n, folder.party(n) / "weights.safetensors") for n in ("bank", "shop"))
    }
    assert (16, 15) in shapes["bank"]  # 15 of the 30 columns, 16 hidden units
    assert (64, 15) in shapes["shop"]


def test_an_evaluation_repeats_the_test_of_the_training(trained):
    folder, summary, _ = trained
    again = evaluate(folder)
    for figure in ("test_loss", "test_accuracy", "weights_sha256"):
        assert again[figure] == summary[figure]
    assert read_json(folder.path / "evaluations/0001.json")["test_loss"] == summary["test_loss"]
    assert (again["steps"], again["steps_per_second"]) == (0, None)


def test_predictions_of_a_set_without_ids(trained):
    folder, summary, _ = trained
    table = pd.read_csv(predict(folder))
    lender = load_data(folder.experiment())["lender"]
    assert table["id"].tolist() == lender.split.test.tolist()
    truth = np.array(lender.classes)[lender.labels[lender.split.test].numpy()]
    assert (table["prediction"] == truth).mean() == pytest.approx(summary["test_accuracy"])
    assert list(table)[2:] == ["probability_malignant", "probability_benign"]


@pytest.mark.parametrize("use", [evaluate, predict])
def test_weights_of_another_format_are_refused(tmp_path, use):
    train(experiment_of(train={"epochs": 1}), tmp_path, "old")
    folder = RunFolder.open(tmp_path / "old")
    path = folder.party("shop") / "party.json"
    reseal_json(path, lambda record: record.update(format=99))
    with pytest.raises(RunFolderError, match="another format") as caught:
        use(folder)
    assert caught.value.got == f"format 99, by vfl {VERSION}"


def test_a_failing_run_says_why_and_has_no_summary(tmp_path):
    experiment = experiment_of(train={"epochs": 3, "optimizer": "sgd", "learning_rate": 1e6})
    with pytest.raises(NonFiniteError):
        train(experiment, tmp_path, "wild")
    failure = read_json(tmp_path / "wild" / "failure.json")
    assert (failure["code"], failure["exit"]) == ("V005", 2)
    assert not (tmp_path / "wild" / "summary.json").exists()


def test_data_that_is_not_there_leaves_no_folder(tmp_path):
    experiment = experiment_of(
        data={"source": str(tmp_path / "no.csv")}, label={"party": "lender", "column": "y"}
    )
    with pytest.raises(MissingDataError):
        train(experiment, tmp_path, "never")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def diabetes(tmp_path_factory):
    """The table of 442 patients as a CSV, and as Parquet files of two parties in other orders."""
    folder = tmp_path_factory.mktemp("diabetes")
    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame.insert(0, "patient", [f"p-{number:03d}" for number in range(len(frame))])
    frame["sex"] = np.where(frame["sex"] == 1, "f", "m")
    frame.to_csv(folder / "all.csv", index=False)
    clinic = frame[["patient", "age", "sex", "bmi", "bp"]].sample(frac=1, random_state=1)
    clinic.to_parquet(folder / "clinic.parquet", index=False)
    laboratory = frame[["patient", *(f"s{n}" for n in range(1, 7))]].sample(frac=1, random_state=2)
    laboratory.to_parquet(folder / "laboratory.parquet", index=False)
    frame[["patient", "target"]].iloc[::-1].to_csv(folder / "hospital.csv", index=False)
    return folder, frame


REGRESSION = {
    "label": {
        "party": "hospital",
        "column": "target",
        "task": "regression",
        "top": "mlp:hidden=16",
    },
    "train": {"epochs": 15, "batch_size": 32, "learning_rate": 0.005},
}


def of_one_table(folder):
    parties = {"clinic": {"width": 8, "columns": ["age", "sex", "b*"]}}
    parties["laboratory"] = {"width": 8, "columns": ["s[1-6]"]}
    data = {"source": str(folder / "all.csv"), "id": "patient"}
    return experiment_of(name="diabetes", data=data, parties=parties, **REGRESSION)


def of_own_tables(folder):
    parties = {
        name: {"width": 8, "source": str(folder / f"{name}.parquet")}
        for name in ("clinic", "laboratory")
    }
    data = {"source": str(folder / "hospital.csv"), "id": "patient"}
    return experiment_of(name="diabetes", data=data, parties=parties, **REGRESSION)


@pytest.fixture(scope="module")
def regression(diabetes, tmp_path_factory):
    folder, _ = diabetes
    root = tmp_path_factory.mktemp("regression")
    return RunFolder(root / "one"), train(of_one_table(folder), root, "one")


def test_predictions_name_the_rows_of_the_table(diabetes, regression):
    _, frame = diabetes
    folder, summary = regression
    table = pd.read_csv(predict(folder))
    assert list(table) == ["id", "prediction"]
    truth = frame.set_index("patient").loc[table["id"], "target"].to_numpy()
    rmse = np.sqrt(np.mean((table["prediction"].to_numpy() - truth) ** 2))
    assert rmse == pytest.approx(summary["test_rmse"], rel=1e-5)
    assert len(table) == round(0.2 * len(frame))


def test_parties_with_tables_in_other_orders_train_the_same_model(diabetes, regression, tmp_path):
    """Rows meet by id: the same weights as from one table, bit for bit."""
    folder, _ = diabetes
    _, summary = regression
    apart = train(of_own_tables(folder), tmp_path, "apart")
    assert apart["weights_sha256"] == summary["weights_sha256"]
    assert apart["test_rmse"] == summary["test_rmse"]
    assert evaluate(RunFolder.open(tmp_path / "apart"))["test_rmse"] == summary["test_rmse"]


def test_bins_in_one_table_and_in_party_files_train_the_same_model(diabetes, regression, tmp_path):
    """And a federated party, which reads its own file alone, has the same inputs."""
    folder, frame = diabetes
    data = {"source": str(folder / "all.csv"), "id": "patient", "bins": 8}
    one = of_one_table(folder).model_copy(update={"data": DataSettings(**data)})
    summary = train(one, tmp_path, "one")
    assert summary["weights_sha256"] != regression[1]["weights_sha256"]
    inputs = load_data(one)
    tables = {"clinic": "clinic.parquet", "laboratory": "laboratory.parquet"}
    tables |= {"hospital": "hospital.csv"}
    for party, table in tables.items():
        lines = [f'party = "{party}"', "[data]", f'source = "{folder / table}"', 'id = "patient"']
        lines += ['label = "target"'] if party == "hospital" else ["bins = 8"]
        (tmp_path / f"{party}.toml").write_text("\n".join(lines))
        own = own_data(
            read_party_file(tmp_path / f"{party}.toml"), Terms.of(one, "train", "x"), "regression"
        )
        if party != "hospital":
            assert torch.equal(own.inputs, inputs[party].inputs)
    parties = {
        name: {"width": 8, "source": str(tmp_path / f"{name}.toml")}
        for name in ("clinic", "laboratory")
    }
    source = {"source": str(tmp_path / "hospital.toml")}
    apart = experiment_of(name="diabetes", data=source, parties=parties, **REGRESSION)
    assert train(apart, tmp_path, "apart")["weights_sha256"] == summary["weights_sha256"]
    with pytest.raises(ConfigError, match="each party's own file"):
        load_data(apart.model_copy(update={"data": DataSettings(**source, bins=8)}))
    stored = PartyFolder(RunFolder.open(tmp_path / "one").party("clinic")).encoder()
    again = load_for_prediction("clinic", folder / "clinic.parquet", "patient", stored)
    assert torch.equal(again.inputs, inputs["clinic"].inputs)
    rmse = pd.read_csv(predict(RunFolder.open(tmp_path / "one"))).set_index("id")["prediction"]
    truth = frame.set_index("patient").loc[rmse.index, "target"]
    assert np.sqrt(np.mean((rmse - truth) ** 2)) == pytest.approx(summary["test_rmse"], rel=1e-5)


def test_classes_of_a_table_have_probabilities(diabetes, tmp_path):
    _, frame = diabetes
    grades = pd.cut(frame["target"], [0, 100, 200, 400], labels=["low", "middle", "high"])
    graded = frame.drop(columns="target").assign(grade=grades.astype(str))
    graded.to_csv(tmp_path / "g.csv", index=False)
    data = {"source": str(tmp_path / "g.csv"), "id": "patient"}
    parties = {"clinic": {"columns": ["age", "sex", "b*"]}, "laboratory": {"columns": ["s[1-6]"]}}
    label = {"party": "hospital", "column": "grade"}
    train(experiment_of(data=data, parties=parties, label=label), tmp_path, "grades")
    table = pd.read_csv(predict(RunFolder.open(tmp_path / "grades")), index_col="id")
    named = table.filter(like="probability_")
    assert list(named) == ["probability_high", "probability_low", "probability_middle"]
    np.testing.assert_allclose(named.sum(axis=1), 1, atol=1e-5)
    assert (named.idxmax(axis=1).str.removeprefix("probability_") == table["prediction"]).all()
    assert set(table.index) < set(frame["patient"])


def test_settings_from_a_file_give_the_run_of_the_same_settings(tmp_path, trained):
    folder, summary, _ = trained
    again = train(read_experiment(folder.path / "config.toml"), tmp_path, "again")
    assert again["weights_sha256"] == summary["weights_sha256"]


def test_the_tables_that_were_read_are_named_whatever_the_file_says_besides(tmp_path, trained):
    assert trained[1]["sources"] == {"all parties": "breast_cancer"}
    own = {"bank": {"width": 8, "source": "bank.csv"}, "shop": {"width": 8, "source": "shop.csv"}}
    data = {"source": "sqlite:///loans.db?me=word", "id": "id"}
    label = {"party": "lender", "column": "late"}
    made = experiment_of(parties=own, data=data, label=label)
    found = {"bank": "bank.csv", "shop": "shop.csv", "lender": "a database"}
    assert sources_read(made) == found
