"""Sealed messages between parties that a label party carries: what their keys are bound to."""

import pytest

from vfl.config import Experiment, read_party_file
from vfl.core.errors import AuthenticationError, RolledBackError
from vfl.datasets.alignment.protocols import Send
from vfl.session import Terms
from vfl.session.relay import PairSeals
from vfl.session.store.identity import Identity
from vfl.session.store.witness import Standing, Witness

NAMES, SESSION = ("bank", "shop"), "5" * 32


def terms_of(mode="train", run="one", **changes):
    content = {"parties": {name: {"width": 4} for name in NAMES}, "label": {"party": "lender"}}
    return Terms.of(Experiment.model_validate(content | changes), mode, run)


@pytest.fixture
def files(tmp_path):
    identities = {name: Identity.fresh() for name in NAMES}
    for name, other in (NAMES, NAMES[::-1]):
        identities[name].keep_at(tmp_path / name / "identity.key")
        identities[name].public.keep_at(tmp_path / other / "peers" / f"{name}.pub")
        text = f'party = "{name}"\n[data]\nsource = "x.csv"\nid = "id"\n'
        (tmp_path / name / "party.toml").write_text(text)
    return {name: read_party_file(tmp_path / name / "party.toml") for name in NAMES}


def offer_of(files, terms, session=SESSION, **more):
    seals = PairSeals(files["shop"], terms, session, **more)
    return seals, seals.offers()[0].payload


OTHER = {
    "defense": {"defense": "clipped_noise:norm=1.0,sigma=2.0"},
    "codec": {"codec": "topk:k=2"},
    "learning rate": {"train": {"learning_rate": 0.5}},
    "width": {"parties": {"bank": {"width": 4}, "shop": {"width": 5}}},
    "mode": {"mode": "predict"},
    "run": {"run": "two"},
}


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_parties_that_were_told_different_terms_agree_on_no_key(files, change):
    """The label party sends each its terms: nothing is sealed for one that has others."""
    bank = PairSeals(files["bank"], terms_of(), SESSION)
    _, offer = offer_of(files, terms_of(**change))
    with pytest.raises(AuthenticationError, match="not sealed by party 'shop'"):
        bank.open("shop", offer)
    assert bank.seal(Send("shop", b"words")) == []


def test_an_offer_of_another_session_is_refused(files):
    bank = PairSeals(files["bank"], terms_of(), SESSION)
    with pytest.raises(AuthenticationError):
        bank.open("shop", offer_of(files, terms_of(), "6" * 32)[1])


def test_what_is_sealed_is_opened_once_by_its_receiver_and_about_the_same(files):
    bank, (shop, offer) = PairSeals(files["bank"], terms_of(), SESSION), offer_of(files, terms_of())
    shop.open("bank", bank.offers()[0].payload)
    bank.open("shop", offer)
    sealed = bank.sealed("shop", b"words", b"CUT 3")
    assert shop.opened("bank", sealed, b"CUT 3") == b"words"
    with pytest.raises(AuthenticationError):
        shop.opened("bank", sealed, b"CUT 3")


def test_an_offer_signs_the_count_of_its_store(files, tmp_path):
    """Changed on its way it is no offer; and a store that went back offers a count met before."""
    terms = terms_of()
    own = Standing(Witness(tmp_path / "bank-store", "bank"), "bank", "one", "lender")
    theirs = Standing(Witness(tmp_path / "shop-store", "shop"), "shop", "one", "lender")
    _, offer = offer_of(files, terms, standing=theirs)
    raised = offer[:39] + bytes([offer[39] ^ 1]) + offer[40:]
    with pytest.raises(AuthenticationError):
        PairSeals(files["bank"], terms, SESSION, standing=own).open("shop", raised)
    PairSeals(files["bank"], terms, SESSION, standing=own).open("shop", offer)
    with pytest.raises(RolledBackError, match="store of party 'shop'"):
        PairSeals(files["bank"], terms, SESSION, standing=own).open("shop", offer)
