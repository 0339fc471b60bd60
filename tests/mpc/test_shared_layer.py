"""One shared linear layer: what its three parties compute, and that nothing is used twice."""

import hmac

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from shared_layers import encode_weights
from torch import nn

from vfl.core.errors import NonFiniteError, ReusedPadError, RingRangeError
from vfl.core.seeds import Secret, generator
from vfl.mpc.secure.shared_layer import (
    GRADIENT_BITS,
    INPUT_BITS,
    OUTPUT_BITS,
    WEIGHT_BITS,
    Dealer,
    Owner,
    Partner,
    check_outputs,
    encode_gradient,
    encode_inputs,
    first_weights,
)
from vfl.mpc.stream import PadStream

ROWS, COLUMNS, WIDTH = 7, 5, 3
KEYS = bytes(32), bytes([1]) * 32


class Layer:
    """Owner, partner and dealer of one layer, and the truth none of them has."""

    def __init__(self):
        draw = generator(0, "layer")
        self.module = nn.Linear(COLUMNS, WIDTH)
        self.inputs = torch.randn(ROWS, COLUMNS, generator=draw)
        self.gradient = torch.randn(ROWS, WIDTH, generator=draw)
        whole = encode_weights(self.module)
        self.first = torch.randint(-(2**63), 2**63 - 1, whole.shape, generator=draw)
        self.second = whole - self.first
        self.words = encode_inputs(self.inputs, "bank")
        self.owner, self.partner = Owner(PadStream(KEYS[0])), Partner("bank", Secret(KEYS[1]), "x")
        self.partner.share = self.second
        self.partner.begin(PadStream(KEYS[1]), COLUMNS + 1, WIDTH)
        self.dealer = Dealer(PadStream(KEYS[0]), PadStream(KEYS[1]), COLUMNS + 1, WIDTH)

    def forward(self, step):
        """Both shares of the outputs, what was opened, and what else was dealt."""
        dealt = self.dealer.deal(ROWS, step)
        opened = self.owner.opened(self.words, step)
        weights = self.partner.opened(step)
        own = self.owner.outputs(self.words, self.first, weights, step)
        return own, self.partner.outputs(opened, dealt, step), opened, weights

    def backward(self, step, rate=0.25):
        """Both shares of what the weights lose."""
        self.forward(step)
        dealt = self.dealer.deal_update(step)
        words = encode_gradient(self.gradient, rate, "bank")
        own = self.owner.change(self.words, self.dealer.share_gradient(words, step), step)
        return own, self.partner.change(dealt, step)


def python_words(tensor):
    return [[int(word) for word in row] for row in tensor]


def in_ring(rows):
    """Python integers as the numbers of the ring they are."""
    return torch.tensor([[(v + 2**63) % 2**64 - 2**63 for v in row] for row in rows])


def product(left, right):
    """A matrix product of Python integers, which have no end."""
    return [[sum(a * b for a, b in zip(row, column, strict=True))
             for column in zip(*right, strict=True)] for row in left]  # fmt: skip


def test_the_shares_of_the_outputs_add_up_exactly():
    layer = Layer()
    own, other, *_ = layer.forward(0)
    whole = python_words(encode_weights(layer.module))
    assert torch.equal(own + other, in_ring(product(python_words(layer.words), whole)))
    found = (own + other).double() * 2.0**-OUTPUT_BITS
    with torch.no_grad():
        expected = layer.module(layer.inputs).double()
    bound = 2.0 ** -(INPUT_BITS + 1) * layer.module.weight.double().abs().sum(1).max()
    assert (found - expected).abs().max() <= bound + 1e-6


def test_the_shares_of_an_update_add_up_exactly():
    layer = Layer()
    own, other = layer.backward(0, rate=0.25)
    words = python_words(torch.round(layer.gradient.double() * 0.25 * 2**GRADIENT_BITS).long())
    columns = list(zip(*python_words(layer.words), strict=True))
    assert torch.equal(own + other, in_ring(product(columns, words)))
    found = (own + other).double() * 2.0**-WEIGHT_BITS
    ones = torch.cat([layer.inputs, torch.ones(ROWS, 1)], 1).double()
    assert torch.allclose(found, 0.25 * ones.t() @ layer.gradient.double(), atol=1e-3)


def test_what_anybody_gets_is_uniform():
    """Chi-square over all bytes of what is opened and dealt; the plain numbers fail it."""
    layer = Layer()
    seen = {"inputs": [], "weights": [], "outputs": [], "update": [], "gradient": []}
    for step in range(200):
        own, _, opened, weights = layer.forward(step)
        dealt = layer.dealer.deal_update(step)
        words = encode_gradient(layer.gradient, 0.25, "bank")
        shared = layer.dealer.share_gradient(words, step)
        parts = (opened, weights, own, dealt, shared)
        for name, words in zip(seen, parts, strict=True):
            seen[name].append(words.numpy().copy())
    seen["plain"] = [layer.words.numpy()] * 200

    def statistic(words):
        counts = np.bincount(np.concatenate(words).ravel().view(np.uint8), minlength=256)
        return ((counts - counts.mean()) ** 2 / counts.mean()).sum()

    figures = {name: statistic(words) for name, words in seen.items()}
    assert figures.pop("plain") > 10_000
    assert max(figures.values()) < 255 + 5 * np.sqrt(2 * 255), figures


def test_nothing_is_dealt_opened_or_multiplied_twice():
    layer = Layer()
    layer.backward(3)
    for again in (
        lambda: layer.dealer.deal(ROWS, 3),
        lambda: layer.dealer.deal_update(3),
        lambda: layer.owner.opened(layer.words, 3),
        lambda: layer.partner.opened(2),
        lambda: layer.owner.outputs(layer.words, layer.first, layer.first, 3),
        lambda: layer.partner.outputs(layer.words, layer.gradient.long(), 3),
        lambda: layer.owner.change(layer.words, layer.gradient.long(), 3),
        lambda: layer.partner.change(layer.first, 3),
        lambda: layer.dealer.share_gradient(layer.gradient.long(), 3),
    ):
        with pytest.raises(ReusedPadError):
            again()


def test_a_gradient_of_an_exchange_that_was_not_dealt_is_refused():
    layer = Layer()
    with pytest.raises(ReusedPadError):
        layer.dealer.share_gradient(layer.gradient.long(), 0)
    layer.dealer.deal(ROWS, 1)
    with pytest.raises(ReusedPadError):
        layer.dealer.share_gradient(layer.gradient.long(), 1)


def test_first_weights_are_spread_as_those_of_a_layer():
    halves = [first_weights(401, 100, Secret(bytes([key]) * 32), "bank") for key in range(2)]
    layer = nn.Linear(400, 100).weight.detach().double()
    for half in halves:
        assert (half.double() * 2.0**-WEIGHT_BITS).abs().max() <= 0.5**0.5 / 20
    found = (halves[0] + halves[1]).double() * 2.0**-WEIGHT_BITS
    assert found.std().item() == pytest.approx(layer.std().item(), rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack(halves).flatten(1).double())[0, 1])) < 0.03


def test_first_weights_come_from_the_whole_of_a_secret():
    """Not from a torch generator, of whose seed 32 bits matter: all of them can be tried."""
    secret = Secret(bytes(range(32)))
    key = hmac.digest(bytes(range(32)), b"first weights\x1fbank", "sha256")
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    words = np.frombuffer(cipher.update(bytes(8 * 5 * 3)), "<u8").reshape(5, 3)
    exact = (2 * (words >> 11) * 2.0**-53 - 1) / 8**0.5
    found = first_weights(5, 3, secret, "bank").numpy() * 2.0**-WEIGHT_BITS
    assert np.abs(found - exact).max() <= 2.0 ** -(WEIGHT_BITS + 1)


def test_a_value_that_does_not_fit_is_named_by_layer_and_bits():
    with pytest.raises(RingRangeError) as caught:
        encode_inputs(torch.tensor([[1.0, 123456.0]]), "bank")
    assert caught.value.where == "columns of party 'bank'"
    assert caught.value.got == "17 bits before the point"
    assert "123456" not in str(caught.value)
    with pytest.raises(RingRangeError, match="'shop'"):
        encode_gradient(torch.tensor([[4000.0]]), 1.0, "shop")
    with pytest.raises(NonFiniteError):
        encode_inputs(torch.tensor([[float("nan")]]), "bank")


def test_outputs_near_the_end_of_the_ring_stop_the_session():
    check_outputs(torch.tensor([[1000.0, -1000.0]]), 4)
    with pytest.raises(RingRangeError) as caught:
        check_outputs(torch.tensor([[1.0, -1030.0]]), 4)
    assert caught.value.where == "first layer, step 4"
    assert caught.value.got == "11 bits before the point"
    assert "1030" not in str(caught.value)
