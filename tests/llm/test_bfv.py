"""The index by homomorphic encryption: entries, what is refused, and the whole answer."""

import numpy as np
import pytest
import torch

from vfl.core.errors import ProtocolError
from vfl.llm.two_party import Form
from vfl.models.decoder import Decoder, DecoderShape
from vfl.mpc import private

pytest.importorskip("tenseal", reason="the extra he is not installed")
from vfl.llm import as_printed as bfv


@pytest.mark.parametrize("count", [1, 50, 512, 513, 1024, 1025, 10_000])
def test_entries_of_several_rows(count):
    source = np.random.default_rng(count)
    order = np.stack([source.permutation(count) for _ in range(3)])
    places = [0, count // 2, count - 1]
    keys = bfv.Keys()
    query = keys.query(places, count)
    found = bfv.answer(query, order)
    assert keys.read(found, 3, count) == [
        int(row[place]) for row, place in zip(order, places, strict=True)
    ]
    assert len(query) <= bfv.most_query_bytes(3, count)
    assert len(found) <= bfv.most_answer_bytes(3, count)


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
        lambda query: query[:4] + bytes(16) + query[20:],
    ],
)
def test_messages_that_are_none(damage):
    keys = bfv.Keys()
    query = damage(keys.query([3], 50))
    with pytest.raises(ProtocolError):
        bfv.answer(query, np.arange(50)[None])
    with pytest.raises(ProtocolError):
        keys.read(query, 1, 50)


def polynomials(ciphertext):
    """The coefficients of both, from what is sent; axes (2, degree)."""
    with bfv._scratch() as file:
        loaded = bfv._loaded(ciphertext, file)
    found = loaded.dyn_array()
    return np.reshape([found.at(i) for i in range(2 * bfv._DEGREE)], (2, -1))


def plain(keys, ciphertext):
    package = bfv.package()
    found = package.Plaintext()
    with bfv._scratch() as file:
        loaded = bfv._loaded(ciphertext, file)
    package.Decryptor(bfv._context(), keys._key).decrypt(loaded, found)
    return np.array([found.data(i) for i in range(found.coeff_count())])


def test_the_other_coefficients_of_an_answer_say_nothing():
    """They would be the other entries; two answers to one query have no more alike than chance."""
    keys, order = bfv.Keys(), np.arange(1000)
    query = keys.query([700], 1000)
    first, second = (
        plain(keys, bfv._unframed(bfv.answer(query, order[None]), 2, 2**20)[0]) for _ in range(2)
    )
    assert first[0] == second[0] == 700 % 32
    count = min(len(first), len(second))
    alike = (first[1:count] == second[1:count]).mean()
    assert alike == pytest.approx(1 / 32, abs=0.025)  # of a thousand, 4.5 deviations


def test_an_asker_reads_the_order_of_a_thousand_scores_by_division():
    """What the module warns of: who asks knows the factor that the order was multiplied with."""
    modulus = bfv.package().CoeffModulus.Create(bfv._DEGREE, [24])[0].value()
    order = np.random.default_rng(3).permutation(1024)
    query = bfv.Keys().query([5], 1024)
    answers = bfv._unframed(bfv.answer(query, order[None]), 2, 2**20)
    (asked,) = bfv._unframed(query, 1, 2**20)
    found = 0
    for digit, each in enumerate(answers):
        factor = quotient(polynomials(each)[1], polynomials(asked)[1], modulus)
        entries = np.concatenate([factor[:1], -factor[:0:-1]])
        found = found + (entries % 32 << 5 * digit)
    assert (found == order).all()


def quotient(product, factor, modulus):
    """Of polynomials modulo X^1024 + 1 and a prime, by their values at its roots; centred."""
    degree = len(product)
    root = next(
        each
        for base in range(2, 100)
        if pow(each := pow(base, (modulus - 1) // (2 * degree), modulus), degree, modulus) != 1
    )
    powers = [1]
    for _ in range(2 * degree - 1):
        powers.append(powers[-1] * root % modulus)
    odd = np.outer(2 * np.arange(degree) + 1, np.arange(degree)) % (2 * degree)
    there = np.array(powers, dtype=np.int64)[odd]

    def times(matrix, vector):  # sums of 1,024 products of 48 bits fit 64
        return matrix @ (np.asarray(vector, np.int64) % modulus) % modulus

    values = times(there, product)
    inverse = np.array([pow(int(each), -1, modulus) for each in times(there, factor)])
    back = np.array(powers, dtype=np.int64)[-odd.T % (2 * degree)]
    found = times(back, values * inverse % modulus) * pow(degree, -1, modulus) % modulus
    return np.where(found > modulus // 2, found - modulus, found)


@pytest.mark.parametrize("mode", ["fast", "thesis"])
def test_answers_with_it(mode):
    torch.manual_seed(0)
    model = Decoder(DecoderShape(vocabulary=60, width=32, layers=1, heads=2)).eval()
    with private(model, form=Form(mode, retrieval="bfv")) as hidden:
        assert hidden.generate([4, 9], 3) == model.generate([4, 9], 3)
        found = hidden.generate_all([[4], [9]], 2)
    assert found == [model.generate([4], 2), model.generate([9], 2)]
