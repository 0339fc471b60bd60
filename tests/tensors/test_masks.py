"""Masks of a dealer: who was given one hides a value under it once, and nobody else reads it."""

import pytest
import torch

from vfl import tensors
from vfl.core.errors import AuthenticationError, ConsentError
from vfl.mpc.numbers import FIELD
from vfl.tensors.keys import seal
from vfl.tensors.shares import Session
from vfl.tensors.wire import packed


@pytest.fixture
def masked(workers):
    """A hidden tensor of alice, a computation with MACs, and a mask that carol dealt for alice."""
    alice, bob, carol = workers
    secret = alice.load(torch.tensor([3.0, -1.0]))
    session = Session.of([alice, bob], carol, mac=True)
    return secret, session, session.do("mask", [], [2], "alice")


def holders_keys(session):
    return [worker.public_key() for worker in session.workers[:-1]]


def test_nobody_but_the_owner_reads_a_mask_or_what_is_behind_it(masked):
    secret, session, mask = masked
    alice, bob, carol = session.workers
    for worker, part in zip(session.workers, mask.parts, strict=True):
        with pytest.raises(ConsentError, match="does not let me"):
            worker.read(part.number)
    parcel = carol.pack(mask.parts[-1].number, "alice", alice.public_key())
    number, _ = alice.accept(parcel)
    with pytest.raises(ConsentError, match="does not let me"):
        alice.read(number)
    hidden = alice.masked(secret.number, number, 16, holders_keys(session))
    places = [worker.accept(each) for worker, each in zip((alice, bob), hidden, strict=True)]
    for worker, (at, _) in zip((alice, bob), places, strict=True):
        with pytest.raises(ConsentError, match="does not let me"):
            worker.read(at)
    shared = tensors.fix_precision(secret).share(alice, bob, dealer=carol, mac=True)
    with pytest.raises(ConsentError, match="does not let me"):
        shared.get()


def test_a_mask_hides_once(masked):
    _, session, mask = masked
    alice, _, carol = session.workers
    parcel = carol.pack(mask.parts[-1].number, "alice", alice.public_key())
    with pytest.raises(ConsentError, match="sent only once"):
        carol.pack(mask.parts[-1].number, "alice", alice.public_key())
    alice.accept(parcel)
    with pytest.raises(AuthenticationError, match="before"):
        alice.accept(parcel)


def test_whoever_leads_cannot_say_what_is_behind_an_owners_mask(masked):
    _, session, mask = masked
    own = session.do("plus", [mask], torch.zeros(2).long())
    with pytest.raises(ConsentError, match="does not let me"):
        session.workers[0].read(own.parts[0].number)
    parcels = [
        seal(key, packed({"value": torch.zeros(2).long(), "readers": None, "token": bytes(16)}))
        for key in holders_keys(session)
    ]
    with pytest.raises(AuthenticationError, match="another mask"):
        session.do("input", [mask, session._accepted(parcels, torch.Size([2]))])


def test_shares_of_a_mask_are_of_nothing_where_the_dealer_knows_another_reader(masked):
    _, session, _ = masked
    readers = {"carol": "alice", "alice": "me", "bob": "me"}
    asked = [
        (worker, (session._name, "mask", [], ([2], readers[worker.name])))
        for worker in session.workers
    ]
    places = session._ask("perform", asked)
    shares = [
        worker.read(number)[0]
        for worker, (number, _) in zip(session.workers[:-1], places[:-1], strict=True)
    ]
    (mask,) = (session.workers[-1]._held[places[-1][0]].value.elements,)
    assert not torch.equal(FIELD.add(*shares), mask)
