"""All parties in one process: sessions of every mode, and what their records say."""

import pytest
import torch
from torch import nn

from vfl.config import Experiment
from vfl.core.frame import HEADER_BYTES, Kind
from vfl.datasets import Dealing, load_bundled
from vfl.session import Adversary
from vfl.session.label import summarise
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

PARTIES = ["bank", "shop"]


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, "lender", Dealing(1, limit=300), flatten=True)


def experiment_of(**changes):
    settings = {
        "name": "trial",
        "seed": 1,
        "parties": {name: {"width": 8} for name in PARTIES},
        "label": {"party": "lender"},
        "train": {"epochs": 3, "batch_size": 32, "learning_rate": 0.01},
    }
    return Experiment.model_validate(settings | changes)


@pytest.fixture(scope="module")
def trained(data):
    records = []
    session = LocalSession(experiment_of(), data, outputs=10, on_epoch=records.append).run()
    return session, records


def test_training_learns_and_tells_every_epoch(trained):
    session, records = trained
    assert [record["epoch"] for record in records] == [1, 2, 3]
    assert [record["steps"] for record in records] == [7, 14, 21]
    assert records == session.label.history
    assert records[-1]["train_loss"] < 0.7 * records[0]["train_loss"]
    assert "test_accuracy" not in records[0]
    assert records[-1]["test_accuracy"] > 0.5


def test_every_byte_is_counted(trained, data):
    """210 rows in 7 batches, 30 for validation, 60 for the test; 8 float32 a row and party."""
    session, records = trained
    for party in PARTIES:
        up = 3 * (7 * HEADER_BYTES + 210 * 32 + HEADER_BYTES + 30 * 32) + HEADER_BYTES + 60 * 32
        down = 3 * (7 * HEADER_BYTES + 210 * 32 + HEADER_BYTES) + HEADER_BYTES
        assert session.ledger.bytes_by_party("up")[party] == up
        assert session.ledger.bytes_by_party("down")[party] == down
    assert records[-1]["bytes_up"] == session.ledger.total_bytes("up")


def test_the_summary_of_a_run(trained):
    session, records = trained
    figures = summarise(session.label, session.weights_digest(), "runs/one")
    assert figures["test_accuracy"] == records[-1]["test_accuracy"]
    assert figures["bytes_up"] == session.ledger.bytes_by_party("up")
    assert (figures["steps"], figures["run"]) == (21, "runs/one")
    assert figures["formula_ratio"] == 1.0
    dense_bytes = 2 * 4 * 3 * 210 * 16
    headers = 3 * 7 * 2 * 2 * HEADER_BYTES
    assert figures["wire_ratio"] == (dense_bytes + headers) / dense_bytes
    assert figures["weights_sha256"] == session.weights_digest()
    assert figures["steps_per_second"] == pytest.approx(
        21 / session.label.progress.train_seconds, abs=0.1
    )


def test_an_evaluation_finds_what_the_training_ended_with(trained, data):
    session, records = trained
    weights = session.weights()
    again = LocalSession(experiment_of(), data, mode="evaluate", outputs=10, weights=weights).run()
    (record,) = again.label.history
    assert record["test_loss"] == records[-1]["test_loss"]
    assert record["test_accuracy"] == records[-1]["test_accuracy"]
    assert again.weights_digest() == session.weights_digest()


def test_a_prediction_gives_outputs_in_row_order(trained, data):
    session, records = trained
    weights = session.weights()
    again = LocalSession(experiment_of(), data, mode="predict", outputs=10, weights=weights)
    outputs = again.run().outputs()
    rows = data["lender"].split.test
    assert outputs.shape == (len(rows), 10)
    hits = (outputs.argmax(1) == data["lender"].labels[rows]).float().mean()
    assert float(hits) == pytest.approx(records[-1]["test_accuracy"])


def test_modules_and_adversaries_of_the_callers_own(data):
    class Silent(Adversary):
        def cut(self, cut, context):
            return torch.zeros_like(cut)

    seen = []
    top = nn.Linear(16, 10)
    top.register_forward_hook(lambda module, given, result: seen.append(given[0]))
    session = LocalSession(
        experiment_of(),
        data,
        outputs=10,
        bottoms={"bank": nn.Sequential(nn.Flatten(), nn.Linear(32, 8))},
        top=top,
        adversaries={"shop": Silent()},
    ).run()
    assert session.label.model["top"] is top
    assert all((merged[:, 8:] == 0).all() and merged[:, :8].any() for merged in seen)


def test_a_defense_is_in_the_model_that_trains(data):
    trace = Trace(kinds=[Kind.CUT], parties=["shop"])
    LocalSession(experiment_of(defense="layer_norm"), data, outputs=10, observers=[trace]).run()
    first = next(iter(trace))
    cut = torch.frombuffer(bytearray(first.payload), dtype=torch.float32).view(-1, 8)
    torch.testing.assert_close(cut.mean(1), torch.zeros(len(cut)), atol=1e-5, rtol=0)


def test_the_global_generator_is_left_alone(data):
    before = torch.random.get_rng_state()
    LocalSession(experiment_of(codec="randtopk:k=3"), data, outputs=10).run()
    assert torch.equal(torch.random.get_rng_state(), before)
