"""What is recorded: exactly what crossed, at the party it crossed, through kills and resumes."""

import numpy as np
import pytest

from vfl.core.errors import RunFolderError
from vfl.core.frame import Frame, Kind
from vfl.core.storage import weights_digest
from vfl.session import rules
from vfl.session.trace import Recorder, read, recorder

LAST = 21  # three epochs of six batches and a validation query, and the test rows


def test_a_trace_holds_the_bytes_that_crossed(training):
    training.session().run()
    assert training.frames("lender") == training.heard
    assert len(training.heard) == 2 * (2 * 18 + 3 + 1)


@pytest.mark.parametrize("party", ["bank", "shop"])
def test_a_feature_party_holds_its_own_side_only(training, party):
    training.session().run()
    assert training.frames(party) == [frame for frame in training.heard if frame[0] == party]
    assert training.read(party).party == party
    states = [set(snapshot.weights) for snapshot in training.read(party).snapshots()]
    assert not any(name.startswith("top") for state in states for name in state)


def test_every_frame_says_which_rows_it_is_about(training):
    session = training.session().run()
    schedule = {one.step: one for one in rules.schedule(session.terms, session.label.data.split)}
    assert max(schedule) == LAST
    for frame in training.read("lender").frames():
        exchange = schedule[frame.step]
        assert (frame.phase, frame.epoch) == (exchange.phase, exchange.epoch)
        assert frame.rows.dtype == np.int64
        assert np.array_equal(frame.rows, exchange.rows)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"phases": ["validation"]}, {("validation", epoch) for epoch in (1, 2, 3)}),
        ({"phases": ["test"]}, {("test", 3)}),
        ({"phases": ["train", "test"], "epochs": [2]}, {("train", 2), ("test", 3)}),
        ({"snapshots": 1}, set()),
    ],
)
def test_only_what_was_asked_for(training, settings, kept):
    training.session(trace=settings).run()
    for party in ("bank", "lender"):
        assert {(one.phase, one.epoch) for one in training.read(party).frames()} == kept


def test_a_trace_changes_nothing(training):
    traced = training.session().run().weights_digest()
    assert traced == training.session(trace={}).run().weights_digest()


def test_snapshots_are_the_weights_at_their_epochs(training):
    seen = {}
    session = training.session()
    first = weights_digest(session.clients[0].weights())
    session.label.progress._on_epoch = lambda record: seen.setdefault(
        record["epoch"], weights_digest(session.clients[0].weights())
    )
    session.run()
    snapshots = list(training.read("bank").snapshots())
    assert [(one.epoch, one.step) for one in snapshots] == [(0, 0), (2, 14), (3, 22)]
    assert weights_digest(snapshots[0].weights) == first
    assert weights_digest(snapshots[1].weights) == seen[2]
    assert weights_digest(snapshots[2].weights) == weights_digest(session.weights()["bank"])


def everything(training):
    """All that the three parties hold: frames, and what each snapshot is."""
    return {
        party: (
            training.frames(party),
            [(one.epoch, one.step, weights_digest(one.weights)) for one in own.snapshots()],
        )
        for party in ("bank", "shop", "lender")
        for own in [training.read(party)]
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, training_in):
    other = training_in(tmp_path_factory.mktemp("undisturbed"))
    other.session().run()
    return everything(other)


@pytest.mark.parametrize("kills", [[2], [7, 8, 9, 13, 21], [14, 15, 16, 17]])
@pytest.mark.parametrize("held_bytes", [1000, 10**9], ids=["some", "epoch"])
def test_kills_and_resumes_leave_the_trace_of_an_undisturbed_run(
    training, undisturbed, killed, monkeypatch, kills, held_bytes
):
    monkeypatch.setattr(recorder, "HELD_BYTES", held_bytes)
    for step in kills:
        training.kill_at = step
        with pytest.raises(killed):
            training.session().run()
    training.kill_at = None
    training.session().run()
    assert everything(training) == undisturbed


DEEP = {"train": {"epochs": 3, "batch_size": 40, "checkpoint_every": 4, "in_flight": 3}}


def test_kills_with_several_in_flight_leave_that_trace_too(training, training_in, tmp_path, killed):
    whole = training_in(tmp_path / "whole")
    whole.session(**DEEP).run()
    for step in (6, 9, 10, 17):
        training.kill_at = step
        with pytest.raises(killed):
            training.session(**DEEP).run()
    training.kill_at = None
    training.session(**DEEP).run()
    assert everything(training) == everything(whole)


def test_an_early_stop_ends_the_trace_with_the_epoch_it_came_after(training):
    """A learning rate that large makes the loss rise at once."""
    hasty = {"epochs": 9, "batch_size": 40, "learning_rate": 0.3, "patience": 1, "keep": "best"}
    session = training.session(train=hasty, trace={"phases": ["test"], "snapshots": 1}).run()
    end = session.label.history[-1]["epoch"]
    snapshots = list(training.read("bank").snapshots())
    assert [one.epoch for one in snapshots] == list(range(end + 1))
    assert end < 9
    assert weights_digest(snapshots[-1].weights) == session.clients[0].weights_digest()


def test_a_resumed_run_keeps_its_settings(training, killed):
    training.kill_at = 12
    with pytest.raises(killed):
        training.session().run()
    training.kill_at = None
    with pytest.raises(RunFolderError, match="begun with other settings"):
        training.session(trace={"phases": ["train"]}).run()


def test_memory_stays_bounded(training, monkeypatch):
    """Never more than the limit and one frame are held."""
    monkeypatch.setattr(recorder, "HELD_BYTES", 1500)
    held = []
    write = recorder.Recorder._write

    def watched(self):
        held.append(sum(len(one.payload) for one in self._held))
        write(self)

    monkeypatch.setattr(recorder.Recorder, "_write", watched)
    training.session(codec="none").run()
    assert 1500 < max(held) <= 1500 + 4 * 8 * 60
    assert training.frames("lender") == training.heard


def test_frames_that_are_on_their_way_at_a_checkpoint(training, data, tmp_path):
    """A gradient that comes after the checkpoint comes again after going back to it."""
    session = training.session()
    settings, split = session._recorders["bank"][0]._settings, data["bank"].split

    def record(start, upto, checkpoint=None):
        """Each cut leaves before the gradient of the one before it has come."""
        own = Recorder(tmp_path / "pipelined", "bank", settings, session.terms, split)
        own.begin(start, dict)
        for exchange in own.follow(rules.schedule(session.terms, split, start)):
            if exchange.step == checkpoint:
                own.save(checkpoint)
            own("bank", "up", Frame(Kind.CUT, exchange.step, b"cut %d" % exchange.step))
            before = exchange.step - 1
            if before >= 0:
                own("bank", "down", Frame(Kind.GRAD, before, b"gradient %d" % before))
            if exchange.step == upto:
                break
        own.end()
        return [one.payload.decode() for one in read(tmp_path / "pipelined").frames()]

    whole = record(start=0, upto=5)
    assert whole[-3:] == ["gradient 3", "cut 5", "gradient 4"]
    (tmp_path / "pipelined").rename(tmp_path / "whole")
    record(start=0, upto=4, checkpoint=3)
    assert record(start=3, upto=5) == whole
