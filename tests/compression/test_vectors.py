"""Vectors of 16 states code to the bytes numpy does, and touch nothing outside their arrays."""

import numpy as np
import pytest

from vfl.compression.coding import range_coder
from vfl.compression.coding.range_coder import LANES, AdaptiveCounts, decode_columns, encode_columns
from vfl.core import compiled
from vfl.core.errors import CorruptFrameError

pytestmark = pytest.mark.skipif(not compiled.COMPILED, reason="needs numba")

SHAPES = [(256, 160), (3, 1280), (130, 77), (64, 16)]


def counts_of(width, bits, seed=0, steps=2):
    """Counts that have seen a few steps, and codes of the next one."""
    counts = AdaptiveCounts(np.full((width, 2**bits), 4), weight=24)
    draw = np.random.default_rng(seed)
    for step in range(steps + 1):
        codes = np.minimum(draw.geometric(0.2, (90, width)) - 1, 2**bits - 1).astype(np.uint8)
        if step < steps:
            counts.count_columns(step, codes)
    return counts, codes


def drawn(rows, width, bits):
    """Codes as they come, with the rarest and the most frequent of each context."""
    draw = np.random.default_rng(rows)
    codes = np.minimum(draw.geometric(0.2, (rows, width)) - 1, 2**bits - 1).astype(np.uint8)
    codes[0], codes[-1] = 0, 2**bits - 1
    return codes


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("states", [16, 64, 256])
def test_bytes_and_codes_are_the_same(monkeypatch, both, bits, rows, width, states):
    counts, _ = counts_of(width, bits)
    codes = drawn(rows, width, bits)
    states = min(states, 1 << (width.bit_length() - 1))
    monkeypatch.setattr(range_coder, "state_count", lambda *_: states)
    first, second = both(lambda: encode_columns(counts.table, codes))
    assert first == second
    assert len(first) > 1 + 4 * states
    for found in both(lambda: decode_columns(first, counts, rows)):
        assert np.array_equal(found, codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_symbols_that_cannot_occur_are_passed_over(monkeypatch, both, bits):
    draw = np.random.default_rng(bits)
    start = draw.integers(0, 3, (100, 2**bits)) * draw.integers(1, 900, (100, 2**bits))
    start[:, 2**bits // 2] = 1
    codes = np.stack([draw.choice(np.flatnonzero(own), 50) for own in start], 1).astype(np.uint8)
    monkeypatch.setattr(range_coder, "state_count", lambda *_: 64)
    counts = AdaptiveCounts(start, weight=24)
    payload = encode_columns(counts.table, codes)
    for found in both(lambda: decode_columns(payload, counts, 50)):
        assert np.array_equal(found, codes)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_counts_are_the_same(both, bits):
    def learned():
        counts, _ = counts_of(33, bits, steps=40)
        return counts.table.tolist(), counts.tag, counts.state_dict()["counts"].tolist()

    first, second = both(learned)
    assert first == second


@pytest.mark.parametrize(("bits", "width"), [(2, 64), (4, 77), (8, 48)])
def test_damaged_payloads_are_read_or_refused_alike(both, monkeypatch, bits, width):
    """Whatever the bytes are: the same codes, which then encode to them, or the same refusal."""
    counts, codes = counts_of(width, bits)
    monkeypatch.setattr(range_coder, "state_count", lambda *_: 16)
    payload = encode_columns(counts.table, codes)
    draw = np.random.default_rng(bits)

    def outcome(raw):
        try:
            return decode_columns(raw, counts, len(codes)).tobytes()
        except CorruptFrameError as refusal:
            return str(refusal)

    refused = 0
    for case in range(30):
        raw = bytearray(payload)
        for bit in draw.integers(0, 8 * len(raw), 1 + case % 3):
            raw[bit // 8] ^= 1 << bit % 8
        least = payload[: 1 + 4 * 16]
        damaged = [
            bytes(raw),
            bytes(raw[: case % len(raw)]),
            bytes(raw) + b"\0\0",
            payload[:1] + draw.bytes(len(payload) - 1),
            payload[:1] + b"\xff" * (len(payload) - 1),
            least[:1] + draw.bytes(64),
            least,
        ]
        for each in damaged:
            first, second = both(lambda each=each: outcome(each))
            assert first == second
            refused += isinstance(first, str)
    assert refused > 5 * 30


@pytest.mark.parametrize("missing", [0, 1, 2, 40, 10_000])
def test_words_are_never_read_behind_the_padding(missing):
    """A hostile state takes a word for every symbol; the loop stops in the row that has too few."""
    from vfl.compression.coding import vectors

    counts = AdaptiveCounts(np.full((64, 4), 4), weight=24)
    counts.count_columns(0, np.zeros((4000, 64), np.uint8))  # code 3 has a share of few
    states = np.full(32, (1 << 16) + (1 << 15) - 1, np.uint32)  # whose last slot is code 3's
    words = np.full(max(0, 20 - missing) + 32 + LANES, 0xFFFF, np.uint16)
    codes = np.full((100, 64), 9, np.uint8)
    taken = vectors.decode(*counts.starts, words, states, codes)
    assert len(words) - 32 - LANES < taken <= len(words) - LANES
    assert (codes[2:] == 9).all()


def test_a_code_that_no_context_has_names_no_share_outside_its_context():
    """The encoder masks codes, so that not even a defect of a quantiser leaves the table."""
    counts, _ = counts_of(64, 2)
    codes = np.random.default_rng(0).integers(0, 256, (500, 64)).astype(np.uint8)
    payload = range_coder._encode_in_vectors(counts.table, codes, np.full(16, 1 << 16, np.uint32))
    masked = range_coder._encode_in_vectors(
        counts.table, codes & 3, np.full(16, 1 << 16, np.uint32)
    )
    assert payload.tolist() == masked.tolist()
