"""Softmax on shares: beside torch's, who sees what, and which bytes it sends."""

import math

import pytest
import torch

from vfl.core.errors import BadOptionError
from vfl.core.frame import HEADER_BYTES
from vfl.llm.packing import packed_bytes
from vfl.llm.parties import most_bytes
from vfl.llm.shared_softmax import OPENINGS, inverse_bits_of
from vfl.llm.two_party import Form, LocalRoles
from vfl.models.decoder import DecoderShape
from vfl.mpc.channel import Channel

BITS, PROBABILITY, RING = 20, 12, 44


def draw(*shape, seed, scale=1.0):
    source = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=source, dtype=torch.float64)


def softmax_of(values, rows, score_bits=6, watch=None):
    """Softmax on shares, P1's share, and the three roles; `watch` gets what P1 sees."""
    form = Form(protect="scores", integer_bits=max(8, score_bits), score_bits=score_bits)
    with LocalRoles(form, {}, timeout_s=60) as table:
        table.parties[1].watch = watch

        def program(party):
            own = values if party.role == 1 else None
            ring = BITS + score_bits + 2
            scores = party.question(values.shape, own, BITS, ring, "scores")
            return party.softmax(scores, rows, PROBABILITY, RING)

        material = table.run(lambda party: party.prepare(program))
        first, second = table.run(lambda p: p.answer(program, material[p.role]), (0, 1))
        total = ((first.share + second.share) << 64 - RING) >> 64 - RING
        return total.double() * 2.0**-PROBABILITY, second, table


def by_row(values, rows):
    found = torch.zeros_like(values)
    for row in range(int(rows[-1]) + 1):
        found[rows == row] = torch.softmax(values[rows == row], 0)
    return found


CASES = {
    "one score": (torch.tensor([3.3]), [0]),
    "some rows": (draw(21, seed=1, scale=4), [0, 1, 1] + [2] * 3 + [3] * 15),
    "equal": (torch.zeros(64), [0] * 64),
    "far apart": (torch.tensor([-63.0, 63.0, 62.5, 0.0, -63.9, -63.9, -60.0]), [0] * 4 + [1] * 3),
    "one stands out": (torch.tensor([20.0] + [11.0] * 255), [0] * 256),
    **{f"{length} alike": (torch.zeros(length), [0] * length) for length in (145, 200, 350, 1100)},
    "long and flat": (draw(512, seed=512, scale=0.5), [0] * 512),
}


@pytest.mark.parametrize("case", CASES)
def test_softmax_is_torchs(case):
    values, rows = CASES[case]
    values, rows = values.double(), torch.tensor(rows)
    found, second, _ = softmax_of(values, rows)
    assert (found - by_row(values, rows)).abs().max() < 4 * 2.0**-PROBABILITY
    sums = torch.zeros(int(rows[-1]) + 1, dtype=torch.float64).index_add(0, rows, found)
    assert (sums - 1).abs().max() < 0.01 + len(values) * 2.0**-PROBABILITY
    assert second.known, "P1's share is a pad, so that the next product takes one message"


def online_model(rows, score_bits):
    """Payload bytes and messages of a softmax between the holders, in their order.

    Seven openings, in both directions: the level of each score; for each row and each of 2^(bits +
    1) levels a count; an exponent of 13 fraction bits; a row's sum, 5 fraction bits; products'
    factors; the sum again with its row's 15 bits; the second inverse. Then P1's shares.
    """
    lengths = rows.bincount()
    scores, count, longest = len(rows), len(lengths), int(lengths.max())
    level, above = score_bits + 2, math.ceil(math.log2(math.e * longest + 2))
    product, last = max(17 + inverse_bits_of(longest), 15 + above), RING + 13
    opened = [
        [(scores, level)],
        [(count << score_bits + 1, longest.bit_length())],
        [(scores, level + 13)],
        [(count, 5 + above)],
        [(scores, product), (count, product)],
        [(count, 10), (scores, 15)],
        [(count, last)],
    ]
    assert len(opened) == OPENINGS
    size = sum(packed_bytes(*part) for one in opened for part in one)
    return 2 * size + packed_bytes(scores, RING), 2 * OPENINGS + 1


def test_scores_larger_than_values_are_refused():
    with pytest.raises(BadOptionError, match="no room for scores") as caught:
        Form(protect="scores", integer_bits=8, score_bits=9)
    assert "--integer-bits 9" in str(caught.value)


@pytest.mark.parametrize("score_bits", [4, 7])
def test_bytes_and_messages_are_the_models(score_bits):
    rows = torch.arange(6).repeat_interleave(29)
    *_, table = softmax_of(draw(len(rows), seed=2), rows, score_bits)
    asked = 0, packed_bytes(len(rows), BITS + score_bits + 2)
    sent = [each for each in table.traffic() if each.phase == "online"]
    frames = sum(each.frames for each in sent)
    payload = sum(each.wire_bytes for each in sent) - HEADER_BYTES * frames
    size, messages = online_model(rows, score_bits)
    assert (payload - asked[1], frames - 1) == (size, messages)


@pytest.mark.parametrize("score", [0.0, -15.0])
def test_openings_are_uniform_whatever_the_scores(score):
    """Each holder sees openings alone; Pearson's statistic of 16 cells has mean 15."""
    count, opened = 4096, {}
    scores, rows = torch.full((count,), score).double(), torch.zeros(count, dtype=torch.int64)
    *_, table = softmax_of(scores, rows, 4, opened.__setitem__)
    assert not table.leaks()
    long = [each for each in opened.values() if each.numel() == count]
    assert len(long) == 4
    assert max(map(statistic, long)) < 60


def test_no_message_is_larger_than_a_party_accepts(monkeypatch):
    sizes, send = [], Channel.send_bytes

    def sent(self, payload, number, phase):
        sizes.append(len(payload))
        send(self, payload, number, phase)

    monkeypatch.setattr(Channel, "send_bytes", sent)
    shape, tokens, score_bits = DecoderShape(vocabulary=64, width=32, layers=1, heads=2), 24, 11
    rows = torch.ones(shape.heads, tokens, tokens).tril().reshape(-1, tokens).nonzero()[:, 0]
    softmax_of(draw(len(rows), seed=3), rows, score_bits)
    form = Form(protect="scores", integer_bits=score_bits, score_bits=score_bits)
    assert max(sizes) <= most_bytes(shape, tokens, form)


def statistic(values, cells=16):
    """Pearson's statistic of values beside equal cells of their range."""
    bits = values.abs().max().log2().ceil() + 1
    counts = torch.histc(values.double(), cells, -(2.0 ** (bits - 1)), 2.0 ** (bits - 1))
    wanted = values.numel() / cells
    return float(((counts - wanted) ** 2 / wanted).sum())


def test_thesis_mode_is_refused():
    with pytest.raises(BadOptionError, match="only fast mode"):
        Form("thesis", protect="scores")
