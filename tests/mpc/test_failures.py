"""Parties that die, sleep, lie or do something else: a typed error at all three, and no hang."""

import threading

import numpy as np
import pytest
import torch

from vfl.core.errors import (
    DisagreementError,
    PeerError,
    PeerFailedError,
    ProtocolError,
    ReusedPadError,
)
from vfl.core.frame import Frame, Kind
from vfl.mpc.channel import Channel
from vfl.mpc.in_process import mesh
from vfl.mpc.permuted import function
from vfl.mpc.ring import matmul
from vfl.mpc.rules import Rules
from vfl.mpc.shares import MovedIndices, Truncation
from vfl.mpc.three_party.trio import Trio, make_party

MODES = ["thesis", "fast"]


def product(party, shape=(6, 4)):
    """A program of all kinds of messages; `shape` is what a liar says of its inputs."""
    x = party.share(0, shape, torch.ones(shape) if party.role == 0 else None, "x")
    w = party.share(1, (shape[1], 2), torch.ones(shape[1], 2) if party.role == 1 else None, "w")
    x, w = party.open(x, w.facing(x))
    truncations = [Truncation(party.rules.bits, party.rules.zmax_bits(2 * party.rules.bits))]
    z, _ = party.multiply(x, w, matmul, truncations, where="layer 0")
    (y,) = party.apply(z, function("relu"), "layer 0", value=True, slope=False)
    return party.reveal(y, "y", 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", [0, 1, 2])
def test_who_lies_about_a_shape_is_found_out(mode, role):
    with Trio(Rules(mode, least_permuted=1), timeout_s=60) as trio:
        with pytest.raises(ProtocolError, match="another size") as caught:
            trio.run(lambda party: product(party, (7, 4) if party.role == role else (6, 4)))
        assert "bytes" in caught.value.got
        with pytest.raises(PeerError):
            trio.run(lambda party: product(party))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", [0, 1, 2])
def test_who_falls_asleep_is_not_waited_for_longer_than_agreed(mode, role):
    """It sleeps until another one has given up."""
    given_up = threading.Event()

    def program(party):
        if party.role == role:
            assert given_up.wait(60)
        try:
            return product(party)
        except PeerError:
            given_up.set()
            raise

    with Trio(Rules(mode), timeout_s=60) as trio:
        for party in trio.parties:
            for channel in party.channels.values():
                channel.link._timeout_s = 0.1
        with pytest.raises(PeerError):
            trio.run(program)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", [0, 1, 2])
def test_who_dies_takes_the_others_along(mode, role):
    class Killed(Exception):
        pass

    def program(party):
        product(party)
        if party.role == role:
            raise Killed("value 1.2345")
        return product(party)

    with Trio(Rules(mode), timeout_s=60) as trio:
        with pytest.raises(Killed):
            trio.run(program)
        with pytest.raises(PeerError) as caught:
            trio.run(lambda party: product(party))
    assert "1.2345" not in str(caught.value)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_parties_with_other_plans_never_begin(odd):
    links, _ = mesh(timeout_s=60)
    errors = {}

    def begin(role):
        party = make_party(role, links[role], Rules("fast", bits=20 if role == odd else 21))
        try:
            party.agree({}, "session")
        except PeerError as error:
            errors[role] = error
            for link in links[role].values():
                link.fail(error)

    threads = [threading.Thread(target=begin, args=(role,)) for role in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert isinstance(errors[odd], DisagreementError)
    assert isinstance(errors[0], DisagreementError), "P0 compares for itself"
    told = (DisagreementError, PeerFailedError)
    assert all(isinstance(error, told) for error in errors.values())


@pytest.mark.parametrize(
    "tail",
    [
        [9, 0, 1],  # more than there are
        [1, 0, 5],  # outside
        [1, 1, 2, 2],  # twice
        [0, 0, 3],  # not counted
        bytes(9),  # no whole numbers
    ],
)
def test_index_lists_that_cannot_be(tail):
    links, _ = mesh(timeout_s=60)
    raw = tail if isinstance(tail, bytes) else np.array(tail, "<u4").tobytes()
    links[0][1].send(Frame(Kind.PROTOCOL, 7, raw))
    with pytest.raises(ProtocolError):
        Channel(links[1][0], "P0").receive_moved([], [5], 7)


def test_index_lists_arrive_as_they_were():
    links, _ = mesh(timeout_s=60)
    words = [torch.arange(6).reshape(2, 3), torch.tensor([-1])]
    moved = [
        MovedIndices(torch.tensor([0, 4]), torch.tensor([2])),
        MovedIndices(*torch.empty(2, 0).long()),
    ]
    Channel(links[0][1], "P1").send_moved(words, moved, 3)
    found, indices = Channel(links[1][0], "P0").receive_moved([(2, 3), (1,)], [5, 9], 3)
    assert all(torch.equal(one, two) for one, two in zip(found, words, strict=True))
    assert [(p.large.tolist(), p.small.tolist()) for p in indices] == [([0, 4], [2]), ([], [])]


@pytest.mark.parametrize("mode", MODES)
def test_going_back_reuses_no_pad(mode):
    """A rollback under the same keys raises before anything is sent."""
    with Trio(Rules(mode), timeout_s=60) as trio:
        trio.run(product)
        for party in trio.parties:
            party._number = 0
        sent = [dict(channel.frames) for channel in trio.parties[0].channels.values()]
        with pytest.raises(ReusedPadError):
            trio.run(product)
        assert [dict(channel.frames) for channel in trio.parties[0].channels.values()] == sent


def test_every_attempt_has_keys_of_its_own():
    party = make_party(0, {}, Rules())
    found = set()
    for session, attempt in (("a", 0), ("a", 1), ("b", 0), ("a 1", 0)):
        party.use_key(1, bytes(32), session, attempt)
        found.add(party.pad(1, (4,), "share", 1).numpy().tobytes())
    party.use_key(2, bytes(32), "a", 0)
    found.add(party.pad(2, (4,), "share", 1).numpy().tobytes())
    assert len(found) == 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", [0, 1, 2])
def test_a_restarted_party_cannot_come_back_into_its_session(mode, role):
    """Its keys are gone with it: whatever it begins anew, all three end."""
    errors = {}

    def program(party):
        if party.role == role:
            links = {peer: channel.link for peer, channel in party.channels.items()}
            party = make_party(role, links, party.rules)
        try:
            if party.role == role:
                party.agree({}, "session")
            product(party)
        except PeerError as error:
            errors[party.role] = error
            raise

    with Trio(Rules(mode), timeout_s=0.5) as trio:
        trio.run(product)
        with pytest.raises(PeerError):
            trio.run(program)
    assert set(errors) == {0, 1, 2}
