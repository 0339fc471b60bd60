"""Regressions by whole federated sessions and in one process, against fits on all columns."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from played_session import PlayedSession, stand_in
from served import Serving, settings
from stand_in_flower import Flower
from trees_session import lose_once

from vfl.config import Experiment
from vfl.config.experiment import read_experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import (
    BadOptionError,
    DataError,
    ExposedCutError,
    LostPeerError,
    PeerError,
    PeerFailedError,
    SpecError,
)
from vfl.core.storage import read_json
from vfl.experiments.pages import build_report
from vfl.serving.front import settings_file
from vfl.session.store.party_folder import PartyFolder
from vfl.training.run import evaluate, predict, train
from vfl.training.specs import checked
from vfl.trees.newton import (
    Penalty,
    Selection,
    family,
    fit,
    local_sums,
    outcome_of,
    stepwise,
)
from vfl.trees.regression_ends import Design, TrainingEnd

ROOT = Path(__file__).parents[2]
ROWS, OTHERS = 500, ("bank", "shop")
COLUMNS = {"bank": ["income", "debt"], "shop": ["city", "basket"], "lender": ["age"]}
CONTENT = {
    "model": "regression:helper=notary",
    "data": {"validation": 0.0},
    "parties": {name: {} for name in COLUMNS},
    "label": {"party": "lender"},
    "train": {"epochs": 1},
    "federation": {"rejoin_window_s": 0.2, "step_timeout_s": 60.0, "restart_timeout_s": 20.0},
}
ACCEPTS = (
    '[consent]\nmodels = ["regression:*"]\nmodes = ["train", "evaluate", "predict", "serve"]\n'
)
NOTARY = f'party = "notary"\nrole = "dealer"\n{ACCEPTS}'
LABELS = {"logistic": "paid", "linear": "amount", "poisson": "claims"}


def made_table():
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"id": [f"r{row:03}" for row in range(ROWS)]})
    table["income"], table["age"], noise = draw.normal(size=(3, ROWS)).astype(np.float32)
    table["debt"] = (100 * table.income + 80 * noise + 1000).astype(np.float32)
    table["basket"] = draw.gamma(2, 30, ROWS).astype(np.float32)
    table["city"] = draw.choice(["bonn", "jena", "ulm"], ROWS)
    effect = (
        0.8 * table.income - 0.01 * table.basket + table.city.map({"bonn": 0, "jena": 1, "ulm": -1})
    )
    table["paid"] = (draw.random(ROWS) < 1 / (1 + np.exp(-effect))).astype(int)
    table["amount"] = np.round(50 * effect + 20 * draw.normal(size=ROWS) + 300, 2)
    table["claims"] = draw.poisson(np.exp(0.5 * effect))
    return table


def central(table, rows, label, of):
    """A fit in one place, on columns standardised over the same rows; parties in their order."""
    own = table.iloc[rows]
    columns = [own.income, own.debt, own.city == "jena", own.city == "ulm", own.basket, own.age]
    inputs = np.stack([column.to_numpy(float) for column in columns], axis=1)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    inputs = np.column_stack([np.ones(len(rows)), inputs])
    labels = own[label].to_numpy(np.float32).astype(float)
    return outcome_of(of, inputs.T @ labels, labels), inputs


def experiment(folder, name, **more):
    """One process reads one table."""
    made_table().to_csv(folder / "table.csv", index=False)
    label = LABELS[name]
    task = "classification" if name == "logistic" else "regression"
    content = {
        **CONTENT,
        "model": f"regression:family={name},helper=notary",
        "data": {"source": str(folder / "table.csv"), "id": "id", "validation": 0.0},
        "parties": {one: {"columns": own} for one, own in COLUMNS.items()},
        "label": {"party": "lender", "column": label, "task": task},
    }
    del content["federation"]
    return Experiment.model_validate(content | more)


def compare(figures, name, table, rows):
    of = family({"logistic": "binomial", "linear": "gaussian", "poisson": "poisson"}[name])
    outcome, inputs = central(table, rows, LABELS[name], of)
    want = fit(of, outcome, local_sums(of, inputs))
    found = figures["regression"]["columns"]
    order = [
        1,
        2,
        3,
        4,
        5,
        0,
        6,
    ]  # the label party's columns come last, the intercept first of them
    for what, values in (
        ("coefficient", want.coefficients),
        ("standard_error", want.standard_errors),
        ("p_value", want.p_values),
        ("lower", want.intervals()[:, 0]),
    ):
        mine = [one[what] for one in found]
        np.testing.assert_allclose(mine, values[order], rtol=1e-6, atol=1e-6)
    for what in ("log_likelihood", "deviance", "null_deviance", "aic", "bic"):
        assert figures["regression"][what] == pytest.approx(getattr(want, what), rel=1e-7)
    return want


@pytest.mark.parametrize("name", ["linear", "logistic", "poisson"])
def test_one_process_fits_what_all_columns_fit(tmp_path, name):
    figures = train(experiment(tmp_path, name), tmp_path, "run")
    folder = RunFolder.open(tmp_path / "run")
    rows = PartyFolder(folder.party("lender")).rows()
    want = compare(figures, name, made_table(), rows.split.train)
    shown = [(one["party"], one["column"]) for one in figures["regression"]["columns"]]
    assert shown[0] == ("bank", 1)
    assert shown[-2:] == [("lender", "intercept"), ("lender", "age")]
    own = PartyFolder(folder.party("bank")).card()["model"]["regression"]["own_columns"]
    assert [one["column"] for one in own] == ["income", "debt"]
    scale = made_table().iloc[rows.split.train].debt.astype(float).std(ddof=0)
    assert own[1]["coefficient"] == pytest.approx(want.coefficients[2] / scale, rel=1e-4)
    again = evaluate(folder)
    measure = "test_auc" if name == "logistic" else "test_rmse"
    assert again[measure] == figures[measure]
    predict(folder)
    assert len(pd.read_csv(tmp_path / "run" / "predictions.csv")) > 0
    page = build_report(tmp_path / "run").read_text()
    assert "Log-likelihood" in page


class Session(PlayedSession):
    """A bank, a shop with texts, a lender with labels and a column, and a notary without data."""

    def __init__(self, folder):
        super().__init__(folder, Flower((*OTHERS, "notary")), CONTENT)
        self.table = made_table()
        for name, columns in COLUMNS.items():
            (folder / name).mkdir()
            own = self.table[["id", *columns]]
            own.to_csv(folder / name / "new.csv", index=False)
            more = {label: self.table[label] for label in LABELS.values() if name == "lender"}
            own.assign(**more).to_csv(folder / name / "data.csv", index=False)
            self.describe(name)
        (folder / "notary").mkdir()
        self.write("notary", NOTARY)
        self.introduce(*OTHERS, "notary")

    def describe(self, name, more=ACCEPTS):
        columns = "".join(f'"{one}", ' for one in COLUMNS[name])
        label = 'label = "paid"\n' if name == "lender" else ""
        data = f'[data]\nsource = "data.csv"\nid = "id"\npredict = "new.csv"\n{label}'
        self.write(name, f'party = "{name}"\n{data}columns = [{columns}]\n{more}')

    def kept(self, name):
        path = self.folder / name / "store" / "runs" / "run" / "parties" / name
        return PartyFolder(path)


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path)


def test_a_federation_fits_what_all_columns_fit(session):
    session.play()
    assert not session.flower.failures
    figures = read_json(session.run / "summary.json")
    rows = session.kept("lender").rows().split.train
    compare(figures, "logistic", session.table, rows)
    told = (session.run / "summary.json").read_text()
    assert not any(name in told for other in OTHERS for name in COLUMNS[other])
    own = session.kept("shop").card()["model"]["regression"]["own_columns"]
    assert [one["column"] for one in own] == ["city=1", "city=2", "basket"]
    seen = {(one["observer"], one["what"]): one["values"] for one in figures["revealed"]}
    assert seen["lender", "sums over rows, X^T w X"] % 49 == 0
    assert not any("margins, training" in what for _, what in seen)
    notary = read_json(session.folder / "notary/store/runs/run/parties/notary/disclosed-train.json")
    assert [one["what"] for one in notary["disclosed"]] == ["permuted margins, training rows"]


def test_rows_are_answered_without_the_helper(session):
    session.play()
    before = read_json(session.run / "summary.json")["test_auc"]
    session.flower.parties = OTHERS
    session.play(mode="evaluate")
    assert read_json(session.run / "evaluations/0001.json")["test_auc"] == before
    session.play(mode="predict")
    predicted = pd.read_csv(session.run / "predictions.csv").set_index("id")["probability_1"]
    settings_file(session.run, settings())
    serving = Serving(session.run, lambda: session.play("serve"))
    try:
        serving.client.wait_ready()
        ids = ["r003", "r007", "r011"]
        status, told = serving.client.predict(*ids)
        assert status == 200, told
        found = [one["probabilities"][1] for one in told["predictions"]]
        assert np.allclose(found, predicted[ids], atol=1e-6)
    finally:
        serving.stop()
    assert not session.flower.failures


def test_a_training_begins_again_when_a_party_was_lost(session, monkeypatch):
    """The fit is the same, under masks that are new."""
    session.play()
    whole = read_json(session.run / "summary.json")
    lose_once(monkeypatch, "shop", 0)
    for name in (*COLUMNS, "notary"):
        (session.folder / name / "store").rename(session.folder / name / "before")
    session.write("notary", NOTARY)
    for name in COLUMNS:
        session.describe(name)
    session.play(federation=CONTENT["federation"] | {"max_restarts": 1})
    assert "restart 1 of 1" in (session.run / "notes.txt").read_text()
    again = read_json(session.run / "summary.json")
    assert again["test_auc"] == whole["test_auc"]
    assert again["regression"]["columns"] == whole["regression"]["columns"]


def test_a_training_goes_on_from_its_fit(tmp_path, monkeypatch):
    """After the fit no party asks for sums again."""
    asked = experiment(tmp_path, "linear")
    asked = asked.model_copy(update={"data": asked.data.model_copy(update={"validation": 0.2})})
    whole, last_word, fits = train(asked, tmp_path, "whole"), TrainingEnd.end, []
    lead = TrainingEnd._lead

    def breaking(end, report):
        if end.party != "lender":
            return last_word(end, report)
        raise LostPeerError("a test ends it")  # after the last checkpoint, which all have by then

    def leading(end, own):
        fits.append(1)
        lead(end, own)

    monkeypatch.setattr(TrainingEnd, "_lead", leading)
    monkeypatch.setattr(TrainingEnd, "end", breaking)
    with pytest.raises(PeerError):  # which party says it first differs
        train(asked, tmp_path, "run")
    monkeypatch.setattr(TrainingEnd, "end", last_word)
    again = train(asked, tmp_path, "run", resume=True)
    assert len(fits) == 1
    assert again["regression"] == whole["regression"]
    assert again["test_rmse"] == whole["test_rmse"]


@pytest.mark.parametrize("consent", ["", '[consent]\nmodels = ["trees:*"]\n'])
def test_a_party_takes_part_only_if_its_file_says_so(session, consent):
    session.describe("bank", consent)
    with pytest.raises(PeerFailedError):
        session.play()
    assert "V403" in {error.code for error in session.flower.failures}


def test_a_label_party_without_columns(tmp_path):
    content = experiment(tmp_path, "logistic").model_dump(mode="json", exclude_none=True)
    content["parties"]["shop"]["columns"] += content["parties"].pop("lender")["columns"]
    content["data"]["validation"] = 0.2
    figures = train(Experiment.model_validate(content), tmp_path, "run")
    assert [one["column"] for one in figures["regression"]["columns"]] == [
        1,
        2,
        1,
        2,
        3,
        4,
        "intercept",
    ]
    rows = PartyFolder(RunFolder.open(tmp_path / "run").party("lender")).rows()
    outcome, inputs = central(made_table(), rows.split.train, "paid", family("binomial"))
    want = fit(family("binomial"), outcome, local_sums(family("binomial"), inputs))
    found = [one["coefficient"] for one in figures["regression"]["columns"]]
    np.testing.assert_allclose(found, np.roll(want.coefficients, -1), atol=1e-6)
    assert figures["regression"]["own_columns"] == []


@pytest.mark.parametrize(("name", "select"), [("linear", "p"), ("logistic", "aic")])
def test_columns_are_selected_as_in_one_place(tmp_path, name, select):
    asked = experiment(tmp_path, name, model=f"regression:family={name},select={select}")
    figures = train(asked, tmp_path, "run")
    rows = PartyFolder(RunFolder.open(tmp_path / "run").party("lender")).rows()
    of = family("gaussian" if name == "linear" else "binomial")
    outcome, inputs = central(made_table(), rows.split.train, LABELS[name], of)
    want = stepwise(of, outcome, local_sums(of, inputs), Selection(select))
    assert 1 < want.parameters < 7
    columns = figures["regression"]["columns"]
    order = [1, 2, 3, 4, 5, 0, 6]
    assert [one["standard_error"] is not None for one in columns] == want.active[order].tolist()
    found = [one["coefficient"] for one in columns]
    np.testing.assert_allclose(found, want.coefficients[order], atol=1e-6)


def test_a_penalty_is_that_of_one_place(tmp_path):
    asked = experiment(tmp_path, "logistic", model="regression:l1=0.02,l2=0.01")
    found = train(asked, tmp_path, "run")["regression"]["columns"]
    rows = PartyFolder(RunFolder.open(tmp_path / "run").party("lender")).rows()
    of = family("binomial")
    outcome, inputs = central(made_table(), rows.split.train, "paid", of)
    want = fit(of, outcome, local_sums(of, inputs), penalty=Penalty(0.02, 0.01))
    order = [1, 2, 3, 4, 5, 0, 6]
    mine = [one["coefficient"] for one in found]
    np.testing.assert_allclose(mine, want.coefficients[order], atol=1e-6)
    assert 0.0 in mine
    assert {one["p_value"] for one in found} == {None}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda table: table.assign(debt=table.income * 2 + 1), "collinear"),
        (lambda table: table.assign(debt=7.0), "one value"),
        (lambda table: table.assign(city="bonn"), "one value"),
        (lambda table: table.assign(debt=table.debt.where(table.index > 5)), "missing or infinite"),
        (lambda table: table.assign(paid=(table.income > 0).astype(int)), "separates"),
    ],
)
def test_tables_that_no_regression_fits(tmp_path, change, told):
    asked = experiment(tmp_path, "logistic")
    change(made_table()).to_csv(tmp_path / "table.csv", index=False)
    with pytest.raises(DataError, match=told):
        train(asked, tmp_path, "run")


@pytest.mark.parametrize(
    ("more", "kind", "told"),
    [
        ({"model": "regression:family=logit"}, SpecError, "logistic"),
        ({"model": "regression:select=p,l2=1"}, SpecError, "penalty"),
        ({"model": "regression:helper=bank"}, ExposedCutError, "helper"),
        ({"train": {"epochs": 2}}, ExposedCutError, "epochs"),
        ({"train": {"epochs": 1, "weight_decay": 0.1}}, ExposedCutError, "l2=0.01"),
        ({"codec": "topk:k=2"}, ExposedCutError, "codec"),
        ({"defense": "label_dp:epsilon=2"}, ExposedCutError, "defense"),
    ],
)
def test_settings_that_have_no_part_in_a_regression(more, kind, told):
    with pytest.raises(kind, match=told):
        checked(CONTENT | more, "a test")


def test_labels_and_weights_of_another_regression(tmp_path):
    with pytest.raises(BadOptionError, match="two classes"):
        train(experiment(tmp_path, "logistic", model="regression:family=poisson"), tmp_path, "a")
    weighted = {"party": "lender", "column": "paid", "class_weight": "balanced"}
    with pytest.raises(ExposedCutError, match="have weight 1"):
        train(experiment(tmp_path, "logistic", label=weighted), tmp_path, "b")


def test_the_first_experiment_of_the_page(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "regression.md").read_text()
    (tmp_path / "experiment.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    made_table().assign(defaulted=made_table().paid).drop(columns=["id", *LABELS.values()]).to_csv(
        tmp_path / "loans.csv", index=False
    )
    figures = train(read_experiment(tmp_path / "experiment.toml"), tmp_path, "run")
    columns = [(one["party"], one["column"]) for one in figures["regression"]["columns"]]
    assert columns[-3:] == [("bank", "intercept"), ("bank", "income"), ("bank", "debt")]
    assert figures["test_auc"] > 0.6


def test_a_category_that_training_rows_lack_counts_as_the_mean():
    cells = np.array([[0.0, 1.0], [2.0, 0.0], [1.0, 2.0]])
    design = Design.fit(cells, (3, 0))
    assert design.names(["city", "age"]) == ["city=1", "city=2", "age"]
    found = design.columns(np.array([[np.nan, np.nan], [1.0, 1.0]]))
    assert found[0].tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(found[1], [2**0.5, -(2**-0.5), 0.0])
