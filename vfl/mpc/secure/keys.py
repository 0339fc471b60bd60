"""Keys for every pair of parties other than the label party, which relays but cannot learn them.

Each party offers an X25519 key (RFC 7748) that it made for this attempt alone, signed with its
identity key. The signature covers all facts on which both parties of a pair must agree: session,
attempt, digest of the terms, all parties in order, and the party that makes the offer. The
signature of an offer of another session, other settings, another party or another role therefore
fails verification. The signature also covers the counter of the party's store
(`vfl.session.store.witness`); every other party compares this counter with the last one that it has
seen. The key of a pair is derived by HKDF (RFC 5869) from the pair's shared secret, and is bound to
the same facts and to both parties' offers. The label party relays the offers of keys. Without a
private key, it learns nothing from the offers, and without an identity key, it cannot replace them
with its own.

Wire format: p_1 .. p_n are the feature parties in merge order, and then a third party if one deals;
the label party relays. All lengths in this description are in bytes.

1. ``context`` is the SHA-256 of the JSON array ``[session, attempt, terms, [p_1, .., p_n]]``
   without spaces.
2. p_i sends a PROTOCOL frame: its X25519 public key X_i (32), the counter C_i of its store (8,
   big-endian), and an Ed25519 signature (64). The signed text is: "vfl masked sum offer 2" |
   context | length of the party's name (1) | name | X_i | C_i.
3. The label party, which relays, sends all offers to all parties, in order of the parties. Each
   party checks the signatures with pinned keys, checks that its own offer came back unchanged, and
   checks that every other party's counter has increased.
4. For i < j, key_ij is 32 bytes of HKDF-SHA256 without salt, with the input X25519(x_i, X_j). The
   info of HKDF is: "vfl masked sum pair 1" | context | length of p_i | p_i | X_i | length of p_j |
   p_j | X_j.

Test vector, with the keys of RFC 7748, section 6.1: session 32 times ``5``, attempt 0, terms 64
times ``a``, parties bank and shop.

    private key of bank   77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a
    private key of shop   5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb
    X25519                4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742
    key of the pair       7deaf7d298f8ae132fc4f873ca93c192e144e9299a164737d3643fd478087769
    words of ("cut", 7)   cdd91394 6c3e3d9b e83c82fb 2fb527db

Two parties seal (encrypt and authenticate) messages for each other by AES-256-GCM. The key for a
direction is HKDF-SHA256 of the pair's key without salt, with this info: "vfl relayed message 1" |
length of the sender's name (1) | sender | length of the receiver's name (1) | receiver. The nonce
is the number of messages sealed in this direction so far, as 12 bytes, big-endian. The first
message "words" about "inputs 7" from bank to shop, under the key above, is
c867c30d6f5ac5e18d3b3c702ff76033a39b5c702c.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vfl.core.errors import AuthenticationError, ProtocolError
from vfl.core.frame import Payload
from vfl.mpc.channel import split_payload
from vfl.session.store.identity import Identity, Pin
from vfl.transport.pairs import (
    OFFER_BYTES,
    TAG_BYTES,
    Agreeing,
    NotAgreedError,
    SealedPairs,
    derived,
    opened_offer,
)

__all__ = ["OFFER_BYTES", "TAG_BYTES", "Agreement", "Binding", "pair_key", "pair_seals"]
_OFFER, _PAIR = b"vfl masked sum offer 2", b"vfl masked sum pair 1"


@dataclass(frozen=True, slots=True)
class Binding:
    """Facts about one attempt to which its keys are bound; no other attempt accepts them.

    Attributes:
        session: name of the session.
        attempt: number of earlier attempts at the session.
        terms: digest of the agreed settings.
        parties: all feature parties in merge order; if a third party deals, it comes last.
    """

    session: str
    attempt: int
    terms: str
    parties: tuple[str, ...]

    def digest(self) -> bytes:
        """Return the SHA-256 digest of all fields, written as JSON without spaces."""
        facts = [self.session, self.attempt, self.terms, list(self.parties)]
        return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).digest()


class Agreement:
    """One party's part of the key agreement in one attempt at a session.

    Args:
        party: name of the party.
        identity: the party's own identity key.
        pins: the other parties' public identity keys.
        binding: facts about the session's attempt to which the keys are bound.
        count: counter of the party's store; see `vfl.session.store.witness`.
        admit: function that receives each other party's signed counter, and raises an error if the
            counter has not increased.
    """

    def __init__(
        self,
        party: str,
        identity: Identity,
        pins: Mapping[str, Pin],
        binding: Binding,
        count: int = 0,
        admit: Callable[[str, int], None] = lambda party, count: None,
    ) -> None:
        self._party = party
        self._pins, self._admit = pins, admit
        self.binding = binding
        own = Agreeing()
        self._own: Agreeing | None = own
        self.offer = own.offer(identity, _signed(binding, party), count)

    def keys(self, offers: Payload) -> dict[str, bytes]:
        """Return the key of each pair that includes this party, by the name of the other party.

        The method may be called only once.

        Args:
            offers: offers of all parties in the order of the parties, as the relay distributes
                them.

        Raises:
            TruncatedFrameError: the offers have too few or too many bytes.
            AuthenticationError: a party did not sign its key offer for this attempt.
            RolledBackError: the store of another party was restored from an old copy.
            ProtocolError: the method was already called.
        """
        own, self._own = self._own, None
        if own is None:
            raise ProtocolError(
                "the parties' key offers were read twice", fix="begin a new attempt"
            )
        keys = {}
        parties, what = self.binding.parties, "the offers of keys have the wrong length"
        parts = split_payload(offers, [OFFER_BYTES] * len(parties), None, what)
        for party, offer in zip(parties, map(bytes, parts), strict=True):
            if party == self._party:
                if offer != self.offer:
                    raise _not_signed(party)
                continue
            try:
                pin, about = self._pins[party], _signed(self.binding, party)
                public, count = opened_offer(offer, pin, about)
                self._admit(party, count)
                shared = own.shared(public)
            except NotAgreedError:
                raise _not_signed(party) from None
            offered = {self._party: own.public, party: public}
            ordered = {name: offered[name] for name in parties if name in offered}
            keys[party] = pair_key(shared, self.binding, ordered)
        return keys

    def __repr__(self) -> str:
        return "Agreement(...)"


def pair_key(shared: bytes, binding: Binding, offered: Mapping[str, bytes]) -> bytes:
    """Derive the 32-byte key of a pair.

    Args:
        shared: the pair's shared secret of X25519.
        binding: facts about the session's attempt to which the key is bound.
        offered: both parties' X25519 keys, in the order of the parties.
    """
    info = [_PAIR, binding.digest()]
    for party, public in offered.items():
        info += [bytes([len(party)]), party.encode(), public]
    return derived(shared, b"".join(info))


def _signed(binding: Binding, party: str) -> bytes:
    return b"".join([_OFFER, binding.digest(), bytes([len(party)]), party.encode()])


def _not_signed(party: str) -> AuthenticationError:
    return AuthenticationError(
        f"the keys received for party '{party}' are not its own, or not for this session",
        where="key agreement of the session",
        want=f"an offer signed with the identity key pinned for '{party}', for this session, "
        "attempt, configuration and role",
        fix=f"compare your peers/{party}.pub with that party's fingerprint, by telephone for "
        "example; if they are equal, an attacker in between changes what parties send",
    )


_RELAYED = b"vfl relayed message 1"


def pair_seals(party: str, keys: Mapping[str, bytes]) -> SealedPairs[Payload, bytes]:
    """Make the seals (encryption) between one party and each other party in one attempt.

    Args:
        party: name of this party.
        keys: 32-byte key of each pair that includes this party; see `Agreement`.

    >>> there = pair_seals("bank", {"shop": bytes(32)})
    >>> here = pair_seals("shop", {"bank": bytes(32)})
    >>> here.opened("bank", there.sealed("shop", b"words", b"inputs 7"), b"inputs 7")
    b'words'
    """

    def cipher(pair: bytes, *way: str) -> AESGCM:
        names = [bytes([len(name)]) + name.encode() for name in way]
        return AESGCM(derived(pair, _RELAYED + b"".join(names)))

    seals = SealedPairs[Payload, bytes](list(keys), _not_sealed)
    for other, pair in keys.items():
        seals.use(other, cipher(pair, party, other), cipher(pair, other, party))
    return seals


def _not_sealed(sender: str, size: int, about: bytes) -> AuthenticationError:
    return AuthenticationError(
        f"a relayed message differs from the message that party '{sender}' sealed for this place",
        where=about.decode(),
        got=f"{size} bytes",
        want="the next message of that party, unchanged",
        fix="an attacker in between changes, repeats or drops the parties' messages",
    )
