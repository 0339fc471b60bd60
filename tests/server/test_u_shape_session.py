"""A party in the middle, over real streams: what is learned, who can read what, who consents."""

import re

import numpy as np
import pandas as pd
import pytest
from played_session import stand_in
from taken_session import FEATURES, IDS, ROWS, SHARED, with_middle

from vfl.core.errors import ConfigError, VFLError
from vfl.core.frame import Frame, Kind
from vfl.core.storage import read_json
from vfl.session.relay import PairSeals, SealedLinks

MIDDLE = "compute"
MODEL = {"party": MIDDLE, "width": 6, "model": "mlp:hidden=8,last=relu"}
CONSENT = '[consent]\nmiddle = ["compute"]\n'


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return with_middle(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "codec": "randtopk:k=2,values=8",
            "middle": MODEL | {"codec": "topk:k=3"},
            "train": SHARED["train"] | {"in_flight": 3, "patience": 1, "keep": "best"},
        },
    ],
    ids=["plain", "codecs, in flight, early stopping"],
)
def test_a_federation_trains_what_one_process_trains(session, changes):
    session.play("train", **changes)
    summary = read_json(session.run / "summary.json")
    local = session.alone(**changes)
    assert summary["weights_sha256"] == local.weights_digest()
    assert session.flower.failures == []
    session.play("evaluate", **changes)
    assert read_json(session.run / "evaluations/0001.json")["test_loss"] == summary["test_loss"]
    session.play("predict", **changes)
    assert len(pd.read_csv(session.run / "predictions.csv")) == ROWS
    for name in (*FEATURES, MIDDLE):  # each half is at its owner
        run = session.folder / name / "store/runs/run/parties"
        assert [path.name for path in run.iterdir()] == [name]
        assert (run / name / "weights.safetensors").exists()


def test_a_training_goes_on_where_all_have_a_checkpoint(session, monkeypatch):
    session.flower.tells = False  # a reply of an attempt that is over would count for the next
    saved, real = [], SealedLinks._receive

    def receive(self, number):
        frame = real(self, number)
        if frame.kind is Kind.GRAD and frame.step == 6 and not saved:
            saved.append(frame.step)
            raise SystemExit  # the process of whoever gets it first ends
        return frame

    monkeypatch.setattr(SealedLinks, "_receive", receive)
    session.play("train")
    assert saved
    notes = (session.run / "notes.txt").read_text()
    assert re.search(
        r"party '\w+' disconnected and did not reconnect; restart 1 of 3, from exch", notes
    )
    digest = read_json(session.run / "summary.json")["weights_sha256"]
    assert digest == session.alone().weights_digest()


def test_nobody_reads_what_is_for_another(session, monkeypatch):
    """Neither a label nor a cut is in what the label party's streams carry for others."""
    received = {name: [] for name in (*FEATURES, MIDDLE)}
    real = SealedLinks._receive

    def note(self, number):
        frame = real(self, number)
        received[self._seals._me].append((number, frame.kind, bytes(frame.payload)))
        return frame

    monkeypatch.setattr(SealedLinks, "_receive", note)
    sent = {}

    def seal(self, other, message, about=b""):
        sent.setdefault((self._me, other), []).append(message)
        return sealing(self, other, message, about)

    sealing = PairSeals.sealed
    monkeypatch.setattr(PairSeals, "sealed", seal)
    seen = session.play("train")
    cuts = sent["bank", MIDDLE]
    assert len(cuts) > 10
    carried = [payload for *_, payload in seen]
    assert not any(cut in payload for cut in cuts for payload in carried)
    # The middle gets both parties' cuts and the output's gradient; a feature party its gradients.
    kinds = {name: {(number, kind) for number, kind, _ in got} for name, got in received.items()}
    assert {(1, Kind.CUT), (2, Kind.CUT), (0, Kind.GRAD)} <= kinds[MIDDLE]
    assert {number for number, kind in kinds["bank"] if kind is Kind.GRAD} == {3}
    costs = pd.read_csv(session.folder / "lender" / "data.csv")["cost"]
    marks = [np.array(cost, kind).tobytes() for cost in costs for kind in ("<f4", "<f8")]
    whole = [payload for got in received.values() for *_, payload in got]
    whole += [payload for payloads in sent.values() for payload in payloads] + carried
    assert not any(mark in payload for payload in whole for mark in marks)
    assert not any(one.encode() in payload for payload in whole for one in IDS)


def test_a_frame_that_was_changed_on_its_way_ends_the_session(session, monkeypatch):
    from vfl.session.relay import Switchboard

    real = Switchboard._hand_on

    def hand_on(self, sender, frame):
        if frame.kind is Kind.CUT and frame.step == 2:
            changed = bytes([frame.payload[0] ^ 1]) + bytes(frame.payload[1:])
            frame = Frame(frame.kind, frame.step, changed, frame.peer)
        real(self, sender, frame)

    monkeypatch.setattr(Switchboard, "_hand_on", hand_on)
    with pytest.raises(VFLError, match="V404"):
        session.play("train")


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("bank", CONSENT.replace("compute", "other"), "cuts for the middle party 'compute'"),
        (MIDDLE, "[consent]\nmax_parameters = 50\n", "parameters"),
        (MIDDLE, "[consent]\nmax_epochs = 1\n", "epochs 2"),
        (MIDDLE, '[consent]\nmax_bytes = 5000\ncodecs = ["topk:*"]\n', "codec none; up to"),
        (MIDDLE, "[consent]\nmax_rows = 50\n", "200 rows"),
    ],
)
def test_who_does_not_consent_takes_no_part(session, name, text, match):
    assert session.refuses(name, text, match)


def test_a_party_of_another_role_is_not_asked(session):
    path = session.folder / MIDDLE / "party.toml"
    session.write(MIDDLE, path.read_text().replace('"middle"', '"dealer"'))
    with pytest.raises(VFLError, match="to be in the middle, but the party has another role"):
        session.play("train")


def test_a_trace_has_no_place_beside_a_middle(session):
    path = session.folder / "lender" / "party.toml"
    session.write("lender", path.read_text() + '[trace]\nphases = ["train"]\n')
    with pytest.raises(ConfigError, match="a trace can contain links to one label party"):
        session.play("train")
