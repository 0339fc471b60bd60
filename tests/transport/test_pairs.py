"""Bytes of two parties that sign, agree and seal: recorded, so that no version changes them."""

import hashlib
import secrets
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from vfl.config import read_party_file
from vfl.core.frame import Frame, Kind
from vfl.mpc.secure.keys import Agreement, Binding, pair_seals
from vfl.session.ranks.machines import RanksKey
from vfl.session.relay import PairSeals
from vfl.session.store.identity import Identity
from vfl.tensors.keys import WorkerKeys, seal
from vfl.tensors.remote import _Sealed

NAMES, SESSION = ("bank", "shop"), "5" * 32


@pytest.fixture(autouse=True)
def numbered(monkeypatch):
    """Keys and nonces that are drawn are numbered: the first is 32 times 1."""
    drawn = iter(range(1, 200))
    of = X25519PrivateKey.from_private_bytes
    monkeypatch.setattr(X25519PrivateKey, "generate", lambda: of(bytes([next(drawn)]) * 32))
    monkeypatch.setattr(secrets, "token_bytes", lambda size: bytes([next(drawn)]) * size)


def digest(*parts):
    return hashlib.sha256(b"|".join(map(bytes, parts))).hexdigest()[:16]


def identities():
    return {name: Identity.of_simulation(bytes([7 + at]) * 32) for at, name in enumerate(NAMES)}


def secure_mode(tmp_path):
    own = identities()
    pins = {name: identity.public for name, identity in own.items()}
    binding = Binding(SESSION, 0, "a" * 64, NAMES)
    bank, shop = (Agreement(name, own[name], pins, binding, 5) for name in NAMES)
    offers = bank.offer + shop.offer
    key = bank.keys(offers)["shop"]
    assert key == shop.keys(offers)["bank"]
    there = pair_seals("bank", {"shop": key})
    sent = ((b"words", b"inputs 7"), (b"more", b"inputs 8"))
    return offers, key, *(there.sealed("shop", *each) for each in sent)


def session_relay(tmp_path):
    seals = {}
    for (name, identity), other in zip(identities().items(), NAMES[::-1], strict=True):
        identity.keep_at(tmp_path / name / "identity.key")
        identity.public.keep_at(tmp_path / other / "peers" / f"{name}.pub")
        text = f'party = "{name}"\n[data]\nsource = "x.csv"\nid = "id"\n'
        (tmp_path / name / "party.toml").write_text(text)
    terms = SimpleNamespace(
        digest=lambda: "a" * 64,
        feature_parties=NAMES,
        label_party="lender",
        secure="none",
        middle=None,
        mode="train",
        tasks=(),
    )
    for name in NAMES:
        seals[name] = PairSeals(read_party_file(tmp_path / name / "party.toml"), terms, SESSION)
    offers = [seals[name].offers()[0].payload for name in NAMES]
    seals["bank"].open("shop", offers[1])
    seals["shop"].open("bank", offers[0])
    sent = [seals["bank"].sealed("shop", text, b"CUT 3") for text in (b"a", b"bc")]
    assert seals["shop"].opened("bank", sent[0], b"CUT 3") == b"a"
    back = seals["shop"].sealed("bank", b"d", b"GRAD 3")
    return *offers, *sent, back


def workers(tmp_path):
    signing = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
    bob, alice = WorkerKeys("bob", signing), WorkerKeys("alice")
    parcel = seal(bob.public, b"a share")
    assert bob.unseal(parcel) == b"a share"
    key = bob.agreed(alice.public, "session\nbob\nalice")
    assert key == alice.agreed(bob.public, "session\nbob\nalice")
    sent = []

    class End:
        def send(self, message):
            sent.append(message["frame"])

        def relayed(self, session, role):
            return sent.pop(0)

    here, there = _Sealed(End(), "s", 0, 1, key), _Sealed(End(), "s", 1, 0, key)
    here.send(Frame(Kind.PROTOCOL, 4, b"words"))
    here.send(Frame(Kind.PROTOCOL, 5, b"words"))
    crossed = list(sent)
    assert there.receive().step == 4
    return bob.public, alice.public, parcel, key, *crossed


def ranks(tmp_path):
    key = RanksKey("bank", bytes([3]) * 32)
    return key.token(1).encode(), key._derived("authority", 48)


@pytest.mark.parametrize(
    ("play", "recorded"),
    [
        (secure_mode, "3e3f7f9a7c530a1b"),
        (session_relay, "a3125647092b4228"),
        (workers, "218f97218f09fb84"),
        (ranks, "a6d375ead4ae4686"),
    ],
)
def test_bytes_are_those_of_the_versions_before(play, recorded, tmp_path):
    assert digest(*play(tmp_path)) == recorded
