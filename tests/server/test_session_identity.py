"""A label party that uses one name for several sessions, over real streams.

It forgets its own run folder and ledger, as a label party that is not honest can; every feature
party remembers, and sends nothing.
"""

import shutil

import pandas as pd
import pytest
import torch
from played_session import PARTY, Noting, PlayedSession, stand_in
from sealed import weights_at
from stand_in_flower import Flower
from typer.testing import CliRunner

from vfl.cli import app
from vfl.config import read_party_file
from vfl.core.errors import (
    DisagreementError,
    MisalignedError,
    PeerFailedError,
    RolledBackError,
    VFLError,
)
from vfl.core.frame import Kind
from vfl.session.store.party_folder import own_ledger

PARTIES = ("bank", "shop", "club")
EXPERIMENT = {
    "merge": "sum",
    "parties": {name: {"width": 4, "bottom": "mlp:hidden=8"} for name in PARTIES},
    "label": {"party": "lender", "top": "linear"},
    "train": {"epochs": 1, "batch_size": 20},
    "federation": {
        "rejoin_window_s": 0.2,
        "step_timeout_s": 60.0,
        "max_restarts": 0,
        "join_timeout_s": 300.0,
    },
}
TWO = {name: EXPERIMENT["parties"][name] for name in PARTIES[:2]}
NOISY = "clipped_noise:norm=1.0,sigma={}"


class Session(PlayedSession):
    """Three parties and a lender."""

    def __init__(self, folder, flower):
        super().__init__(folder, flower, EXPERIMENT)
        self.write_tables(PARTIES)

    def write(self, name, more):
        super().write(name, PARTY.format(name=name, more=more))

    def forget(self):
        """What a dishonest label party does before it uses a name again."""
        self.forget_store("lender")
        self.flower.failures.clear()

    def refused(self, mode="train", **changes):
        """Play a session that a party is to refuse: its refusal, and no cut at the label party."""
        with pytest.raises(VFLError):
            self.play(mode, **changes)
        refusals = [one for one in self.flower.failures if isinstance(one, DisagreementError)]
        assert refusals
        assert all("is bound to another session" in one.what for one in refusals)
        return refusals

    def broken_off(self, **how):
        """Bank's training cuts of a session that does not end well."""
        with pytest.raises(VFLError):
            self.play(**how)
        return cuts(Noting.seen)


def refusals_of(session):
    found = [one for one in session.flower.failures if isinstance(one, DisagreementError)]
    assert found
    return found


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path, Flower(PARTIES, tells=True))


def cuts(seen, party="bank"):
    return [payload for one, way, kind, _, payload in seen
            if (one, way) == (party, "up") and kind in (Kind.CUT, Kind.QUERY)]  # fmt: skip


def weights_of(session, party="bank"):
    part = session.folder / party / "store" / "runs" / "run" / "parties" / party
    return weights_at(part / "weights.safetensors")


def test_one_name_with_two_scales_of_noise_is_refused(session):
    seen = session.play(defense=NOISY.format(1))
    assert len(cuts(seen)) > 3
    session.forget()
    (refusal, *_) = session.refused(defense=NOISY.format(2))
    assert refusal.got == "defense clipped_noise:norm=1.0,sigma=2"
    assert refusal.want == "defense clipped_noise:norm=1.0,sigma=1"


def test_one_name_with_fewer_parties_under_a_secure_sum_is_refused(session):
    session.introduce("bank", "shop")
    first = session.play(secure="none")
    assert cuts(first)
    session.forget()
    session.refused(parties=TWO)
    session.refused(secure="sum")


#: So small that trainings from anything at all send almost the same cuts.
STILL = EXPERIMENT["train"] | {"learning_rate": 1e-7}
ENOUGH = (Kind.CUT, 3)


@pytest.mark.parametrize("ends", [False, True])
def test_plays_of_one_name_leave_its_noise(session, ends):
    """Gradients of other tops would make other noises of each cut, whose mean leaves little."""
    how = {"defense": NOISY.format(1), "train": STILL}
    plays = []
    for play in range(3):
        if ends and play == 0:
            plays.append(cuts(session.play(**how)))
        else:
            plays.append(session.broken_off(enough=ENOUGH, **how))
        session.forget()
    assert len(plays[0]) > 3
    for step in range(4):
        sent = {each[step] for each in plays if len(each) > step}
        assert len(sent) == 1, f"{len(sent)} noises on the cut of step {step}"
    spent = own_ledger(session.flower.files["bank"]).entries()[0]
    assert spent.passes == 1


def test_what_differs_is_told_before_it_is_sent(session):
    how = {"defense": NOISY.format(1), "train": STILL}
    session.broken_off(enough=ENOUGH, **how)
    session.forget()
    assert len(session.broken_off(**how)) <= 1  # none, where another party refuses first
    for refusal in refusals_of(session):
        assert "would send different contents than before in the training 'run'" in refusal.what
        assert refusal.where == "exchange 1"
        assert refusal.fix == "start a run with another name"


def test_noise_under_a_secure_sum_is_not_averaged_either(session):
    """Masks are new in every attempt, and the noise below them would be."""
    names = {"parties": TWO, "secure": "sum", "defense": NOISY.format(1), "train": STILL}
    session.introduce("bank", "shop")
    assert len(session.broken_off(enough=ENOUGH, **names)) > 2
    session.forget()
    assert len(session.broken_off(enough=ENOUGH, **names)) <= 1
    assert any("different contents than before" in one.what for one in refusals_of(session))


@pytest.mark.parametrize(
    ("codec", "secure"), [("none", "none"), ("randtopk:k=2,alpha=0.3", "none"), ("none", "sum")]
)
def test_an_honest_resume_sends_the_same_again(session, codec, secure):
    """Noise on cuts and on gradients; the training is broken off twice and goes on."""
    session.introduce("bank", "shop")
    train = EXPERIMENT["train"] | {"epochs": 3, "checkpoint_every": 2}
    defense = f"{NOISY.format(1)}+gradient_noise:norm=inf,sigma=0.01"
    how = {"defense": defense, "train": train, "codec": codec, "secure": secure, "parties": TWO}
    first = session.broken_off(enough=(Kind.CUT, 5), **how)
    again = session.broken_off(enough=(Kind.GRAD, 8), resume=True, **how)
    assert len(first) > 4
    session.play(resume=True, **how)
    assert secure != "none" or set(first) & set(again)
    bank = own_ledger(session.flower.files["bank"]).entries()[0]
    assert (bank.state, bank.passes) == ("ended", 3)


def test_a_feature_party_gets_no_second_noise_on_a_gradient(session):
    """It sends another cut of the same rows after a restart; the label party notes as well."""
    how = {"defense": "gradient_noise:norm=1,sigma=1", "train": STILL}
    session.broken_off(enough=ENOUGH, **how)
    for name in PARTIES:  # they forget their names, and so draw other first weights
        session.forget_store(name)
    shutil.rmtree(session.run)
    session.flower.failures.clear()
    with pytest.raises(DisagreementError, match="different contents than before") as caught:
        session.play(**how)
    assert caught.value.where == "exchange 0"


def test_a_limit_of_epsilon_holds_over_all_names(session):
    session.write("bank", "[consent]\nmax_epsilon = 15.0")
    how = {"defense": NOISY.format(1), "train": EXPERIMENT["train"] | {"epochs": 2}}
    session.broken_off(**how)
    (refusal,) = [one for one in session.flower.failures if one.code == "V403"]
    assert refusal.want == "epsilon <= 15 in all"
    assert own_ledger(session.flower.files["bank"]).entries() == []
    for name in PARTIES[1:]:  # the others had bound the name already
        session.forget_store(name)
    session.forget()
    assert cuts(session.play(defense=NOISY.format(1)))


def test_a_finished_run_keeps_its_weights(session):
    session.play()
    before = weights_of(session)
    session.forget()
    session.refused(train=EXPERIMENT["train"] | {"learning_rate": 0.1})
    session.forget()
    # The same terms once more, from another top: all of it was once sent before it was refused.
    assert session.broken_off() == []
    assert all("has already ended at party" in one.what for one in refusals_of(session))
    after = weights_of(session)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_party_names_its_company_under_a_secure_sum(session):
    session.write("bank", "[consent]\nmin_parties = 3\nparties = ['club']")
    asked = {"secure": "sum", "parties": TWO}
    with pytest.raises(VFLError):
        session.play(**asked)
    (refusal,) = [one for one in session.flower.failures if one.code == "V403"]
    assert refusal.got == "2 feature parties; no club"
    assert refusal.want == "at least 3 in a secure mode; club in a secure mode"
    assert read_party_file(session.folder / "bank" / "party.toml").consent.min_parties == 3


def test_an_innocent_party_is_told_whose_rows_differ(session):
    """Not to check host, port and TLS, which are as they should be."""
    table = session.folder / "shop" / "data.csv"
    pd.read_csv(table).iloc[1:].to_csv(table, index=False)
    with pytest.raises(MisalignedError):
        session.play()
    assert len(session.flower.failures) == len(PARTIES)
    late = [one for one in session.flower.failures if one.code == "V405"]
    assert len(late) < len(PARTIES)  # it is shop that does not match, and it came
    for told in map(str, late):  # they came when the label party had ended
        assert "see the output of the label party's command" in told
    for told in (str(one) for one in session.flower.failures if one not in late):
        assert "the tables of 'shop' and 'lender' have different rows" in told
        assert "keep only the ids that all parties have" in told
        assert "TLS" not in told


def copied(session, name):
    """A copy of a party's store as it is now; gives what puts it back."""
    store, copy = session.folder / name / "store", session.folder / f"copy of {name}"
    shutil.copytree(store, copy)

    def put_back():
        shutil.rmtree(store)
        shutil.copytree(copy, store)

    return put_back


def went_back(session):
    return [one for one in session.flower.failures if isinstance(one, RolledBackError)]


def test_a_party_whose_store_went_back_is_told_before_it_sends(session):
    session.play()
    put_back = copied(session, "bank")
    session.play("predict")
    put_back()
    with pytest.raises(PeerFailedError, match="stopped with V411: the store of party 'bank'"):
        session.play("predict")
    assert cuts(Noting.seen) == []
    told, *_ = went_back(session)
    assert "vfl sessions party.toml --restored" in told.fix


def test_a_label_party_whose_store_went_back_is_told_by_who_notices(session):
    session.play()
    put_back = copied(session, "lender")
    session.play("predict")
    put_back()
    with pytest.raises(RolledBackError, match="store of party 'lender'"):
        session.play("predict")
    assert cuts(Noting.seen) == []


@pytest.mark.parametrize("honest", [True, False])
def test_feature_parties_witness_each_other_where_they_sign_keys(session, honest):
    """A label party that hides what it has met: under a secure sum the other parties have, too."""
    how = {"parties": TWO, "secure": "sum"}
    session.introduce("bank", "shop")
    session.play(**how)
    put_back = copied(session, "bank")
    session.play("predict", **how)
    put_back()
    if not honest:
        witness = own_ledger(session.flower.files["lender"]).witness
        witness._change(lambda now: {"peers": {}})
    with pytest.raises(VFLError):
        session.play("predict", **how)
    assert went_back(session)
    assert cuts(Noting.seen, "shop") == []  # without which bank's is under a mask
    assert not honest or cuts(Noting.seen) == []


def test_a_party_goes_on_once_it_says_that_its_store_was_put_back(session):
    session.play()
    put_back = copied(session, "bank")
    session.play("predict")
    put_back()
    with pytest.raises(PeerFailedError, match="stopped with V411"):
        session.play("predict")
    path = str(session.folder / "bank" / "party.toml")
    assert CliRunner().invoke(app, ["sessions", path, "--restored"]).exit_code == 0
    session.play("predict")
