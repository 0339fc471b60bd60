"""Shares with MACs: the field, each step against whole numbers, and holders that lie."""

import random

import pytest
import torch

from vfl.core.errors import CheatingError
from vfl.mpc.in_process import LocalParties
from vfl.mpc.many.authenticated import AuthenticatedMember
from vfl.mpc.numbers import FIELD, P
from vfl.mpc.ring import matmul
from vfl.mpc.shares import SharedTensor, blank

VALUES = torch.tensor([0, 1, -1, 12345, -98765, 2**40, -(2**40), 2**58, -(2**58), -(2**59)])


def members(holders=2, lying=None):
    """All parties; of holders and the dealer those in `lying` are of another class."""

    def make(role, links):
        kind = (lying or {}).get(role, AuthenticatedMember)
        return kind(role, links, holders)

    parties = LocalParties(make, 10.0, holders + 1)
    parties.agree({})
    return parties


def shared(member, values):
    (mine,), _ = member.dealt(lambda: [FIELD.lift(values)], [values.shape], "input")
    return SharedTensor(blank((2, *values.shape)), 0) if member.deals else mine


def revealed(parties, program):
    found = parties.run(lambda member: member.opened(program(member))[0])
    assert torch.equal(found[0], found[1])
    return FIELD.lower(found[0])


def test_the_field_against_whole_numbers_of_any_size():
    draw = random.Random(1)
    edge = [0, 1, 2, P - 1, P - 2, 1 << 31, (1 << 31) - 1, 1 << 60, (1 << 60) + 1]
    ones = edge + [draw.randrange(P) for _ in range(41)]
    twos = [draw.choice(edge + ones) for _ in ones]
    left, right = torch.tensor(ones), torch.tensor(twos)
    pairs = list(zip(ones, twos, strict=True))
    assert FIELD.mul(left, right).tolist() == [one * two % P for one, two in pairs]
    assert FIELD.add(left, right).tolist() == [(one + two) % P for one, two in pairs]
    assert FIELD.sub(left, right).tolist() == [(one - two) % P for one, two in pairs]
    product = FIELD.matmul(left.view(5, 10), right.view(10, 5)).tolist()
    rows, columns = (
        [ones[at : at + 10] for at in range(0, 50, 10)],
        [twos[at::5] for at in range(5)],
    )
    want = [[sum(a * b for a, b in zip(row, column, strict=True)) % P for column in columns]
            for row in rows]  # fmt: skip
    assert product == want
    total = FIELD.additive(lambda each: each.sum(0, keepdim=True), left)
    assert total.tolist() == [sum(ones) % P]


@pytest.mark.parametrize("holders", [2, 3])
def test_each_step_gives_what_whole_numbers_give(holders):
    with members(holders) as parties:
        assert torch.equal(revealed(parties, lambda each: shared(each, VALUES)), VALUES)
        small = torch.tensor([[3, -7, 2**28], [-(2**29), 5, 0]])
        product = revealed(
            parties, lambda each: each.multiply(shared(each, small), shared(each, small))
        )
        assert torch.equal(product, small * small)
        found = revealed(
            parties,
            lambda each: each.multiply(shared(each, small), shared(each, small.t() % 97), matmul),
        )
        assert torch.equal(found, small @ (small.t() % 97))
        divided = revealed(parties, lambda each: each.divide(shared(each, VALUES), 16))
        assert ((divided - (VALUES >> 16)).abs() <= 1).all()
        negative = revealed(parties, lambda each: each.is_negative(shared(each, VALUES)))
        assert torch.equal(negative, (VALUES < 0).long())


def test_division_is_off_by_one_unit_at_most_over_many_masks():
    draw = torch.Generator().manual_seed(3)
    values = torch.randint(-(2**58), 2**58, (4000,), generator=draw)
    with members() as parties:
        divided = revealed(parties, lambda each: each.divide(shared(each, values), 20))
    assert ((divided - (values >> 20)).abs() <= 1).all()
    assert 0 < (divided != values >> 20).sum() < len(values)


class Liar(AuthenticatedMember):
    """Opens its share plus something, in one opening of them all."""

    when, by, seen = 0, 1, 0

    def _sums(self, parts, number, numbers=None):
        type(self).seen += 1
        if type(self).seen == self.when:
            parts = [FIELD.add(parts[0], torch.tensor(self.by)), *parts[1:]]
        return super()._sums(parts, number, numbers)


@pytest.mark.parametrize("by", [1, P - 1])
@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("when", range(1, 10))
def test_a_holder_that_lies_at_any_opening_of_a_sign_is_found(when, role, by):
    """Of the other steps `test_holders.py` says so."""
    liar = type("Liar", (Liar,), {"when": when, "by": by, "seen": 0})
    with pytest.raises(CheatingError, match="lied"), members(lying={role: liar}) as parties:
        parties.run(lambda each: each.opened(each.is_negative(shared(each, VALUES))))
    assert liar.seen >= when
