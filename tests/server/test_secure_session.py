"""Secure sums through whole federated sessions: keys from files, restarts, refusals, predictions.

Streams are real; only Flower's part is played by a stand-in.
"""

import csv
from collections import defaultdict

import numpy as np
import pytest
from played_session import PARTY, Noting, PlayedSession, largest, note_limits, stand_in
from stand_in_flower import Flower

from vfl.core.errors import LostPeerError, MissingPartyError, PeerFailedError
from vfl.core.frame import Kind
from vfl.core.storage import read_json
from vfl.mpc.secure import shared_layer
from vfl.mpc.secure.beaver import ShareHolder
from vfl.mpc.secure.sum import MaskedCut
from vfl.session.store.identity import Identity
from vfl.session.store.session_ledger import Meter

PARTIES = ("bank", "shop")
EXPERIMENT = {
    "merge": "sum",
    "secure": "sum",
    "parties": {name: {"width": 4, "bottom": "mlp:hidden=8"} for name in PARTIES},
    "label": {"party": "lender", "top": "linear"},
    "train": {"epochs": 2, "batch_size": 20, "checkpoint_every": 3},
    "federation": {"rejoin_window_s": 0.2, "step_timeout_s": 60.0, "max_restarts": 0},
}

SHORT = EXPERIMENT["federation"] | {"join_timeout_s": 0.3}


class Session(PlayedSession):
    """Folders of three parties, and a way to play a session between them."""

    def __init__(self, folder, flower):
        super().__init__(folder, flower, EXPERIMENT)
        self.write_tables(PARTIES)
        self.introduce(*PARTIES)

    def write(self, name, more):
        super().write(name, PARTY.format(name=name, more=more))


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path, Flower(PARTIES))


def sent(seen, kind, party="bank"):
    return [(step, payload) for one, way, of, step, payload in seen
            if (one, way, of) == (party, "up", kind)]  # fmt: skip


def test_a_training_and_a_prediction_use_keys_of_their_own(session):
    seen = session.play()
    assert [len(payload) for _, payload in sent(seen, Kind.PROTOCOL)] == [104]
    assert len(sent(seen, Kind.CUT)) == 2 * 5
    assert all(len(payload) == 4 * 4 * 20 for _, payload in sent(seen, Kind.CUT)[:4])
    assert read_json(session.run / "summary.json")["weights_sha256"]
    asked = session.play(mode="predict")
    assert sent(asked, Kind.PROTOCOL) != sent(seen, Kind.PROTOCOL)
    ((_, query),) = sent(asked, Kind.QUERY)
    assert len(query) == 4 * 4 * 120
    assert (session.run / "predictions.csv").stat().st_mode & 0o077 == 0
    with (session.run / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120
    # The party files name no other rows to predict: those of the training are among them.
    counts = read_json(session.run / "parties" / "lender" / "card.json")["data"]["rows"]
    assert [row["trained"] for row in rows].count("yes") == counts["train"] > 0


SHARED = {
    "secure": "beaver",
    "parties": {name: {"width": 4, "bottom": "mlp:hidden=none"} for name in PARTIES},
    "train": EXPERIMENT["train"] | {"optimizer": "sgd", "momentum": 0, "learning_rate": 0.1},
}


def test_a_training_and_a_prediction_with_shared_first_layers(session):
    seen = session.play(**SHARED)
    assert [len(payload) for _, payload in sent(seen, Kind.PROTOCOL)] == [104, 4]
    cuts, openings = sent(seen, Kind.CUT), sent(seen, Kind.OPENING)
    assert len(cuts) == len(openings) == 2 * 5
    assert all(len(payload) == 8 * 4 * 20 for _, payload in cuts[:4])
    assert all(len(payload) == 8 * (20 * 3 + 3 * 4) + 2 * 16 for _, payload in openings[:4])
    before = read_json(session.run / "summary.json")
    session.play(mode="evaluate", **SHARED)
    after = read_json(session.run / "evaluations/0001.json")
    assert after["test_loss"] == before["test_loss"]
    asked = session.play(mode="predict", **SHARED)
    ((_, opened),) = sent(asked, Kind.QUERY_OPENING)
    assert len(opened) == 8 * (120 * 3 + 3 * 4) + 2 * 16
    with (session.run / "predictions.csv").open() as file:
        assert len(list(csv.reader(file))) == 1 + 120


@pytest.mark.parametrize(
    ("limit", "what"),
    [
        # Its own layer has 3 columns with that of ones, 4 wide; so has the other one.
        ("max_parameters = 20", "24 parameters"),
        ("max_memory_bytes = 40000", "bytes of memory for shares"),
    ],
)
def test_the_share_of_anothers_layer_counts_before_it_is_made(session, monkeypatch, limit, what):
    made, first = [], shared_layer.first_weights
    monkeypatch.setattr(
        shared_layer, "first_weights", lambda *about: made.append(about) or first(*about)
    )
    for name in PARTIES:
        session.write(name, f"[consent]\n{limit}")
    with pytest.raises(PeerFailedError, match="does not consent"):
        session.play(**SHARED)
    refusals = [error for error in session.flower.failures if error.code == "V403"]
    assert refusals
    assert all(what in refusal.got for refusal in refusals)
    assert not made
    assert not sent(Noting.seen, Kind.OPENING, "shop")


def test_everybody_reserves_what_an_epoch_with_shared_layers_can_take(session, monkeypatch):
    """So the account of a session that is killed holds the bytes of the epoch it was in."""
    reserved, spent = defaultdict(list), Meter.spent

    def noting(meter, *, coming):
        if coming:
            reserved[id(meter)].append((meter.most, meter.bytes["up"], meter.bytes["down"]))
        return spent(meter, coming=coming)

    monkeypatch.setattr(Meter, "spent", noting)
    session.play(**SHARED)
    assert [len(epochs) for epochs in reserved.values()] == [2, 2, 2]
    for (most, *before), (_, *after) in reserved.values():
        taken = [end - start for start, end in zip(before, after, strict=True)]
        assert 0 < taken[0] <= most.bytes_up
        assert 0 < taken[1] <= most.bytes_down


SAID_ONCE = (Kind.DONE, Kind.PROTOCOL)  # reports, and keys of several lengths under one kind


@pytest.mark.parametrize(
    "settings", [{}, {"secure": "sum:bits=8"}, SHARED], ids=["sum", "sum8", "beaver"]
)
def test_limits_leave_no_byte_to_spare(session, monkeypatch, settings):
    for mode in ("train", "predict"):
        with monkeypatch.context() as patched:
            limits = note_limits(patched)
            crossed = largest(session.play(mode=mode, **settings))
        assert len(crossed) >= 10
        for (party, way, kind), size in crossed.items():
            most = getattr(limits[party], way)[kind]
            assert size <= most
            if kind not in (*SAID_ONCE, Kind.ACK, Kind.GRAD) or (
                kind is Kind.GRAD and "train" in settings
            ):
                assert size == most, (mode, party, way, kind)


def test_a_party_that_allows_fewer_bytes_than_shared_layers_take_refuses(session):
    """It cannot know how many before it is told the other layer's columns; no input has left."""
    session.write("shop", "[consent]\nmax_bytes = 20000")
    refusal = session.refusal(**SHARED)
    assert refusal.want == "bytes <= 20000"
    assert not sent(Noting.seen, Kind.OPENING, "shop")


def test_shared_first_layers_go_on_after_a_lost_party(session, monkeypatch):
    left = [1]
    answer = ShareHolder.answer

    def dying(end, step):
        if end.party == "shop" and step == 8 and left:
            left.pop()
            raise SystemExit
        answer(end, step)

    monkeypatch.setattr(ShareHolder, "answer", dying)
    federation = EXPERIMENT["federation"] | {"max_restarts": 1}
    seen = session.play(federation=federation, **SHARED)
    opened = sent(seen, Kind.OPENING)
    steps = [step for step, _ in opened]
    again = {step for step in steps if steps.count(step) == 2}
    assert again, "the second attempt went back to exchange 6"
    assert len({payload for _, payload in opened}) == len(opened)
    assert read_json(session.run / "summary.json")["weights_sha256"]


class Dies:
    """Ends the process of a party, as far as a thread can, when it is about to send a cut."""

    def __init__(self, monkeypatch, party, step, times, then=lambda: None):
        self.left = times
        encode = MaskedCut.encode

        def dying(codec, cut, context):
            if codec._party == party and context.step == step and self.left:
                self.left -= 1
                then()
                raise SystemExit
            return encode(codec, cut, context)

        monkeypatch.setattr(MaskedCut, "encode", dying)


def test_after_a_lost_party_the_next_attempt_has_new_keys(session, monkeypatch):
    Dies(monkeypatch, "shop", step=8, times=1)
    federation = EXPERIMENT["federation"] | {"max_restarts": 1}
    seen = session.play(federation=federation)
    cuts = sent(seen, Kind.CUT)
    again = {step for step, _ in cuts if [one for one, _ in cuts].count(step) == 2}
    assert again, "the second attempt went back to exchange 6"
    for step in again:
        first, second = (np.frombuffer(each, "<u4") for one, each in cuts if one == step)
        assert not np.any(first == second)
    assert len(sent(seen, Kind.PROTOCOL)) == 2
    assert "restart 1 of 1" in (session.run / "notes.txt").read_text()
    assert read_json(session.run / "summary.json")["weights_sha256"]


def test_a_damaged_checkpoint_of_one_party_sends_all_back_to_an_older_one(session, monkeypatch):
    own = session.folder / "shop" / "store" / "runs" / "run" / "parties" / "shop" / "checkpoints"

    def damage():
        newest = max(own.glob("*.checkpoint"))
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)

    Dies(monkeypatch, "shop", step=8, times=1, then=damage)
    session.play(federation=EXPERIMENT["federation"] | {"max_restarts": 1})
    notes = (session.run / "notes.txt").read_text()
    assert "restart 1 of 1, from exchange 6" in notes
    assert "stopped with V009" in notes
    assert "the session returns to an older checkpoint" in notes
    assert "checkpoint 6 cannot be used; the training continues from exchange 3" in notes
    assert read_json(session.run / "summary.json")["weights_sha256"]
    assert any(error.code == "V009" for error in session.flower.failures)


def test_a_party_that_stays_away_ends_the_session_with_its_name(session, monkeypatch):
    Dies(monkeypatch, "shop", step=3, times=9)
    with pytest.raises(LostPeerError, match="'shop'"):
        session.play()


def test_an_identity_that_is_not_the_pinned_one_stops_before_the_first_cut(session):
    Identity.fresh().public.keep_at(session.folder / "shop" / "peers" / "bank.pub")
    with pytest.raises(PeerFailedError, match="V404"):
        session.play()
    assert not sent(Noting.seen, Kind.CUT, "shop")
    assert any("'bank'" in error.what and error.code == "V404" for error in session.flower.failures)


def test_a_missing_key_is_told_at_its_owner_only(session):
    (session.folder / "shop" / "peers" / "bank.pub").unlink()
    with pytest.raises(PeerFailedError, match="its own log says why"):
        session.play()
    errors = {error.code: str(error) for error in session.flower.failures}
    assert "peers/bank.pub" in errors["V201"]


def test_a_partys_own_trace_of_masked_cuts_is_refused(session):
    session.write("bank", '[trace]\nphases = ["train"]')
    with pytest.raises(MissingPartyError):  # the stand-in brings no replies
        session.play(federation=SHORT)
    assert "V601" in [error.code for error in session.flower.failures]


def test_a_party_can_insist_on_a_secure_sum(session):
    session.write("shop", '[consent]\nsecure = ["sum*"]')
    refusal = session.refusal(secure="none")
    assert refusal.got == "secure none"
