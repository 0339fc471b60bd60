"""Key agreement between two parties, with signatures and encrypted messages, over any channel.

Each party generates an X25519 key (RFC 7748) for one attempt and sends an offer: its public key,
optionally with a counter and a signature. The signature covers data that must be equal at both
parties. HKDF-SHA256 (RFC 5869) derives keys from the shared secret; the keys depend on the agreed
data. AES-256-GCM encrypts messages ("seals" them), which are numbered in each direction. A
`SealedPairs` object holds both directions between one party and each other party. The callers
define the signed data and the data bound to a key: see the heads of `vfl.mpc.secure.keys`,
`vfl.session.relay`, `vfl.session.ranks.machines` and `vfl.tensors.keys`.
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
#: Bytes of an offer: an X25519 key, the counter of its party's store, and one signature over both.
OFFER_BYTES = PUBLIC_BYTES + COUNT_BYTES + SIGNATURE_BYTES
#: Largest number of messages encrypted under one key.
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
    """An offer is not signed by its party, or has no valid key.

    The caller adds the name of the party to the error.
    """


def derived(secret: bytes, info: bytes, size: int = KEY_BYTES, salt: bytes | None = None) -> bytes:
    """Derive key bytes by HKDF-SHA256; they depend on `info`."""
    return HKDF(SHA256(), size, salt=salt, info=info).derive(secret)


class Agreeing:
    """One party's X25519 key for one attempt; the private key never leaves this object.

    Attributes:
        public: public key, 32 bytes.

    >>> bank, shop = Agreeing(), Agreeing()
    >>> bank.key(shop.public, b"one session") == shop.key(bank.public, b"one session")
    True
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def offer(self, signer: Signer, about: bytes, count: int = 0) -> bytes:
        """Make an offer: public key and counter, signed together with the data of both parties."""
        told = self.public + count.to_bytes(COUNT_BYTES)
        return told + signer.sign(about + told)

    def shared(self, public: bytes) -> bytes:
        """Compute the shared secret, from which keys are derived.

        Raises:
            NotAgreedError: the other public value is not a valid key, or is a point of small order.
        """
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise NotAgreedError from None

    def key(self, public: bytes, info: bytes, salt: bytes | None = None) -> bytes:
        """Derive the 32-byte key that both parties share; it depends on `info`.

        It raises the errors of `shared`.
        """
        return derived(self.shared(public), info, salt=salt)

    def __repr__(self) -> str:
        return "Agreeing(...)"

    def __reduce__(self) -> str:
        raise TypeError("a key is never serialised")


def opened_offer(offer: bytes, pin: Verifier, about: bytes) -> tuple[bytes, int]:
    """Verify an offer; return the peer's public key and its counter.

    Raises:
        NotAgreedError: the owner of the pinned key has not signed this offer with the same data.
    """
    told, signature = offer[:-SIGNATURE_BYTES], offer[-SIGNATURE_BYTES:]
    if len(offer) != OFFER_BYTES or not pin.has_signed(about + told, signature):
        raise NotAgreedError
    return told[:PUBLIC_BYTES], int.from_bytes(told[PUBLIC_BYTES:])


Given = TypeVar("Given", bound=Sized, contravariant=True)
Made = TypeVar("Made", covariant=True)


class Cipher(Protocol[Given, Made]):
    """Interface of AES-256-GCM with one key; `cryptography`'s `AESGCM` has it."""

    def encrypt(self, nonce: bytes, data: Given, about: bytes | None, /) -> Made:
        """Encrypt a message."""

    def decrypt(self, nonce: bytes, data: Given, about: bytes | None, /) -> Made:
        """Decrypt a message."""


class Direction(Generic[Given, Made]):
    """One direction between two parties: the sender encrypts, the receiver decrypts, both count.

    Args:
        cipher: cipher of this direction; or one cipher for both directions, which then differ in
            `way`.
        way: first bytes of every nonce in this direction.
        first: number of the first message.

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
            message: content of the message.
            about: associated data, which must be equal at both parties and is not sent.

        Raises:
            ReusedPadError: this key has already encrypted its maximum number of messages.
        """
        return self._cipher.encrypt(self._nonce(), message, about)

    def open(self, sealed: Given, about: bytes | None = None) -> Made:
        """Decrypt a message; only the sender's next message in order can be decrypted.

        Raises:
            InvalidTag: the message is not the sender's next message, or its associated data differ.
        """
        return self._cipher.decrypt(self._nonce(), sealed, about)

    def _nonce(self) -> bytes:
        if self._next >= _MESSAGES:
            raise ReusedPadError(
                "a key has sealed its maximum number of messages",
                got=f"{_MESSAGES} messages",
                fix="begin a new attempt, with new keys",
            )
        number, self._next = self._next, self._next + 1
        return self._way + number.to_bytes(NONCE_BYTES - len(self._way))

    def __repr__(self) -> str:
        return "Direction(...)"

    def __reduce__(self) -> str:
        raise TypeError("a key is never serialised")


class SealedPairs(Generic[Given, Made]):
    """Encrypted messages between one party and others, numbered separately in each direction.

    Args:
        others: the other parties.
        refused: returns the error for a message that cannot be decrypted; it receives the sender,
            the length of the message and its associated data.
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
        """Set the ciphers to and from another party, and the number of the first message."""
        self._there[other] = Direction(there, first=first)
        self._back[other] = Direction(back, first=first)

    def has_keys(self, other: str) -> bool:
        """Return whether this party has keys for messages to another party."""
        return other in self._there

    def sealed(self, other: str, message: Given, about: bytes = b"") -> Made:
        """Encrypt a message for another party; see `Direction.seal`."""
        return self._there[other].seal(message, about)

    def opened(self, sender: str, sealed: Given, about: bytes = b"") -> Made:
        """Decrypt a message from another party; only that party's next message can be decrypted.

        Raises:
            VFLError: the message is not the next one, or its associated data differ; see `refused`.
        """
        try:
            return self._back[sender].open(sealed, about)
        except InvalidTag:
            raise self._refused(sender, len(sealed), about) from None

    def __repr__(self) -> str:
        return "SealedPairs(...)"
