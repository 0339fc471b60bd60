"""Lengths that say nothing: agreed sizes, and queries of one length."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vfl.compression import INFERENCE, StepContext, make
from vfl.compression.coding.padding import agreed_size, pad, padded_limit, unpad
from vfl.core.errors import BadOptionError, FrameError
from vfl.core.seeds import Secret, generator

WIDTH = 16
VARIABLE = [
    "topk:k=3,values=4,packer=range",
    "randtopk:k=3,alpha=0,values=8,packer=range,scale=agreed",
    "quantise:values=3,packer=range,grad=bf16",
    "relu",
    "relu:values=fp32,packer=bitmap",
    "relu:values=4,packer=enumerative,scale=row,grad=4",
    "l1:target=3,scale=agreed",
    "rate:bits=3",
]
lengths = st.integers(0, 5000)


def with_pad(spec, word):
    return f"{spec}{',' if ':' in spec else ':'}pad={word}"


def cut_of(seed, rows=40, sparse=0.0):
    noise = torch.randn(rows, WIDTH, generator=generator(seed, "padding"))
    return (noise * torch.linspace(0.2, 2, WIDTH) - sparse).relu()


def training(step):
    return StepContext(step, training=True, secret=Secret.of_simulation(0, "feature"))


@given(lengths, st.integers(0, 2000))
def test_an_agreed_size_is_the_least_of_the_ladder_that_fits(limit, below):
    length = max(0, limit - below)
    rungs = {math.ceil((limit + 1) * 2 ** (-step / 4)) for step in range(4 * 14)}
    assert agreed_size(length, limit) == min(each for each in rungs if each >= length + 1)


@given(st.binary(max_size=300), st.integers(0, 1000))
def test_a_padded_payload_comes_back(payload, more):
    limit = len(payload) + more
    padded = pad(payload, limit)
    assert bytes(unpad(padded, limit)) == payload
    assert len(padded) <= padded_limit(limit)
    assert len(padded) < 2**0.25 * (len(payload) + 1) + 1


@given(st.binary(min_size=1, max_size=60), st.integers(0, 100), st.data())
def test_nothing_can_be_hidden_in_padding(payload, more, data):
    """A reader takes exactly the bytes that `pad` makes: any other payload it reads is another."""
    limit = len(payload) + more
    changed = bytearray(pad(payload, limit))
    where = data.draw(st.integers(0, len(changed) - 1))
    changed[where] ^= data.draw(st.integers(1, 255))
    for candidate in (bytes(changed), pad(payload, limit) + b"\0", pad(payload, limit)[:-1]):
        try:
            read = bytes(unpad(candidate, limit))
        except FrameError:
            continue
        assert candidate == pad(read, limit)


@pytest.mark.parametrize("spec", VARIABLE)
def test_a_query_says_the_same_whatever_its_padding(spec):
    senders = {word: make(with_pad(spec, word)) for word in ("no", "query", "always")}
    readers = {word: make(with_pad(spec, word)) for word in senders}
    found = {}
    for word, sender in senders.items():
        for step in range(4):
            payload = sender.encode(cut_of(step), training(step)).payload
            readers[word].decode(payload, 40, WIDTH, training(step))
            for end in (sender, readers[word]):
                end.commit(step)
        payload = sender.encode(cut_of(9)).payload
        found[word] = readers[word].decode(payload, 40, WIDTH).cut
    assert torch.equal(found["query"], found["no"])
    assert torch.equal(found["always"], found["no"])


@pytest.mark.parametrize("spec", VARIABLE)
def test_padding_is_of_queries_unless_training_is_asked_for(spec):
    """Training frames of the default are those of ``pad=no``, bit for bit."""
    plain, default = make(with_pad(spec, "no")), make(spec)
    for step in range(3):
        one, other = (each.encode(cut_of(step), training(step)) for each in (plain, default))
        assert bytes(one.payload) == bytes(other.payload)
        grads = []
        for end in (plain, default):
            _, saved = end.decode(one.payload, 40, WIDTH, training(step))
            grads.append(bytes(end.encode_grad(cut_of(step), saved, training(step))))
            end.commit(step)
        assert grads[0] == grads[1]


@pytest.mark.parametrize("spec", VARIABLE)
def test_training_frames_have_agreed_sizes_where_asked(spec):
    """Cuts and gradients, through both ends; what is packed is that of ``pad=no``."""
    frames = {word: [] for word in ("no", "always")}
    for word, found in frames.items():
        sender, receiver = make(with_pad(spec, word)), make(with_pad(spec, word))
        for step in range(12):
            payload, kept = sender.encode(cut_of(step, sparse=step / 40), training(step))
            decoded, saved = receiver.decode(payload, 40, WIDTH, training(step))
            grad = receiver.encode_grad(decoded, saved, training(step))
            back = sender.decode_grad(grad, kept, 40, WIDTH, training(step))
            assert max(len(payload), len(grad)) <= sender.payload_limit(40, WIDTH)
            found.append((bytes(payload), bytes(grad), decoded, back))
            sender.commit(step)
            receiver.commit(step)
    for plain, filled in zip(frames["no"], frames["always"], strict=True):
        assert all(map(torch.equal, plain[2:], filled[2:]))
        for one, other in zip(plain[:2], filled[:2], strict=True):
            assert other[: len(one)] == one
            assert other[len(one) :].strip(b"\0") in (b"\x80", b"")  # as long as ever, or filled
            assert len(one) <= len(other) < 2**0.25 * (len(one) + 1) + 1
    for way in range(2):
        plain, filled = ({len(each[way]) for each in frames[word]} for word in ("no", "always"))
        assert len(plain) == 1 or len(filled) <= len(plain) / 2
    changed = bytearray(frames["always"][-1][0])
    changed[-1] ^= 1
    with pytest.raises(FrameError):
        receiver.decode(changed, 40, WIDTH, training(step))


def test_a_query_of_one_length_takes_the_fewest_bits_of_any_fixed_format():
    cut = torch.zeros(256, 128)
    for spec, bits, scale_bytes in (
        ("topk:k=3,values=4,packer=range", 19 + 12, 4),
        ("quantise:values=4,packer=range", 4 * 128, 4),
        ("relu:values=4", 4 * 128, 2),
        ("relu:values=fp32,packer=bitmap", 32 * 128, 0),
    ):
        payload = make(spec).encode(cut, INFERENCE).payload
        assert len(payload) == 256 * scale_bytes + 256 * bits // 8


def test_an_unknown_word_is_refused():
    with pytest.raises(BadOptionError) as caught:
        make("relu:pad=queries")
    assert caught.value.fix == "did you mean 'query'?"
