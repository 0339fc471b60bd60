"""Early stopping and the best weights: one decision at the label party, the same at everybody."""

import numpy as np
import pytest
import torch
from killing import Killed

from vfl.config import Experiment
from vfl.core.errors import ProtocolError
from vfl.core.storage import read_json, read_lines
from vfl.datasets import Dealing, load_bundled
from vfl.session import EarlyStopping, Exchange
from vfl.training.local import LocalSession
from vfl.training.run import train

PARTIES = ("left", "right")
#: So fast that the validation loss soon rises again.
FAST = {"epochs": 30, "batch_size": 20, "learning_rate": 0.03, "checkpoint_every": 9}


def experiment(**train):
    return Experiment.model_validate(
        {
            "parties": {name: {"width": 8, "bottom": "mlp:hidden=16"} for name in PARTIES},
            "train": FAST | train,
        }
    )


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, "label", Dealing(0, limit=300))


def session(data, folder=None, observers=(), **settings):
    return LocalSession(
        experiment(**settings), data, outputs=10, checkpoints=folder, observers=observers
    )


@pytest.fixture(scope="module")
def whole(data):
    return session(data).run()


def losses(played):
    return [record["validation_loss"] for record in played.label.history]


def patient(values, patience):
    """Epoch after which a training with these losses stops, by looking back."""
    for epoch in range(1, len(values) + 1):
        best = int(np.argmin(values[:epoch])) + 1
        if epoch - best >= patience:
            return epoch
    return len(values)


@pytest.mark.parametrize("patience", [1, 4])
def test_it_stops_once_patience_is_at_an_end(data, whole, patience):
    """Without it the losses of the same seed say where that must be."""
    stopped = session(data, patience=patience, keep="best").run()
    end = patient(losses(whole), patience)
    assert 1 < end < FAST["epochs"]
    assert losses(stopped) == losses(whole)[:end]
    assert [record["epoch"] for record in stopped.label.history] == list(range(1, end + 1))
    assert "test_accuracy" in stopped.label.history[-1]
    best = int(np.argmin(losses(whole)[:end])) + 1
    assert stopped.label.history[-1]["best_epoch"] == best
    assert stopped.weights_digest() == session(data, epochs=best).run().weights_digest()


def test_the_best_weights_are_those_of_a_training_that_ends_there(data, whole):
    best = int(np.argmin(losses(whole))) + 1
    kept = session(data, keep="best").run()
    short = session(data, epochs=best).run()
    assert 1 < best < FAST["epochs"]
    assert kept.weights_digest() == short.weights_digest() != whole.weights_digest()
    assert kept.label.history[-1]["test_loss"] == short.label.history[-1]["test_loss"]


def test_one_byte_an_epoch_is_what_it_costs(data, whole):
    judged = session(data, keep="best").run()
    more = judged.ledger.total_bytes("down") - whole.ledger.total_bytes("down")
    assert more == FAST["epochs"] * len(PARTIES)


@pytest.mark.parametrize(("in_flight", "share"), [(1, 0.4), (5, 0.7)])
def test_an_interrupted_run_stops_and_ends_alike(data, tmp_path, share, in_flight):
    settings = {"patience": 2, "keep": "best", "in_flight": in_flight}
    undisturbed = session(data, **settings).run()

    def kill(party, direction, frame):
        if frame.step >= share * undisturbed.label.progress.train_steps:
            raise Killed

    with pytest.raises(Killed):
        session(data, tmp_path, [kill], **settings).run()
    resumed = session(data, tmp_path, **settings).run()
    assert resumed.weights_digest() == undisturbed.weights_digest()
    assert losses(resumed) == losses(undisturbed)


def test_the_run_folder_says_where_it_stopped(tmp_path):
    settings = experiment(patience=2, keep="best").model_copy(
        update={"data": experiment().data.model_copy(update={"rows": 300})}
    )
    train(settings, tmp_path, "run")
    records = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["epochs"] == len(records) < FAST["epochs"]
    assert summary["best_epoch"] == int(np.argmin([r["validation_loss"] for r in records])) + 1


@pytest.mark.parametrize("setting", [{"patience": 1}, {"keep": "best"}])
def test_without_validation_rows_there_is_nothing_to_judge_by(setting):
    content = experiment(**setting).model_dump()
    content["data"]["validation"] = 0.0
    with pytest.raises(ValueError, match=r"data\.validation"):
        Experiment.model_validate(content)


def exchange(phase="validation", epoch=1, last=True):
    return Exchange(7, phase, epoch, np.arange(3), last)


@pytest.mark.parametrize(
    ("settings", "answer", "when"),
    [
        ({}, b"\1", exchange()),
        ({"keep": "best"}, b"", exchange()),
        ({"keep": "best"}, b"\3", exchange()),
        ({"keep": "best"}, b"\1\1", exchange()),
        ({"keep": "best"}, b"\1", exchange(last=False)),
        ({"keep": "best"}, b"\1", exchange("test")),
    ],
)
def test_an_answer_that_was_not_agreed_is_refused(settings, answer, when):
    state = {"w": torch.zeros(2)}
    stopping = EarlyStopping(experiment(**settings).train, lambda: state, lambda best: None)
    with pytest.raises(ProtocolError, match="does not have the agreed form"):
        stopping.obey(answer, when)
    assert stopping.best_epoch == stopping.stopped == 0
