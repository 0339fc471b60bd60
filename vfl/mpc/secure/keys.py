"""Keys for every pair of feature parties, agreed on through a relay that cannot learn them.

Each party offers an X25519 key (RFC 7748) made for this attempt alone, signed with its identity
key. The signature covers everything both must mean alike: session, attempt, the digest of the
terms, all parties in their order, and whose offer it is. So an offer of another session, of other
settings, of another party or under another role does not verify. It also covers the count of the
party's store (`vfl.session.store.witness`), which each other party compares. The key of a pair
follows by HKDF (RFC 5869) from the shared secret, bound to the same facts and both offers. The
label party relays the offers; without a private key it learns nothing from them, and without an
identity key it cannot put its own in their place.

Feature parties p_1 .. p_n in merge order; the label party relays. Lengths in bytes.

1. ``context`` = SHA-256 of the JSON array ``[session, attempt, terms, [p_1, .., p_n]]``, no spaces.
2. p_i sends a PROTOCOL frame: its X25519 public key X_i (32), the count C_i of its store (8, big
   end first), and the Ed25519 signature (64) of "vfl masked sum offer 2" | context | length of its
   name (1) | name | X_i | C_i.
3. The relay sends everybody all offers in order. Each checks the signatures with pinned keys, and
   that its own offer came back unchanged, and that no count is one that it has met before.
4. For i < j: key_ij = HKDF-SHA256, no salt, input X25519(x_i, X_j), info "vfl masked sum pair 1" |
   context | length of p_i | p_i | X_i | length of p_j | p_j | X_j; 32 bytes.

Test vector, with the keys of RFC 7748, section 6.1: session 32 times ``5``, attempt 0, terms 64
times ``a``, parties bank and shop.

    private key of bank   77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a
    private key of shop   5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb
    X25519                4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742
    key of the pair       7deaf7d298f8ae132fc4f873ca93c192e144e9299a164737d3643fd478087769
    words of ("cut", 7)   cdd91394 6c3e3d9b e83c82fb 2fb527db

What two seal for each other is AES-256-GCM. Key: HKDF-SHA256 of the pair's key, no salt, info "vfl
relayed message 1" | length of the sender's name (1) | sender | length | receiver. Nonce: 12 bytes,
big-endian, the number of messages sealed in this direction so far. The first message "words" about
"inputs 7" from bank to shop, under the key above, is c867c30d6f5ac5e18d3b3c702ff76033a39b5c702c.
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
    """What the keys are good for, and nothing else.

    Attributes:
        session: name of the session.
        attempt: counts its restarts.
        terms: digest of what was agreed.
        parties: all feature parties, in merge order, and a third party that deals after them.
    """

    session: str
    attempt: int
    terms: str
    parties: tuple[str, ...]

    def digest(self) -> bytes:
        """SHA-256 of all of it, as JSON without spaces."""
        facts = [self.session, self.attempt, self.terms, list(self.parties)]
        return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).digest()


class Agreement:
    """One party's side of the agreement, for one attempt.

    Args:
        party: who offers.
        identity: its own identity key.
        pins: the other parties' public identity keys.
        binding: what the keys will be good for.
        count: of its store; see `vfl.session.store.witness`.
        admit: told the count of each other party, as it has signed it; raises if that went back.
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
        """The key of each pair this party is in, by the other's name; can be asked for once.

        Args:
            offers: everybody's, in the order of the parties, as the relay hands them out.

        Raises:
            TruncatedFrameError: too few or too many bytes.
            AuthenticationError: an offer that its party has not signed for this attempt.
            RolledBackError: the store of another party was put back from a copy.
            ProtocolError: asked a second time.
        """
        own, self._own = self._own, None
        if own is None:
            raise ProtocolError("offers came twice", fix="begin a new attempt")
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
    """The 32-byte key of a pair.

    Args:
        shared: what X25519 gave.
        binding: what the key is good for.
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
        f"the keys that came for party '{party}' are not its own, or not for this session",
        where="key agreement of the session",
        want=f"an offer signed with the identity key pinned for '{party}', for this session, "
        "attempt, configuration and role",
        fix=f"compare your peers/{party}.pub with that party's fingerprint, by telephone for "
        "example; if they are equal, somebody in between changes what parties send",
    )


_RELAYED = b"vfl relayed message 1"


def pair_seals(party: str, keys: Mapping[str, bytes]) -> SealedPairs[Payload, bytes]:
    """What a party and others seal for each other in one attempt.

    Args:
        party: whose end it is.
        keys: of each pair it is in, 32 bytes; see `Agreement`.

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
        f"a relayed message is not what party '{sender}' sealed for this place",
        where=about.decode(),
        got=f"{size} bytes",
        want="its next message, unchanged",
        fix="somebody in between changes, repeats or drops what parties send each other",
    )
