"""A party's store is put back from a copy, and what it has forgotten is asked for once more."""

import shutil

import numpy as np
import pandas as pd
import pytest
from llm_parties import LlmParties
from played_session import Noting, PlayedSession, stand_in
from promise import BrokenPromiseError
from stand_in_flower import Flower

from vfl.core.errors import VFLError
from vfl.core.frame import Kind
from vfl.llm import parties as llm
from vfl.session.party_folder import own_ledger, own_terms

ROWS = 120
NOISE = "clipped_noise:norm=1.0,sigma=4"
EXPERIMENT = {
    "merge": "sum",
    "parties": {name: {"width": 4, "bottom": "mlp:hidden=8"} for name in ("bank", "shop")},
    "label": {"party": "lender", "top": "linear"},
    "train": {"epochs": 1, "batch_size": 20, "learning_rate": 0.1},
    "defense": NOISE,
    "federation": {
        "rejoin_window_s": 0.2,
        "step_timeout_s": 30.0,
        "max_restarts": 0,
        "join_timeout_s": 30.0,
    },
}


class Session(PlayedSession):
    """Bank and shop with columns, a lender with labels, and copies of their stores."""

    def __init__(self, folder):
        super().__init__(folder, Flower(("bank", "shop"), tells=True), EXPERIMENT)
        self._draw = np.random.default_rng(0)
        for name in ("bank", "shop"):
            self.table(name, a=self._draw.normal(size=ROWS), b=self._draw.normal(size=ROWS))
        self.table("lender", paid=np.arange(ROWS) % 2)

    def table(self, name, consent="", **columns):
        own = self.folder / name
        own.mkdir(exist_ok=True)
        ids = [f"r{row:03}" for row in range(ROWS)]
        if columns:
            pd.DataFrame({"id": ids, **columns}).to_csv(own / "data.csv", index=False)
        label = 'label = "paid"\n' if name == "lender" else ""
        text = f'party = "{name}"\n[data]\nsource = "data.csv"\nid = "id"\n'
        self.write(name, f"{text}{label}{consent}")

    def train(self, name):
        """Cuts of bank that the lender received in a training of this name."""
        from vfl.server.session import run_session

        Noting.seen, Noting.enough = [], None
        experiment, lender = self.experiment(), self.flower.files["lender"]
        try:
            run_session(
                self.flower, experiment, lender, own_terms(experiment, "train", name, lender)
            )
        except VFLError:
            pass
        finally:
            for thread in self.flower.threads:
                thread.join(timeout=20)
        return cuts_of_bank()

    def broken_off(self, step, *, resume):
        """The same of a training that breaks off at an exchange."""
        with pytest.raises(VFLError):
            self.play(resume=resume, enough=(Kind.CUT, step))
        return cuts_of_bank()


def cuts_of_bank():
    return {
        step: payload
        for party, way, kind, step, payload in Noting.seen
        if (party, way, kind) == ("bank", "up", Kind.CUT)
    }


def put_back(copy, folder):
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A private model of which two questions may be asked, dealt for more."""
    monkeypatch.setattr(llm, "_GRACE_S", 0.0)
    parties = LlmParties(tmp_path, limits={"max_questions": 2}).start("owner", "dealer")
    parties.user().deal(4, 1, questions=4)
    yield parties
    parties.end()


def test_spent_epsilon_is_not_forgotten(session):
    """`max_epsilon` bounds what all sessions of a party spend, also after its store went back."""
    assert session.train("first")
    ledger = own_ledger(session.flower.files["bank"])
    one = ledger.entries()[0].spent_epsilon
    session.table("bank", f"[consent]\nmax_epsilon = {2.5 * one}\n")
    store, copy = session.folder / "bank" / "store", session.folder / "copy"
    shutil.copytree(store, copy)
    assert session.train("second")
    assert not session.train("third")  # the limit holds as long as the store does
    put_back(copy, store)
    if session.train("fourth"):
        raise BrokenPromiseError(
            f"3 trainings spent epsilon {3 * one:.3g} of one row where {2.5 * one:.3g} is allowed"
        )


def test_one_nonce_protects_one_content(session):
    """Under one nonce an exchange goes out with one content, also after a store went back."""
    session.broken_off(0, resume=False)
    store, copy = session.folder / "bank" / "store", session.folder / "copy"
    shutil.copytree(store, copy)
    (before,) = own_ledger(session.flower.files["bank"]).entries()
    first = session.broken_off(3, resume=True)
    put_back(copy, store)
    session.table("lender", paid=1 - np.arange(ROWS) % 2)  # other gradients, and so other cuts
    second = session.broken_off(3, resume=True)
    (after,) = own_ledger(session.flower.files["bank"]).entries()
    assert before.nonce == after.nonce
    changed = [step for step in first.keys() & second.keys() if first[step] != second[step]]
    if changed:
        raise BrokenPromiseError(
            f"{len(changed)} exchanges went out with two contents under one nonce"
        )


def test_a_model_owner_counts_every_question(asked):
    """An owner answers `max_questions` with one set of weights, also after its store went back."""
    store, copy = asked.folder / "owner" / "store", asked.folder / "copy"
    shutil.copytree(store, copy)
    for _ in "ab":
        asked.user().ask([7, 3, 9, 41], 1)
    with pytest.raises(VFLError):
        asked.user().ask([7, 3, 9, 41], 1)
    asked.end("owner")
    put_back(copy, store)
    asked.start("owner")
    try:
        asked.user().ask([7, 3, 9, 41], 1)
    except VFLError:
        return
    raise BrokenPromiseError("3 questions were answered where the owner allows 2")
