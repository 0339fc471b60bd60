"""Several label parties over real streams: what is learned, who can read what, who consents."""

import numpy as np
import pandas as pd
import pytest
from played_session import PlayedSession, stand_in
from stand_in_flower import Flower

from vfl.config import Experiment
from vfl.core.errors import VFLError
from vfl.core.frame import Kind
from vfl.core.seeds import Secret
from vfl.core.storage import read_json
from vfl.session.identity import Identity
from vfl.session.party_folder import INJECTED_SECRET
from vfl.session.relay import PairSeals, SealedLinks
from vfl.training.run import load_data, session_of

FEATURES, OTHER, ROWS = ("bank", "shop"), "insurer", 200
TASK = {"party": OTHER, "task": "regression", "top": "mlp:hidden=7", "weight": 0.3}
CONTENT = {
    "name": "shared",
    "parties": {name: {"width": 4, "bottom": "mlp:hidden=8"} for name in FEATURES},
    "label": {"party": "lender", "top": "linear"},
    "tasks": [TASK],
    "train": {"epochs": 2, "batch_size": 32, "checkpoint_every": 4},
    "federation": {"step_timeout_s": 5.0, "rejoin_window_s": 1.0, "join_timeout_s": 90.0},
}
CONSENT = '[consent]\nlabel_parties = ["insurer"]\n'


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    everybody = (*FEATURES, OTHER)
    played = PlayedSession(tmp_path, Flower(everybody, tells=True), CONTENT)
    draw, identities = np.random.default_rng(0), {name: Identity.fresh() for name in everybody}
    ids = [f"Zq8id{row:03}" for row in range(ROWS)]
    cells = {name: draw.normal(size=(ROWS, 2)) for name in FEATURES}
    tables = {name: {"a": own[:, 0], "b": own[:, 1]} for name, own in cells.items()}
    tables["lender"] = {"ill": np.where(cells["bank"][:, 0] + cells["shop"][:, 0] > 0, "y", "n")}
    # No other number is near these; their bytes are looked for.
    tables[OTHER] = {"cost": 71_000.0 + 1000 * cells["bank"][:, 1] - 500 * cells["shop"][:, 1]}
    for name in (*everybody, "lender"):
        (tmp_path / name).mkdir(exist_ok=True)
        Secret.of_simulation(0, name).keep_at(tmp_path / name / "store" / INJECTED_SECRET)
        for other in identities.keys() - {name} if name in identities else ():
            identities[name].keep_at(tmp_path / name / "identity.key")
            identities[name].public.keep_at(tmp_path / other / "peers" / f"{name}.pub")
        pd.DataFrame({"id": ids, **tables[name]}).to_csv(tmp_path / name / "data.csv", index=False)
        label = {"lender": 'label = "ill"\n', OTHER: 'label = "cost"\n'}.get(name, "")
        consent = CONSENT if name in FEATURES else ""
        text = f'party = "{name}"\n[data]\nsource = "data.csv"\nid = "id"\n{label}{consent}'
        played.write(name, text)
    return played


def alone(session, **changes):
    """The same in one process."""
    content = CONTENT | changes
    files = {name: str(session.folder / name / "party.toml") for name in (*FEATURES, OTHER)}
    content |= {
        "data": {"source": str(session.folder / "lender/party.toml")},
        "label": CONTENT["label"] | {"column": "ill"},
        "tasks": [content["tasks"][0] | {"column": "cost", "source": files[OTHER]}],
        "parties": {
            name: own | {"source": files[name]} for name, own in CONTENT["parties"].items()
        },
    }
    experiment = Experiment.model_validate(content)
    return session_of(experiment, load_data(experiment), "train").run()


def own_part(session, name=OTHER):
    return session.folder / name / "store/runs/run/parties" / name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "codec": "randtopk:k=2,values=8",
            "defense": "gradient_noise",
            "train": CONTENT["train"] | {"in_flight": 3},
        },
    ],
    ids=["plain", "codec, defense, in flight"],
)
def test_a_federation_trains_what_one_process_trains(session, changes):
    session.play("train", **changes)
    assert session.flower.failures == []
    local, summary = alone(session, **changes), read_json(session.run / "summary.json")
    assert summary["weights_sha256"] == local.weights_digest()
    learned = read_json(own_part(session) / "summary.json")
    assert learned["history"][-1]["test_rmse"] == local.others[OTHER].history[-1]["test_rmse"]
    assert learned["bytes_up"] == local.others[OTHER].ledger.bytes_by_party("up")
    assert summary["bytes_up"] == local.ledger.bytes_by_party("up")
    session.play("evaluate", **changes)
    assert read_json(session.run / "evaluation.json")["test_loss"] == summary["test_loss"]
    assert read_json(own_part(session) / "evaluation.json")["test_loss"] == learned["test_loss"]
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
    assert "party 'insurer' went away and did not come back; restart 1 of 3" in notes
    digest = read_json(session.run / "summary.json")["weights_sha256"]
    assert digest == alone(session).weights_digest()


def test_no_label_party_reads_gradients_of_another(session, monkeypatch):
    sent, sealing = {}, PairSeals.seal

    def seal(self, message, about=b""):
        sent.setdefault((self._me, message.to), []).append(bytes(message.payload))
        return sealing(self, message, about)

    monkeypatch.setattr(PairSeals, "seal", seal)
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
        ("bank", CONSENT.replace("insurer", "other"), "label parties beside 'lender': insurer"),
        (OTHER, "[consent]\nmax_parameters = 50\n", "parameters in top mlp:hidden=7"),
        (OTHER, "[consent]\nmax_epochs = 1\n", "epochs 2"),
        (OTHER, "[consent]\nmax_bytes = 5000\n", "bytes"),
        (OTHER, "[consent]\nmax_rows = 50\n", "200 rows"),
    ],
)
def test_who_does_not_consent_takes_no_part(session, name, text, match):
    path = session.folder / name / "party.toml"
    session.write(name, path.read_text().partition("[consent]")[0] + text)
    with pytest.raises(VFLError, match="stopped with V403"):
        session.play("train")
    assert any(match in str(failure) for failure in session.flower.failures)


def test_other_rows_at_a_further_label_party_are_refused(session):
    table = session.folder / OTHER / "data.csv"
    pd.read_csv(table).iloc[1:].to_csv(table, index=False)
    with pytest.raises(VFLError, match="different rows"):
        session.play("train")


def test_such_a_run_is_not_served(session):
    session.play("train")
    with pytest.raises(VFLError, match="not served row by row"):
        session.play("serve")
