"""A network that nobody holds, trained by whole federated sessions: both places of the labels.

Streams are real; only Flower's part is played by a stand-in.
"""

import json
import shutil
import time

import numpy as np
import pandas as pd
import pytest
from played_session import PlayedSession, stand_in
from stand_in_flower import Flower

from vfl.clients.whole_network import WholeNetworkParty
from vfl.core.errors import MissingPartyError, PeerFailedError
from vfl.core.frame import Kind
from vfl.core.storage import read_json
from vfl.session.store.session_ledger import SessionLedger

TABLE = '[data]\nsource = "data.csv"\nid = "id"\n'
ROWS = 120
TRAIN = {
    "epochs": 3,
    "batch_size": 20,
    "checkpoint_every": 3,
    "optimizer": "sgd",
    "momentum": 0,
    "learning_rate": 1.0,
}
FEDERATION = {"rejoin_window_s": 0.2, "step_timeout_s": 60.0, "max_restarts": 0}


def content(names, secure):
    return {
        "merge": "concat",
        "secure": secure,
        "data": {"validation": 0},
        "parties": {name: {"width": 2, "bottom": "identity"} for name in names},
        "label": {"party": "lender", "top": "linear"},
        "train": TRAIN,
        "federation": FEDERATION,
    }


class Session(PlayedSession):
    """Folders of three parties: two with columns, and a lender or a notary as the third."""

    def __init__(self, folder, helper):
        self.others = ("bank", "shop") if helper == "lender" else ("bank", "notary")
        holders = ("bank", "shop") if helper == "lender" else ("bank", "lender")
        secure = "permuted" if helper == "lender" else "permuted:dealer=notary"
        super().__init__(folder, Flower(self.others), content(holders, secure))
        draw = np.random.default_rng(0)
        columns = draw.normal(size=(ROWS, 4))
        tables = dict(zip(holders, (columns[:, :2], columns[:, 2:]), strict=True))
        label = (columns.sum(1) > 0).astype(int)
        for name in {*self.others, "lender"}:
            (folder / name).mkdir()
            table = pd.DataFrame({"id": [f"r{row:03}" for row in range(ROWS)]})
            if name in tables:
                table["a"], table["b"] = tables[name].T
            if name == "lender":
                table["paid"] = label
            if name == "notary":
                self.write(name, 'role = "dealer"\n')
                continue
            table.to_csv(folder / name / "data.csv", index=False)
            table.drop(columns="paid", errors="ignore").to_csv(
                folder / name / "new.csv", index=False
            )
            more = 'label = "paid"\n' if name == "lender" else ""
            self.write(name, f'{TABLE}{more}predict = "new.csv"\n')
        self.introduce(*self.others)

    def write(self, name, more):
        super().write(name, f'party = "{name}"\n{more}\n')


@pytest.fixture(params=["lender", "notary"])
def session(request, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path, request.param)


def test_a_training_an_evaluation_and_a_prediction(session):
    seen = session.play()
    assert not session.flower.failures
    before = read_json(session.run / "summary.json")
    assert before["test_accuracy"] > 0.6  # 24 rows, keys of its own each time
    kinds = {kind for _, _, kind, _, _ in seen}
    assert kinds == {Kind.PROTOCOL, Kind.OPENING, Kind.DONE}
    relayed = {
        way: [payload for _, direction, kind, _, payload in seen
              if (direction, kind) == (way, Kind.OPENING)]
        for way in ("up", "down")
    }  # fmt: skip
    assert sorted(relayed["up"]) == sorted(relayed["down"])
    for name in session.others:
        kept = session.folder / name / "store" / "runs" / "run" / "parties" / name
        told = read_json(kept / "disclosed-train.json")
        assert all(row["party"] == name for row in told["sent"])
        assert not any("result" in one["what"] for one in told["disclosed"])
        assert (kept / "weights.safetensors").exists() == (name != "notary")
    session.play(mode="evaluate")
    after = read_json(session.run / "evaluations/0001.json")
    assert after["test_accuracy"] == before["test_accuracy"]
    session.play(mode="predict")
    assert len(pd.read_csv(session.run / "predictions.csv")) == ROWS


def lose(monkeypatch, name):
    """This party's process ends once, at exchange 8."""
    left, play = [1], WholeNetworkParty.play

    def dying(party, start, through, *more):
        def until(schedule):
            for exchange in through(schedule):
                if exchange.step == 8 and party.name == name and left:
                    left.pop()
                    raise SystemExit
                yield exchange

        return play(party, start, until, *more)

    monkeypatch.setattr(WholeNetworkParty, "play", dying)


ONE_MORE = FEDERATION | {"max_restarts": 1, "restart_timeout_s": 20.0}


@pytest.mark.parametrize(("session", "place"), [("lender", 0), ("notary", 1)], indirect=["session"])
def test_a_training_goes_on_when_a_party_was_lost(session, monkeypatch, place):
    """At its next attempt everybody goes back to the last checkpoint that was committed.

    It begins while the one before still writes its account, and has the party's folder.
    """
    spend = SessionLedger._spend

    def slowly(ledger, *about, checked):
        time.sleep(0.0 if checked else 0.3)
        spend(ledger, *about, checked=checked)

    monkeypatch.setattr(SessionLedger, "_spend", slowly)
    lose(monkeypatch, session.others[place])
    seen = session.play(federation=ONE_MORE)
    offers = [payload for _, way, kind, step, payload in seen
              if (way, kind, step) == ("up", Kind.PROTOCOL, 0) and len(payload) == 104]  # fmt: skip
    assert len(set(offers)) == 2 * 2, "both attempts have keys of their own"
    notes = (session.run / "notes.txt").read_text()
    assert "restart 1 of 1, from exchange 6" in notes
    assert read_json(session.run / "summary.json")["test_accuracy"] > 0.75
    lines = (session.run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["epoch"] == 3


@pytest.mark.parametrize("session", ["lender"], indirect=True)
@pytest.mark.parametrize(
    "limit",
    [
        "max_parameters = 4",
        "max_bytes = 5000",
        'secure = ["permuted:mode=thesis*"]',
    ],
)
def test_what_a_party_does_not_consent_to_ends_the_session(session, limit):
    session.write("bank", f"{TABLE}\n[consent]\n{limit}\n")
    with pytest.raises((PeerFailedError, MissingPartyError)):  # on the stream, or before it joins
        session.play(federation=FEDERATION | {"join_timeout_s": 60.0})
    assert "V403" in {error.code for error in session.flower.failures}


@pytest.mark.parametrize("session", ["notary"], indirect=True)
def test_what_an_attempt_before_sent_counts_too(session, monkeypatch):
    """Two attempts, each with its setup, send more than one: no limit that one meets is enough."""
    (party, *_) = session.others
    folder = session.folder / party / "store"
    session.play()
    (entry,) = SessionLedger(folder / "sessions", party).entries()
    alone = entry.spent["train"].bytes_up + entry.spent["train"].bytes_down
    for name in (*session.others, "lender"):
        shutil.rmtree(session.folder / name / "store")
    session.write(party, f"{TABLE}\n[consent]\nmax_bytes = {alone + 2000}\n")
    lose(monkeypatch, session.others[1])
    with pytest.raises(PeerFailedError, match="does not consent to continue"):
        session.play(federation=ONE_MORE)
