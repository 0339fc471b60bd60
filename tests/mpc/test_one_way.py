"""Products with columns a holder has in plaintext: right, and what they must not disclose."""

import pytest
import torch

from vfl.mpc.permuted import function
from vfl.mpc.ring import decode, encode, inner, matmul
from vfl.mpc.rules import Rules
from vfl.mpc.three_party.trio import Trio

ROWS, COLUMNS, WIDTH = 6, 5, 3


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


X, W = draw(ROWS, COLUMNS, seed=0), draw(COLUMNS, WIDTH, seed=1)
G = draw(ROWS, WIDTH, seed=2)


def columns(party, split):
    """The first columns of P0, the others of P1."""
    left, right = (
        party.share(owner, part.shape, part if party.role == owner else None, "x")
        for owner, part in enumerate((X[:, :split], X[:, split:]))
    )
    return left.beside(right)


def mixed(party, values):
    """A sum of both holders' halves, as first weights are."""
    halves = [values * 0.25, values * 0.75]
    one, two = (
        party.share(owner, half.shape, half if party.role == owner else None, "w")
        for owner, half in enumerate(halves)
    )
    return one.plus(two)


def value_of(shares):
    return decode(shares[0].share + shares[1].share, shares[0].bits)


@pytest.fixture
def trio():
    with Trio(Rules("fast"), timeout_s=60) as made:
        yield made


@pytest.mark.parametrize("split", [0, 2, COLUMNS])
@pytest.mark.parametrize("faced", [True, False], ids=["one way", "both ways"])
def test_the_forward_product(trio, split, faced):
    def program(party):
        x, w = columns(party, split), mixed(party, W)
        x, w = party.open(x, w.facing(x) if faced else w)
        return party.multiply(x, w, matmul, where="z")[0]

    assert float((value_of(trio.run(program)) - X @ W).abs().max()) < 1e-5


@pytest.mark.parametrize("split", [0, 2, COLUMNS])
@pytest.mark.parametrize("width", [1, WIDTH])
def test_the_backward_product(trio, split, width):
    def program(party):
        x, g = columns(party, split), mixed(party, G[:, :width])
        return party.multiply(*party.open(x, g), inner, where="gradient")[0]

    wanted = X.t() @ G[:, :width]
    assert float((value_of(trio.run(program)) - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize("split", [0, 2, COLUMNS])
def test_each_word_travels_one_way(trio, split):
    """P0 opens its columns, and its share of the weights that meet the columns of P1."""

    def program(party):
        x = columns(party, split)
        party.open(x, mixed(party, W).facing(x))
        return [sum(channel.sent.values()) for channel in party.channels.values()]

    before = {
        party.role: sum(party.channels[1 - party.role].sent.values()) for party in _pair(trio)
    }
    trio.run(program)
    sent = {
        party.role: sum(party.channels[1 - party.role].sent.values()) - before[party.role]
        for party in _pair(trio)
    }
    for role, own, rest in ((0, split, COLUMNS - split), (1, COLUMNS - split, split)):
        assert sent[role] == 8 * (ROWS * own + rest * WIDTH) + 16


def _pair(trio):
    return trio.parties[:2]


def test_what_is_in_clear_with_its_owner_is_nothing_at_the_other(trio):
    shares = trio.run(lambda party: columns(party, 2))
    bits = trio.parties[0].rules.bits
    assert torch.equal(shares[0].share[:, :2], encode(X[:, :2], bits, "x"))
    assert not shares[0].share[:, 2:].any()
    assert not shares[1].share[:, :2].any()
    assert shares[0].owned == shares[1].owned == shares[2].owned == 2


def test_thesis_mode_shares_everything():
    with Trio(Rules("thesis"), timeout_s=60) as trio:
        shares = trio.run(lambda party: columns(party, 2))
    assert {share.owned for share in shares} == {None}
    assert all((share.share != 0).all() for share in shares[:2])


def test_factors_that_were_opened_for_others_are_refused(trio):
    def other_columns(party):
        x, w = columns(party, 2), mixed(party, W)
        opened = party.open(x, w.facing(columns(party, 3)))
        party.multiply(*opened, matmul, where="z")

    with pytest.raises(ValueError, match="facing"):
        trio.run(other_columns)


def test_values_are_shown_and_answered_in_blocks(trio):
    values = draw(2**14, seed=3)

    def program(party):
        shared = party.share(0, values.shape, values if party.role == 0 else None, "x")
        return party.apply(shared, function("relu"), "x", value=True, slope=True)

    found = trio.run(program)
    values_of, slopes_of = (value_of([each[at] for each in found]) for at in (0, 1))
    assert float((values_of - values.relu()).abs().max()) < 2e-5
    assert float((slopes_of - (values > 0).double()).abs().max()) == 0
