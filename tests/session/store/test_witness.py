"""The count of a store: it only grows for who goes on, and gives away who went back."""

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl.config import Experiment
from vfl.core.errors import ConsentError, DisagreementError, ProtocolError, RolledBackError
from vfl.core.frame import Frame, Kind
from vfl.session import Terms
from vfl.session.store import witness as module
from vfl.session.store.session_ledger import SessionLedger
from vfl.session.store.witness import BLOCK, MOST, RESTORED, Announcement, Standing, Witness

CONTENT = {"parties": {name: {"width": 4} for name in ("bank", "shop")}, "merge": "sum"}
NOISE = "clipped_noise:norm=1.0,sigma=4.0"


def terms_of(run="one", mode="train", **changes):
    return Terms.of(Experiment.model_validate(CONTENT | {"defense": NOISE} | changes), mode, run)


def put_back(copy, folder):
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


class Pair:
    """Bank and lender, and what passes between them."""

    def __init__(self, folder):
        self.folder, self.store, self.copy = folder, folder / "bank", folder / "copy"
        self.bank, self.lender = Witness(self.store, "bank"), Witness(folder / "lender", "lender")

    def meet(self, noted=None):
        self.ends = (
            Standing(self.bank, "bank", "run", "lender", lambda: noted),
            Standing(self.lender, "lender", "run", "lender"),
        )
        self.ends[0].require(self.ends[1].known_of("bank"), "lender")
        announced = self.ends[0].announce("lender")
        self.ends[1].require(announced.known, "bank")
        self.ends[1].admit("bank", announced)
        self.ends[0].admit("lender", self.ends[1].answer())

    def send(self, frames):
        for step in range(frames):
            for end in self.ends:
                end("bank", "up", Frame(Kind.CUT, step))

    def conclude(self, *, ends):
        if ends:
            self.ends[1].conclude({"bank": self.ends[0].announce().count})
        self.ends[1].write()


@settings(max_examples=25, deadline=None)
@given(
    sessions=st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=5),
    copied=st.integers(0, 4),
    seed=st.integers(0, 9),
)
def test_who_goes_on_is_let_in_and_who_went_back_is_not(tmp_path_factory, sessions, copied, seed):
    """Sessions of any number of frames, each ended or killed; a copy from between any two."""
    pair = Pair(tmp_path_factory.mktemp("pair"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "BLOCK", 4)  # so that frames go beyond it
        for number, (frames, ends) in enumerate(sessions):
            if number == min(copied, len(sessions) - 1):
                pair.bank.announce()
                shutil.copytree(pair.store, pair.copy)
            pair.meet()
            pair.send(frames)
            pair.conclude(ends=ends)
            met = pair.lender.read().peers["bank"]
            assert pair.bank.read().count >= met
        put_back(pair.copy, pair.store)
        with pytest.raises(RolledBackError, match="restored from an earlier copy"):
            pair.meet()


@pytest.mark.parametrize("ends", [True, False])
def test_a_copy_made_within_a_session_is_noticed(tmp_path, monkeypatch, ends):
    monkeypatch.setattr(module, "BLOCK", 8)
    pair = Pair(tmp_path)
    pair.meet()
    pair.send(2)
    shutil.copytree(pair.store, pair.copy)
    pair.send(3 if ends else 30)
    pair.conclude(ends=ends)
    put_back(pair.copy, pair.store)
    with pytest.raises(RolledBackError):
        pair.meet()


def test_a_journal_that_lacks_what_came_is_noticed_to_the_exchange(tmp_path):
    pair = Pair(tmp_path)
    pair.meet(noted=0)
    pair.send(3)
    received = pair.ends[1].received
    assert received == {"bank": 3}
    again = Standing(pair.lender, "lender", "run", "lender", received=received)
    with pytest.raises(RolledBackError, match="has lost part of its journal") as caught:
        again.admit("bank", Announcement(count=pair.bank.announce(), noted=2))
    assert (caught.value.got, caught.value.want) == (
        "a journal up to exchange 2",
        "a journal up to exchange 3, which the party has sent",
    )
    again.admit("bank", Announcement(count=pair.bank.announce(), noted=3))
    again.admit("bank", Announcement(count=pair.bank.announce()))  # it keeps no journal


@pytest.mark.parametrize("name", ["bank", "lender"])
def test_however_often_it_tries_a_store_that_went_back_is_refused(tmp_path, name):
    """Each attempt moves the count of who announces it, and is refused all the same."""
    pair = Pair(tmp_path)
    pair.meet()
    shutil.copytree(tmp_path / name, pair.copy)
    for _ in range(2):
        pair.meet()
        pair.conclude(ends=True)
    put_back(pair.copy, tmp_path / name)
    for _ in range(5):
        with pytest.raises(RolledBackError, match=f"'{name}' was restored"):
            pair.meet()
    {"bank": pair.bank, "lender": pair.lender}[name].restored(0.0)
    pair.meet()


def test_a_peer_is_let_in_again_by_a_session_that_began_before_another_one(tmp_path):
    """As where a service loses a party after a training beside it, or after a promotion."""
    bank = Witness(tmp_path / "bank", "bank")
    store = Witness(tmp_path / "lender", "lender")
    served, trained = (Standing(store, "lender", run, "lender") for run in ("served", "trained"))
    for session in (served, trained, served, served, trained):
        bank.admit("lender", session.answer().count)  # which raises where a count went back


def test_a_count_is_taken_once(tmp_path):
    """A copy that had no other session in the meantime announces the very count of the store."""
    lender = Witness(tmp_path, "lender")
    lender.admit("bank", 7)
    with pytest.raises(RolledBackError) as caught:
        lender.admit("bank", 7)
    assert (caught.value.got, caught.value.want[:11]) == (
        "7, as the party announced",
        "more than 7",
    )
    lender.admit("bank", 8)


def test_who_lies_about_what_it_met_refuses_and_changes_nothing(tmp_path):
    bank, liar, shop = (Witness(tmp_path / name, name) for name in ("bank", "liar", "shop"))
    liar.admit("bank", MOST - 1)
    count = bank.announce()
    with pytest.raises(RolledBackError):
        liar.admit("bank", count)
    with pytest.raises(RolledBackError):
        bank.require(MOST - 1, "party 'liar'")
    assert bank.read().count == count + BLOCK
    shop.admit("bank", bank.announce())


def test_a_doubt_stays_until_a_restore_is_declared(tmp_path):
    bank = Witness(tmp_path / "bank", "bank")
    count = bank.announce()
    with pytest.raises(RolledBackError) as first:
        bank.require(count + 2 * BLOCK, "party 'shop'")
    assert first.value.got == f"{count + BLOCK} on disk"
    assert first.value.want == f"at least {count + 2 * BLOCK}, which party 'shop' knows"
    for _ in range(3):
        bank.announce()
    with pytest.raises(RolledBackError) as later:
        bank.require(0, "party 'shop'")
    assert later.value.want.startswith("a declared loss, because party 'shop' knew")
    bank.restored(0.0)
    bank.require(0, "party 'shop'")


def test_a_store_that_was_put_back_goes_on_once_its_party_says_so(tmp_path):
    """Trainings under way end, all of max_epsilon counts as spent, and peers let it in."""
    one = SessionLedger(tmp_path / "any", "bank").begin(terms_of()).epsilon
    ledger = SessionLedger(tmp_path / "bank", "bank", max_epsilon=40 * one)
    short = {"train": {"epochs": 1}}
    ledger.begin(terms_of("open", **short))
    ledger.begin(terms_of("over", **short))
    ledger.end("over", "a" * 64)
    peer = Witness(tmp_path / "lender", "lender")
    shutil.copytree(ledger.folder, tmp_path / "copy")
    for _ in range(3):
        peer.admit("bank", ledger.witness.announce())
    put_back(tmp_path / "copy", ledger.folder)
    with pytest.raises(RolledBackError):
        peer.admit("bank", ledger.witness.announce())
    ledger.restored()
    peer.admit("bank", ledger.witness.announce())
    assert ledger.witness.read().count > RESTORED
    with pytest.raises(ConsentError, match="more of its rows' privacy"):
        ledger.begin(terms_of("new", **short))
    with pytest.raises(ConsentError):
        ledger.begin(terms_of("over", "predict", **short))
    larger = SessionLedger(ledger.folder, "bank", max_epsilon=80 * one)
    larger.begin(terms_of("new", **short))
    with pytest.raises(DisagreementError, match="has no record of the messages"):
        larger.begin(terms_of("open", **short))


@pytest.mark.parametrize("content", [None, {}, {"count": 0}, {"count": MOST}, {"count": 1, "x": 1}])
def test_an_announcement_of_another_form(content):
    with pytest.raises(ProtocolError, match="did not send the count"):
        Announcement.parse(content, "lender")
