"""Messages that a relay carries and cannot read: AES-256-GCM between two parties.

Each direction of a pair has a key of its own, by HKDF (RFC 5869) from the key the pair agreed on
for one attempt, and its nonces count messages: the receiver counts along, so none travels. What is
changed, left out, repeated, moved or sent back to its sender does not open. (NIST SP 800-38D, 8.2.1
allows counters; a key seals fewer than 2^32 messages.)
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from vfl.errors import AuthenticationError, ReusedPadError
from vfl.frame import Payload

TAG_BYTES = 16
_KEY_BYTES, _NONCE_BYTES = 32, 12
_MESSAGES = 2**32
_RELAYED = b"vfl relayed message 1"


class Sealing:
    """One direction of a pair in one attempt; the sender seals, the receiver opens.

    Args:
        pair: the 32-byte key of the pair; see `vfl.mpc.agreement`.
        sender, receiver: names of the parties.

    >>> there, here = (Sealing(bytes(32), "bank", "shop") for _ in range(2))
    >>> here.open(there.seal(b"words", "inputs 7"), "inputs 7")
    b'words'
    """

    def __init__(self, pair: bytes, sender: str, receiver: str) -> None:
        names = [bytes([len(name)]) + name.encode() for name in (sender, receiver)]
        info = _RELAYED + b"".join(names)
        self._cipher = AESGCM(HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=info).derive(pair))
        self._sender = sender
        self._count = 0

    def seal(self, message: Payload, about: str) -> bytes:
        """The message, unreadable, and `TAG_BYTES` longer.

        Args:
            message: what to carry.
            about: what both ends must mean alike, such as purpose and step; it does not travel.

        Raises:
            ReusedPadError: this key has sealed all the messages it is good for.
        """
        return self._cipher.encrypt(self._nonce(), message, about.encode())

    def open(self, sealed: Payload, about: str) -> bytes:
        """What was sealed; the next message is the only one that opens.

        Raises:
            AuthenticationError: it is not the sender's next message, or is about something else.
        """
        try:
            return self._cipher.decrypt(self._nonce(), sealed, about.encode())
        except InvalidTag:
            raise AuthenticationError(
                f"a relayed message is not what party '{self._sender}' sealed for this place",
                where=about,
                got=f"{len(sealed)} bytes",
                want="its next message, unchanged",
                fix="somebody in between changes, repeats or drops what parties send each other",
            ) from None

    def _nonce(self) -> bytes:
        if self._count >= _MESSAGES:
            raise ReusedPadError(
                "a key has sealed as many messages as it may",
                got=f"{_MESSAGES} messages",
                fix="begin a new attempt, with new keys",
            )
        nonce = self._count.to_bytes(_NONCE_BYTES, "big")
        self._count += 1
        return nonce

    def __repr__(self) -> str:
        return "Sealing(...)"

    def __reduce__(self) -> str:
        raise TypeError("a key is never serialised")
