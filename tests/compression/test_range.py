"""Adaptive range coding of cuts: both ends learn alike, and only from what was committed."""

import numpy as np
import pytest
import torch

from vfl.compression import StepContext, make
from vfl.compression.coding import range_coder
from vfl.compression.coding.layouts import new_layout
from vfl.compression.coding.range_coder import AdaptiveCounts
from vfl.core.errors import (
    CheckpointError,
    CorruptFrameError,
    TruncatedFrameError,
    WidthError,
)
from vfl.core.seeds import generator

SPECS = [
    "topk:k=3,values=4,packer=range",
    "quantise:values=3,packer=range",
    "relu:values=4",
    "l1:target=3",
    "rate:bits=4",
]
WIDTH = 12


def cut_of(step, rows=40):
    """Units differ in how often and how strongly they are above zero."""
    noise = torch.randn(rows, WIDTH, generator=generator(step, "cut"))
    return (noise * torch.linspace(0.2, 2, WIDTH) + torch.linspace(-1, 1, WIDTH)).relu()


def training(step):
    return StepContext(step, training=True)


def send(sender, receiver, step):
    payload = sender.encode(cut_of(step), training(step)).payload
    return payload, receiver.decode(payload, 40, WIDTH, training(step)).cut


@pytest.mark.parametrize("spec", SPECS)
def test_both_ends_learn_and_frames_get_shorter(spec):
    sender, receiver, still = make(spec), make(spec), make(spec)
    first = last = 0
    for step in range(30):
        payload, cut = send(sender, receiver, step)
        unlearned, same = send(still, make(spec), step)
        assert torch.equal(cut, same)
        first, last = first + len(unlearned), last + len(payload)
        sender.commit(step)
        receiver.commit(step)
    assert last < 0.95 * first


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_learned_before_the_commit(spec):
    sender, receiver = make(spec), make(spec)
    payload, cut = send(sender, receiver, 0)
    again, same = send(sender, receiver, 0)
    assert bytes(payload) == bytes(again)
    assert torch.equal(cut, same)


@pytest.mark.parametrize("spec", SPECS)
def test_steps_in_flight_are_learned_in_order(spec):
    """Two steps behind at both ends, through a checkpoint of either."""
    sender, receiver = make(spec), make(spec)
    whole = []
    for step in range(8):
        whole.append(bytes(send(sender, receiver, step)[0]))
        if step == 4:
            sender, receiver = (restored(spec, each) for each in (sender, receiver))
        if step >= 2:
            sender.commit(step - 2)
            receiver.commit(step - 2)
    sender, receiver = make(spec), make(spec)
    for step in range(8):
        assert bytes(send(sender, receiver, step)[0]) == whole[step]
        if step >= 2:
            sender.commit(step - 2)
            receiver.commit(step - 2)


def restored(spec, codec):
    other = make(spec)
    other.load_state_dict({name: value.clone() for name, value in codec.state_dict().items()})
    return other


@pytest.mark.parametrize("spec", SPECS)
def test_ends_that_lost_step_are_found_out(spec):
    sender, receiver = make(spec), make(spec)
    found = 0
    for step in range(20):
        send(sender, restored(spec, sender), step)
        sender.commit(step)
        try:
            send(sender, receiver, step + 1)
        except CorruptFrameError as error:
            found += "other counts" in error.what
    assert found >= 19  # one byte agrees by chance once in 256


@pytest.mark.parametrize("spec", SPECS)
def test_a_query_teaches_nothing(spec):
    codec, other = make(spec), make(spec)
    for _ in range(3):
        codec.decode(codec.encode(cut_of(0)).payload, 40, WIDTH)
        codec.commit(0)
    assert bytes(codec.encode(cut_of(1)).payload) == bytes(other.encode(cut_of(1)).payload)


@pytest.mark.parametrize("contexts", [1, 2000])
def test_counts_of_few_of_many_contexts_are_those_of_all(contexts):
    counts = AdaptiveCounts(np.full((contexts, 3), 4), weight=2)
    expected = np.full((contexts, 3), 4)
    for step in range(3):
        which, symbols = np.array([0, contexts - 1, 0]), np.array([step, 1, 2])
        np.add.at(expected, (which, symbols), 2)
        counts.count(step, counts.cells(which, symbols))
    assert counts.state_dict()["counts"].tolist() == expected.tolist()
    shares = (counts.table & 0xFFFF).astype(int)
    assert (shares.sum(axis=1) == 2**15).all()
    assert (counts.table >> 16 == shares.cumsum(axis=1) - shares).all()
    assert np.abs(shares / 2**15 - expected / expected.sum(axis=1, keepdims=True)).max() < 1e-4


def test_counts_of_the_coder_of_before_are_refused():
    """Its checkpoints, and its frames: untaught ends began with tag 0."""
    codec = make("quantise:values=3,packer=range")
    payload = bytes(codec.encode(cut_of(0), training(0)).payload)
    state = {**codec.state_dict(), "history": torch.tensor(0)}
    with pytest.raises(CheckpointError, match="another range coder"):
        make("quantise:values=3,packer=range").load_state_dict(state)
    with pytest.raises(CorruptFrameError, match="other counts"):
        codec.decode(b"\0" + payload[1:], 40, WIDTH, training(0))


@pytest.mark.parametrize("rows", [1, 3, 64, 256])
def test_several_states_and_only_as_many_as_the_encoder_takes(monkeypatch, rows):
    layout = new_layout("range", 60, None, 8)
    rng = np.random.default_rng(rows)
    none, codes = np.zeros((rows, 0), int), rng.integers(0, 256, (rows, 60), np.uint8)
    body = layout.pack(none, codes)
    assert len(body) <= layout.limit_bytes(rows)
    assert layout.unpack(memoryview(body), rows)[1].tolist() == codes.tolist()
    assert body[0] & 15 == {1: 0, 3: 0, 64: 0, 256: 5}[rows]
    with monkeypatch.context() as patched:
        patched.setattr(range_coder, "state_count", lambda *_: 16 if rows < 256 else 1)
        other = layout.pack(none, codes)
    with pytest.raises(CorruptFrameError, match="invalid states"):
        layout.unpack(memoryview(other), rows)
    for place in {0, 1, len(body) // 2, len(body) - 1}:
        broken = bytearray(body)
        broken[place] ^= 4
        try:
            changed = layout.unpack(memoryview(broken), rows)[1]
        except CorruptFrameError:
            continue
        assert layout.pack(none, changed) == bytes(broken)


def test_a_table_that_would_be_too_large():
    with pytest.raises(WidthError) as caught:
        make("topk:k=9,values=4,packer=range").check(1280)
    assert caught.value.fix == "packer=enumerative"


def test_a_payload_that_ends_in_its_scales():
    with pytest.raises(TruncatedFrameError, match="inside its scales"):
        make("relu:values=4").decode(b"\0\0", 3, WIDTH)
