"""Keys of workers: public keys for encryption, and proofs of which worker owns a key.

Every worker has an X25519 key for as long as its process runs; the leader forwards the public keys
to the other workers. A worker may also have an Ed25519 key in a file; with this key it signs its
X25519 key. The owners of other workers can receive the fingerprint of the Ed25519 key directly, not
through the leader. Workers whose owners have this fingerprint then accept only X25519 keys that
this Ed25519 key has signed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vfl.core.errors import AuthenticationError, UserError
from vfl.core.storage import write_bytes
from vfl.transport.pairs import (
    NONCE_BYTES,
    PUBLIC_BYTES,
    SIGNATURE_BYTES,
    Agreeing,
    NotAgreedError,
)

_FINGERPRINT_DIGITS, _GROUP = 32, 4


class WorkerKeys:
    """The keys of one worker, and the fingerprints of other workers' signing keys that it knows.

    Args:
        name: name of the worker.
        signing: the permanent Ed25519 signing key of this worker; with None, the worker signs
            nothing.
        known: known fingerprints of other workers' signing keys, by the workers' names. If this
            mapping has entries, the worker encrypts only for the workers that it names, and joins
            computations only with them.

    Raises:
        UserError: a text in `known` is not a fingerprint.
    """

    def __init__(
        self,
        name: str,
        signing: Ed25519PrivateKey | None = None,
        known: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._signing = name, signing
        self._known = {other: _digits(text, other) for other, text in (known or {}).items()}
        self._key = Agreeing()
        self._opened: set[bytes] = set()

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of this worker's permanent key, for the owners of other workers."""
        return None if self._signing is None else _fingerprint(self._signing.public_key())

    @property
    def public(self) -> bytes:
        """Public X25519 key (32 bytes), followed by a signature if there is a permanent key.

        With a permanent key, its public part and its signature of the X25519 key add 96 bytes.
        """
        own = self._key.public
        if self._signing is None:
            return own
        signed = self._signing.sign(_statement(self._name, own))
        return own + self._signing.public_key().public_bytes_raw() + signed

    def require_of(self, name: str, key: bytes) -> None:
        """Refuse a public key that is not the named worker's, if this worker knows fingerprints.

        Raises:
            AuthenticationError: the named worker is not among the known workers, or the key does
                not belong to it.
        """
        if self._known and not self._is_of(name, key):
            raise AuthenticationError(
                f"this is not the key of {name} whose fingerprint is known",
                where=self._name,
                want=", ".join(sorted(self._known)),
                fix=f"start {name} with --key, and this worker with --peer {name}=FINGERPRINT",
            )

    def require_known(self, keys: Sequence[bytes]) -> None:
        """Refuse a list of public keys unless each belongs to a different known worker.

        The worker itself counts as known. If this worker knows no fingerprint, it refuses nothing.

        Raises:
            AuthenticationError: a key does not belong to a known worker, or two keys belong to one.
        """
        if not self._known:
            return
        owners = [self._owner(key) for key in keys]
        if len(set(owners)) < len(owners):
            raise AuthenticationError(
                "two shares would be sent to the same worker", where=self._name
            )

    def agreed(self, key: bytes, about: str) -> bytes:
        """Derive the key that this worker and a public key's owner share for one purpose."""
        own, other = self._key.public, key[:PUBLIC_BYTES]
        return self._key.key(other, _info(min(own, other), max(own, other), about))

    def unseal(self, parcel: bytes) -> bytes:
        """Decrypt a message that another worker's `seal` encrypted for this worker.

        Each message can be opened only once.

        Raises:
            AuthenticationError: the message was encrypted for another worker, was changed, or was
                opened before.
        """
        once, nonce, rest = (
            parcel[:PUBLIC_BYTES],
            parcel[PUBLIC_BYTES : PUBLIC_BYTES + NONCE_BYTES],
            parcel[PUBLIC_BYTES + NONCE_BYTES :],
        )
        if once in self._opened:
            raise AuthenticationError("this encrypted message was opened before", where=self._name)
        try:
            cipher = AESGCM(self._key.key(once, _info(once, self._key.public)))
            content = cipher.decrypt(nonce, rest, None)
        except (InvalidTag, NotAgreedError, ValueError):
            raise AuthenticationError(
                "an encrypted message from another worker cannot be opened", where=self._name
            ) from None
        self._opened.add(once)
        return content

    def _owner(self, key: bytes) -> str:
        """Return the name of the known worker that owns a public key."""
        for name in [*self._known, self._name]:
            if self._is_of(name, key):
                return name
        raise AuthenticationError(
            "this key belongs to no worker with a known fingerprint",
            where=self._name,
            want=", ".join(sorted(self._known)),
            fix="start every worker with --key, and with --peer for every other worker",
        )

    def _is_of(self, name: str, key: bytes) -> bool:
        own, other = key[:PUBLIC_BYTES], key[PUBLIC_BYTES:]
        if name == self._name:
            return own == self._key.public
        if name not in self._known or len(other) != PUBLIC_BYTES + SIGNATURE_BYTES:
            return False
        signer = Ed25519PublicKey.from_public_bytes(other[:PUBLIC_BYTES])
        try:
            signer.verify(other[PUBLIC_BYTES:], _statement(name, own))
        except InvalidSignature:
            return False
        return _digits(_fingerprint(signer), name) == self._known[name]


def seal(key: bytes, content: bytes) -> bytes:
    """Encrypt bytes for the owner of a public key; each message uses a new temporary key."""
    once, nonce = Agreeing(), secrets.token_bytes(NONCE_BYTES)
    cipher = AESGCM(once.key(key[:PUBLIC_BYTES], _info(once.public, key[:PUBLIC_BYTES])))
    return once.public + nonce + cipher.encrypt(nonce, content, None)


def signing_key(path: Path) -> Ed25519PrivateKey:
    """Read a key file; create the file if it is missing.

    Only its owner can read the file.

    Raises:
        UserError: the file does not contain an Ed25519 key.
    """
    if not path.exists():
        write_bytes(path, Ed25519PrivateKey.generate().private_bytes_raw())
    try:
        return Ed25519PrivateKey.from_private_bytes(path.read_bytes())
    except (OSError, ValueError):
        raise UserError(
            "this is not a worker's key",
            where=str(path),
            fix="give the path of a new file, which is then created",
        ) from None


def _statement(name: str, key: bytes) -> bytes:
    return b"vfl.tensors key of " + name.encode() + b"\0" + key


def _info(once: bytes, key: bytes, about: str = "seal") -> bytes:
    """Return the bytes to which a derived key is bound."""
    return b"vfl.tensors " + about.encode() + once + key


def _fingerprint(key: Ed25519PublicKey) -> str:
    digits = hashlib.sha256(key.public_bytes_raw()).hexdigest()[:_FINGERPRINT_DIGITS]
    return "-".join(digits[at : at + _GROUP] for at in range(0, len(digits), _GROUP))


def _digits(text: str, name: str) -> str:
    found = text.replace("-", "").strip().lower()
    if len(found) != _FINGERPRINT_DIGITS or not set(found) <= set("0123456789abcdef"):
        raise UserError(
            f"this is not a fingerprint of {name}",
            want="eight groups of four digits, in the form in which a worker prints its"
            " fingerprint",
        )
    return found
