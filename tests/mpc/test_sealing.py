"""What a relay can do with messages it cannot read: nothing that goes unnoticed."""

import hmac
import pickle

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vfl.core.errors import AuthenticationError, ReusedPadError
from vfl.mpc.secure import keys as sealing
from vfl.mpc.secure.keys import TAG_BYTES, pair_seals

KEY = bytes(range(32))
ABOUT = b"inputs 7"


class Way:
    """One direction of a pair, as one end has it."""

    def __init__(self, sender="bank", receiver="shop", key=KEY):
        self.sender, self.receiver = sender, receiver
        self.there, self.here = (
            pair_seals(sender, {receiver: key}),
            pair_seals(receiver, {sender: key}),
        )

    def seal(self, message, about=ABOUT):
        return self.there.sealed(self.receiver, message, about)

    def open(self, sealed, about=ABOUT):
        return self.here.opened(self.sender, sealed, about)


def test_messages_open_in_their_order_and_are_longer_by_a_tag():
    way = Way()
    for number, message in enumerate([b"", b"words", bytes(1000)]):
        sealed = way.seal(message, b"inputs %d" % number)
        assert len(sealed) == len(message) + TAG_BYTES
        assert way.open(sealed, b"inputs %d" % number) == message


def test_the_same_message_never_looks_the_same():
    way = Way()
    assert len({way.seal(bytes(64)) for _ in range(20)}) == 20


@pytest.mark.parametrize("place", [0, 4, -1])
def test_a_changed_byte_is_refused(place):
    way = Way()
    sealed = bytearray(way.seal(b"words"))
    sealed[place] ^= 1
    with pytest.raises(AuthenticationError, match="'bank'") as caught:
        way.open(sealed)
    assert caught.value.where == ABOUT.decode()


@pytest.mark.parametrize("length", [0, TAG_BYTES - 1, TAG_BYTES, 20])
def test_a_message_of_another_length_is_refused(length):
    way = Way()
    with pytest.raises(AuthenticationError):
        way.open(way.seal(b"words")[:length])


def test_a_repeated_a_skipped_and_a_moved_message_are_refused():
    way = Way()
    first, second = (way.seal(b"words") for _ in range(2))
    with pytest.raises(AuthenticationError):
        way.open(second)
    way = Way()
    assert way.open(way.seal(b"words")) == b"words"
    with pytest.raises(AuthenticationError):
        way.open(first)
    with pytest.raises(AuthenticationError):
        Way().open(Way().seal(b"words"), b"inputs 8")


@pytest.mark.parametrize(
    "other", [("shop", "bank"), ("bank", "clinic"), ("ban", "kshop"), ("bank", "shop", bytes(32))]
)
def test_each_direction_pair_and_attempt_has_a_key_of_its_own(other):
    with pytest.raises(AuthenticationError):
        Way(*other).open(Way().seal(b"words"))


def test_a_key_seals_no_more_than_its_nonces(monkeypatch):
    monkeypatch.setattr("vfl.transport.pairs._MESSAGES", 2)
    way = Way()
    way.seal(b"")
    way.seal(b"")
    with pytest.raises(ReusedPadError):
        way.seal(b"")


def test_the_test_vector_of_the_documentation():
    """HKDF by RFC 5869, with hmac alone; the pair's key is that of the secure sum's page."""
    pair = bytes.fromhex("7deaf7d298f8ae132fc4f873ca93c192e144e9299a164737d3643fd478087769")
    pseudorandom = hmac.digest(bytes(32), pair, "sha256")
    info = b"vfl relayed message 1" + b"\x04bank" + b"\x04shop"
    key = hmac.digest(pseudorandom, info + b"\x01", "sha256")
    sealed = AESGCM(key).encrypt(bytes(12), b"words", b"inputs 7")
    assert Way(key=pair).seal(b"words") == sealed
    assert sealing.__doc__ is not None
    assert sealed.hex() in sealing.__doc__
    assert pair.hex() in sealing.__doc__


def test_a_key_is_not_serialised_or_shown():
    seals = Way().there
    assert KEY.hex() not in repr(seals)
    with pytest.raises(TypeError):
        pickle.dumps(seals)
