"""The range coder: exact both ways, close to the entropy, and strict about what it reads."""

import math

import numpy as np
import pytest

from vfl.compression.coding.range_coder import Reader, encode, next_symbol
from vfl.core.errors import CorruptFrameError


def draw(rng, contexts, symbols, length, largest=2000):
    """Counts of random contexts, and a sequence of (context, possible symbol)."""
    counts = rng.integers(0, largest, size=(contexts, symbols)) // rng.integers(
        1, 50, size=(contexts, symbols)
    )
    counts[:, 0] += 1
    which = rng.integers(contexts, size=length)
    shares = counts / counts.sum(axis=1, keepdims=True)
    drawn = np.array([rng.choice(symbols, p=shares[context]) for context in which], int)
    return counts, which, drawn


def shares_of(counts, which, drawn):
    """The shares of 2^15 of all contexts, and those of the symbols."""
    sums = counts.cumsum(axis=1)
    used = (counts > 0).cumsum(axis=1)
    ends = used + (2**15 - used[:, -1:]) * sums // sums[:, -1:]
    table = (ends - np.diff(ends, axis=1, prepend=0)) * 2**16 + np.diff(ends, axis=1, prepend=0)
    table = table.astype(np.uint32)
    return table, table[which, drawn]


def decode(payload, table, which):
    reader, flat = Reader(payload), table.reshape(-1)
    width = table.shape[1]
    found = [
        next_symbol(reader.words, reader.states, reader.taken, flat, context * width, width)
        for context in which.tolist()
    ]
    reader.finish()
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [0, 1, 2, 700])
def test_symbols_come_back_in_no_more_bytes_than_their_entropy(seed, length):
    rng = np.random.default_rng(seed)
    counts, which, drawn = draw(rng, contexts=5, symbols=9, length=length)
    cumulative, shares = shares_of(counts, which, drawn)
    payload = encode(shares)
    assert decode(payload, cumulative, which) == drawn.tolist()
    bits = float(np.log2(2**15 / (shares & 0xFFFF)).sum())
    assert len(payload) <= bits / 8 * 1.001 + 4
    assert len(payload) >= math.floor(bits / 8)


def test_symbols_of_the_least_share_and_of_nearly_all():
    counts = np.array([[1, 2**15 - 5, 1]])
    which, drawn = np.zeros(400, int), np.arange(400) % 3
    cumulative, shares = shares_of(counts, which, drawn)
    assert decode(encode(shares), cumulative, which) == drawn.tolist()


def test_a_certain_symbol_takes_nothing():
    assert encode(np.full(1000, 2**15, np.uint32)) == b""


def test_only_what_the_encoder_writes_is_read():
    """Of all payloads with a state of two bytes, those are accepted that sequences encode to."""
    counts = np.array([[3, 1, 4], [2, 50, 1]])
    which = np.array([1, 0, 1, 0])
    written = set()
    cumulative = None
    for number in range(81):
        drawn = np.array([number // 3**place % 3 for place in range(4)])
        cumulative, shares = shares_of(counts, which, drawn)
        written.add(encode(shares))
    accepted = set()
    candidates = [b"", *(bytes([a]) for a in range(256))]
    candidates += [bytes([a, b]) for a in range(256) for b in range(0, 256, 4)]
    candidates += [bytes([32, a, b]) for a in range(256) for b in range(0, 256, 4)]
    candidates += [payload for payload in written if len(payload) <= 3]
    for payload in candidates:
        try:
            if -1 not in decode(payload, cumulative, which):
                accepted.add(payload)
        except CorruptFrameError:
            continue
    assert accepted == {payload for payload in written if len(payload) <= 3}
    assert len(written) == 81
    assert len(accepted) >= 3
