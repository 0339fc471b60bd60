"""Several label parties over real streams: what is learned, who can read what, who consents."""

import numpy as np
import pandas as pd
import pytest
from played_session import stand_in
from taken_session import FEATURES, IDS, ROWS, SHARED, with_insurer

from vfl.core.errors import VFLError
from vfl.core.frame import Kind
from vfl.core.storage import read_json
from vfl.session.relay import PairSeals, SealedLinks

OTHER = "insurer"
CONSENT = '[consent]\nlabel_parties = ["insurer"]\n'


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return with_insurer(tmp_path)


def own_part(session, name=OTHER):
    return session.folder / name / "store/runs/run/parties" / name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "codec": "randtopk:k=2,values=8",
            "defense": "gradient_noise:norm=inf",
            "train": SHARED["train"] | {"in_flight": 3},
        },
    ],
    ids=["plain", "codec, defense, in flight"],
)
def test_a_federation_trains_what_one_process_trains(session, changes):
    session.play("train", **changes)
    assert session.flower.failures == []
    local, summary = session.alone(**changes), read_json(session.run / "summary.json")
    assert summary["weights_sha256"] == local.weights_digest()
    learned = read_json(own_part(session) / "summary.json")
    assert learned["history"][-1]["test_rmse"] == local.others[OTHER].history[-1]["test_rmse"]
    assert learned["bytes_up"] == local.others[OTHER].ledger.bytes_by_party("up")
    assert summary["bytes_up"] == local.ledger.bytes_by_party("up")
    session.play("evaluate", **changes)
    assert read_json(session.run / "evaluations/0001.json")["test_loss"] == summary["test_loss"]
    again = read_json(own_part(session) / "evaluations/0001.json")
    assert again["test_loss"] == learned["test_loss"]
    session.play("predict", **changes)
    assert len(pd.read_csv(session.run / "predictions.csv")) == ROWS
    told = pd.read_csv(own_part(session) / "predictions.csv")
    assert len(told) == ROWS
    assert told["prediction"].between(60_000, 80_000).all()
    assert "test_rmse" not in summary  # who leads is not told how well the other learned


def test_a_training_goes_on_where_all_have_a_checkpoint(session, monkeypatch):
    session.flower.tells = False  # a reply of an attempt that is over would count for the next
    saved, real = [], SealedLinks._receive

    def receive(self, number):
        frame = real(self, number)
        if frame.kind is Kind.CUT and frame.step == 6 and number and not saved:
            saved.append(frame.step)
            raise SystemExit  # the other label party's process ends
        return frame

    monkeypatch.setattr(SealedLinks, "_receive", receive)
    session.play("train")
    assert saved
    notes = (session.run / "notes.txt").read_text()
    assert "party 'insurer' disconnected and did not reconnect; restart 1 of 3" in notes
    digest = read_json(session.run / "summary.json")["weights_sha256"]
    assert digest == session.alone().weights_digest()


def test_no_label_party_reads_gradients_of_another(session, monkeypatch):
    sent, sealing = {}, PairSeals.sealed

    def seal(self, other, message, about=b""):
        sent.setdefault((self._me, other), []).append(bytes(message))
        return sealing(self, other, message, about)

    monkeypatch.setattr(PairSeals, "sealed", seal)
    seen = session.play("train")
    carried = [payload for *_, payload in seen]
    gradients = [one for one in sent[OTHER, "bank"] if len(one) > 100]
    assert len(gradients) > 8
    assert not any(one in payload for one in gradients for payload in carried)
    cuts = {one for one in sent["bank", OTHER] if len(one) > 100}
    plain = {p for party, way, kind, _, p in seen if (party, way, kind) == ("bank", "up", Kind.CUT)}
    assert cuts & plain  # the same bytes go to each label party, and would be found
    costs = pd.read_csv(session.folder / OTHER / "data.csv")["cost"]
    marks = [np.array(cost, kind).tobytes() for cost in costs for kind in ("<f4", "<f8")]
    whole = carried + [one for payloads in sent.values() for one in payloads]
    assert not any(mark in payload for payload in whole for mark in marks)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        (
            "bank",
            CONSENT.replace("insurer", "other"),
            "label parties in addition to 'lender': insurer",
        ),
        (OTHER, "[consent]\nmax_parameters = 50\n", "parameters in top mlp:hidden=7"),
        (OTHER, "[consent]\nmax_epochs = 1\nmax_rows = 50\n", "epochs 2; 200 rows"),
        (OTHER, "[consent]\nmax_bytes = 5000\n", "bytes"),
    ],
)
def test_who_does_not_consent_takes_no_part(session, name, text, match):
    assert session.refuses(name, text, match)


def test_a_task_needs_a_table(session):
    session.write(OTHER, f'party = "{OTHER}"\nrole = "dealer"\n')
    with pytest.raises(VFLError, match="to learn a task, but the party has another role") as found:
        session.play("train")
    assert "[data] in its own file" in str(found.value)
    assert "no [data]" not in str(found.value)


def test_rows_are_aligned_with_both_label_parties(session):
    """Each lacks other rows, in an order of its own, until all four know which are common."""
    draw, common = np.random.default_rng(3), set(IDS)
    for name in (*FEATURES, OTHER, "lender"):
        path = session.folder / name / "data.csv"
        table = pd.read_csv(path).sample(frac=0.9, random_state=int(draw.integers(1000)))
        common &= set(table["id"])
        table.to_csv(path, index=False)
    longer = {"epochs": 12, "batch_size": 16, "learning_rate": 0.02}
    aligned = {"data": {"alignment": "alignment"}, "train": longer}
    for mode in ("align", "train", "predict"):
        session.play(mode, **aligned)
    assert session.flower.failures == []
    for run in (session.run, own_part(session)):
        assert set(pd.read_csv(run / "predictions.csv")["id"]) == common
    assert read_json(own_part(session) / "summary.json")["test_r2"] > 0.5  # of the right rows


def test_other_rows_at_a_further_label_party_are_refused(session):
    table = session.folder / OTHER / "data.csv"
    pd.read_csv(table).iloc[1:].to_csv(table, index=False)
    with pytest.raises(VFLError, match="different rows"):
        session.play("train")
