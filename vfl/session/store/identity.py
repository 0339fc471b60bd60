"""Identity keys, with which feature parties authenticate each other across the label party's relay.

Each party has an Ed25519 key pair (RFC 8032), in files of the OpenSSH format, as ``ssh-keygen -t
ed25519`` makes them. Other parties pin (store) the public key: each party receives the other
parties' public keys over a channel that the relaying label party does not control.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from vfl.config import PartyFile
from vfl.core.errors import DataError, MissingDataError
from vfl.core.storage import write_bytes
from vfl.transport import fingerprint

#: Remedies in error texts: the first for a missing identity key, the second for a missing pinned
#: key (another party's stored public key).
MAKE_IDENTITY = "vfl join FOLDER makes an identity key; give its public part to the other parties"
_ASK = "ask that party for its file NAME.pub, and let it read the fingerprint aloud"


class Identity:
    """One party's identity key pair; the private key never leaves the party.

    Args:
        private: the private key.
    """

    __slots__ = ("_private",)

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def fresh(cls) -> Identity:
        """Generate a new private key from random numbers of the operating system."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def of_simulation(cls, seed: bytes) -> Identity:
        """Make a private key from a seed of 32 bytes, for a process that runs all parties.

        Such a key protects no party.
        """
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def kept_at(cls, path: Path, fix: str = MAKE_IDENTITY) -> Identity:
        """Load the private key from a file.

        `fix` is the remedy in the error if the file is missing.

        Raises:
            MissingDataError: the file does not exist.
            DataError: the file contains something other than a key.
        """
        load = partial(serialization.load_ssh_private_key, password=None)
        return cls(_key_at(path, load, Ed25519PrivateKey, "private", fix))

    def keep_at(self, path: Path) -> None:
        """Write the private key to a file that only its owner can read."""
        openssh = serialization.PrivateFormat.OpenSSH
        plain = serialization.NoEncryption()
        pem = self._private.private_bytes(serialization.Encoding.PEM, openssh, plain)
        write_bytes(path, pem)

    def sign(self, message: bytes) -> bytes:
        """Sign a message with the private key; the signature has 64 bytes."""
        return self._private.sign(message)

    @property
    def public(self) -> Pin:
        """Return the public key, which other parties store in order to authenticate this party."""
        return Pin(self._private.public_key())

    def __repr__(self) -> str:
        return "Identity(...)"

    def __reduce__(self) -> str:
        raise TypeError("an identity is never serialised")


class Pin:
    """Another party's public identity key (a pinned key), as received from that party.

    Args:
        public: the public key.
    """

    __slots__ = ("_public",)

    def __init__(self, public: Ed25519PublicKey) -> None:
        self._public = public

    @classmethod
    def kept_at(cls, path: Path) -> Pin:
        """Load the public key from a file.

        Other lines of this file may contain other kinds of keys.

        Raises:
            MissingDataError: the file does not exist.
            DataError: the file contains something other than a key.
        """
        return cls(_key_at(path, _load_public, Ed25519PublicKey, "public", _ASK))

    def keep_at(self, path: Path) -> None:
        """Write the public key as one line of text."""
        line = self._public.public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        write_bytes(path, line + b"\n")

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the public key's 32 bytes, as hexadecimal digits."""
        return hashlib.sha256(self._public.public_bytes_raw()).hexdigest()

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Return whether the owner of this key signed the message."""
        try:
            self._public.verify(signature, message)
        except InvalidSignature:
            return False
        return True


def _load_public(content: bytes) -> object:
    kind = b"ssh-ed25519 "
    (line,) = [line for line in content.splitlines() if line.startswith(kind)]
    return serialization.load_ssh_public_key(line)


def read_pins(folder: Path, parties: Iterable[str]) -> dict[str, Pin]:
    """Read the pinned public keys of the given parties, each from the file ``NAME.pub``.

    Raises:
        MissingDataError, DataError: a file is missing, or contains no Ed25519 key.
    """
    return {party: Pin.kept_at(folder / f"{party}.pub") for party in parties}


def keys_of(party: PartyFile) -> str:
    """Return a text: whether this party has an identity key, and which parties' keys it has pinned.

    Raises:
        DataError: a file contains something other than a key.
    """
    key, peers = party.beside(party.identity.key), party.beside(party.identity.peers)
    if not key.exists():
        return f"no key; {MAKE_IDENTITY}"
    Identity.kept_at(key)
    pinned = {path.stem: fingerprint(path.read_bytes()) for path in sorted(peers.glob("*.pub"))}
    read_pins(peers, pinned)
    told = ", ".join(f"{name} ({shown})" for name, shown in pinned.items())
    return f"has an identity key; pinned keys: {told or 'no party'}"


def _key_at(path: Path, load: Callable[[bytes], object], wanted: type, part: str, fix: str) -> Any:
    try:
        key = load(path.read_bytes())
    except FileNotFoundError:
        raise MissingDataError("an identity key is missing", where=str(path), fix=fix) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, wanted):
        first = "move this file away; then " if part == "private" else ""
        where, fix = str(path), first + fix
        raise DataError(f"this is no OpenSSH Ed25519 {part} key", where=where, fix=fix)
    return key
