"""Identity keys: who a party is to the other feature parties, whatever lies between them.

An Ed25519 key pair a party (RFC 8032). Files are OpenSSH's, as ``ssh-keygen -t ed25519`` makes
them. A public key is pinned: it reaches the other parties by a way that the label party, which
relays everything else, does not control.
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

#: What to do without a key, and without a pin.
MAKE_IDENTITY = "vfl join FOLDER makes one; give its public part to the other parties"
_ASK = "ask that party for its NAME.pub, and let it read out the fingerprint"


class Identity:
    """One party's own identity key; the private part never leaves it.

    Args:
        private: the key.
    """

    __slots__ = ("_private",)

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def fresh(cls) -> Identity:
        """A new key from the operating system."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def of_simulation(cls, seed: bytes) -> Identity:
        """The key of 32 bytes, for a process that plays every party; it protects nobody."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def kept_at(cls, path: Path, fix: str = MAKE_IDENTITY) -> Identity:
        """The key in a file; `fix` is what to do without it.

        Raises:
            MissingDataError: there is none.
            DataError: the file holds something else.
        """
        load = partial(serialization.load_ssh_private_key, password=None)
        return cls(_key_at(path, load, Ed25519PrivateKey, "private", fix))

    def keep_at(self, path: Path) -> None:
        """Write the private key to a file only its owner can read."""
        openssh = serialization.PrivateFormat.OpenSSH
        plain = serialization.NoEncryption()
        pem = self._private.private_bytes(serialization.Encoding.PEM, openssh, plain)
        write_bytes(path, pem)

    def sign(self, message: bytes) -> bytes:
        """A signature of 64 bytes."""
        return self._private.sign(message)

    @property
    def public(self) -> Pin:
        """What the other parties pin."""
        return Pin(self._private.public_key())

    def __repr__(self) -> str:
        return "Identity(...)"

    def __reduce__(self) -> str:
        raise TypeError("an identity is never serialised")


class Pin:
    """Another party's public identity key, as it was given to us.

    Args:
        public: the key.
    """

    __slots__ = ("_public",)

    def __init__(self, public: Ed25519PublicKey) -> None:
        self._public = public

    @classmethod
    def kept_at(cls, path: Path) -> Pin:
        """The key in a file, which may hold keys of other kinds on other lines.

        Raises:
            MissingDataError: there is none.
            DataError: the file holds something else.
        """
        return cls(_key_at(path, _load_public, Ed25519PublicKey, "public", _ASK))

    def keep_at(self, path: Path) -> None:
        """Write the key as one line of text."""
        line = self._public.public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        write_bytes(path, line + b"\n")

    @property
    def sha256(self) -> str:
        """SHA-256 of the key's 32 bytes, as hex."""
        return hashlib.sha256(self._public.public_bytes_raw()).hexdigest()

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether the owner of this key signed the message."""
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
    """The pinned keys of some parties, each in ``NAME.pub``.

    Raises:
        MissingDataError, DataError: one is missing, or is no Ed25519 key.
    """
    return {party: Pin.kept_at(folder / f"{party}.pub") for party in parties}


def keys_of(party: PartyFile) -> str:
    """Whether this party could take part in a secure mode, and with whom.

    Raises:
        DataError: a file holds something else than a key.
    """
    key, peers = party.beside(party.identity.key), party.beside(party.identity.peers)
    if not key.exists():
        return f"no key; {MAKE_IDENTITY}"
    Identity.kept_at(key)
    pinned = {path.stem: fingerprint(path.read_bytes()) for path in sorted(peers.glob("*.pub"))}
    read_pins(peers, pinned)
    told = ", ".join(f"{name} ({shown})" for name, shown in pinned.items())
    return f"key of its own; pinned: {told or 'nobody'}"


def _key_at(path: Path, load: Callable[[bytes], object], wanted: type, part: str, fix: str) -> Any:
    try:
        key = load(path.read_bytes())
    except FileNotFoundError:
        raise MissingDataError("an identity key is missing", where=str(path), fix=fix) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, wanted):
        raise DataError(f"this is no OpenSSH Ed25519 {part} key", where=str(path), fix=fix)
    return key
