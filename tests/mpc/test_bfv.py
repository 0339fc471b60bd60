"""The index by homomorphic encryption: entries, what is refused, and the whole answer."""

import numpy as np
import pytest
import torch

from vfl.core.errors import ProtocolError
from vfl.models.decoder import Decoder, DecoderShape
from vfl.mpc import private
from vfl.mpc.two_party import Form

pytest.importorskip("tenseal", reason="the extra he is not installed")
from vfl.mpc import bfv


@pytest.mark.parametrize("count", [1, 50, 4097, 10_000])
def test_entries_of_several_rows(count):
    source = np.random.default_rng(count)
    order = np.stack([source.permutation(count) for _ in range(3)])
    places = [0, count // 2, count - 1]
    keys = bfv.Keys()
    query = keys.query(places, count)
    found = bfv.answer(query, order)
    assert keys.read(found, 3) == [
        int(row[place]) for row, place in zip(order, places, strict=True)
    ]
    assert len(query) <= bfv.most_query_bytes(3, count)
    assert len(found) <= bfv.most_answer_bytes(3)


def test_the_goals_of_table_6_1():
    """100,000 scores: 2.3 MiB there and back."""
    keys = bfv.Keys()
    query = keys.query([77_777], 100_000)
    order = np.arange(100_000)[::-1].copy()
    found = bfv.answer(query, order[None])
    assert keys.read(found, 1) == [22_222]
    assert len(query) + len(found) < 1.6 * 2**20


def test_a_query_is_never_the_same_twice():
    keys = bfv.Keys()
    assert keys.query([3], 50) != keys.query([3], 50) != bfv.Keys().query([3], 50)


@pytest.mark.parametrize(
    "damage",
    [
        lambda query: b"",
        lambda query: query[:-1],
        lambda query: query + b"x",
        lambda query: query[:4] + bytes(len(query) - 4),
        lambda query: b"\xff\xff\xff\xff" + query[4:],
        lambda query: query[:4] + query[4:200] + bytes(1000) + query[1200:],
    ],
)
def test_messages_that_are_none(damage):
    keys = bfv.Keys()
    query = damage(keys.query([3], 50))
    with pytest.raises(ProtocolError):
        bfv.answer(query, np.arange(50)[None])
    with pytest.raises(ProtocolError):
        keys.read(query, 1)


@pytest.mark.parametrize("mode", ["fast", "thesis"])
def test_answers_with_it(mode):
    torch.manual_seed(0)
    model = Decoder(DecoderShape(vocabulary=60, width=32, layers=1, heads=2)).eval()
    with private(model, form=Form(mode, retrieval="bfv")) as hidden:
        assert hidden.generate([4, 9], 3) == model.generate([4, 9], 3)
        found = hidden.generate_all([[4], [9]], 2)
    assert found == [model.generate([4], 2), model.generate([9], 2)]
