"""A label party that uses one name for several sessions, over real streams.

It forgets its own run folder and ledger, as a label party that is not honest can; every feature
party remembers, and sends nothing.
"""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from played_session import PlayedSession, stand_in
from sealed import weights_at
from stand_in_flower import Flower

from vfl.config import read_party_file
from vfl.core.errors import DisagreementError, VFLError
from vfl.core.frame import Kind
from vfl.session.party_folder import own_ledger, own_secret
from vfl.session.terms import Terms

PARTIES = ("bank", "shop", "club")
PARTY = """\
party = "{name}"
[data]
source = "data.csv"
id = "id"
{more}
"""
EXPERIMENT = {
    "merge": "sum",
    "parties": {name: {"width": 4, "bottom": "mlp:hidden=8"} for name in PARTIES},
    "label": {"party": "lender", "top": "linear"},
    "train": {"epochs": 1, "batch_rows": 20},
    "federation": {
        "rejoin_window_s": 0.2,
        "step_timeout_s": 5.0,
        "max_restarts": 0,
        "join_timeout_s": 5.0,
    },
}
TWO = {name: EXPERIMENT["parties"][name] for name in PARTIES[:2]}
NOISY = "clipped_noise:norm=1.0,sigma={}"


class Session(PlayedSession):
    """Three parties and a lender."""

    def __init__(self, folder, flower):
        super().__init__(folder, flower, EXPERIMENT)
        draw = np.random.default_rng(0)
        for name in (*PARTIES, "lender"):
            (folder / name).mkdir()
            columns = {"a": draw.normal(size=120), "b": draw.normal(size=120)}
            if name == "lender":
                columns = {"paid": np.arange(120) % 2}
            table = pd.DataFrame({"id": [f"r{row:03}" for row in range(120)], **columns})
            table.to_csv(folder / name / "data.csv", index=False)
            self.write(name, 'label = "paid"' if name == "lender" else "")

    def write(self, name, more):
        super().write(name, PARTY.format(name=name, more=more))

    def forget(self):
        """What a dishonest label party does before it uses a name again."""
        shutil.rmtree(self.folder / "lender" / "store")
        self.flower.failures.clear()

    def refused(self, mode="train", **changes):
        """Play a session that a party is to refuse: its refusal, and no cut at the label party."""
        with pytest.raises(VFLError):
            self.play(mode, **changes)
        refusals = [one for one in self.flower.failures if isinstance(one, DisagreementError)]
        assert refusals
        assert all("stands for another session" in one.what for one in refusals)
        return refusals


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path, Flower(PARTIES))


def cuts(seen, party="bank"):
    return [payload for one, way, kind, _, payload in seen
            if (one, way, kind) == (party, "up", Kind.CUT)]  # fmt: skip


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


def test_a_finished_run_keeps_its_weights(session):
    session.play()
    before = weights_of(session)
    session.forget()
    session.refused(train=EXPERIMENT["train"] | {"learning_rate": 0.1})
    session.forget()
    # The same terms once more, but from another top: gradients, and so weights, are not the same.
    with pytest.raises(VFLError):
        session.play()
    assert any("with other weights" in one.what for one in session.flower.failures)
    after = weights_of(session)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    "change", [{"defense": NOISY.format(0)}, {"codec": "topk:k=2"}, {"parties": TWO}]
)
def test_an_evaluation_belongs_to_its_training(session, change):
    session.play(defense=NOISY.format(1))
    lender = own_ledger(session.flower.files["lender"])
    (lender.folder / "run.json").unlink()
    with pytest.raises(VFLError):
        session.play("evaluate", **({"defense": NOISY.format(1)} | change))
    # Our own label party refuses already; a dishonest one is refused by the parties.
    terms = Terms.of(
        session.experiment(**({"defense": NOISY.format(1)} | change)), "evaluate", "run"
    )
    with pytest.raises(DisagreementError, match="stands for another session"):
        own_ledger(session.flower.files["bank"]).begin(terms)


def test_names_of_their_own_share_no_draw(session):
    """Honest names, two scales: with one key for both, twice the first less the second is a cut."""
    party = session.flower.files["bank"]
    one, two = (
        own_secret(party, own_ledger(party).begin(terms))
        for terms in (
            Terms.of(session.experiment(defense=NOISY.format(sigma)), "train", f"run-{sigma}")
            for sigma in (1, 2)
        )
    )
    assert one != two
    assert one.number("init") != two.number("init")


def test_a_party_names_its_company_under_a_secure_sum(session):
    session.write("bank", "[consent]\nmin_parties = 3\nparties = ['club']")
    asked = {"secure": "sum", "parties": TWO}
    with pytest.raises(VFLError):
        session.play(**asked)
    (refusal,) = [one for one in session.flower.failures if one.code == "V403"]
    assert refusal.got == "2 feature parties; no club"
    assert refusal.want == "at least 3 in a secure mode; club in a secure mode"
    assert read_party_file(session.folder / "bank" / "party.toml").consent.min_parties == 3
