"""The range coder: exact both ways, close to the entropy, and strict about what it reads."""

import math

import numpy as np
import pytest

from vfl.compression.coding.range_coder import LARGEST_TOTAL, Reader, Shares, encode, next_symbol
from vfl.core.compiled import native
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
    cumulative = np.concatenate([np.zeros((len(counts), 1), int), counts.cumsum(axis=1)], axis=1)
    return cumulative, Shares(cumulative[which, drawn], counts[which, drawn], cumulative[which, -1])


def decode(payload, cumulative, which):
    reader, flat = Reader(payload), native(cumulative.reshape(-1))
    width = cumulative.shape[1]
    found = [
        next_symbol(reader.raw, reader.state, flat, context * width, width - 1)
        for context in which.tolist()
    ]
    reader.finish()
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length", [0, 1, 2, 700])
def test_symbols_come_back_in_no_more_bytes_than_their_entropy(seed, length):
    rng = np.random.default_rng(seed)
    counts, which, drawn = draw(rng, contexts=5, symbols=9, length=length)
    cumulative, shares = shares_of(counts, which, drawn)
    payload = encode(shares)
    assert decode(payload, cumulative, which) == drawn.tolist()
    bits = float(np.log2(shares.totals / shares.sizes).sum())
    assert len(payload) <= bits / 8 * 1.001 + 2
    assert len(payload) >= math.floor(bits / 8)


def test_totals_up_to_the_largest_and_symbols_of_one_count():
    counts = np.array([[1, LARGEST_TOTAL - 2, 1]])
    which, drawn = np.zeros(400, int), np.arange(400) % 3
    cumulative, shares = shares_of(counts, which, drawn)
    assert decode(encode(shares), cumulative, which) == drawn.tolist()


def test_a_certain_symbol_takes_nothing():
    one = np.ones(1000, int)
    assert encode(Shares(one - 1, one, one)) == b""


def test_only_what_the_encoder_writes_is_read():
    """Of all two-byte payloads exactly as many are accepted as sequences encode to two bytes."""
    counts = np.array([[3, 1, 4], [2, 5, 1]])
    which = np.array([0, 1, 1, 0])
    written = set()
    cumulative = None
    for number in range(81):
        drawn = np.array([number // 3**place % 3 for place in range(4)])
        cumulative, shares = shares_of(counts, which, drawn)
        written.add(encode(shares))
    accepted = set()
    candidates = [b"", *(bytes([a]) for a in range(256))]
    candidates += [bytes([a, b]) for a in range(256) for b in range(256)]
    for payload in candidates:
        try:
            if -1 not in decode(payload, cumulative, which):
                accepted.add(payload)
        except CorruptFrameError:
            continue
    assert accepted == {payload for payload in written if len(payload) <= 2}
    assert len(written) == 81
