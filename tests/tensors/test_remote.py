"""Workers of other processes: what is refused, what is lost, and what nobody between may see."""

from functools import partial

import pytest
import torch
from elsewhere import Elsewhere

from vfl import tensors
from vfl.core.errors import LostPeerError, PeerError, ProtocolError, UserError
from vfl.tensors.remote import Ticket
from vfl.tensors.requests import REQUESTS
from vfl.tensors.wire import packed, unpacked
from vfl.tensors.workers import Worker
from vfl.transport import Timeouts

X = torch.tensor([[1.5, -2.25, 0.5], [-0.75, 3.0, 2.0]])


def test_a_worker_that_was_killed_is_a_typed_error(tmp_path):
    elsewhere = Elsewhere(tmp_path, rejoin_window_s=0.5)
    alice, bob, carol = elsewhere.workers
    x = tensors.send(X, bob)
    shared = tensors.fix_precision(X).share(alice, bob, dealer=carol)
    elsewhere.processes[1].kill()
    for call in (x.get, lambda: shared * shared, lambda: shared.get(), lambda: x + 1):
        with pytest.raises(LostPeerError, match="bob has disconnected"):
            call()
    y = tensors.send(X, alice)  # the others go on
    assert torch.equal((y + 1).get(), X + 1)
    again = tensors.fix_precision(X)
    with pytest.raises(LostPeerError):
        again.share(alice, bob, dealer=carol)
    codes, said = elsewhere.close()
    assert [codes[0], codes[2]] == [0, 0], said
    with pytest.raises(LostPeerError, match="closed"):
        y.get()


def test_a_ticket_is_good_for_its_worker_and_its_pool(tmp_path, monkeypatch):
    # A worker without the pool's certificate tries until this window is over.
    monkeypatch.setattr("vfl.tensors.remote.Timeouts", partial(Timeouts, rejoin_window_s=0.5))
    path = tmp_path / "alice.ticket"
    path.write_text("{}")
    with pytest.raises(UserError, match="ticket"):
        Ticket.read(path)
    with tensors.Pool("alice", tls=True) as pool:
        pool.write_tickets(tmp_path)
        assert Ticket.read(path) == pool.tickets["alice"]
        assert path.stat().st_mode & 0o077 == 0
        assert pool.tickets["alice"].token not in repr(pool.tickets)
        forged = Ticket("127.0.0.1", pool.tickets["alice"].port, "x", "alice", "y")
        with pytest.raises(PeerError):
            tensors.serve(Worker("alice"), forged)


def test_what_is_no_message_is_refused():
    good = packed({"ask": "run", "args": [X, (1, 2), slice(None, 3), float("inf"), b"ab"]})
    back = unpacked(good)["args"]
    assert torch.equal(back[0], X)
    assert back[1:] == [(1, 2), slice(None, 3), float("inf"), b"ab"]
    for bad in [
        b"", good[:-1], good + b"x", b"\x05\0\0\0{}", packed(0)[:4] + b'{"object": 1}',
        b"\x1f\0\0\0" + b'{"tensor": ["float32",[-1],0]} ', b"\x0b\0\0\0" + b'{"bytes":9}',
    ]:  # fmt: skip
        with pytest.raises(ProtocolError):
            unpacked(bad)
    for other in (object(), lambda: 0, {1, 2}, X.to(torch.complex64)):
        with pytest.raises(UserError, match="cannot be sent"):
            packed(other)


def test_only_what_is_on_the_list_can_be_asked(everywhere):
    if everywhere is None:
        assert REQUESTS.keys().isdisjoint(
            {"load", "allow", "grant", "stop", "unseal", "agreed", "held"}
        )
        assert all(callable(getattr(Worker, name)) for name in REQUESTS)
        return
    alice = everywhere[0]
    for name in ("allow", "unseal", "__class__", "stop", "eval"):
        with pytest.raises(UserError, match="no request of this name"):
            alice.pool.ask(name, [(alice, ())])
    with pytest.raises(ProtocolError, match="could not execute") as caught:
        alice.pool.ask("read", [(alice, ())])
    assert "IndexError" in str(caught.value)
    assert torch.equal(tensors.send(X, alice).get(), X)  # it goes on


def test_whoever_asks_cannot_say_it_is_somebody_else(everywhere):
    if everywhere is None:
        pytest.skip("in one process everybody may say anything")
    alice = everywhere[0]
    x = tensors.find(alice, "rows")
    assert tensors.send(X, alice).get("bob") is not None
    with pytest.raises(PeerError, match="does not let me"):
        x.get("alice")


def test_the_leader_passes_on_what_it_cannot_read(everywhere, monkeypatch):
    """Neither a tensor that moves nor a share that goes to its holder is in what it sees."""
    if everywhere is None:
        pytest.skip("there is nobody between")
    alice, bob, carol = everywhere
    seen = []
    pool, name = alice.pool, "_next"
    original = getattr(pool, name)

    def listen(*args):
        found = original(*args)
        seen.append(packed(found[1]))
        return found

    x = tensors.send(X * 4096, alice)
    needle = (X * 4096).numpy().tobytes()[:12]
    monkeypatch.setattr(pool, name, listen)
    moved = x.move(bob)
    shared = tensors.fix_precision(x).share(alice, bob, dealer=carol)
    product = shared * shared
    assert not any(needle in each for each in seen)
    got = moved.get()
    assert any(needle in each for each in seen)
    assert torch.equal(got, X * 4096)
    monkeypatch.undo()
    assert torch.allclose(product.get().float_precision(), (X * 4096) ** 2, rtol=1e-4)


def test_a_session_of_workers_of_two_kinds_is_refused(everywhere):
    if everywhere is None:
        pytest.skip("of one kind")
    alice, bob, _ = everywhere
    (here,) = tensors.virtual("here")
    with pytest.raises(UserError, match="cannot share"):
        tensors.fix_precision(X).share(alice, bob, dealer=here)
    with pytest.raises(UserError, match="all be in this process"):
        tensors.fix_precision(here.load(X)).share(alice, bob, dealer=everywhere[2])
