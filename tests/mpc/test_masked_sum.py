"""Numbers of a ring, and the masks that cancel out."""

import numpy as np
import pytest
import torch

from vfl.core.errors import (
    BadOptionError,
    NonFiniteError,
    ReusedPadError,
    RingOverflowError,
    TruncatedFrameError,
)
from vfl.core.seeds import generator
from vfl.mpc import ring as ring_loops
from vfl.mpc.secure.masks import PairwiseMasks, Ring
from vfl.session import secure_mode

PARTIES = ["bank", "shop", "clinic"]


def cut(seed, rows=7, width=5, scale=3.0):
    return scale * torch.randn(rows, width, generator=generator(seed, "cut"))


def keys_of(parties, number=0):
    """The same key at both ends of every pair."""
    return {
        party: {
            other: bytes([number, *sorted((parties.index(party), parties.index(other)))])
            + bytes(29)
            for other in parties
            if other != party
        }
        for party in parties
    }


def masks_of(parties=PARTIES, number=0):
    keys = keys_of(parties, number)
    return {party: PairwiseMasks(party, parties, keys[party]) for party in parties}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_the_sum_is_exact_to_half_a_step_a_party(bits, count):
    parties = PARTIES[:count]
    ring, masks = Ring.of(bits, None, count), masks_of(parties)
    scale = min(3.0, ring.reach / 4)
    cuts = {party: cut(at, scale=scale) for at, party in enumerate(parties)}
    payloads = []
    for party in parties:
        own = lambda count, m=masks[party]: m.elements(count, ring.dtype, "cut", 4)  # noqa: E731
        words = ring.encode(cuts[party], party, 4, own)
        payloads.append(words.tobytes())
    total = ring.decode(payloads, 7, 5)
    exact = torch.stack(list(cuts.values())).double().sum(0)
    assert len(payloads[0]) == 35 * bits // 8
    assert (total.double() - exact).abs().max() <= count * 2.0 ** -(ring.fraction + 1)
    assert total.dtype == torch.float32


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_loops_and_passes_round_and_wrap_as_whole_numbers_of_python_do(monkeypatch, bits, compiled):
    monkeypatch.setattr(ring_loops, "COMPILED", compiled and ring_loops.COMPILED)
    draw, most, kind = np.random.default_rng(bits), 2 ** (bits - 1) // 3, np.dtype(f"i{bits // 8}")
    values = draw.uniform(-most / 4, most / 4, 500).astype(np.float32)
    mask = draw.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), 500).astype(kind)
    words = mask.copy()
    assert ring_loops.encode_onto(values, 4.0, most, words)
    half = 2 ** (bits - 1)
    wrapped = lambda number: (number + half) % (2 * half) - half  # noqa: E731
    numbers = zip(values.tolist(), mask.tolist(), strict=True)
    assert words.tolist() == [wrapped(round(4 * value) + hides) for value, hides in numbers]
    found = ring_loops.decode_sum(words, mask, 0.5)
    pairs = zip(words.tolist(), mask.tolist(), strict=True)
    assert found.tolist() == [float(np.float32(wrapped(a + b))) / 2 for a, b in pairs]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("last", [1.0, -1.0])
def test_the_last_number_that_fits_and_the_first_that_does_not(monkeypatch, compiled, last):
    """Of 2^30 - 1 and its neighbours float32 has 2^30 alone."""
    monkeypatch.setattr(ring_loops, "COMPILED", compiled and ring_loops.COMPILED)
    words = np.zeros(2, np.int32)
    for number, fits in ((2**30 - 64, True), (2**30, False), (np.inf, False), (np.nan, False)):
        values = np.array([0.5, last * number], np.float32)
        assert ring_loops.encode_onto(values, 1.0, 2**30 - 1, words) is fits


def test_the_sum_wraps_nowhere_at_the_ends_of_the_range():
    for parties in (2, 3, 5):
        ring = Ring.of(8, 0, parties)
        for sign in (-1, 1):
            end = torch.full((1, 1), sign * ring.reach)
            words = [ring.encode(end, "bank", 0).tobytes()] * parties
            assert ring.decode(words, 1, 1).item() == sign * ring.reach * parties


@pytest.mark.parametrize("value", [16384.0, -16385.0, 1e9, 3e38])
def test_a_value_that_would_overflow_is_found_before_it_is_encoded(value):
    values = torch.tensor([[1.0, value]])
    with pytest.raises(RingOverflowError) as caught:
        Ring.of(32, 16, 2).encode(values, "bank", 12)
    told = str(caught.value)
    assert "party 'bank'" in told
    assert "step 12" in told
    needed = int(caught.value.got.split()[0])
    assert 2.0 ** (needed - 2) <= 2 * abs(value) * 2**16 + 1 <= 2.0 ** (needed - 1)
    assert str(abs(value)) not in told
    assert str(int(abs(value))) not in told


def test_nan_is_refused():
    with pytest.raises(NonFiniteError):
        Ring.of(32, 16, 2).encode(torch.tensor([[1.0, float("nan")]]), "bank", 0)


def test_options_that_make_no_ring_are_refused():
    for spec in ("sum:bits=12", "sum:bits=8,fraction=7", "sum:fraction=-1"):
        with pytest.raises(BadOptionError):
            secure_mode.make(spec)
    with pytest.raises(BadOptionError, match="out of range") as caught:
        secure_mode.make("sum:bits=8,fraction=4").ring(16)
    assert caught.value.want.startswith("0 to 2")
    Ring.of(8, 2, 16)


@pytest.mark.parametrize("parties", [1, 2, 3, 5, 100])
def test_the_error_states_the_most_fraction_bits_that_fit(parties):
    with pytest.raises(BadOptionError) as caught:
        Ring.of(16, 15, parties)
    most = int(caught.value.want.split(",")[0].removeprefix("0 to "))
    Ring.of(16, most, parties)
    with pytest.raises(BadOptionError):
        Ring.of(16, most + 1, parties)


def test_a_payload_of_another_length_is_refused():
    ring = Ring.of(16, None, 2)
    with pytest.raises(TruncatedFrameError, match="masked payload"):
        ring.decode([bytes(12), bytes(14)], 2, 3)


def test_masks_cancel_out_and_differ_by_step_and_purpose():
    masks = masks_of()
    words = {
        purpose: [masks_added(masks[party], *purpose) for party in PARTIES]
        for purpose in [("cut", 0), ("cut", 1), ("query", 1)]
    }
    for each in words.values():
        assert not np.any(sum(each[1:], start=each[0]))
        assert all(np.any(one) for one in each)
    flat = [one.tobytes() for each in words.values() for one in each]
    assert len(set(flat)) == len(flat)


def masks_added(masks, *purpose, count=64, dtype=np.uint32):
    return masks.elements(count, np.dtype(dtype), *purpose)


def test_a_mask_is_never_given_twice():
    masks = masks_of()["bank"]
    masks_added(masks, "cut", 5)
    for step in (5, 4):
        with pytest.raises(ReusedPadError):
            masks_added(masks, "cut", step)
    assert "\\x" not in repr(masks)
