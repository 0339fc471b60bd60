"""The group ristretto255 (RFC 9496) by libsodium: ids become points, which scalars multiply.

The group has prime order. So the encoding of a point discloses nothing about a cofactor or a twist,
whereas a hash that is used as an X25519 coordinate would. vfl calls the operating system's
libsodium without Python's global lock, so that threads share the work. If libsodium is not
installed, vfl uses the copy in the package rbcl.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from vfl.core.errors import MissingPackageError, ProtocolError
from vfl.core.frame import Payload

POINT_BYTES = SCALAR_BYTES = 32
_HASH_BYTES = 64
_ORDER = 2**252 + 27742317777372353535851937790883648493
_DOMAIN = b"vfl alignment ristretto255 1"
_LIBRARIES = ("libsodium.so.26", "libsodium.so.23", "libsodium.26.dylib", "libsodium.23.dylib")
_SHARE = 512  # number of points in a thread's task


def fresh_scalar() -> bytes:
    """Draw a secret scalar, uniform from 1 to the group's order minus 1; 32 bytes."""
    return (1 + secrets.randbelow(_ORDER - 1)).to_bytes(SCALAR_BYTES, "little")


def points_of(ids: Sequence[bytes]) -> bytes:
    """Map each id to a point by SHA-512 and RFC 9496, section 4.3.4; 32 bytes per id, joined.

    Raises:
        MissingPackageError: libsodium is not installed.
    """
    from_hash, _ = _functions()
    return _mapped(
        len(ids),
        lambda row, out: from_hash(out, hashlib.sha512(_DOMAIN + ids[row]).digest()),
    )


def random_points(count: int) -> bytes:
    """Draw points that belong to no id, which hide the number of ids."""
    from_hash, _ = _functions()
    return _mapped(count, lambda row, out: from_hash(out, os.urandom(_HASH_BYTES)))


def multiply(points: Payload, scalar: bytes, sender: str = "this party") -> bytes:
    """Multiply each point by a scalar.

    Args:
        points: encodings of points, 32 bytes each, joined.
        scalar: 32 bytes, not 0.
        sender: owner of the points, for the error text.

    Raises:
        ProtocolError: the bytes do not encode points, or encode the identity.
        MissingPackageError: libsodium is not installed.
    """
    _, times = _functions()
    given = bytes(points)
    start = ctypes.addressof(source := ctypes.create_string_buffer(given, len(given)))
    found = _mapped(
        len(given) // POINT_BYTES,
        lambda row, out: times(out, scalar, start + POINT_BYTES * row),
    )
    del source
    if len(given) % POINT_BYTES or (given and not found):
        raise ProtocolError(f"the points of {sender} are no points of ristretto255")
    return found


def available() -> bool:
    """Return whether libsodium is installed."""
    try:
        _functions()
    except MissingPackageError:
        return False
    return True


def _mapped(count: int, fill: Callable[[int, int], int]) -> bytes:
    """Fill `count` points in threads; return empty bytes if `fill` refuses a point."""
    made = ctypes.create_string_buffer(POINT_BYTES * count)
    start = ctypes.addressof(made)

    def some(first: int) -> bool:
        rows = range(first, min(first + _SHARE, count))
        return any([fill(row, start + POINT_BYTES * row) for row in rows])

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        refused = any(list(threads.map(some, range(0, count, _SHARE))))
    return b"" if refused else made.raw


@cache
def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """Return the two libsodium functions: (out, hash) and (out, scalar, point); 0 means success."""
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            from_hash, times = (
                library.crypto_core_ristretto255_from_hash,
                library.crypto_scalarmult_ristretto255,
            )
        except (OSError, AttributeError):  # libsodium is not installed, or too old
            continue
        if library.sodium_init() < 0:
            continue
        from_hash.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        times.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return from_hash, times
    return _of_rbcl()


def _of_rbcl() -> tuple[Callable[..., int], Callable[..., int]]:
    try:
        import rbcl
    except ImportError:
        raise MissingPackageError(
            "alignment by ristretto255 needs libsodium, 1.0.18 or newer",
            fix="apt install libsodium23, brew install libsodium, or pip install 'vfl[psi]'",
        ) from None

    def from_hash(out: int, digest: bytes) -> int:
        ctypes.memmove(out, rbcl.crypto_core_ristretto255_from_hash(digest), POINT_BYTES)
        return 0

    def times(out: int, scalar: bytes, point: int) -> int:
        try:
            made = rbcl.crypto_scalarmult_ristretto255(scalar, ctypes.string_at(point, POINT_BYTES))
        except (RuntimeError, ValueError):
            return -1
        ctypes.memmove(out, made, POINT_BYTES)
        return 0

    return from_hash, times
