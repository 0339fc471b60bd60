"""What each party sees, and what it cannot make of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vfl.mpc.permuted import Permutation, function
from vfl.mpc.ring import decode, encode, matmul
from vfl.mpc.rules import Rules
from vfl.mpc.shares import Truncation
from vfl.mpc.stream import PadStream
from vfl.mpc.three_party.trio import Trio

MODES = ["thesis", "fast"]
KEY = bytes(range(32))


class Overheard:
    """A link that keeps what its own end receives."""

    def __init__(self, link, frames):
        self._link, self._frames = link, frames

    def receive(self):
        frame = self._link.receive()
        self._frames.append(bytes(frame.payload))
        return frame

    def poll(self):
        frame = self._link.poll()
        if frame is not None:
            self._frames.append(bytes(frame.payload))
        return frame

    def __getattr__(self, name):
        return getattr(self._link, name)


def overheard(private):
    """Everything each party receives from each, from now on."""
    heard = {}
    for party in private.trio.parties:
        for peer, channel in party.channels.items():
            frames = heard[party.role, peer] = []
            channel.link = Overheard(channel.link, frames)
    return heard


@pytest.mark.parametrize("mode", MODES)
def test_what_one_holder_hears_is_uniform(setting, chain, mode):
    inputs = torch.zeros(500, 40, dtype=torch.float64)
    private = setting(mode, chain(40, 1), inputs)
    heard = overheard(private)
    private.infer()
    for pair in ((0, 1), (1, 0)):
        words = np.frombuffer(
            b"".join(frame[: len(frame) // 8 * 8] for frame in heard[pair]), "<u8"
        )
        words = words[words > 2**40]  # counts of index lists are small
        if mode == "fast":  # inputs were opened before
            opened = private.shared[pair[0]].opened.difference
            words = np.concatenate([words, opened.numpy().reshape(-1).view("<u8")])
        ones = np.unpackbits(words.view(np.uint8)).mean()
        assert abs(ones - 0.5) < 5 * 0.5 / (64 * len(words)) ** 0.5


def test_signs_are_fair_and_lie_over_the_values():
    values = torch.full((4000,), 2.0, dtype=torch.float64)
    permutation = Permutation(PadStream(KEY), Rules("fast"), 4000, function("tanh"), 1)
    seen = decode(permutation.apply(encode(values, 20, "x"), 20, True), 20)
    assert set(seen.tolist()) == {2.0, -2.0}
    assert abs(float(seen.mean())) < 5 * 2 / 4000**0.5


def test_thesis_mode_lays_no_signs():
    values = torch.full((100,), 2.0, dtype=torch.float64)
    permutation = Permutation(PadStream(KEY), Rules("thesis"), 100, function("tanh"), 1)
    assert set(decode(permutation.apply(encode(values, 20, "x"), 20, True), 20).tolist()) == {2.0}


def product_and_share(values):
    """What P2 hears of P1 of a product that is revealed to it, and P1's share if P2 knew both
    factors: a right guess would be confirmed by it, and few small values found without one."""
    with Trio(Rules("fast"), {"test": "fresh"}) as trio:
        heard = overheard(SimpleNamespace(trio=trio))

        def program(party):
            shared = [
                party.share(owner, value.shape, value if party.role == owner else None, "x")
                for owner, value in enumerate(values)
            ]
            number = party.number + 1
            opened = party.open(shared[0], shared[1].facing(shared[0]))
            product, _ = party.multiply(*opened, matmul, where="product")
            party.reveal(product, "z", 2)
            return number

        number = trio.run(program)[2]
        # P0 owns the left factor and P1 the right one, so each has drawn one mask.
        u, v = (
            torch.from_numpy(
                PadStream(trio.parties[2].pads[holder]._key)
                .elements64(value.numel(), "mask", holder, number)
                .view(np.int64)
            ).reshape(value.shape)
            for holder, value in enumerate(values)
        )
        e = encode(values[0], Rules("fast").bits, "x") - u
        pad = PadStream(trio.parties[2].pads[0]._key).elements64(len(e), "product", number + 1)
        dealt = u @ v - torch.from_numpy(pad.view(np.int64))[:, None]
        return heard[2, 1][-1], e @ v + dealt


FACTORS = [torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double() for _ in "xw"]


def test_a_result_told_to_the_dealer_confirms_no_guess():
    values = [FACTORS[0], FACTORS[1][:3, :1]]
    sent, share = product_and_share(values)
    sent = torch.from_numpy(np.frombuffer(sent, "<i8").reshape(40, 1).copy())
    assert not (sent == share).any()


@pytest.mark.parametrize("mode", MODES)
def test_only_a_divided_share_that_is_revealed_is_small(mode):
    """P0 hears it with the result, which is the sum of it and P0's own share."""
    with Trio(Rules(mode), timeout_s=60) as trio:
        heard = overheard(SimpleNamespace(trio=trio))

        def program(party):
            left, right = (
                party.share(owner, each.shape, each if party.role == owner else None, "x")
                for owner, each in enumerate([FACTORS[0], FACTORS[1][:3]])
            )
            opened, bits = party.open(left, right.facing(left)), party.rules.bits
            divided = [Truncation(bits, party.rules.zmax_bits(2 * bits))]
            product, _ = party.multiply(*opened, matmul, divided, where="product")
            return party.reveal(product, "product", 0)

        trio.run(program)
    *others, revealed = heard[0, 1]
    assert np.abs(np.frombuffer(revealed, "<i8")).max() < 2.0 ** (64 - Rules(mode).bits)
    for frame in others:
        ones = np.unpackbits(np.frombuffer(frame, np.uint8))
        assert abs(ones.mean() - 0.5) < 5 * 0.5 / len(ones) ** 0.5
