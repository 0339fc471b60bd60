"""Scorecards: in one process, over a federation's streams, and on bad input."""

import json
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from loans import OTHERS, Session, made_table, trained
from played_session import stand_in
from served import Serving, settings
from sklearn.metrics import roc_auc_score

from vfl.cli import main
from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import (
    DataError,
    ExposedCutError,
    PeerFailedError,
    UserError,
    VFLError,
)
from vfl.core.storage import read_json
from vfl.serving.front import settings_file
from vfl.serving.local import serve
from vfl.training.run import predict, train
from vfl.trees.grow import Layout
from vfl.trees.scorecard.card import Card
from vfl.trees.scorecard.fitting import Local, fit_card
from vfl.trees.scorecard.loaded import LoadedCard, part_of
from vfl.trees.scorecard.mode import Scorecard
from vfl.trees.scorecard.page import write_card
from vfl.trees.scorecard.points import Scale

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial_trees.md"


@pytest.fixture(scope="module")
def carded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    return *trained(folder, made_table()), folder / "run"


def test_a_card_tells_goods_from_bads(carded):
    loaded, summary, _ = carded
    card = loaded.card
    assert [line.name for line in loaded.lines] == ["income", "basket", "city", "age"]
    assert all(line.column.on_card for line in loaded.lines)
    assert summary["test_auc"] > 0.78
    assert card.scores["test"].auc(of=0) == pytest.approx(summary["test_auc"], abs=1e-6)
    basket, city = loaded.lines[1], loaded.lines[2]
    assert len(city.bins) == 4, "two of the cities share a bin"
    assert set(city.bins[0].split(", ")) <= {"jena", "ulm"}, "goods first"
    assert (np.diff(basket.column.weights[:-1]) < 0).all(), "who buys more pays less"
    assert basket.bins[0].startswith("< ")
    again = Card.of_state(card.state_dict())
    assert again.scores["train"].auc() == card.scores["train"].auc()


def test_what_is_told_stands_in_the_ledger(carded):
    loaded, summary, _ = carded
    told = {(one["observer"], one["what"]): one["values"] for one in summary["revealed"]
            if one["observer"] != "lender"}  # fmt: skip
    count = sum(len(line.bins) for line in loaded.lines if line.party == "shop")
    assert told["shop", "weights of evidence of its bins"] == count
    learned = {
        (one["what"], one["of"]) for one in summary["revealed"] if one["observer"] == "lender"
    }
    assert ("bins of cells", "registry") in learned


def test_page_and_text_show_the_card(carded):
    loaded, _, run = carded
    page, text = (path.read_text() for path in write_card(run))
    for word in (*loaded.lines[2].bins, "Calibration", "weight of evidence", "Who learned what"):
        assert word in page
    assert "vfl.trees" not in page
    points = loaded.lines[2].column.points
    for number in points[:-1]:
        assert f" {number} " in text
    assert "600 points mean 50 good rows per bad row" in text


def run_command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["vfl", *map(str, words)])
    capsys.readouterr()
    with suppress(SystemExit):
        main()
    return capsys.readouterr().out


def test_commands_train_show_and_print_json(tmp_path, carded, monkeypatch, capsys):
    _, _, run = carded
    out = run_command(monkeypatch, capsys, "scorecard", run)
    assert "| shop     | city" in out
    assert "Gini" in out
    out = run_command(monkeypatch, capsys, "bins", run)
    assert "information value" in out
    assert "points |" not in out
    found = json.loads(run_command(monkeypatch, capsys, "bins", run, "--json"))
    assert {one["column"] for one in found["columns"]} == {"income", "basket", "city", "age"}
    run_command(monkeypatch, capsys, "scorecard", run, "--reasons", "2")
    scores = pd.read_csv(run / "scores.csv")
    assert list(scores) == ["id", "score", "reason_1", "reason_2"]
    assert set(scores.reason_1.dropna()) <= {"lender", *OTHERS}
    predicted = pd.read_csv(run / "predictions.csv")
    odds = np.log(predicted.probability_good / predicted.probability_bad)
    assert np.allclose(Scale().score(odds), scores.score, atol=0.01)
    worst, best = scores.score.idxmin(), scores.score.idxmax()
    assert isinstance(scores.reason_1[worst], str)
    assert pd.isna(scores.reason_2[best])
    assert 0 < found["scores"]["test"]["ks"] < 1
    # An experiment about another model becomes one about a card.
    made_table().to_csv(tmp_path / "loans.csv", index=False)
    text = """
[data]
source = "loans.csv"
id = "id"
[parties.lender]
columns = ["income", "age"]
[parties.shop]
columns = ["basket", "city"]
[label]
party = "lender"
column = "paid"
"""
    (tmp_path / "e.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    model = "model=scorecard:bad=bad,base_score=500"
    out = run_command(monkeypatch, capsys, "scorecard", "e.toml", "-s", model)
    assert "| lender" in out


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"task": "regression"}, "V103", "good rows from bad rows"),
        ({"class_weight": "balanced"}, "V103", "count every row"),
    ],
)
def test_labels_of_another_kind_are_refused(tmp_path, change, code, told):
    table = made_table(300)
    if change.get("task"):
        table["paid"] = (table.paid == "good").astype(float)
    with pytest.raises(VFLError, match=told) as refusal:
        trained(tmp_path, table, label={"party": "lender", "column": "paid"} | change)
    assert refusal.value.code == code


def test_a_class_that_is_absent_is_refused(tmp_path):
    table = made_table(300)
    table["paid"] = "good"
    with pytest.raises(UserError):
        trained(tmp_path, table)
    parts = {"lender": (np.zeros((9, 1), np.uint8), Layout((2,), (False,)))}
    with pytest.raises(DataError, match="the same class"):  # where test rows have all the bads
        fit_card(Scorecard(), Local(parts, [0], np.zeros(9, bool)), 9, 0)
    with pytest.raises(VFLError, match="names no class"):
        trained(tmp_path, made_table(300), "scorecard:bad=late")


def test_columns_that_tell_nothing_are_left_out(tmp_path):
    table = made_table(800)
    table["age"], table["basket"] = 7.0, np.nan
    loaded, _ = trained(tmp_path, table)
    on_card = {line.name: line.column.on_card for line in loaded.lines}
    assert on_card == {"income": True, "basket": False, "city": True, "age": False}


def test_a_card_without_columns_says_so(tmp_path):
    table = made_table(800)
    draw = np.random.default_rng(3)
    table["paid"] = draw.permutation(table.paid)
    loaded, summary = trained(tmp_path, table, "scorecard:bad=bad,min_iv=5")
    assert loaded.card.base > 0
    assert summary["test_auc"] == 0.5
    page, _ = write_card(tmp_path / "run")
    assert "no column is on the card" in page.read_text()


def test_too_many_categories_and_statistics_are_refused(tmp_path):
    table = made_table(2000)
    table["city"] = [f"city {row}" for row in range(2000)]
    with pytest.raises(VFLError, match="categories") as refusal:
        trained(tmp_path, table)
    assert refusal.value.code == "V200"
    with pytest.raises(VFLError, match="too many statistics"):
        trained(tmp_path, made_table(), "scorecard:bad=bad,budget=3", name="small")


def test_a_column_that_knows_the_outcome_needs_a_penalty(tmp_path):
    table = made_table(800)
    table["age"] = (table.paid == "good").astype(float)
    with pytest.raises(VFLError, match="separates") as refusal:
        trained(tmp_path, table)
    assert "l2" in refusal.value.fix
    other = tmp_path / "other"
    other.mkdir()
    loaded, _ = trained(other, table, "scorecard:bad=bad,l2=0.01")
    assert "suspicious" in write_card(other / "run")[0].read_text()
    assert np.isnan(loaded.lines[0].column.error), "a penalised fit has no standard errors"


@pytest.mark.parametrize(
    ("model", "more", "kind"),
    [
        ("scorecard", {"train": {"epochs": 2}}, ExposedCutError),
        ("scorecard", {"codec": "topk:k=2"}, ExposedCutError),
        ("scorecard:bins=1", {}, UserError),
        ("scorecard:monotone=up", {}, UserError),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, model, more, kind):
    with pytest.raises(kind):
        trained(tmp_path, made_table(300), model, **more)


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path)


def test_a_federation_makes_the_card_of_one_process(session, tmp_path, monkeypatch, capsys):
    session.play()
    assert not session.flower.failures
    figures = read_json(session.run / "summary.json")
    everybody = ("lender", *OTHERS)
    sources = {name: {"source": str(session.folder / name / "party.toml")} for name in everybody}
    content = session.experiment().model_dump(mode="json", exclude_none=True) | {
        "parties": sources, "label": {"party": "lender", "column": "paid"}
    }  # fmt: skip
    alone = train(Experiment.model_validate(content), tmp_path, "alone")
    assert alone["weights_sha256"] == figures["weights_sha256"]
    assert alone["test_auc"] == figures["test_auc"]
    loaded, whole = LoadedCard(session.run), LoadedCard(tmp_path / "alone")
    assert [line.name for line in loaded.lines] == ["income", "column 1", "column 2", "column 1"]
    assert "basket" not in write_card(session.run)[0].read_text().replace("rising=basket", "")
    # A feature party has its own lines in its own folder.
    own = session.folder / "shop" / "store" / "runs" / "run" / "parties" / "shop"
    lines = [line for line in whole.lines if line.party == "shop"]
    assert [(name, bins) for name, bins, _ in part_of(own)] == [
        (line.name, line.bins) for line in lines
    ]
    told = json.loads(run_command(monkeypatch, capsys, "scorecard", own, "--json"))
    assert [one["points"] for one in told] == [
        points for line in lines for points in line.column.points.tolist()
    ]
    assert "| city" in run_command(monkeypatch, capsys, "bins", own)
    ((name, _, _),) = part_of(session.run / "parties" / "lender")
    assert name == "income"
    session.play(mode="predict")
    scores = pd.read_csv(loaded.write_scores(1))
    columns_of_others = {f"{name} column {number}" for name in OTHERS for number in (1, 2)}
    assert set(scores.reason_1.dropna()) <= {"lender income"} | columns_of_others
    predicted = pd.read_csv(session.run / "predictions.csv")
    assert roc_auc_score(made_table().paid == "good", predicted.probability_good) > 0.78


def test_a_served_row_has_its_score_and_reasons(session):
    session.play()
    session.play(mode="predict")
    predicted = pd.read_csv(session.run / "predictions.csv", keep_default_na=False).set_index("id")
    settings_file(session.run, settings())
    serving = Serving(session.run, lambda: session.play("serve"))
    try:
        serving.client.wait_ready()
        ids = ["r00003", "r00007", "r00011"]
        status, told = serving.client.predict(*ids)
        assert status == 200, told
        for name, one in zip(ids, told["predictions"], strict=True):
            assert one["score"] == predicted.score[name]
            assert "; ".join(one["reasons"]) == predicted.reasons[name]
    finally:
        serving.stop()
    assert not session.flower.failures


def test_a_party_answers_for_no_card_that_it_has_not_agreed_to(session):
    session.describe("shop", '[consent]\nmodels = ["scorecard:*reasons=party*"]\n')
    with pytest.raises(PeerFailedError):
        session.play()
    assert "V403" in {error.code for error in session.flower.failures}


def test_the_tutorial_goes_from_two_tables_to_a_served_model_and_a_card(
    tmp_path, monkeypatch, capsys
):
    page = TUTORIAL.read_text()
    (sample,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (settings_of_trees,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(sample, str(TUTORIAL), "exec"), {})
    Path("trees.toml").write_text(settings_of_trees)
    commands = [shlex.split(line) for line in re.findall(r"^    vfl (.*)$", page, re.MULTILINE)]
    boost, make_card = commands
    assert "`vfl serve RUN`" in page
    run_command(monkeypatch, capsys, *boost)
    (run,) = Path("runs").iterdir()
    assert read_json(run / "summary.json")["test_auc"] > 0.75
    predict(RunFolder.open(run))
    tested = pd.read_csv(run / "predictions.csv").id
    serving = Serving(run, lambda: serve(run, settings()))
    try:
        serving.client.wait_ready()
        (body,) = re.findall(r"-d '(.*?)' http", page)
        status, told = serving.client.ask("/predict", json.loads(body))
        assert status == 200, told
    finally:
        serving.stop()
    out = run_command(monkeypatch, capsys, *make_card)
    assert "| shop  | city" in out
    (card,) = set(Path("runs").iterdir()) - {run}
    assert {"bank", "shop"} >= set(pd.read_csv(card / "scores.csv").reason_1.dropna())
    answered = []
    serving = Serving(card, lambda: serve(card, settings()))
    try:
        serving.client.wait_ready()
        for one in tested[:20]:
            answered.append(serving.client.ask("/predict", {"ids": [one]})[1])
    finally:
        serving.stop()
    found = [json.loads(text)["predictions"][0] for text in answered]
    assert len({len(one["reasons"]) for one in found}) > 1
    assert len({len(text) for text in answered}) == 1, "TLS shows lengths, which tell nothing"
