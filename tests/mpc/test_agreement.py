"""Keys of pairs through a relay: who may be in a pair, for what, and what the relay can do."""

import hashlib
import hmac
import json
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from vfl.core.errors import (
    AuthenticationError,
    DataError,
    MissingDataError,
    ProtocolError,
    TruncatedFrameError,
)
from vfl.mpc.secure import keys
from vfl.mpc.secure.keys import OFFER_BYTES, Agreement, Binding, pair_key
from vfl.mpc.stream import PadStream
from vfl.session.store.identity import Identity, Pin, read_pins
from vfl.transport.certificates import node_key_pair

PARTIES = ("bank", "shop", "clinic")
BINDING = Binding("5" * 32, 0, "a" * 64, PARTIES)
IDENTITIES = {
    name: Identity.of_simulation(hashlib.sha256(name.encode()).digest()) for name in PARTIES
}
PINS = {name: identity.public for name, identity in IDENTITIES.items()}


def sides(binding=BINDING, **others):
    """Everybody's side; `others` bind to something else."""
    return {
        name: Agreement(name, IDENTITIES[name], PINS, others.get(name, binding))
        for name in binding.parties
    }


def relayed(agreements):
    return b"".join(agreements[name].offer for name in PARTIES)


def test_both_ends_of_every_pair_have_its_key_and_nobody_else():
    agreements = sides()
    offers = relayed(agreements)
    keys = {name: agreement.keys(offers) for name, agreement in agreements.items()}
    assert keys["bank"]["shop"] == keys["shop"]["bank"]
    assert keys["bank"]["clinic"] == keys["clinic"]["bank"]
    assert len({key for own in keys.values() for key in own.values()}) == 3
    assert all(len(key) == 32 for own in keys.values() for key in own.values())


def test_the_relay_cannot_put_its_own_key_in_between():
    """It knows everything that is public, and makes an X25519 key and a signature of its own."""
    agreements, own = sides(), Identity.fresh()
    mine = Agreement("shop", own, PINS, BINDING)
    offers = agreements["bank"].offer + mine.offer + agreements["clinic"].offer
    with pytest.raises(AuthenticationError, match="'shop'"):
        agreements["bank"].keys(offers)
    unsigned = bytearray(relayed(sides()))
    unsigned[OFFER_BYTES] ^= 1
    with pytest.raises(AuthenticationError):
        sides()["bank"].keys(agreements["bank"].offer + bytes(unsigned[OFFER_BYTES:]))


@pytest.mark.parametrize(
    "other",
    [
        replace(BINDING, terms="b" * 64),
        replace(BINDING, session="6" * 32),
        replace(BINDING, attempt=1),
        replace(BINDING, parties=("shop", "bank", "clinic")),
    ],
    ids=["configuration", "session", "attempt", "order of the parties"],
)
def test_an_offer_for_something_else_is_refused(other):
    agreements = sides(shop=other)
    with pytest.raises(AuthenticationError, match="'shop'"):
        agreements["bank"].keys(relayed(agreements))


def test_one_identity_key_in_two_roles_signs_for_one_of_them():
    """Shop and clinic are of one organisation; the relay exchanges their offers."""
    pins = PINS | {"clinic": PINS["shop"]}
    own = {"bank": IDENTITIES["bank"]} | dict.fromkeys(("shop", "clinic"), IDENTITIES["shop"])
    bank, shop, clinic = (Agreement(name, own[name], pins, BINDING) for name in PARTIES)
    with pytest.raises(AuthenticationError, match="'shop'"):
        bank.keys(bank.offer + clinic.offer + shop.offer)


def test_another_identity_key_than_the_pinned_one_is_refused():
    agreements = sides()
    other = Agreement("bank", IDENTITIES["bank"], PINS | {"shop": PINS["clinic"]}, BINDING)
    offers = other.offer + agreements["shop"].offer + agreements["clinic"].offer
    with pytest.raises(AuthenticationError, match="'shop'"):
        other.keys(offers)


def test_offers_of_another_length_or_twice_are_refused():
    agreements = sides()
    with pytest.raises(TruncatedFrameError):
        sides()["bank"].keys(relayed(agreements)[:-1])
    agreements["bank"].keys(relayed(agreements))
    with pytest.raises(ProtocolError, match="twice"):
        agreements["bank"].keys(relayed(agreements))


def test_a_point_of_small_order_is_refused():
    """Whoever signs zeros as its key would make the pair's secret zero."""
    agreements = sides()
    zero = bytes(32 + 8)  # and a count of 0
    shop = sides()["shop"]
    message = b"".join([b"vfl masked sum offer 2", BINDING.digest(), b"\x04", b"shop", zero])
    offer = zero + IDENTITIES["shop"].sign(message)
    assert len(offer) == len(shop.offer)
    with pytest.raises(AuthenticationError, match="'shop'"):
        agreements["bank"].keys(agreements["bank"].offer + offer + agreements["clinic"].offer)


# RFC 7748, section 6.1: private and public keys of two, and their shared secret.
ALICE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
ALICE_PUBLIC = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
BOB_PUBLIC = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
SHARED = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"


def by_hand():
    """The pair's key from the secret of RFC 7748 by RFC 5869, sections 2.2 and 2.3."""
    facts = json.dumps(["5" * 32, 0, "a" * 64, ["bank", "shop"]], separators=(",", ":"))
    info = b"vfl masked sum pair 1" + hashlib.sha256(facts.encode()).digest()
    info += b"\x04bank" + bytes.fromhex(ALICE_PUBLIC) + b"\x04shop" + bytes.fromhex(BOB_PUBLIC)
    pseudorandom = hmac.digest(bytes(32), bytes.fromhex(SHARED), "sha256")
    return hmac.digest(pseudorandom, info + b"\x01", "sha256")


def test_the_test_vector_of_the_documentation():
    private = X25519PrivateKey.from_private_bytes(bytes.fromhex(ALICE))
    shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(BOB_PUBLIC)))
    assert shared.hex() == SHARED
    offered = {"bank": bytes.fromhex(ALICE_PUBLIC), "shop": bytes.fromhex(BOB_PUBLIC)}
    key = pair_key(shared, replace(BINDING, parties=("bank", "shop")), offered)
    assert key == by_hand()
    words = PadStream(key).elements32(4, "cut", 7)
    told = [key.hex(), " ".join(f"{word:08x}" for word in words)]
    assert keys.__doc__ is not None
    assert all(each in keys.__doc__ for each in (*told, SHARED, ALICE, BOB)), told


def test_identity_files_are_openssh_and_private(tmp_path):
    identity = Identity.fresh()
    identity.keep_at(tmp_path / "identity.key")
    identity.public.keep_at(tmp_path / "peers" / "bank.pub")
    assert (tmp_path / "identity.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "peers" / "bank.pub").read_text().startswith("ssh-ed25519 ")
    again = Identity.kept_at(tmp_path / "identity.key")
    (pin,) = read_pins(tmp_path / "peers", ["bank"]).values()
    assert pin.has_signed(b"message", again.sign(b"message"))
    assert not pin.has_signed(b"message", Identity.fresh().sign(b"message"))
    assert repr(again) == "Identity(...)"


def test_missing_and_foreign_key_files_are_refused(tmp_path):
    with pytest.raises(MissingDataError, match="identity key"):
        Identity.kept_at(tmp_path / "identity.key")
    with pytest.raises(MissingDataError, match="identity key"):
        read_pins(tmp_path, ["shop"])
    (tmp_path / "shop.pub").write_text("ssh-ed25519 AAAA")
    with pytest.raises(DataError, match="public key"):
        Pin.kept_at(tmp_path / "shop.pub")
    private, public = node_key_pair()  # of a SuperNode: another kind of key
    (tmp_path / "node.key").write_bytes(private)
    (tmp_path / "node.pub").write_bytes(public)
    with pytest.raises(DataError, match="private key") as caught:
        Identity.kept_at(tmp_path / "node.key")
    assert "move this file away" in caught.value.fix, "vfl join replaces no key"
    with pytest.raises(DataError, match="public key"):
        Pin.kept_at(tmp_path / "node.pub")
