"""Two parties that sign, agree on keys and seal messages, whoever carries what they send.

Each makes an X25519 key (RFC 7748) for one attempt and offers its public half, perhaps signed and
with a count: the signature covers what both must mean alike. Keys follow from the shared secret by
HKDF-SHA256 (RFC 5869), bound to what was agreed. Messages are sealed with AES-256-GCM, counted in
each direction; `SealedPairs` keeps both directions of every pair that a party is in. What is signed
and what binds a key are its owner's: `vfl.mpc.secure.keys`, `vfl.session.relay`,
`vfl.session.ranks.machines` and `vfl.tensors.keys` each say so in their heads.
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
#: An X25519 key, the count of its party's store, and the signature of both.
OFFER_BYTES = PUBLIC_BYTES + COUNT_BYTES + SIGNATURE_BYTES
#: Messages under one key, at most.
_MESSAGES = 2**32


class Signer(Protocol):
    """A key that stays; see `vfl.session.store.identity.Identity`."""

    def sign(self, message: bytes) -> bytes:
        """A signature of 64 bytes."""


class Verifier(Protocol):
    """Its public half; see `vfl.session.store.identity.Pin`."""

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether its owner signed the message."""


class NotAgreedError(ValueError):
    """An offer is not signed by its party, or gives no key; the owner says which party's it is."""


def derived(secret: bytes, info: bytes, size: int = KEY_BYTES, salt: bytes | None = None) -> bytes:
    """Bytes by HKDF-SHA256, bound to `info`."""
    return HKDF(SHA256(), size, salt=salt, info=info).derive(secret)


class Agreeing:
    """One party's X25519 key of one attempt; its private half never leaves this object.

    Attributes:
        public: 32 bytes.

    >>> bank, shop = Agreeing(), Agreeing()
    >>> bank.key(shop.public, b"one session") == shop.key(bank.public, b"one session")
    True
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def offer(self, signer: Signer, about: bytes, count: int = 0) -> bytes:
        """The public half and a count, signed together with what both must mean alike."""
        told = self.public + count.to_bytes(COUNT_BYTES)
        return told + signer.sign(about + told)

    def shared(self, public: bytes) -> bytes:
        """What both have in common, to derive keys from.

        Raises:
            NotAgreedError: the other half is no key, or a point of small order.
        """
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise NotAgreedError from None

    def key(self, public: bytes, info: bytes, salt: bytes | None = None) -> bytes:
        """The 32-byte key of both, bound to `info`; raises what `shared` does."""
        return derived(self.shared(public), info, salt=salt)

    def __repr__(self) -> str:
        return "Agreeing(...)"

    def __reduce__(self) -> str:
        raise TypeError("a key is never serialised")


def opened_offer(offer: bytes, pin: Verifier, about: bytes) -> tuple[bytes, int]:
    """The public half and the count of an offer.

    Raises:
        NotAgreedError: the owner of the pinned key has not signed it, about the same.
    """
    told, signature = offer[:-SIGNATURE_BYTES], offer[-SIGNATURE_BYTES:]
    if len(offer) != OFFER_BYTES or not pin.has_signed(about + told, signature):
        raise NotAgreedError
    return told[:PUBLIC_BYTES], int.from_bytes(told[PUBLIC_BYTES:])


Given = TypeVar("Given", bound=Sized, contravariant=True)
Made = TypeVar("Made", covariant=True)


class Cipher(Protocol[Given, Made]):
    """AES-256-GCM under one key, such as `AESGCM`."""

    def encrypt(self, nonce: bytes, data: Given, about: bytes | None, /) -> Made:
        """The message, unreadable."""

    def decrypt(self, nonce: bytes, data: Given, about: bytes | None, /) -> Made:
        """What was encrypted."""


class Direction(Generic[Given, Made]):
    """One direction of a pair: the sender seals, the receiver opens, both count.

    Args:
        cipher: under the key of this direction, or of the pair where directions differ in `way`.
        way: how every nonce begins.
        first: number of the first message.

    >>> from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    >>> there, here = (Direction(AESGCM(bytes(32))) for _ in range(2))
    >>> here.open(there.seal(b"words", b"inputs 7"), b"inputs 7")
    b'words'
    """

    def __init__(self, cipher: Cipher[Given, Made], way: bytes = b"", first: int = 0) -> None:
        self._cipher, self._way, self._next = cipher, way, first

    def seal(self, message: Given, about: bytes | None = None) -> Made:
        """The message, unreadable, and `TAG_BYTES` longer.

        Args:
            message: what to carry.
            about: what both ends must mean alike; it does not travel.

        Raises:
            ReusedPadError: this key has sealed all the messages it is good for.
        """
        return self._cipher.encrypt(self._nonce(), message, about)

    def open(self, sealed: Given, about: bytes | None = None) -> Made:
        """What was sealed; the next message is the only one that opens.

        Raises:
            InvalidTag: it is not the sender's next message, or is about something else.
        """
        return self._cipher.decrypt(self._nonce(), sealed, about)

    def _nonce(self) -> bytes:
        if self._next >= _MESSAGES:
            raise ReusedPadError(
                "a key has sealed as many messages as it may",
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
    """Messages between one party and others, sealed and counted each way once keys were agreed on.

    Args:
        others: whom it exchanges messages with.
        refused: makes the error for a message that does not open, of its sender, its length and
            what it should have been about.
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
        """The ciphers of both directions to another party, and the number of the first message."""
        self._there[other] = Direction(there, first=first)
        self._back[other] = Direction(back, first=first)

    def has_keys(self, other: str) -> bool:
        """Whether messages with another party can be sealed."""
        return other in self._there

    def sealed(self, other: str, message: Given, about: bytes = b"") -> Made:
        """A message for another party; see `Direction.seal`."""
        return self._there[other].seal(message, about)

    def opened(self, sender: str, sealed: Given, about: bytes = b"") -> Made:
        """What another party sealed; its next message is the only one that opens.

        Raises:
            VFLError: it is not that message, or is about something else; see `refused`.
        """
        try:
            return self._back[sender].open(sealed, about)
        except InvalidTag:
            raise self._refused(sender, len(sealed), about) from None

    def __repr__(self) -> str:
        return "SealedPairs(...)"
