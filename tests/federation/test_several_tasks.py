"""Two label parties on a real federation: `vfl init --task`, then each party's command."""

import pandas as pd
import pytest
from real_deployment import Deployment, results
from served import asked_of_deployment, client_of, predicted, same
from sklearn.datasets import load_breast_cancer
from taken_project import FEATURES, alone, writer

from vfl.core.storage import read_json

pytestmark = pytest.mark.net

NODES, EPOCHS = (*FEATURES, "insurer"), "train.epochs=3"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    sizes = load_breast_cancer(as_frame=True).data["mean radius"]
    large = (sizes > sizes.median()).map({True: "large", False: "small"})
    write = writer("insurer", "--task", "insurer", "--serve", labels=large)
    started = Deployment(tmp_path_factory.mktemp("tasks") / "project", sides=NODES, write=write)
    try:
        yield started.start()
    finally:
        started.close()


def test_both_learn_what_one_process_learns_and_each_keeps_its_own(federation, tmp_path):
    checked = federation.done("check", federation.folder)
    assert "clinic and insurer see every cut" in checked.said()
    training = federation.trained(EPOCHS)
    run = federation.run(training)
    joined = alone(federation, tmp_path, EPOCHS)
    assert results(run) == results(joined)
    part = federation.folder / "insurer" / "store" / "runs" / run.name / "parties" / "insurer"
    learned = read_json(part / "summary.json")
    figures = read_json(joined / "summary.json")["tasks"]["insurer"]
    assert learned["test_accuracy"] == figures["test_accuracy"] > 0.7
    assert "tasks" not in read_json(run / "summary.json")
    for what in ("evaluate", "predict"):
        asked = federation.done(what, run)
    assert read_json(part / "evaluations/0001.json")["test_loss"] == learned["test_loss"]
    told = pd.read_csv(part / "predictions.csv")
    assert set(told["prediction"]) == {"large", "small"}
    expected = predicted(run)
    assert {prediction for prediction, _ in expected.values()} == {"0", "1"}
    asked = list(expected)[:7]
    answers = asked_of_deployment(federation, run, asked)
    assert all(same(one, expected[each]) for one, each in zip(answers, asked, strict=True))


def test_each_label_party_serves_its_own_task_at_its_own_address(federation):
    training = federation.trained(EPOCHS)
    run = federation.run(training)
    assert federation.ask("predict", run).wait() == 0
    own_file = federation.folder / "insurer" / "party.toml"
    settings = own_file.read_text().replace("port = 8081", "port = 0")
    own_file.write_text(
        settings.replace("probability_decimals = 3", "probability_decimals = 'off'")
    )
    serving = federation.ask(
        "serve", run, "--port", "0", "--task", "insurer", "--probability-decimals", "off"
    )
    serving.wait_for("listens at")
    part = federation.folder / "insurer" / "store" / "runs" / run.name / "parties" / "insurer"
    first, second = client_of(run), client_of(part)
    for client, folder in ((first, run), (second, part)):
        client.wait_ready(timeout_s=90.0)
        expected = predicted(folder)
        asked = list(expected)[:7]
        status, told = client.predict(*asked)
        assert status == 200, told
        for answer, each in zip(told["predictions"], asked, strict=True):
            assert same(answer, expected[each])
    (run / "serving.stop").touch()
    assert serving.wait() == 0, serving.said()
    with pytest.raises(OSError, match="refused"):
        second.predict(asked[0])
