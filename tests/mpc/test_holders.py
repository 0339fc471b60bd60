"""Every protocol with shares against the contract of adversarial holders and of the helper."""

from functools import partial

import numpy as np
import torch

from vfl.core.seeds import Secret
from vfl.mpc.engine import Peer
from vfl.mpc.in_process import LocalParties
from vfl.mpc.many.authenticated import AuthenticatedMember
from vfl.mpc.many.members import LocalMembers
from vfl.mpc.numbers import FIELD
from vfl.mpc.permuted import function
from vfl.mpc.ring import matmul
from vfl.mpc.rules import MODES, Rules
from vfl.mpc.secure.masks import PairwiseMasks, Ring
from vfl.mpc.secure.shared_layer import (
    OUTPUT_BITS,
    Dealer,
    Owner,
    Partner,
    encode_inputs,
)
from vfl.mpc.shares import SharedTensor, Truncation, blank
from vfl.mpc.stream import PadStream
from vfl.mpc.three_party.intersection import intersect, moments
from vfl.mpc.three_party.trio import Trio
from vfl.session.secure_mode import SECURE
from vfl.testing import HolderContract, Protocol
from vfl.trees.newton import family
from vfl.trees.sums import Summing, coarse_bits, fine_bits

#: Of every mode of a session the protocols below that it runs.
OF_MODES = {
    "none": (),
    "sum": ("masked sum",),
    "beaver": ("shared layer",),
    "permuted": ("thesis", "fast"),
    "pea": ("many: product", "many: apply of three", "many: signs"),
    "trees": (),  # bins are shown as they are
    "scorecard": ("sums", "sums at margins"),  # and bins that are shown to the helper
    "regression": ("sums", "sums at margins"),
}


def draw(*shape, seed, scale=1.0):
    source = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=source, dtype=torch.float64)


# Shares with MACs.

INTEGERS = torch.tensor([3, -7, 2**20])


def authenticated(holders, timeout_s):
    def make(role, links):
        return AuthenticatedMember(role, links, holders)

    parties = LocalParties(make, timeout_s, holders + 1)
    parties.agree({})
    return parties


def with_macs(step):
    def program(member, note):
        shared = []
        for values in (INTEGERS, INTEGERS + 1):
            (mine,), _ = member.dealt(lambda v=values: [FIELD.lift(v)], [values.shape], "input")
            blanks = SharedTensor(blank((2, *values.shape)), 0)
            shared.append(blanks if member.deals else mine)
        (found,) = member.opened(step(member, *shared))
        return None if member.deals else FIELD.lower(found)

    return program


def mac(step, result, holders=2, tolerance=0.0):
    return Protocol(
        partial(authenticated, holders), with_macs(step), result, holders, tolerance, macs=True
    )


# Shares of many.

MANY, FEW = draw(20, 16, seed=1), draw(2, 3, seed=1)


def many(step, result, holders=2, values=MANY, **more):
    def program(member, note):
        own = [
            member.share(owner, values.shape, values if member.role == owner else None, "values")
            for owner in (0, 1)
        ]
        return member.reveal(step(member, note, *own), "result")

    def make(timeout_s):
        return LocalMembers(holders, timeout_s=timeout_s)

    return Protocol(make, program, result, holders, tolerance=1e-4, **more)


def applied(member, note, one, two):
    product = member.divide(member.multiply(one, two), member.bits)
    if not member.deals:
        note(product.share)
    return member.apply(product, torch.relu, "relu")


# The three parties of a network.

LEFT, RIGHT = draw(30, 4, seed=2), draw(4, 10, seed=3)


def network(party, note):
    x = party.share(0, LEFT.shape, LEFT if party.role == 0 else None, "x")
    w = party.share(1, RIGHT.shape, RIGHT if party.role == 1 else None, "w")
    x, w = party.open(x, w.facing(x))
    rules = party.rules
    truncations = [Truncation(rules.bits, rules.zmax_bits(2 * rules.bits))]
    z, _ = party.multiply(x, w, matmul, truncations, where="layer 0")
    if party.role != 2:
        shown = z.finer(party.shown_bits(z)).share
        note(torch.cat([shown, -shown]))
    (y,) = party.apply(z, function("relu"), "layer 0", value=True, slope=False)
    return party.reveal(y, "y", 0)


def three(mode):
    return Protocol(
        lambda timeout_s: Trio(Rules(mode), timeout_s=timeout_s),
        network,
        (LEFT @ RIGHT).relu(),
        tolerance=1e-3,
        helper="permuted",
        word_bytes=8 if mode == "thesis" else 5,
    )


# Rows in common.

IDS = [b"id %d" % each for each in range(12)], [b"id %d" % each for each in range(6, 18)]
COLUMNS = draw(12, 1, seed=6), draw(12, 1, seed=7)
JOINED = torch.cat([torch.ones(6, 1).double(), COLUMNS[0][6:], COLUMNS[1][:6]], 1)


def common(party, note):
    ids, values = [*IDS, None][party.role], COLUMNS[1] if party.role == 1 else None
    hidden = intersect(party, 12, 1, ids, values)
    return moments(party, hidden, COLUMNS[0] if party.role == 0 else None, 1)


# What a session carries by frames of its own, here by channels.


class Streams(LocalParties):
    """Two holders and the label party, with a fresh key for every pair and run."""

    def __init__(self, timeout_s):
        super().__init__(lambda role, links: Peer(role, links, {}), timeout_s)
        self.agree({})


def key_of(party, peer, number):
    return party.pads[peer].elements64(4, "key", number).tobytes()


CUTS = draw(30, 8, seed=8).float(), draw(30, 8, seed=9).float()


def masked_sum(party, note):
    number, ring = party.next_number(), Ring.of(32, None, 2)
    if party.role == 2:
        told = [party.channels[role].receive_bytes(number, 4 * 240) for role in (0, 1)]
        return ring.decode(told, 30, 8)
    other = 1 - party.role
    masks = PairwiseMasks(str(party.role), ["0", "1"], {str(other): key_of(party, other, number)})
    cut = ring.encode(
        CUTS[party.role], "bank", 0, lambda count: masks.elements(count, ring.dtype, "cut", 0)
    )
    party.channels[2].send_bytes(cut.tobytes(), number, "online")
    return None


INPUTS = draw(30, 3, seed=10).float()
SHARES = [torch.from_numpy(np.random.default_rng(each).integers(-(2**40), 2**40, (4, 8)))
          for each in (0, 1)]  # fmt: skip
WORDS = encode_inputs(INPUTS, "bank")


def shared_layer(party, note):
    number, rows, sizes = party.next_number(), len(INPUTS), (4, 8)
    if party.role == 2:
        dealer = Dealer(*(PadStream(key_of(party, each, number)) for each in (0, 1)), *sizes)
        party.channels[1].send([dealer.deal(rows, 0)], number, "offline")
        told = [party.channels[role].receive([(rows, 8)], number)[0] for role in (0, 1)]
        return (told[0] + told[1]).double() * 2.0**-OUTPUT_BITS
    stream, there = PadStream(key_of(party, 2, number)), party.channels[1 - party.role]
    if party.role == 0:
        owner = Owner(stream)
        there.send([owner.opened(WORDS, 0)], number)
        (weights,) = there.receive([sizes], number)
        outputs = owner.outputs(WORDS, SHARES[0], weights, 0)
    else:
        partner = Partner("bank", Secret.fresh(), "x")
        partner.share = SHARES[1]
        partner.begin(stream, *sizes)
        (dealt,) = party.channels[2].receive([(rows, 8)], number)
        there.send([partner.opened(0)], number)
        (opened,) = there.receive([WORDS.shape], number)
        outputs = partner.outputs(opened, dealt, 0)
    party.channels[2].send([outputs], number)
    return None


# Sums over rows of a regression.

TABLE = draw(80, 5, seed=11)
OWNED = (2, 3)


class Summed(LocalParties):
    """Two holders of columns, the second with labels, and the helper."""

    def __init__(self, timeout_s):
        super().__init__(lambda role, links: Summing(role, links, len(TABLE), OWNED), timeout_s)
        self.agree({})


def opened(party, bits):
    own = None if party.deals else torch.split(TABLE, OWNED, 1)[party.role]
    return own, party.open_columns(own, bits)


def sums(party, note):
    _, columns = opened(party, fine_bits(party.rows))
    labels = TABLE[:, 0] if party.role == 1 else None
    found = party.gram(columns), party.label_products(columns, labels)
    return torch.cat([found[0], found[1][:, None]], 1) if party.role == 1 else None


def sums_at_margins(party, note):
    (own, fine), (_, coarse) = (
        opened(party, bits(party.rows)) for bits in (fine_bits, coarse_bits)
    )
    margins = None if own is None else own.sum(1)
    found = party.sums_at(family("binomial"), fine, coarse, margins)
    return None if found is None else torch.from_numpy(found.curvature)


CHANCES = TABLE.sum(1).sigmoid()
GRAM = torch.cat([TABLE.T @ TABLE, TABLE.T @ TABLE[:, :1]], 1)
CURVATURE = TABLE.T @ (TABLE * (CHANCES * (1 - CHANCES))[:, None])


PROTOCOLS = {
    "sums": Protocol(Summed, sums, GRAM, tolerance=1e-3),
    "sums at margins": Protocol(
        Summed, sums_at_margins, CURVATURE, tolerance=1e-3, helper="masked"
    ),
    "macs: reveal": mac(lambda member, one, two: one, INTEGERS, 3),
    "macs: product": mac(
        lambda member, one, two: member.multiply(one, two), INTEGERS * (INTEGERS + 1)
    ),
    "macs: divide": mac(lambda member, one, two: member.divide(one, 4), INTEGERS >> 4, 2, 1.0),
    "many: product": many(
        lambda member, note, one, two: member.divide(member.multiply(one, two), member.bits),
        MANY * MANY,
        3,
    ),
    "many: apply of three": many(applied, (MANY * MANY).relu(), 3, helper="permuted"),
    **{mode: three(mode) for mode in MODES},
    "intersection": Protocol(
        lambda timeout_s: Trio(Rules("fast"), timeout_s=timeout_s),
        common,
        JOINED.T @ JOINED,
        tolerance=1e-3,
        helper="masked",
    ),
    "masked sum": Protocol(Streams, masked_sum, CUTS[0] + CUTS[1], tolerance=1e-3, helper="masked"),
    "shared layer": Protocol(
        Streams,
        shared_layer,
        (WORDS.double() @ (SHARES[0] + SHARES[1]).double()) * 2.0**-OUTPUT_BITS,
        tolerance=1e-3,
        helper="masked",
    ),
}


SIGNS = many(lambda member, note, one, two: member.is_negative(one), (FEW < 0).double(), values=FEW)


class TestProtocols(HolderContract):
    protocols = PROTOCOLS


class TestSigns(HolderContract):
    protocols = {"many: signs": SIGNS}  # noqa: RUF012
    #: Without MACs nothing is found: a product says so of the same openings in a tenth of the time.
    test_well_formed_false_message_is_detected_by_macs = None


def test_every_mode_of_a_session_is_under_the_contract():
    assert set(OF_MODES) == set(SECURE.names()), "a mode without its protocols in this table"
    named = {name for names in OF_MODES.values() for name in names}
    assert named <= {*PROTOCOLS, *TestSigns.protocols}
