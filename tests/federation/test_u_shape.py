"""A party in the middle on a real federation: `vfl init --middle`, then each party's command."""

import pandas as pd
import pytest
from real_deployment import Deployment, results
from served import asked_of_deployment, predicted, same
from taken_project import FEATURES, MARK, alone, writer

from vfl.core.storage import read_json

pytestmark = pytest.mark.net

NODES = (*FEATURES, "compute")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    write = writer("compute", "--middle", "compute", "--serve")
    started = Deployment(tmp_path_factory.mktemp("middle") / "project", sides=NODES, write=write)
    try:
        yield started.start()
    finally:
        started.close()


def test_it_trains_evaluates_predicts_and_serves_as_one_process_does(federation, tmp_path):
    checked = federation.done("check", federation.folder)
    assert "compute sees every cut and no label" in checked.said()
    training = federation.trained("train.epochs=3")
    done = federation.run(training)
    losses, weights, *_ = results(done)
    joined = results(alone(federation, tmp_path, "train.epochs=3"))
    assert (losses, weights) == joined[:2]
    summary = read_json(done / "summary.json")
    assert summary["test_accuracy"] > 0.85
    for what in ("evaluate", "predict"):
        asked = federation.done(what, done)
    assert read_json(done / "evaluations/0001.json")["test_loss"] == summary["test_loss"]
    ids = pd.read_csv(done / "predictions.csv")["id"]
    assert len(ids) == 569
    own = federation.folder / "compute" / "store" / "runs" / done.name / "parties"
    card = read_json(own / "compute" / "card.json")
    assert card["role"] == "party in the middle"
    marked = [path for path in (federation.folder / "compute").rglob("*") if path.is_file()]
    assert not any(MARK.encode() in path.read_bytes() for path in marked)
    expected = predicted(done)
    asked = list(expected)[:7]
    answers = asked_of_deployment(federation, done, asked)
    assert all(same(one, expected[each]) for one, each in zip(answers, asked, strict=True))


def test_a_middle_that_dies_is_named_and_the_training_goes_on_later(federation):
    quick = ("train.epochs=60", "federation.max_restarts=0", "federation.rejoin_window_s=2.0")
    training = federation.train(*quick)
    training.wait_for("epoch   3")
    federation.kill("flwr-clientapp", "compute")
    assert training.wait() == 3, training.said()
    assert "party 'compute' disconnected" in training.last_words(), training.said()
    federation.trained(resume=training)
    assert read_json(federation.run(training) / "summary.json")["epochs"] == 60
