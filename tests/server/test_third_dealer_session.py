"""One feature party, the label party and a third that deals, through whole federated sessions.

Streams are real; only Flower's part is played by a stand-in.
"""

import csv

import numpy as np
import pandas as pd
import pytest
from played_session import Noting, PlayedSession, largest, note_limits, stand_in
from stand_in_flower import Flower

from vfl.core.errors import ConfigError, PeerFailedError
from vfl.core.frame import Kind
from vfl.core.storage import read_json
from vfl.mpc.secure.beaver import DealerEnd
from vfl.session.store.identity import Identity

TABLE = '[data]\nsource = "data.csv"\nid = "id"\n'
ROWS, WIDTH = 120, 4
EXPERIMENT = {
    "merge": "sum",
    "secure": "beaver:dealer=notary",
    "parties": {"bank": {"width": WIDTH, "bottom": "mlp:hidden=none"}},
    "label": {"party": "lender", "top": "linear"},
    "train": {"epochs": 2, "batch_size": 20, "checkpoint_every": 3, "optimizer": "sgd",
              "momentum": 0, "learning_rate": 0.1},
    "federation": {"rejoin_window_s": 0.2, "step_timeout_s": 60.0, "max_restarts": 0},
}  # fmt: skip


class Session(PlayedSession):
    """Folders of three parties, and a way to play a session between them."""

    def __init__(self, folder, flower):
        super().__init__(folder, flower, EXPERIMENT)
        draw = np.random.default_rng(0)
        ids = [f"r{row:03}" for row in range(ROWS)]
        tables = {
            "bank": {"a": draw.normal(size=ROWS), "b": draw.normal(size=ROWS)},
            "lender": {"paid": np.arange(ROWS) % 2},
        }
        for name in ("bank", "notary", "lender"):
            (folder / name).mkdir()
            if name in tables:
                table = pd.DataFrame({"id": ids, **tables[name]})
                table.to_csv(folder / name / "data.csv", index=False)
        self.write("bank", TABLE)
        self.write("lender", f'{TABLE}label = "paid"\n')
        self.write("notary", "", 'role = "dealer"')
        self.introduce("bank", "notary")

    def write(self, name, more, role=""):
        super().write(name, f'party = "{name}"\n{role}\n{more}\n')


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path, Flower(("bank", "notary")))


def sent(seen, kind, party="bank", way="up"):
    return [(step, payload) for one, direction, of, step, payload in seen
            if (one, direction, of) == (party, way, kind)]  # fmt: skip


def test_a_training_an_evaluation_and_a_prediction(session):
    seen = session.play()
    assert [len(payload) for _, payload in sent(seen, Kind.PROTOCOL)] == [104, 4]
    assert [len(payload) for _, payload in sent(seen, Kind.PROTOCOL, "notary")] == [104, 32]
    sizes = {
        ("bank", Kind.OPENING): 8 * 20 * 3,
        ("bank", Kind.CUT): 8 * 20 * WIDTH,
        ("notary", Kind.OPENING): 8 * 20 * WIDTH,
        ("notary", Kind.GRAD): 8 * 3 * WIDTH,
    }
    for (party, kind), size in sizes.items():
        frames = sent(seen, kind, party)
        assert len(frames) == 2 * 5
        assert all(len(payload) == size for _, payload in frames[:4]), (party, kind)
    assert not session.flower.failures
    assert not list((session.folder / "notary").rglob("*.safetensors")), "it keeps nothing"
    before = read_json(session.run / "summary.json")
    session.play(mode="evaluate")
    assert read_json(session.run / "evaluations/0001.json")["test_loss"] == before["test_loss"]
    asked = session.play(mode="predict")
    assert sent(asked, Kind.PROTOCOL, "notary") != sent(seen, Kind.PROTOCOL, "notary")
    ((_, opened),) = sent(asked, Kind.QUERY_OPENING)
    assert len(opened) == 8 * ROWS * 3
    with (session.run / "predictions.csv").open() as file:
        assert len(list(csv.reader(file))) == 1 + ROWS


def test_limits_leave_no_byte_to_spare(session, monkeypatch):
    for mode in ("train", "predict"):
        with monkeypatch.context() as patched:
            limits = note_limits(patched)
            crossed = largest(session.play(mode=mode))
        assert {party for party, _, _ in crossed} == {"bank", "notary"}
        for (party, way, kind), size in crossed.items():
            most = getattr(limits[party], way)[kind]
            assert size <= most
            if kind not in (Kind.DONE, Kind.PROTOCOL, Kind.ACK):
                assert size == most, (mode, party, way, kind)


def test_a_lost_dealer_takes_a_new_attempt_with_new_keys(session, monkeypatch):
    left = [1]
    deal = DealerEnd.deal

    def dying(end):
        frame = deal(end)
        if frame.step == 8 and left:
            left.pop()
            raise SystemExit
        return frame

    monkeypatch.setattr(DealerEnd, "deal", dying)
    federation = EXPERIMENT["federation"] | {"max_restarts": 1}
    seen = session.play(federation=federation)
    for party, kind in (("bank", Kind.OPENING), ("notary", Kind.OPENING)):
        frames = sent(seen, kind, party)
        steps = [one for one, _ in frames]
        assert {one for one in steps if steps.count(one) == 2}, "the second attempt went back"
        assert len({payload for _, payload in frames}) == len(frames)
    assert len(sent(seen, Kind.PROTOCOL, "notary")) == 2 * 2
    assert "restart 1 of 1" in (session.run / "notes.txt").read_text()
    assert read_json(session.run / "summary.json")["weights_sha256"]


def test_an_identity_of_the_dealer_that_is_not_the_pinned_one_stops_before_any_input(session):
    Identity.fresh().public.keep_at(session.folder / "bank" / "peers" / "notary.pub")
    error = session.refusal("V404")
    assert not sent(Noting.seen, Kind.OPENING)
    assert "'notary'" in error.what


def test_a_party_with_data_does_not_deal(session):
    session.write("notary", TABLE)
    error = session.refusal("V402")
    assert error.got == "role = 'data'"


def test_a_dealer_sends_no_cuts(session):
    session.write("bank", "", 'role = "dealer"')
    with pytest.raises(PeerFailedError, match="V402"):
        session.play()
    assert any("has no data" in one.what for one in session.flower.failures)


def test_a_dealer_refuses_what_its_file_does_not_allow(session):
    consent = '[consent]\nsecure = ["sum*"]\nmodes = ["predict"]\nmax_epochs = 1'
    session.write("notary", consent, 'role = "dealer"')
    refusal = session.refusal()
    assert refusal.got == "mode train; secure beaver:dealer=notary; epochs 2"


def test_a_dealer_deals_no_more_bytes_than_its_file_allows(session):
    session.write("notary", "[consent]\nmax_bytes = 3000", 'role = "dealer"')
    refusal = session.refusal()
    assert refusal.want == "bytes <= 3000"


@pytest.mark.parametrize(
    ("role", "more", "said"),
    [('role = "data"', "", "[data] is missing"), ('role = "dealer"', TABLE, "leave [data] out")],
)
def test_a_partys_file_says_either_data_or_dealer(session, role, more, said):
    with pytest.raises(ConfigError, match="1 problem") as caught:
        session.write("notary", more, role)
    assert said in str(caught.value)
