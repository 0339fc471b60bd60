"""What was drawn ahead serves the program it was drawn for; any other is refused unsent."""

import pytest
import torch

from vfl.core.errors import ReusedPadError
from vfl.mpc.permuted import function
from vfl.mpc.ring import inner, matmul
from vfl.mpc.rules import Rules
from vfl.mpc.three_party.trio import Trio

SIDE = 3


def columns(party, owner, rows):
    values = torch.ones(rows, SIDE) if party.role == owner else None
    return party.share(owner, (rows, SIDE), values, "x")


def opening(rows=1, owner=0):
    return lambda party: party.open(columns(party, owner, rows))


def question(name="relu", rows=1, slope=False):
    def program(party):
        x = columns(party, 0, rows)
        return party.apply(x, function(name), "x", value=True, slope=slope)

    return program


def opening_of_an_answer(rows=1):
    return lambda party: party.open(question(rows=rows)(party)[0])


def nothing(party):
    columns(party, 0, 1)
    party.open()


def product(operation=matmul):
    """All axes are alike, whatever is multiplied with what."""

    def program(party):
        x, w = columns(party, 0, SIDE).alone(), columns(party, 1, SIDE).alone()
        return party.multiply(*party.open(x, w), operation, where="z")

    return program


@pytest.mark.parametrize(
    ("ahead", "now"),
    [
        (opening(1), opening(5)),
        (opening(5), opening(1)),
        (opening(owner=0), opening(owner=1)),
        (opening_of_an_answer(1), opening_of_an_answer(40)),
        (opening(1), nothing),
        (question(rows=20), question(rows=21)),
        (question("relu"), question("sigmoid")),
        (question(slope=False), question(slope=True)),
    ],
)
def test_another_program_than_was_dealt_is_refused_before_it_sends(ahead, now):
    with Trio(Rules("fast"), timeout_s=60) as trio:
        trio.run(lambda party: party.deal(ahead))

        def refused(party):
            sent = [dict(channel.frames) for channel in party.channels.values()]
            with pytest.raises(ReusedPadError, match="another operation") as caught:
                now(party)
            assert [dict(channel.frames) for channel in party.channels.values()] == sent
            return caught.value.where

        assert len(set(trio.run(refused))) == 1


@pytest.mark.parametrize(
    ("ahead", "now"), [(matmul, inner), (inner, torch.mul), (torch.mul, matmul)]
)
def test_a_product_is_not_made_of_what_was_dealt_for_another(ahead, now):
    def refused(party):
        with pytest.raises(ReusedPadError, match="another operation"):
            product(now)(party)

    with Trio(Rules("fast"), timeout_s=60) as trio:
        trio.run(lambda party: party.deal(product(ahead)))
        trio.run(refused)


@pytest.mark.parametrize("program", [opening(), opening_of_an_answer(), product()])
def test_the_program_that_was_dealt_runs(program):
    with Trio(Rules("fast"), timeout_s=60) as trio:
        trio.run(lambda party: party.deal(program))
        trio.run(program)
        assert not any(party.ahead for party in trio.parties)
