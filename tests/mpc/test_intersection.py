"""Hidden common rows: results against sets and numpy, messages, and each party's view."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl.core.errors import BadOptionError, ConsentError
from vfl.mpc import Rules, Trio, in_process
from vfl.mpc.channel import Channel
from vfl.mpc.three_party.intersection import (
    BITS,
    bins_for,
    intersect,
    moments,
)

PAD = 40


def columns_of(count, seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 2)))


def found(left, right, mode="fast", pad=PAD, then=None):
    """What the parties have after `intersect`, and what they saw."""
    ids = [[b"id %d" % each for each in own] for own in (left, right)] + [None]
    values = [None, columns_of(len(right), 1), None]

    def program(party):
        hidden = intersect(party, pad, 2, ids[party.role], values[party.role])
        return hidden if then is None else then(party, hidden)

    with Trio(Rules(mode), timeout_s=20) as trio:
        return trio.run(program), trio


SETS = st.lists(st.integers(0, 60), unique=True, max_size=PAD)


@pytest.mark.parametrize("mode", ["fast", "thesis"])
@settings(max_examples=15, deadline=None)
@given(left=SETS, right=SETS)
def test_shares_add_up_to_what_is_common(mode, left, right):
    (first, second, _), trio = found(left, right, mode)
    weight = (first.weight.share + second.weight.share)[:, 0].numpy()
    columns = (first.columns.share + second.columns.share).double() / 2**BITS
    assert len(weight) == bins_for(PAD)
    assert sorted(first.rows[first.rows >= 0]) == list(range(len(left)))
    values = columns_of(len(right), 1)
    for bin_, row in enumerate(first.rows):
        common = row >= 0 and left[row] in right
        assert weight[bin_] == common
        if common:
            own = values[right.index(left[row])]
            assert (columns[bin_] - own).abs().max() <= 2.0**-BITS
    assert second.rows is None
    assert trio.leaks() == []


def test_sums_are_those_of_the_common_rows():
    left, right = list(range(300)), list(range(200, 420))[::-1]
    own = columns_of(300, 0)

    def then(party, hidden):
        return moments(party, hidden, own if party.role == 0 else None, 2)

    (sums, *others), trio = found(left, right, pad=400, then=then)
    rows = [(left.index(each), right.index(each)) for each in left if each in right]
    mine, theirs = (list(each) for each in zip(*rows, strict=True))
    joined = torch.cat(
        [torch.ones(len(rows), 1).double(), own[mine], columns_of(220, 1)[theirs]], dim=1
    )
    assert others == [None, None]
    assert float(sums[0, 0]) == 100
    assert torch.allclose(sums, joined.T @ joined, atol=0.01)
    assert [(leak.observer, leak.where) for leak in trio.leaks()] == [
        ("P0", "rows that two parties share"),
        ("P1", "how many rows are common"),
    ]


def test_too_few_common_rows_are_refused_without_a_count():
    def then(party, hidden):
        own = columns_of(30, 0) if party.role == 0 else None
        return moments(party, hidden, own, 2, min_common=10)

    with pytest.raises(ConsentError) as caught:
        found(range(30), range(27, 60), then=then)
    assert caught.value.got is None
    assert caught.value.want == "at least 10"


@pytest.fixture
def wire(monkeypatch):
    """Every payload, by who sent it to whom."""
    sent, send, pair, names = {}, Channel.send_bytes, in_process.local_pair, {}

    def named(both, *more):
        ends = pair(both, *more)
        names.update(zip(map(id, ends), both, strict=True))
        return ends

    def recorded(self, payload, number, phase):
        with threading.Lock():
            sent.setdefault((names[id(self.link)], self.peer), []).append(bytes(payload))
        send(self, payload, number, phase)

    monkeypatch.setattr(in_process, "local_pair", named)
    monkeypatch.setattr(Channel, "send_bytes", recorded)
    return sent


def test_messages_of_other_sets_look_alike_and_nothing_repeats(wire):
    shapes, pieces = set(), []
    for left, right in [(range(40), range(40)), (range(9), range(20, 60)), (range(40), [])]:
        wire.clear()
        found(left, right)
        shapes.add(str(sorted((ends, list(map(len, own))) for ends, own in wire.items())))
        joined = [own for each in wire.values() for own in each if len(own) > 64]
        assert not any(b"id 1" in own for own in joined)
        pieces.append({own[at : at + 16] for own in joined for at in range(0, len(own) - 15, 16)})
    assert len(shapes) == 1
    assert not pieces[0] & pieces[1]
    assert not pieces[0] & pieces[2]


def test_answers_about_common_rows_and_others_are_equally_random(wire):
    """Bits that P0 receives, of all ids common and of none: half of them are 1, word by word."""
    for right in (range(200), range(1000, 1200)):
        wire.clear()
        found(range(200), right, pad=200)
        (answer,) = [own for own in wire["P2", "P0"] if len(own) == bins_for(200) * 3 * 8]
        words = np.frombuffer(answer, "<u8")
        assert len(np.unique(words)) == len(words)
        share = np.unpackbits(words.view(np.uint8)).mean()
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(64 * len(words))


def test_a_party_with_more_ids_is_refused():
    with pytest.raises(BadOptionError, match="more ids"):
        found(range(PAD + 1), range(3))
