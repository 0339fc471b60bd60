import copy
import hmac
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from vfl.core.errors import ReusedPadError
from vfl.mpc import PadStream

KEY = bytes(range(32))


def test_test_vector():
    """The words are AES-128-CTR as anybody else would compute it."""
    name = b"str5:masksint1:3"
    key = hmac.digest(KEY, name, "sha256")[:16]
    counter = (7).to_bytes(8, "big") + bytes(8)
    plain = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update(bytes(80))
    assert PadStream(KEY).elements64(10, "masks", 3, 7).tobytes() == plain
    assert PadStream(KEY).elements32(20, "masks", 3, 7).tobytes() == plain


def test_steps_and_purposes_are_apart():
    purposes = [("a",), ("a", 1), ("a", 2), ("b", 2), ("a", "1", 2), ("a", 1, 2), ("a1", 2)]
    pads = [PadStream(KEY).elements64(4, *purpose).tobytes() for purpose in purposes]
    assert len(set(pads)) == len(purposes)
    assert PadStream(bytes(32)).elements64(4, "a").tobytes() not in pads


def test_neither_order_nor_a_lost_call_matters():
    one, other = PadStream(KEY), PadStream(KEY)
    one.elements64(1000, "b", 1)
    one.elements64(3, "a", 4)
    assert (one.elements64(6, "b", 9) == other.elements64(6, "b", 9)).all()
    assert (one.elements64(6, "a", 9) == other.elements64(6, "a", 9)).all()


@pytest.mark.parametrize("again", [("a", 3), ("a", 2)])
def test_a_pad_is_given_once(again):
    pads = PadStream(KEY)
    pads.elements64(2, "a", 3)
    with pytest.raises(ReusedPadError):
        pads.elements32(1, *again)
    pads.elements64(2, "a", 4)


def test_a_pad_without_a_step_is_given_once():
    pads = PadStream(KEY)
    pads.elements32(2, "once")
    with pytest.raises(ReusedPadError):
        pads.elements32(2, "once")


def test_words_are_uniform():
    words = PadStream(KEY).elements64(100_000, "uniform")
    ones = np.unpackbits(words.view(np.uint8)).reshape(len(words), 64).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(len(words))


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_stream_is_never_copied(take):
    with pytest.raises(TypeError):
        take(PadStream(KEY))


def test_a_key_has_32_bytes():
    with pytest.raises(ValueError, match="32 bytes"):
        PadStream(bytes(16))
    assert "\\x" not in repr(PadStream(KEY))


def test_keys_derived_before_give_the_same_pads_and_use_none():
    early, late = PadStream(bytes(32)), PadStream(bytes(32))
    early.expand(("mask", 0), ("order",))
    for purpose in (("mask", 0, 3), ("order", 1)):
        assert (early.elements64(5, *purpose) == late.elements64(5, *purpose)).all()
