"""Boosted trees trained, tested and asked by whole federated sessions, over real streams."""

import threading
import time

import numpy as np
import pandas as pd
import pytest
import torch
from played_session import stand_in
from served import Serving, settings
from sklearn.metrics import roc_auc_score
from trees_session import ACCEPTS, CONTENT, OTHERS, ROWS, SPEC, lose_once
from trees_session import TreesSession as Session

from vfl.clients.serving import ServedParty
from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConsentError, PeerFailedError, RunFolderError
from vfl.core.frame import Kind
from vfl.core.storage import read_json
from vfl.defenses.label_dp import LabelDP
from vfl.experiments.pages import build_report
from vfl.serving.front import settings_file
from vfl.serving.local import serve
from vfl.session.store.erasure import forget
from vfl.session.terms import EXPLAIN
from vfl.training.run import evaluate, predict, train
from vfl.trees.command import importance as print_importance
from vfl.trees.command import importance_of


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path)


def test_a_training_an_evaluation_and_a_prediction(session):
    seen = session.play()
    assert not session.flower.failures
    figures = read_json(session.run / "summary.json")
    assert figures["test_auc"] > 0.85
    assert {kind for _, _, kind, _, _ in seen} == {Kind.PROTOCOL, Kind.DONE}
    began = [len(payload) for party, way, _, step, payload in seen
             if (party, way, step) == ("bank", "up", 0)]  # fmt: skip
    assert ROWS * 0.8 in began, "a byte a cell of the training and validation rows"
    session.play(mode="evaluate")
    after = read_json(session.run / "evaluations/0001.json")
    assert after["test_auc"] == figures["test_auc"]
    seen = session.play(mode="predict")
    predicted = pd.read_csv(session.run / "predictions.csv")
    assert roc_auc_score(session.table.paid, predicted.probability_1) > 0.9
    answers = [payload for _, way, kind, _, payload in seen if (way, kind) == ("up", Kind.PROTOCOL)]
    assert len(answers) == 2, "one from each feature party, however many trees there are"


def test_one_process_grows_the_trees_of_a_federation(session, capsys):
    session.play()
    everybody = (*OTHERS, "lender")
    sources = {name: {"source": str(session.folder / name / "party.toml")} for name in everybody}
    content = CONTENT | {"parties": sources, "label": {"party": "lender", "column": "paid"}}
    alone = train(Experiment.model_validate(content), session.folder, "alone")
    together = read_json(session.run / "summary.json")
    assert alone["weights_sha256"] == together["weights_sha256"]
    assert alone["test_auc"] == together["test_auc"]
    evaluate(RunFolder.open(session.folder / "alone"))
    page = build_report(session.folder / "alone").read_text()
    assert "Importance" in page
    assert "dense float32" not in page, "nobody sends a cut"
    assert all(name in page.partition("Importance")[2] for name in ("income", "city", "age"))
    told = importance_of(session.folder / "alone")["columns"]
    assert [one["name"] for one in told] == ["income", "city", "age"], "most gain first"
    print_importance(session.folder / "alone")
    lines = capsys.readouterr().out.splitlines()
    told = ["bank", "shop", "lender", "bank:", "shop:", "lender:"]
    assert [line.split()[0] for line in lines[-6:]] == told


def test_rows_that_came_since_the_training_are_told_apart(session):
    """Figures of rows that the run has seen and of new ones are each about those rows."""
    session.play()
    before = read_json(session.run / "summary.json")["test_auc"]
    more = session.table[:200].assign(id=[f"z{row:03}" for row in range(200)])
    more["paid"] = 1 - more.paid  # whoever counts old rows among the new is found out
    for name, columns in {"bank": ["income"], "shop": ["city"], "lender": ["age", "paid"]}.items():
        path = session.folder / name / "data.csv"
        pd.concat([pd.read_csv(path), more[["id", *columns]]]).to_csv(path, index=False)
    session.play(mode="evaluate")
    after = read_json(session.run / "evaluations/0001.json")
    assert after["test_auc"] == before
    assert after["rows"]["new"] == 200
    assert after["new_auc"] < 0.2


def test_a_card_and_a_page_say_what_each_party_keeps(session):
    session.play()
    cards = {name: session.kept(name).card() for name in ("bank", "lender")}
    assert "splits" in cards["bank"]["model"]["half"]
    assert cards["bank"]["model"]["bottom"] is None
    assert "all trees" in cards["lender"]["model"]["half"]
    figures = read_json(session.run / "summary.json")
    assert figures["wire_ratio"] is figures["formula_ratio"] is None, "nobody sends a cut"
    page = build_report(session.run).read_text()
    assert "all trees" in page
    assert "top model" not in page


def test_importance_has_names_of_columns_where_they_are_known(session, capsys):
    session.play()
    with pytest.raises(RunFolderError, match="evaluate"):
        importance_of(session.run)
    session.play(mode="evaluate")
    label = importance_of(session.run)
    assert {one["party"] for one in label["parties"]} == {*OTHERS, "lender"}
    assert label["parties"][0]["party"] == "bank"
    assert sum(one["gain"] for one in label["parties"]) == pytest.approx(1)
    assert [one.get("name") for one in label["columns"] if one["party"] == "lender"] == ["age"]
    assert not any("name" in one for one in label["columns"] if one["party"] in OTHERS)
    bank = importance_of(session.kept("bank").path.parents[1])
    print_importance(session.kept("bank").path.parents[1])
    assert "gain" not in capsys.readouterr().out.partition("splits")[2]
    splits = {one["column"]: one["splits"] for one in label["columns"] if one["party"] == "bank"}
    assert bank == {
        "parties": [],
        "columns": [{"party": "bank", "column": 1, "name": "income", "splits": splits[1]}],
    }


def test_a_party_learns_what_its_columns_add_where_the_label_party_consents(session, capsys):
    session.play()
    whom = [f"{EXPLAIN}bank"]
    with pytest.raises(ConsentError, match="'lender' does not consent") as refused:
        session.play("predict", told=whom)
    assert 'explains = ["bank"]' in refused.value.fix
    assert read_json(session.run / "failure.json")["code"] == "V403"
    session.describe("lender", f'{ACCEPTS}explains = ["bank"]\n')
    seen = session.play("predict", told=whom)
    sent = {party for party, way, kind, _, payload in seen
            if (way, kind) == ("down", Kind.PROTOCOL) and payload}  # fmt: skip
    assert sent == {"bank"}, "who is not named gets nothing"
    (values,) = pd.read_csv(session.kept("bank").path / "explanations.csv").set_index("id").T.values
    assert len(values) == ROWS
    assert np.corrcoef(values, session.table.income)[0, 1] > 0.7
    assert not (session.kept("shop").path / "explanations.csv").exists()
    session.play("evaluate", told=whom)
    label = {one["party"]: one for one in importance_of(session.run)["columns"]}
    (own,) = importance_of(session.kept("bank").path.parents[1])["columns"]
    assert own["shapley"] == pytest.approx(label["bank"]["shapley"], rel=1e-6)
    print_importance(session.kept("bank").path.parents[1])
    assert "shapley" in capsys.readouterr().out
    told = session.kept("bank").path / "disclosed-predict.json"
    assert "what its columns add" in told.read_text()
    forget(session.flower.files["bank"], ["r003"], rewrite=True)
    assert "r003" not in (session.kept("bank").path / "explanations.csv").read_text()


def test_numbers_that_explain_no_column_are_refused(session, monkeypatch):
    session.play()
    session.describe("lender", f'{ACCEPTS}explains = ["bank"]\n')

    def lie(leaves, answers, players, count):
        return np.full((ROWS, count, 1), np.nan)

    monkeypatch.setattr("vfl.trees.ends.Leaves.contributions", lie)
    with pytest.raises(PeerFailedError, match="no Shapley values"):
        session.play("predict", told=[f"{EXPLAIN}bank"])


def probabilities(client, ids):
    status, told = client.predict(*ids)
    assert status == 200, told
    return [one["probabilities"][1] for one in told["predictions"]]


def test_one_exchange_answers_a_request(session):
    session.play()
    session.play(mode="predict")
    predicted = pd.read_csv(session.run / "predictions.csv").set_index("id")["probability_1"]
    settings_file(session.run, settings())
    serving = Serving(session.run, lambda: session.play("serve"))
    try:
        serving.client.wait_ready()
        ids = ["r003", "r007", "r011"]
        found = probabilities(serving.client, ids)
        assert np.allclose(found, predicted[ids], atol=1e-6)
    finally:
        serving.stop()
    assert not session.flower.failures


def margin(answer):
    low, high = answer["probabilities"]
    return np.log(high) - np.log(low)


def test_an_answer_says_what_each_party_added(session):
    session.play()
    settings_file(session.run, settings(explain=True))
    serving = Serving(session.run, lambda: session.play("serve"))
    try:
        serving.client.wait_ready()
        told = [serving.client.predict(one, explain=True)[1] for one in ("r003", "r007")]
    finally:
        serving.stop()
    bases = []
    for one in told:
        parts = one["contributions"]
        assert set(parts) == {*OTHERS, "lender"}
        assert all(own[0] == 0 for own in parts.values()), "the first class is the reference"
        bases.append(margin(one["predictions"][0]) - sum(own[1] for own in parts.values()))
    assert bases[0] == pytest.approx(bases[1], abs=1e-5), "the same whoever is asked for"


def test_requests_are_answered_without_a_party_that_is_away(session, monkeypatch):
    """Its splits send a row to both sides, by weight, until it is back."""
    session.play()
    dying, real = threading.Event(), ServedParty.answer

    def answer(party):
        if dying.is_set() and party._feature.name == "shop":
            raise SystemExit
        return real(party)

    def answered(*missing):
        deadline = time.monotonic() + 30
        while True:
            status, told = client.predict("r003", "r007")
            rows = told.get("predictions", [{}])
            if status == 200 and all(one["missing"] == list(missing) for one in rows):
                return [one["probabilities"][1] for one in rows]
            assert time.monotonic() < deadline, told
            time.sleep(0.05)

    monkeypatch.setattr(ServedParty, "answer", answer)
    monkeypatch.setattr("vfl.server.federation._RETURN_S", 0.2)
    settings_file(session.run, settings(partial=True))
    serving = Serving(session.run, lambda: session.play("serve"))
    try:
        client = serving.client
        client.wait_ready()
        whole, nodes = answered(), session.flower.get_nodes()
        monkeypatch.setattr(session.flower, "get_nodes", lambda: nodes[:1])
        dying.set()
        partial = answered("shop")
        assert abs(whole[0] - whole[1]) > 0.05
        assert partial[0] == partial[1], "the city alone tells them apart"
        assert min(whole) < partial[0] < max(whole)
        explained = client.predict("r003", explain=True)
        assert explained[0] == 403, "nobody asked for contributions"
        dying.clear()
        monkeypatch.setattr(session.flower, "get_nodes", lambda: nodes)
        assert answered() == whole
    finally:
        serving.stop()


def test_one_process_serves_a_run(tmp_path):
    content = {"model": SPEC, "data": {"source": "breast_cancer"}, "parties": {"a": {}, "b": {}}}
    train(Experiment.model_validate(content), tmp_path, "run")
    predicted = predict(RunFolder.open(tmp_path / "run"))
    table = pd.read_csv(tmp_path / "run" / "predictions.csv").set_index("id")
    serving = Serving(tmp_path / "run", lambda: serve(tmp_path / "run", settings()))
    try:
        serving.client.wait_ready()
        ids = [str(one) for one in table.index[:3]]
        assert np.allclose(probabilities(serving.client, ids), table.iloc[:3, -1], atol=1e-6)
    finally:
        serving.stop()
    assert predicted is not None


def test_a_training_goes_on_when_a_party_was_lost(session, monkeypatch):
    session.play()
    whole = read_json(session.run / "summary.json")
    lose_once(monkeypatch, "shop", 5)
    for name in (*OTHERS, "lender"):
        (session.folder / name / "store").rename(session.folder / name / "before")
        session.describe(name, ACCEPTS)
    session.play(federation=CONTENT["federation"] | {"max_restarts": 1})
    assert "restart 1 of 1" in (session.run / "notes.txt").read_text()
    assert read_json(session.run / "summary.json")["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize(
    "consent",
    ["", '[consent]\nmodels = ["trees:*"]\nsecure = ["none"]\n',
     '[consent]\nmodels = ["trees:*epsilon=1*"]\n'],
)  # fmt: skip
def test_a_party_sends_no_bins_that_it_has_not_agreed_to(session, consent):
    session.describe("bank", consent)
    with pytest.raises(PeerFailedError):
        session.play()
    assert "V403" in {error.code for error in session.flower.failures}


def test_trees_follow_from_randomised_labels_alone(tmp_path, monkeypatch):
    """Label DP holds for all splits: true training labels leave no mark on them."""
    draw, figures = np.random.default_rng(0), {}
    table = pd.DataFrame(draw.normal(size=(300, 4)), columns=list("abcd"))
    answers = torch.from_numpy(draw.integers(0, 2, 300))
    monkeypatch.setattr(LabelDP, "labels", lambda own, labels, secret: answers[: len(labels)])
    for name in ("one", "other"):
        table["paid"] = np.random.default_rng(len(name)).integers(0, 2, 300)
        table.to_csv(tmp_path / "table.csv", index=False)
        content = {
            "model": SPEC,
            "defense": "label_dp:epsilon=2",
            "data": {"source": str(tmp_path / "table.csv")},
            "parties": {"bank": {"columns": ["a", "b"]}, "shop": {"columns": ["c", "d"]}},
            "label": {"party": "shop", "column": "paid", "class_weight": "balanced"},
            "train": {"epochs": 3},
        }
        figures[name] = train(Experiment.model_validate(content), tmp_path, name)
    assert figures["one"]["weights_sha256"] == figures["other"]["weights_sha256"]
    (state,) = figures["one"]["privacy"]
    assert (state["protects"], state["epsilon"], state["unit"]) == ("labels", 2.0, "label")
