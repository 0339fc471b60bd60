"""Steps on shares at workers, as a leader asks for them, against the contract of holders."""

import queue

import pytest
import torch

from vfl.core.errors import CheatingError
from vfl.mpc.in_process import LocalParties
from vfl.mpc.many.authenticated import AuthenticatedMember
from vfl.mpc.many.members import LocalMembers
from vfl.mpc.numbers import FIELD
from vfl.tensors.pointers import Masked
from vfl.tensors.shares import perform
from vfl.testing import HolderContract, Protocol

VALUES, OTHERS = torch.tensor([3, -7, 2**20]), torch.tensor([5, 11, -2])
REALS = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4)
SIZES = list(VALUES.shape)


def with_leader(timeout_s):
    """Holders with MACs, each with what the leader brings it from the dealer."""
    parties = LocalParties(lambda role, links: AuthenticatedMember(role, links, 2), timeout_s, 3)
    parties.agree({})
    for member in parties.parties:
        member.desk = [queue.SimpleQueue() for _ in range(2)]
    desks = parties.parties[2].desk
    for member in parties.parties[:2]:
        member.desk = desks
    return parties


def brought(member, whole, of=lambda mask: mask.elements):
    """Something of a mask that the dealer has whole, at the holders too."""
    if member.deals:
        for desk in member.desk:
            desk.put(of(whole))
        return of(whole)
    return member.desk[member.role].get(timeout=60)


def told(member, values):
    """The leader's own values as shares, behind a mask that it may read."""
    mask = perform(member, "mask", [], [SIZES, None]).value
    pad = brought(member, mask)
    public = FIELD.lower(FIELD.sub(FIELD.lift(values), pad))
    return perform(member, "plus", [mask], [public]).value


def hidden(member, values):
    """Values of a worker as shares, behind a mask of the worker's own."""
    mask = perform(member, "mask", [], [SIZES, "alice"]).value
    pad, tokens = brought(member, mask, lambda one: (one.elements, one.tokens))
    below = FIELD.lower(FIELD.sub(FIELD.lift(values), pad))
    masked = perform(member, "blank", [], [SIZES]).value
    if not member.deals:
        masked = Masked(below, tokens[member.role], ["alice"])
    return perform(member, "input", [mask, masked], []).value


def disclosed(member, shared):
    """What the leader reads of a result: an opening of it behind one more mask."""
    mask = perform(member, "mask", [], [SIZES, "me"]).value
    opened = perform(member, "disclose", [shared, mask], []).value
    pad = brought(member, mask)
    return None if member.deals else FIELD.lower(FIELD.sub(opened, pad))


def reused(member, note):
    """A factor that a product has opened is opened for the next one."""
    one, two = told(member, VALUES), hidden(member, OTHERS)
    first = perform(member, "product", [one, two], ["mul"])
    second = perform(member, "product", [first.operands[0], first.operands[1]], ["mul"])
    moved = perform(member, "linear", [first.value, second.value], ["add"]).value
    return disclosed(member, moved)


def divided(member, note):
    return disclosed(member, perform(member, "divide", [told(member, VALUES)], [1]).value)


def many(steps, result, holders=2, tolerance=1e-4):
    def program(member, note):
        own = [
            member.share(role, REALS.shape, REALS if member.role == role else None, "values")
            for role in (0, 1)
        ]
        return member.reveal(steps(member, *own), "result")

    return Protocol(
        lambda timeout_s: LocalMembers(holders, timeout_s=timeout_s),
        program,
        result,
        holders,
        tolerance,
    )


def scaled_product(member, one, two):
    found = perform(member, "product", [one, two], ["mul"])
    again = perform(member, "product", [*found.operands], ["mul"]).value
    both = perform(member, "linear", [found.value, again], ["add"]).value
    share = perform(member, "divide", [both], [member.bits]).value.share
    return type(one)(share, member.bits)


PROTOCOLS = {
    "mac: mask, input, product, disclose": Protocol(
        with_leader, reused, 2 * VALUES * OTHERS, macs=True
    ),
    "mac: divide": Protocol(with_leader, divided, VALUES >> 1, tolerance=1.0, macs=True),
    "product, divide": many(scaled_product, 2 * REALS * REALS),
}


class TestProtocols(HolderContract):
    protocols = PROTOCOLS


def test_who_lies_to_one_holder_about_its_own_input_is_found():
    """Parcels of a worker differ: each holder adds another value to its share of the MAC."""

    def program(member):
        return disclosed(member, hidden(member, VALUES + (member.role == 1)))

    with with_leader(10.0) as parties, pytest.raises(CheatingError):
        parties.run(program)
