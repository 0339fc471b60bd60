"""Key agreement between two parties with signatures, and encrypted messages, over any channel.

Each party generates an X25519 key (RFC 7748) for one attempt of a session, and sends an offer: its
public key, optionally with a counter and a signature. The signature covers data on which both
parties must agree. From the shared secret, HKDF-SHA256 (RFC 5869) derives keys, which also depend
on the agreed data. AES-256-GCM encrypts and authenticates ("seals") messages, which are numbered in
each direction. A `SealedPairs` object encrypts and decrypts the messages between one party and each
other party. The callers define which data are signed, and on which data a key depends: see the
docstrings of the modules `vfl.mpc.secure.keys`, `vfl.session.relay`, `vfl.session.ranks.machines`
and `vfl.tensors.keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Generic, Protocol, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from vfl.core.errors import ReusedPadError, VFLError

PUBLIC_BYTES = KEY_BYTES = 32
SIGNATURE_BYTES, COUNT_BYTES, TAG_BYTES, NONCE_BYTES = 64, 8, 16, 12
#: Bytes of an offer: an X25519 public key, the counter of the party's store, and one signature over
#: both.
OFFER_BYTES = PUBLIC_BYTES + COUNT_BYTES + SIGNATURE_BYTES
#: Largest number of messages that may be encrypted with one key in one direction.
_MESSAGES = 2**32


class Signer(Protocol):
    """A long-term signing key; see `vfl.session.store.identity.Identity`."""

    def sign(self, message: bytes) -> bytes:
        """Sign a message; the signature has 64 bytes."""


class Verifier(Protocol):
    """A long-term verification key; see `vfl.session.store.identity.Pin`."""

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Return whether the owner of the key signed the message."""


class NotAgreedError(ValueError):
    """Error: an offer is not signed by its party, or does not contain a valid key.

    The caller adds the party's name to the error.
    """


def derived(secret: bytes, info: bytes, size: int = KEY_BYTES, salt: bytes | None = None) -> bytes:
    """Derive key bytes from a shared secret by HKDF-SHA256; the key bytes depend on `info`."""
    return HKDF(SHA256(), size, salt=salt, info=info).derive(secret)


class Agreeing:
    """One party's X25519 key pair for one attempt of a session.

    The private key never leaves this object.

    Attributes:
        public: the public key, 32 bytes.

    >>> bank, shop = Agreeing(), Agreeing()
    >>> bank.key(shop.public, b"one session") == shop.key(bank.public, b"one session")
    True
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def offer(self, signer: Signer, about: bytes, count: int = 0) -> bytes:
        """Make an offer: public key, counter, and a signature that also covers `about`."""
        told = self.public + count.to_bytes(COUNT_BYTES)
        return told + signer.sign(about + told)

    def shared(self, public: bytes) -> bytes:
        """Compute the secret that is shared with the owner of `public`; keys are derived from it.

        Raises:
            NotAgreedError: `public` is not a valid key, or is a point of small order.
        """
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise NotAgreedError from None

    def key(self, public: bytes, info: bytes, salt: bytes | None = None) -> bytes:
        """Derive the 32-byte key that is shared with the owner of `public`.

        The key depends on `info`. The method raises the errors of `shared`.
        """
        return derived(self.shared(public), info, salt=salt)

    def __repr__(self) -> str:
        return "Agreeing(...)"

    def __reduce__(self) -> str:
        raise TypeError("a key is never serialised")


def opened_offer(offer: bytes, pin: Verifier, about: bytes) -> tuple[bytes, int]:
    """Verify an offer; return the peer's public key and its counter.

    Raises:
        NotAgreedError: the owner of the pinned key has not signed this offer together with the same
            data `about`.
    """
    told, signature = offer[:-SIGNATURE_BYTES], offer[-SIGNATURE_BYTES:]
    if len(offer) != OFFER_BYTES or not pin.has_signed(about + told, signature):
        raise NotAgreedError
    return told[:PUBLIC_BYTES], int.from_bytes(told[PUBLIC_BYTES:])


Given = TypeVar("Given", bound=Sized, contravariant=True)
Made = TypeVar("Made", covariant=True)


class Cipher(Protocol[Given, Made]):
    """Interface of AES-256-GCM with one key, as in class `AESGCM` of package `cryptography`."""

    def encrypt(self, nonce: bytes, data: Given, about: bytes | None, /) -> Made:
        """Encrypt a message."""

    def decrypt(self, nonce: bytes, data: Given, about: bytes | None, /) -> Made:
        """Decrypt a message."""


class Direction(Generic[Given, Made]):
    """Messages from one party to another: one encrypts, one decrypts, both count them.

    Args:
        cipher: cipher of this direction; if both directions use one cipher, they must differ in
            `way`.
        way: first bytes of every nonce in this direction.
        first: number of the first message in this direction.

    >>> from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    >>> there, here = (Direction(AESGCM(bytes(32))) for _ in range(2))
    >>> here.open(there.seal(b"words", b"inputs 7"), b"inputs 7")
    b'words'
    """

    def __init__(self, cipher: Cipher[Given, Made], way: bytes = b"", first: int = 0) -> None:
        self._cipher, self._way, self._next = cipher, way, first

    def seal(self, message: Given, about: bytes | None = None) -> Made:
        """Encrypt a message; the result is `TAG_BYTES` longer than the message.

        Args:
            message: content of the message in plaintext.
            about: associated data, which must be equal at sender and receiver and is not sent.

        Raises:
            ReusedPadError: the key has already encrypted the maximum number of messages.
        """
        return self._cipher.encrypt(self._nonce(), message, about)

    def open(self, sealed: Given, about: bytes | None = None) -> Made:
        """Decrypt a message; it must be the next message of the sender.

        Raises:
            InvalidTag: the message is not the sender's next message, was changed, or has different
                associated data.
        """
        return self._cipher.decrypt(self._nonce(), sealed, about)

    def _nonce(self) -> bytes:
        if self._next >= _MESSAGES:
            raise ReusedPadError(
                "a key has encrypted its maximum number of messages",
                got=f"{_MESSAGES} messages",
                fix="begin a new attempt of the session, which makes new keys",
            )
        number, self._next = self._next, self._next + 1
        return self._way + number.to_bytes(NONCE_BYTES - len(self._way))

    def __repr__(self) -> str:
        return "Direction(...)"

    def __reduce__(self) -> str:
        raise TypeError("a key is never serialised")


class SealedPairs(Generic[Given, Made]):
    """Encrypted messages between one party and others, numbered in each direction.

    Args:
        others: names of the other parties.
        refused: function that makes the error for a message that cannot be decrypted; its arguments
            are the sender, the length of the message and the associated data.
    """

    def __init__(
        self, others: Sequence[str], refused: Callable[[str, int, bytes], VFLError]
    ) -> None:
        self.others, self._refused = list(others), refused
        self._there: dict[str, Direction[Given, Made]] = {}
        self._back: dict[str, Direction[Given, Made]] = {}

    def use(
        self, other: str, there: Cipher[Given, Made], back: Cipher[Given, Made], first: int = 0
    ) -> None:
        """Set the ciphers for a party's two directions, and the first message's number."""
        self._there[other] = Direction(there, first=first)
        self._back[other] = Direction(back, first=first)

    def has_keys(self, other: str) -> bool:
        """Return whether keys for messages to another party have been set."""
        return other in self._there

    def sealed(self, other: str, message: Given, about: bytes = b"") -> Made:
        """Encrypt a message for another party; see `Direction.seal`."""
        return self._there[other].seal(message, about)

    def opened(self, sender: str, sealed: Given, about: bytes = b"") -> Made:
        """Decrypt another party's message, which must be the party's next message.

        Raises:
            VFLError: the message is not the party's next message, was changed, or has different
                associated data; see `refused`.
        """
        try:
            return self._back[sender].open(sealed, about)
        except InvalidTag:
            raise self._refused(sender, len(sealed), about) from None

    def __repr__(self) -> str:
        return "SealedPairs(...)"
