"""One-time pads from a key that two parties share: AES-128 in counter mode; no pad repeats.

The key usually belongs to one pair of parties in one attempt of one session; the key agreement then
binds the key to these facts. Every purpose has a separate AES key, and every step of a purpose a
separate range of the counter. The pads of the two parties therefore agree whatever the order of the
purposes is, and even if a call is missing.
"""

from __future__ import annotations

import hmac
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from vfl.core.errors import ReusedPadError

#: Number of bytes of a stream's key.
KEY_BYTES = 32
_BLOCK_BYTES = 16
#: Zeros that the cipher encrypts; the result is its key stream.
_ZEROS = bytes(1 << 16)
_AES_KEY_BYTES = 16
_STEPS = 2**63


class PadStream:
    """One-time pads from one key; only one thread may use this object.

    A purpose consists of words and numbers; if its last part is a number, this number is the step.
    The steps of a purpose must increase, so the object remembers only the last step of each
    purpose.

    Args:
        key: 32 bytes that both parties know, valid for one pair of parties, session and attempt.

    >>> ours, theirs = PadStream(bytes(32)), PadStream(bytes(32))
    >>> bool((ours.elements64(3, "share", 7) == theirs.elements64(3, "share", 7)).all())
    True
    """

    __slots__ = ("_ciphers", "_key", "_last")

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key of a pad stream has {KEY_BYTES} bytes")
        self._key = bytes(key)
        self._ciphers: dict[tuple[str | int, ...], CipherContext] = {}
        self._last: dict[tuple[str | int, ...], int] = {}

    def expand(self, *names: tuple[str | int, ...]) -> None:
        """Derive the keys of purposes now.

        Without this call, the first pad of a purpose derives the purpose's key.

        Args:
            names: purposes, each without its step.
        """
        for name in names:
            self._cipher_of(name)

    def elements32(self, count: int, *purpose: str | int) -> np.ndarray:
        """Return uniform elements of the ring 2^32, uint32, axes (count,). See `elements64`."""
        return self._elements(count, np.dtype("<u4"), purpose)

    def elements64(self, count: int, *purpose: str | int) -> np.ndarray:
        """Return uniform elements of the ring 2^64, uint64, axes (count,).

        The caller may change the returned elements.

        Args:
            count: number of elements; a longer pad begins with the same elements as a shorter pad.
            purpose: purpose of the elements; if the purpose has steps, the step is its last part.

        Raises:
            ReusedPadError: the pad for this purpose and step, or for a later step, was already
                returned.
        """
        return self._elements(count, np.dtype("<u8"), purpose)

    def _elements(
        self, count: int, dtype: np.dtype[Any], purpose: tuple[str | int, ...]
    ) -> np.ndarray:
        size = count * dtype.itemsize
        cipher = self._cipher_at(purpose)
        # The cipher needs one block more of output memory than it writes.
        raw, zeros = np.empty(size + _BLOCK_BYTES, dtype=np.uint8), memoryview(_ZEROS)
        for start in range(0, size, len(_ZEROS)):
            cipher.update_into(zeros[: size - start], raw[start:].data)
        return raw[:size].view(dtype)

    def _cipher_at(self, purpose: tuple[str | int, ...]) -> CipherContext:
        """Return the cipher of a purpose, positioned at the first block of the purpose's step.

        The step counts as used from this call on.
        """
        *head, last = purpose
        name, step = (tuple(head), last) if isinstance(last, int) else (purpose, 0)
        if not 0 <= step < _STEPS:
            raise ValueError("the step of a pad is a number from 0 to 2^63 - 1")
        before = self._last.get(name)
        if before is not None and step <= before:
            raise ReusedPadError(
                "a one-time pad was requested again",
                where=f"pad of {' '.join(map(str, name)) or 'no purpose'}",
                got=f"step {step}",
                want=f"a step above {before}",
                fix="resend the stored bytes; after a rollback begin a new attempt, with a new key",
            )
        self._last[name] = step
        cipher = self._cipher_of(name)
        cipher.reset_nonce(step.to_bytes(8, "big") + bytes(8))
        return cipher

    def _cipher_of(self, name: tuple[str | int, ...]) -> CipherContext:
        cipher = self._ciphers.get(name)
        if cipher is None:
            algorithm = algorithms.AES(self._key_of(name))
            cipher = Cipher(algorithm, modes.CTR(bytes(_BLOCK_BYTES))).encryptor()
            self._ciphers[name] = cipher
        return cipher

    def _key_of(self, name: tuple[str | int, ...]) -> bytes:
        """Derive a purpose's AES key; the word "7" and the number 7 give different keys."""
        parts = [f"{type(part).__name__}{len(str(part))}:{part}" for part in name]
        return hmac.digest(self._key, "".join(parts).encode(), "sha256")[:_AES_KEY_BYTES]

    def __repr__(self) -> str:
        return "PadStream(...)"

    def __reduce__(self) -> str:
        raise TypeError("a pad stream is never serialised")
