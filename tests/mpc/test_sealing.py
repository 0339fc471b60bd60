"""What a relay can do with messages it cannot read: nothing that goes unnoticed."""

import hmac
import pickle

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vfl.core.errors import AuthenticationError, ReusedPadError
from vfl.mpc.secure import keys as sealing
from vfl.mpc.secure.keys import TAG_BYTES, Sealing

KEY = bytes(range(32))
ABOUT = "inputs 7"


def ends():
    return Sealing(KEY, "bank", "shop"), Sealing(KEY, "bank", "shop")


def test_messages_open_in_their_order_and_are_longer_by_a_tag():
    there, here = ends()
    for number, message in enumerate([b"", b"words", bytes(1000)]):
        sealed = there.seal(message, f"inputs {number}")
        assert len(sealed) == len(message) + TAG_BYTES
        assert here.open(sealed, f"inputs {number}") == message


def test_the_same_message_never_looks_the_same():
    there, _ = ends()
    assert len({there.seal(bytes(64), ABOUT) for _ in range(20)}) == 20


@pytest.mark.parametrize("place", [0, 4, -1])
def test_a_changed_byte_is_refused(place):
    there, here = ends()
    sealed = bytearray(there.seal(b"words", ABOUT))
    sealed[place] ^= 1
    with pytest.raises(AuthenticationError, match="'bank'") as caught:
        here.open(sealed, ABOUT)
    assert caught.value.where == ABOUT


@pytest.mark.parametrize("length", [0, TAG_BYTES - 1, TAG_BYTES, 20])
def test_a_message_of_another_length_is_refused(length):
    there, here = ends()
    with pytest.raises(AuthenticationError):
        here.open(there.seal(b"words", ABOUT)[:length], ABOUT)


def test_a_repeated_a_skipped_and_a_moved_message_are_refused():
    there, here = ends()
    first, second = (there.seal(b"words", ABOUT) for _ in range(2))
    with pytest.raises(AuthenticationError):
        here.open(second, ABOUT)
    there, here = ends()
    assert here.open(there.seal(b"words", ABOUT), ABOUT) == b"words"
    with pytest.raises(AuthenticationError):
        here.open(first, ABOUT)
    there, here = ends()
    with pytest.raises(AuthenticationError):
        here.open(there.seal(b"words", ABOUT), "inputs 8")


def test_each_direction_pair_and_attempt_has_a_key_of_its_own():
    sealed = Sealing(KEY, "bank", "shop").seal(b"words", ABOUT)
    for other in (
        Sealing(KEY, "shop", "bank"),
        Sealing(KEY, "bank", "clinic"),
        Sealing(KEY, "ban", "kshop"),
        Sealing(bytes(32), "bank", "shop"),
    ):
        with pytest.raises(AuthenticationError):
            other.open(sealed, ABOUT)


def test_a_key_seals_no_more_than_its_nonces(monkeypatch):
    monkeypatch.setattr("vfl.transport.pairs._MESSAGES", 2)
    there, _ = ends()
    there.seal(b"", ABOUT)
    there.seal(b"", ABOUT)
    with pytest.raises(ReusedPadError):
        there.seal(b"", ABOUT)


def test_the_test_vector_of_the_documentation():
    """HKDF by RFC 5869, with hmac alone; the pair's key is that of the secure sum's page."""
    pair = bytes.fromhex("7deaf7d298f8ae132fc4f873ca93c192e144e9299a164737d3643fd478087769")
    pseudorandom = hmac.digest(bytes(32), pair, "sha256")
    info = b"vfl relayed message 1" + b"\x04bank" + b"\x04shop"
    key = hmac.digest(pseudorandom, info + b"\x01", "sha256")
    sealed = AESGCM(key).encrypt(bytes(12), b"words", b"inputs 7")
    assert Sealing(pair, "bank", "shop").seal(b"words", "inputs 7") == sealed
    assert sealing.__doc__ is not None
    assert sealed.hex() in sealing.__doc__
    assert pair.hex() in sealing.__doc__


def test_a_key_is_not_serialised_or_shown():
    there, _ = ends()
    assert repr(there) == "Sealing(...)"
    with pytest.raises(TypeError):
        pickle.dumps(there)
