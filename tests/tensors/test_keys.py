"""Workers that know each other's fingerprints detect a leader that passes on other keys."""

from threading import Thread

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from vfl import tensors
from vfl.core.errors import AuthenticationError, ProtocolError, UserError
from vfl.tensors.keys import WorkerKeys, seal, signing_key
from vfl.tensors.remote import Pool, serve

NAMES = ("alice", "bob", "carol")


def keys_of_friends(names=NAMES):
    """Keys of workers that know each other's fingerprints."""
    signing = {name: Ed25519PrivateKey.generate() for name in names}
    prints = {name: WorkerKeys(name, key).fingerprint for name, key in signing.items()}
    return {
        name: WorkerKeys(name, key, {other: prints[other] for other in names if other != name})
        for name, key in signing.items()
    }


@pytest.fixture
def pool():
    """Workers that know each other, each a thread with a connection of its own."""
    keys = keys_of_friends()
    with Pool(*NAMES, tls=False) as made:
        workers = [tensors.Worker(name, keys[name]) for name in NAMES]
        threads = [
            Thread(target=serve, args=(worker, made.tickets[worker.name])) for worker in workers
        ]
        for thread in threads:
            thread.start()
        workers[0].load(torch.tensor([[2.0, -1.0]]), tag="rows")
        yield made, made.wait()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("mac", [False, True], ids=["plain", "mac"])
def test_workers_that_know_each_other_compute(pool, mac):
    alice, bob, carol = pool[1]
    x = tensors.fix_precision(torch.tensor([1.5, -2.0])).share(alice, bob, dealer=carol, mac=mac)
    assert torch.allclose((x * x).get().float_precision(), torch.tensor([2.25, 4.0]), atol=1e-3)
    rows = tensors.find(alice, "rows")
    hidden = tensors.fix_precision(rows).share(alice, bob, dealer=carol, mac=mac)
    assert hidden.shape == (1, 2)


@pytest.mark.parametrize("mac", [False, True], ids=["plain", "mac"])
def test_a_leader_that_hands_its_own_keys_on_is_found_out(pool, mac, monkeypatch):
    """It would read every share and mask between two workers."""
    made, (alice, bob, carol) = pool
    own, ask = WorkerKeys("bob"), made.ask

    def lying(what, asked):
        found = ask(what, asked)
        if what != "public_key":
            return found
        return [own.public if worker is bob else key for (worker, _), key in
                zip(asked, found, strict=True)]  # fmt: skip

    monkeypatch.setattr(made, "ask", lying)
    rows = tensors.find(alice, "rows")
    with pytest.raises(AuthenticationError, match="not the key of bob"):
        tensors.fix_precision(rows).share(alice, bob, dealer=carol, mac=mac)


def test_nothing_is_sealed_for_a_key_of_somebody_else():
    keys = keys_of_friends()
    worker = tensors.Worker("alice", keys["alice"])
    rows = worker.load(torch.ones(2))
    number = rows.number
    worker.allow(rows, "bob")
    others = [
        WorkerKeys("bob").public,
        WorkerKeys("bob", Ed25519PrivateKey.generate()).public,
        keys["carol"].public,
        keys["bob"].public[:32] + keys["carol"].public[32:],
    ]
    for key in others:
        with pytest.raises(AuthenticationError, match="not the key of bob"):
            keys["alice"].require_of("bob", key)
        with pytest.raises(AuthenticationError, match="not the key of bob"):
            worker.pack(number, "bob", key)
        with pytest.raises(AuthenticationError):
            worker.split(number, 16, [keys["alice"].public, key, key])
    for name in ("bob", "carol"):
        keys["alice"].require_of(name, keys[name].public)
    with pytest.raises(AuthenticationError, match="to the same worker"):
        worker.split(number, 16, [keys["bob"].public] * 2)
    assert len(worker.split(number, 16, [keys["alice"].public, keys["bob"].public])) == 2


def test_a_key_without_fingerprints_takes_every_other():
    keys = WorkerKeys("alice")
    keys.require_of("bob", WorkerKeys("bob").public)
    keys.require_known([WorkerKeys("bob").public] * 2)
    assert keys.fingerprint is None
    assert len(keys.public) == 32


def test_a_parcel_is_opened_once_and_by_whom_it_is_for():
    keys = keys_of_friends()
    parcel = seal(keys["bob"].public, b"content")
    with pytest.raises(AuthenticationError, match="cannot be opened"):
        keys["carol"].unseal(parcel)
    assert keys["bob"].unseal(parcel) == b"content"
    with pytest.raises(AuthenticationError, match="before"):
        keys["bob"].unseal(parcel)


def test_keys_of_a_computation_are_of_its_places(pool, monkeypatch):
    """Two roles under one key would seal two messages under one nonce."""
    made, (alice, bob, carol) = pool
    tensors.fix_precision(torch.ones(1)).share(alice, bob, dealer=carol)
    (name,) = made._of_session
    keys = [[each, made.ask("public_key", [(worker, ())])[0]] for each, worker in
            zip(NAMES, (alice, bob, carol), strict=True)]  # fmt: skip
    with pytest.raises(ProtocolError, match="already"):
        made.ask("sit", [(alice, (name, 1, 2, False, keys))])


def test_a_key_stays_in_its_file(tmp_path):
    path = tmp_path / "alice.key"
    first = WorkerKeys("alice", signing_key(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert WorkerKeys("alice", signing_key(path)).fingerprint == first.fingerprint
    path.write_text("no key")
    with pytest.raises(UserError, match="not a worker's key"):
        signing_key(path)


def test_what_is_no_fingerprint_is_refused():
    with pytest.raises(UserError, match="not a fingerprint of bob"):
        WorkerKeys("alice", known={"bob": "1234"})
