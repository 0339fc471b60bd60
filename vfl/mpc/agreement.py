"""Keys for every pair of feature parties, agreed on through a relay that cannot learn them.

Each party offers an X25519 key (RFC 7748) made for this attempt alone, signed with its identity
key. The signature covers everything both must mean alike: session, attempt, the digest of the
terms, all parties in their order, and whose offer it is. So an offer of another session, of other
settings, of another party or under another role does not verify. The key of a pair follows by HKDF
(RFC 5869) from the shared secret, bound to the same facts and both offers. The label party relays
the offers; without a private key it learns nothing from them, and without an identity key it
cannot put its own in their place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from vfl.errors import AuthenticationError, ProtocolError, TruncatedFrameError
from vfl.frame import Payload
from vfl.mpc.identity import SIGNATURE_BYTES, Identity, Pin
from vfl.mpc.stream import KEY_BYTES

PUBLIC_BYTES = 32
OFFER_BYTES = PUBLIC_BYTES + SIGNATURE_BYTES
_OFFER, _PAIR = b"vfl masked sum offer 1", b"vfl masked sum pair 1"


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
    """

    def __init__(
        self, party: str, identity: Identity, pins: Mapping[str, Pin], binding: Binding
    ) -> None:
        self._party = party
        self._pins = pins
        self.binding = binding
        self._private: X25519PrivateKey | None = X25519PrivateKey.generate()
        public = self._private.public_key().public_bytes_raw()
        self.offer = public + identity.sign(_signed(binding, party, public))

    def keys(self, offers: Payload) -> dict[str, bytes]:
        """The key of each pair this party is in, by the other's name; can be asked for once.

        Args:
            offers: everybody's, in the order of the parties, as the relay hands them out.

        Raises:
            TruncatedFrameError: too few or too many bytes.
            AuthenticationError: an offer that its party has not signed for this attempt.
            ProtocolError: asked a second time.
        """
        private, self._private = self._private, None
        if private is None:
            raise ProtocolError("offers came twice", fix="begin a new attempt")
        keys = {}
        for party, offer in self._split(offers).items():
            if party == self._party:
                if offer != self.offer:
                    raise _not_signed(party)
                continue
            public, signature = offer[:PUBLIC_BYTES], offer[PUBLIC_BYTES:]
            if not self._pins[party].has_signed(_signed(self.binding, party, public), signature):
                raise _not_signed(party)
            keys[party] = self._key(private, party, public)
        return keys

    def _split(self, offers: Payload) -> dict[str, bytes]:
        raw, parties = bytes(offers), self.binding.parties
        if len(raw) != len(parties) * OFFER_BYTES:
            raise TruncatedFrameError(
                "the offers of keys have the wrong length",
                got=f"{len(raw)} bytes",
                want=f"{len(parties) * OFFER_BYTES} bytes for {len(parties)} parties",
            )
        starts = range(0, len(raw), OFFER_BYTES)
        return {
            party: raw[start : start + OFFER_BYTES]
            for party, start in zip(parties, starts, strict=True)
        }

    def _key(self, private: X25519PrivateKey, party: str, public: bytes) -> bytes:
        try:
            shared = private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:  # a point of small order, which gives zeros
            raise _not_signed(party) from None
        offered = {self._party: self.offer[:PUBLIC_BYTES], party: public}
        ordered = [name for name in self.binding.parties if name in offered]
        return pair_key(shared, self.binding, {name: offered[name] for name in ordered})

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
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"".join(info)).derive(shared)


def _signed(binding: Binding, party: str, public: bytes) -> bytes:
    return b"".join([_OFFER, binding.digest(), bytes([len(party)]), party.encode(), public])


def _not_signed(party: str) -> AuthenticationError:
    return AuthenticationError(
        f"the keys that came for party '{party}' are not its own, or not for this session",
        where="key agreement of the secure sum",
        want=f"an offer signed with the identity key pinned for '{party}', for this session, "
        "attempt, configuration and role",
        fix=f"compare your peers/{party}.pub with that party's identity.pub, by telephone for "
        "example; if they are equal, somebody in between changes what parties send",
    )
