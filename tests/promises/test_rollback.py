"""A party's store is put back from a copy, and what it has forgotten is asked for once more."""

import shutil
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest
from llm_parties import LlmParties
from played_session import Noting, PlayedSession, stand_in
from promise import BrokenPromiseError, refused
from stand_in_flower import Flower

from vfl.core.errors import VFLError
from vfl.core.frame import Kind
from vfl.llm import parties as llm
from vfl.session.store.party_folder import own_ledger

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
        "step_timeout_s": 120.0,
        "max_restarts": 0,
        "join_timeout_s": 120.0,
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
        with suppress(VFLError):
            self.play(run=name)
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
def dealt(tmp_path, monkeypatch):
    """Makes a private model with material for questions; whoever stands is let go afterwards."""
    monkeypatch.setattr(llm, "_GRACE_S", 0.0)
    made = []

    def make(questions, **options):
        made.append(LlmParties(tmp_path, **options).start("owner", "dealer"))
        made[-1].user().deal(4, 1, questions=questions)
        return made[-1]

    yield make
    for parties in made:
        parties.end()


@pytest.fixture
def asked(dealt):
    """A private model of which two questions may be asked, dealt for more."""
    return dealt(4, limits={"max_questions": 2})


def asked_twice(parties, newer=()):
    """Ask, put the stores of both ends back, ask again: the material that both questions used.

    Args:
        parties: dealt for one question.
        newer: files that stay newer than the copy.
    """
    used = []
    stores = {name: parties.folder / name / "store" for name in ("owner", "user")}
    for name, store in stores.items():
        shutil.copytree(store, parties.folder / f"copy-{name}")
    for question in ([7, 3, 9, 41], [5, 60, 12, 33]):
        parties.user().ask(question, 1)
        used.append({path.name for path in stores["owner"].glob("material-*/*.used")})
        parties.end("owner")
        for name, store in stores.items():
            copy = parties.folder / f"copy-{name}"
            for each in newer:
                put_back(store / each, copy / each)
            put_back(copy, store)
        parties.start("owner")
    return used[0] & used[1]


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
    for attempt in range(4):  # a count that grows with each attempt does not come to be believed
        if session.train(f"again{attempt}"):
            raise BrokenPromiseError(
                f"3 trainings spent epsilon {3 * one:.3g} of a row where {2.5 * one:.3g} is allowed"
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
    for _ in range(4):  # a count that grows with each attempt does not come to be believed
        with refused("3 questions were answered where the owner allows 2", "V411"):
            asked.user().ask([7, 3, 9, 41], 1)


def test_no_material_answers_two_questions_after_both_ends_went_back(dealt):
    """What a question has used is used by no other, though owner and user forget it together."""
    try:
        asked_twice(dealt(1))
    except VFLError as refusal:
        assert "V411" in str(refusal)  # noqa: PT017 - anything else breaks the promise
        return
    raise BrokenPromiseError("two questions were answered with one material")


def test_without_a_dealer_that_counts_both_ends_can_forget_together(dealt):
    """What `dealer_counts = false` costs; docs/backups.md says so."""
    assert asked_twice(dealt(1, dealer_counts=False))


def test_material_is_counted_by_its_name_too(dealt):
    """A copy that was made within a session may count beyond what the session announced."""
    parties = dealt(1)
    with refused("two questions were answered with one material", "V501"):
        asked_twice(parties, newer=["witness"])
    parties.user().ask([5, 60, 12, 33], 1)  # that material is given up, and other is dealt


def test_a_user_that_leaves_the_dealer_out_has_no_answer(dealt, monkeypatch):
    """Material is not taken at the owner before the dealer has heard both."""
    parties = dealt(1)
    parties.end("owner")
    parties.start("owner", patience_s=3.0)  # for which it waits for the dealer, and so do we
    owner = parties.folder / "owner" / "store"
    monkeypatch.setattr(llm.User, "called_to_count", lambda self, streams, wires, *more: wires)
    with refused("a question was answered whose material the dealer has not counted"):
        parties.user(patience_s=2.0).ask([7, 3, 9, 41], 1)
    assert not list(owner.glob("material-*/*.used"))


def test_a_user_that_names_other_material_to_the_dealer_has_no_answer(dealt, monkeypatch):
    """Owner and user want the same material counted, or the dealer ends the question."""
    parties = dealt(2)
    called = llm.Party.called_to_count

    def lying(self, streams, wires, plan, account):
        (other,) = set(self.store(plan.setup).names()) - set(plan.names)
        return called(self, streams, wires, plan.model_copy(update={"names": (other,)}), account)

    monkeypatch.setattr(llm.User, "called_to_count", lying)
    with refused("the dealer counted other material than was used", "make different requests"):
        parties.user().ask([7, 3, 9, 41], 1)
    assert not list((parties.folder / "owner" / "store").glob("material-*/*.used"))


def test_no_question_begins_while_the_dealer_that_counts_is_away(dealt):
    """It is refused by name, and its material stays good."""
    parties = dealt(1)
    parties.end("dealer")
    with refused("a question began without the dealer", "the dealer cannot be reached"):
        parties.user().ask([7, 3, 9, 41], 1)
    parties.start("dealer")
    assert len(parties.user().ask([7, 3, 9, 41], 1).tokens) == 1
