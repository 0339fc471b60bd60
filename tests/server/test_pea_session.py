"""Rows that nobody shows, trained on by whole federated sessions of three holders and a dealer.

Streams are real; only Flower's part is played by a stand-in.
"""

import json
import socket

import numpy as np
import pandas as pd
import pytest
from played_session import PlayedSession, stand_in
from safetensors.torch import load_file
from stand_in_flower import Flower

from vfl.clients.whole_network import WholeNetworkParty
from vfl.core.errors import MissingPartyError, PeerFailedError
from vfl.core.frame import Kind
from vfl.core.storage import read_json
from vfl.mpc.secure import pea
from vfl.transport import TcpLink

TABLE = '[data]\nsource = "data.csv"\nid = "id"\n'
HOLDERS = ("lender", "bank", "shop")
ROWS = {"lender": 100, "bank": 60, "shop": 80}
FEDERATION = {"rejoin_window_s": 0.2, "step_timeout_s": 60.0, "max_restarts": 0}


class Session(PlayedSession):
    """Folders of three holders, each with rows of its own or columns of its own, and a notary."""

    def __init__(self, folder, divided):
        self.divided, self.others = divided, ("bank", "shop", "notary")
        content = {
            "secure": f"pea:dealer=notary,divided={divided}",
            "data": {"validation": 0},
            "parties": {name: {"bottom": "identity"} for name in HOLDERS},
            "label": {"party": "lender", "top": "linear"},
            "train": {
                "epochs": 2,
                "batch_size": 110 if divided == "rows" else 50,
                "checkpoint_every": 2,
                "optimizer": "sgd",
                "momentum": 0,
                "learning_rate": 1.0,
            },
            "dp": {"noise": 0.01, "clip": 2.0, "delta": 1e-5},
            "federation": FEDERATION,
        }
        super().__init__(folder, Flower(self.others), content)
        draw = np.random.default_rng(0)
        for place, name in enumerate(HOLDERS):
            (folder / name).mkdir()
            self.own_rows(name, place, draw) if divided == "rows" else self.own_columns(name, place)
            self.write(name)
        (folder / "notary").mkdir()
        self.write("notary", 'role = "dealer"\n')
        self.introduce(*self.others)

    def own_rows(self, name, place, draw):
        """A table with the columns and labels of all; what is asked about is the label party's."""
        numbers = draw.normal(size=(ROWS[name], 3))
        table = pd.DataFrame(numbers, columns=list("abc"))
        table.insert(0, "id", [f"{name}{row:03}" for row in range(ROWS[name])])
        table["paid"] = np.where(numbers[:, 0] > 0, "yes", "no")
        table.to_csv(self.folder / name / "data.csv", index=False)

    def own_columns(self, name, place):
        numbers = np.random.default_rng(1).normal(size=(120, 3))
        table = pd.DataFrame({"id": [f"r{row:03}" for row in range(120)], "a": numbers[:, place]})
        if name == "lender":
            table["paid"] = np.where(numbers.sum(1) > 0, "yes", "no")
        table.to_csv(self.folder / name / "data.csv", index=False)

    def write(self, name, more=None):
        if more is None:
            labels = self.divided == "rows" or name == "lender"
            more = TABLE + ('label = "paid"\n' if labels else "")
        super().write(name, f'party = "{name}"\n{more}\n')

    def kept(self, name):
        return self.folder / name / "store" / "runs" / "run" / "parties" / name


@pytest.fixture(params=["rows", "columns"])
def session(request, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path, request.param)


def models(session):
    """What each holder keeps."""
    files = [load_file(session.kept(name) / "weights.safetensors") for name in HOLDERS]
    return [model for file in files for model in file.values()]


def test_a_training_an_evaluation_and_a_prediction(session):
    session.play()
    assert not session.flower.failures
    first, *others = models(session)
    assert first.shape == (4, 2)
    assert all(other.equal(first) for other in others), "every holder has the same model"
    assert not (session.kept("notary") / "weights.safetensors").exists()
    summary = read_json(session.run / "summary.json")
    assert summary["test_accuracy"] > 0.8
    for name in HOLDERS:
        (state,) = read_json(session.kept(name) / "card.json")["privacy"]["states"]
        assert state == summary["privacy"][0]
    for name in ("bank", "shop"):
        told = read_json(session.kept(name) / "disclosed-train.json")["disclosed"]
        assert any("result, model" in one["what"] for one in told)
    session.play(mode="evaluate")
    after = read_json(session.run / "evaluations/0001.json")
    assert after["test_accuracy"] == summary["test_accuracy"]
    session.play(mode="predict")
    rows = 100 if session.divided == "rows" else 120
    assert len(pd.read_csv(session.run / "predictions.csv")) == rows


def offers(seen):
    """Public keys, of which every party offers one an attempt."""
    first = [payload for _, way, kind, step, payload in seen
             if (way, kind, step) == ("up", Kind.PROTOCOL, 0)]  # fmt: skip
    return {payload for payload in first if len(payload) == 104}


def lose(monkeypatch, name, at):
    """This party's process ends once, at an exchange."""
    left, play = [1], WholeNetworkParty.play

    def dying(party, start, through, *more):
        def until(schedule):
            for exchange in through(schedule):
                if exchange.step == at and party.name == name and left:
                    left.pop()
                    raise SystemExit
                yield exchange

        return play(party, start, until, *more)

    monkeypatch.setattr(WholeNetworkParty, "play", dying)


@pytest.mark.parametrize("session", ["rows"], indirect=True)
@pytest.mark.parametrize("name", ["bank", "notary"])
def test_a_training_goes_on_when_a_party_was_lost(session, monkeypatch, name):
    lose(monkeypatch, name, 4)
    more = FEDERATION | {"max_restarts": 1, "restart_timeout_s": 20.0}
    seen = session.play(federation=more)
    assert len(offers(seen)) == 2 * 3, "both attempts have keys of their own"
    assert "restart 1 of 1, from exchange 2" in (session.run / "notes.txt").read_text()
    assert read_json(session.run / "summary.json")["test_accuracy"] > 0.8
    first, *others = models(session)
    assert all(other.equal(first) for other in others)
    lines = (session.run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["epoch"] == 2


@pytest.mark.parametrize("session", ["rows"], indirect=True)
def test_a_stream_that_is_cut_goes_on_where_it_was(session, monkeypatch):
    """Frames that were lost are sent again as they were: no new attempt, no new mask."""
    links, attach = [], TcpLink._attach

    def noting(link, *about):
        links.append(link)
        return attach(link, *about)

    monkeypatch.setattr(TcpLink, "_attach", noting)
    step, steps = pea.train_step, []

    def cutting(member, *rest):
        if member.role == 1:
            steps.append(1)
            if len(steps) == 3:
                for link in links[:3]:
                    socket.socket.shutdown(link._stream._socket, socket.SHUT_RDWR)
        return step(member, *rest)

    monkeypatch.setattr(pea, "train_step", cutting)
    seen = session.play(federation=FEDERATION | {"rejoin_window_s": 20.0})
    assert not session.flower.failures
    assert len(links) >= 2 * 3, "every outer party came back"
    assert len(offers(seen)) == 3
    assert read_json(session.run / "summary.json")["test_accuracy"] > 0.8
    first, *others = models(session)
    assert all(other.equal(first) for other in others)


@pytest.mark.parametrize("session", ["rows"], indirect=True)
@pytest.mark.parametrize(
    "limit",
    ["max_parameters = 4", "max_dp_epsilon = 1.0", "max_bytes = 100000",
     'secure = ["pea:dealer=registry*"]'],
)  # fmt: skip
def test_what_a_party_does_not_consent_to_ends_the_session(session, limit):
    session.write("bank", f'{TABLE}label = "paid"\n[consent]\n{limit}\n')
    with pytest.raises((PeerFailedError, MissingPartyError)):
        session.play(federation=FEDERATION | {"join_timeout_s": 60.0})
    assert "V403" in {error.code for error in session.flower.failures}
