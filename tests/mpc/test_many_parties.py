"""Shares among many holders: against plain numbers, to the byte, and what anybody hears."""

from functools import partial

import numpy as np
import pytest
import torch

from vfl.core.errors import BadOptionError, DisagreementError, RingRangeError, WidthError
from vfl.core.frame import HEADER_BYTES
from vfl.mpc.in_process import LocalParties
from vfl.mpc.many.members import LocalMembers, Lockstep, Member
from vfl.mpc.ring import inner, matmul
from vfl.mpc.rules import LEAST_PERMUTED
from vfl.mpc.shares import SharedTensor

BITS = 20


def draw(*shape, seed=0, scale=1.0):
    source = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=source, dtype=torch.float64)


@pytest.fixture(params=[2, 3, 8])
def members(request):
    with LocalMembers(request.param, timeout_s=60) as found:
        yield found


@pytest.fixture
def pair():
    with LocalMembers(2, timeout_s=60) as found:
        yield found


def shared(member, values, owner=0, bits=-1):
    own = values if member.role == owner else None
    return member.share(owner, values.shape, own, "values", bits)


def value_of(members, program):
    """What a program's result is, which all holders learn alike."""
    *found, dealers = members.run(lambda member: member.reveal(program(member), "result"))
    assert dealers is None
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


def words_of(members, program):
    """What shared words are together."""
    total = 0
    for word in members.run(program)[:-1]:
        total = total ^ word
    return total.numpy().view(np.uint64)


def exact(values, bits=BITS):
    return (values * 2.0**bits).round() * 2.0**-bits


def test_values_of_every_holder_come_back(members):
    values = [draw(5, 3, seed=each) for each in range(members.parties[0].holders)]
    for owner, own in enumerate(values):
        found = value_of(members, partial(shared, values=own, owner=owner))
        assert torch.equal(found, exact(own))
    one = members.run(lambda m: m.reveal(shared(m, values[0]), "result", to=1))
    assert torch.equal(one.pop(1), exact(values[0]))
    assert one == [None] * (len(values))


def test_the_dealer_with_any_one_holder_knows_an_opened_tensor(members):
    """This is the limit that the module's docstring and the promise of `pea` state."""
    values = draw(5, 3)
    *holders, dealer = members.run(lambda m: m.open(shared(m, values))[0])
    for holder in holders:
        assert torch.equal((holder.difference() + dealer.mask()) * 2.0**-BITS, exact(values))


@pytest.mark.parametrize("operation", [torch.mul, matmul, inner])
def test_products(members, operation):
    left = draw(6, 6, seed=1)
    right = draw(6, 6, seed=2)

    def program(member):
        return member.multiply(shared(member, left), shared(member, right, 1), operation)

    found = value_of(members, program)
    plain = operation(exact(left), exact(right))
    assert torch.allclose(found, plain, rtol=0, atol=1e-12)


def test_what_was_opened_serves_in_part_again_and_transposed(pair):
    left, right = draw(6, 4, seed=1), draw(6, 4, seed=2)

    def program(member):
        (opened,) = member.open(shared(member, left))
        some = opened.rows(torch.tensor([4, 1]))
        other = shared(member, right, 1)
        first = member.multiply(opened.transposed(), other, matmul)
        second = member.multiply(some, other.rows(torch.tensor([0, 5])))
        return first.share[:2] + second.share

    halves = pair.run(program)[:2]
    wanted = (exact(left).T @ exact(right))[:2] + exact(left)[[4, 1]] * exact(right)[[0, 5]]
    assert torch.allclose(sum(halves).double() * 2.0 ** (-2 * BITS), wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("positive", [False, True])
def test_divisions_are_off_by_no_more_than_a_unit(members, positive):
    """Also of the largest elements, where a holder's own division is wrong half of the time."""
    elements = torch.from_numpy(np.random.default_rng(0).integers(-(2**62), 2**62, 20_000))
    elements[:4] = torch.tensor([2**62 - 1, -(2**62) + 1, 0, -1])
    if positive:
        elements = torch.abs(elements) + (1 << 62) * torch.arange(2).repeat(10_000)
        elements.clamp_(min=0)
    parts = torch.from_numpy(
        np.random.default_rng(1).integers(-(2**63), 2**63, (members.parties[0].holders - 1, 20_000))
    )
    own = [elements - parts.sum(0), *parts]
    for shift, below in ((20, False), (43, False), (20, True)):

        def program(member, shift=shift, below=below):
            mine = own[0] if member.deals else own[member.role]
            part = member.own(mine, 2 * BITS)
            return member.divide(part, shift, positive=positive, below=below).share

        found = torch.stack(members.run(program)[:-1]).sum(0)
        off = found - (elements >> shift) + below
        assert set(off.tolist()) == {0, 1}


def test_bits_are_those_of_the_number(members):
    values = draw(7, 9, scale=2.0**20)
    values[0, :4] = torch.tensor([0.0, 2.0**-20, -(2.0**-20), -(2.0**41)])
    plain = (values * 2**BITS).round().long().numpy().view(np.uint64)
    found = words_of(members, lambda m: m.bits_of(shared(m, values)))
    assert (found == plain).all()


@pytest.mark.parametrize("holders", [2, 3])
@pytest.mark.parametrize("shape", [(), (5,), (7, 9), (70, 71)])
def test_signs_and_leading_ones_of_all_parties_in_one_process(shape, holders):
    count = int(np.prod(shape))
    drawn = np.random.default_rng(0).integers(-(2**62), 2**62, count) >> np.arange(count) % 63
    elements = torch.from_numpy(drawn).reshape(shape)
    engine = Lockstep(holders)
    shared = SharedTensor(engine.split(elements), 0)
    assert torch.equal(engine.is_negative(shared).share.sum(0), (elements < 0).long())
    places = engine.leading(shared, range(62)).share.sum(0)
    magnitude = torch.where(elements < 0, ~elements, elements)
    wanted = [*((magnitude >> place) == 1 for place in range(62)), elements < 0]
    assert torch.equal(places, torch.stack(wanted).long())


def test_few_values_are_not_shown_to_the_dealer(pair):
    values = draw(LEAST_PERMUTED - 1)
    with pytest.raises(WidthError, match="too few values"):
        pair.run(lambda m: m.apply(shared(m, values), torch.relu, "relu"))


N = 11
#: What is sent online by a holder to each other one, in words, and in how many messages that follow
#: one another.
COSTS = {
    "product": (lambda m, one, two: m.multiply(one, two), 2 * N, 1),
    "division": (lambda m, one, two: m.divide(one, 20), N, 1),
    "bits": (lambda m, one, two: m.bits_of(one), 7 * N, 4),
    "highest": (lambda m, one, two: m.highest_bit(one.share), 3 * N, 3),
    "number": (lambda m, one, two: m.numbers_of(one.share, [3]), N, 1),
    "sign": (lambda m, one, two: m.is_negative(one), N + 2 * N + 2 * 3 + 2 + 1, 5),
}


@pytest.mark.parametrize("name", COSTS)
def test_bytes_and_rounds(members, name):
    program, words, rounds = COSTS[name]
    values = draw(N)
    holders = members.parties[0].holders
    members.hops()
    members.run(lambda m: program(m, shared(m, values), shared(m, values, 1)))
    online = [row for row in members.traffic() if row.phase == "online"]
    assert len(online) == holders * (holders - 1)
    assert {row.wire_bytes for row in online} == {words * 8 + rounds * HEADER_BYTES}
    # The last holder hears of the dealer first.
    assert rounds <= members.hops() <= rounds + 1
    offline = {(row.sender, row.receiver) for row in members.traffic() if row.phase == "offline"}
    assert offline == {(f"P{holders}", f"P{holders - 1}")}


@pytest.mark.parametrize("name", COSTS)
def test_what_a_holder_hears_is_uniform(pair, name, monkeypatch):
    """Of one number again and again: each bit of each message of the other is a coin."""
    program = COSTS[name][0]
    heard = []
    channel = pair.parties[0].channels[1]
    take = channel.receive_bytes

    def receive_bytes(number, size, most=None):
        payload = take(number, size, most)
        heard.append(bytes(payload))
        return payload

    monkeypatch.setattr(channel, "receive_bytes", receive_bytes)
    values = torch.full((4000,), 3.25, dtype=torch.float64)
    pair.run(lambda m: program(m, shared(m, values, 1), shared(m, values, 1)))
    for payload in heard:
        bits = np.unpackbits(np.frombuffer(payload, np.uint8)).reshape(-1, 64)
        assert abs(bits.mean(0) - 0.5).max() < 6 * 0.5 / np.sqrt(len(bits))


def test_parties_with_other_terms_do_not_begin():
    def make(role, links):
        return Member(role, links, holders=2, bits=20 + (role == 1))

    with LocalParties(make, 5, 3) as parties, pytest.raises(DisagreementError):
        parties.agree({})


@pytest.mark.parametrize("holders", [1, 9])
def test_holders_out_of_range(holders):
    with pytest.raises(BadOptionError):
        LocalMembers(holders)


def test_a_value_that_does_not_fit_is_named_by_its_place_alone(pair):
    values = torch.tensor([1.0, 2.0**45], dtype=torch.float64)
    with pytest.raises(RingRangeError) as caught:
        pair.run(lambda m: shared(m, values))
    assert caught.value.where == "values"
    assert str(2**45) not in str(caught.value)
