"""An index, privately retrieved by homomorphic encryption: algorithm 6.5's query (thesis, 2025).

**It does not hide the order from an asker that studies the noise of the answer**, which depends on
the order: SEAL has no noise flooding, and the printed protocol names none. `Form.retrieval` is
"sets" for that reason, and for its size; this form is there to be measured beside it.

The asker encrypts a one-hot vector with BFV (Fan and Vercauteren 2012), in parts of 4096 numbers;
the owner multiplies each with its part of the order and adds them up; all other slots are zero, so
the sum of the slots is the entry, and no rotation is needed. The owner learns nothing. Parameters
have 128 bits of security (homomorphicencryption.org, 2018): degree 4096 and a modulus of 109 bits,
54 of which are a prime that TenSEAL keeps for keys nobody uses here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from vfl.core.errors import MissingPackageError, ProtocolError

_DEGREE, _MODULUS_BITS = 4096, [55, 54]
#: A prime that is 1 modulo twice the degree; an order may be shorter than it.
_PLAIN = 1032193
_LENGTH = struct.Struct("<I")
#: Of two polynomials, with what the library adds.
_MOST_CIPHERTEXT = 2 * 8 * _DEGREE + 1024


class Keys:
    """The asker's, of one query."""

    def __init__(self) -> None:
        self._context = _context()

    def query(self, places: Sequence[int], count: int) -> bytes:
        """One-hot vectors of so many numbers, one a place, encrypted."""
        found = []
        for place in places:
            whole = np.zeros(_parts(count) * _DEGREE, np.int64)
            whole[place] = 1
            for part in whole.reshape(-1, _DEGREE):
                found.append(package().bfv_vector(self._context, part.tolist()).serialize())
        return _framed(found)

    def read(self, answer: bytes, rows: int) -> list[int]:
        """The entries.

        Raises:
            ProtocolError: no answer of so many rows.
        """
        found = []
        for part in _unframed(answer, rows):
            vector = _loaded(self._context, part)
            found.append(sum(vector.decrypt()) % _PLAIN - 1)
        return found


def answer(query: bytes, order: np.ndarray) -> bytes:
    """The owner's part: the entries of each row's order at the encrypted place.

    Args:
        query: of as many rows.
        order: int64, axes (rows, count).

    Raises:
        ProtocolError: no query of that shape.
    """
    rows, count = order.shape
    padded = np.zeros((rows, _parts(count) * _DEGREE), np.int64)
    padded[:, :count] = order + 1  # no part is all zeros, which the library refuses
    context, parts = _context(), iter(_unframed(query, rows * _parts(count)))
    found = []
    for row in padded.reshape(rows, -1, _DEGREE):
        total = None
        for numbers in row:
            product = _loaded(context, next(parts)) * numbers.tolist()
            total = product if total is None else total + product
        assert total is not None, "an order has entries"
        found.append(total.serialize())
    return _framed(found)


def most_query_bytes(rows: int, count: int) -> int:
    """No query is longer."""
    return rows * _parts(count) * (_LENGTH.size + _MOST_CIPHERTEXT)


def most_answer_bytes(rows: int) -> int:
    """No answer is longer."""
    return rows * (_LENGTH.size + _MOST_CIPHERTEXT)


def _parts(count: int) -> int:
    assert count < _PLAIN, "entries are numbers below the modulus"
    return -(-count // _DEGREE)


def _framed(parts: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _unframed(payload: bytes, count: int) -> list[bytes]:
    start, parts = 0, []
    for _ in range(count):
        head = payload[start : start + _LENGTH.size]
        size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        start += _LENGTH.size + size
        if not 0 < size <= _MOST_CIPHERTEXT or start > len(payload):
            raise _no_ciphertexts()
        parts.append(payload[start - size : start])
    if start != len(payload):
        raise _no_ciphertexts()
    return parts


def _loaded(context: Any, part: bytes) -> Any:
    """A ciphertext of these parameters; the library checks that it is one."""
    try:
        found = package().bfv_vector_from(context, part)
    except (ValueError, RuntimeError, IndexError, TypeError):
        raise _no_ciphertexts() from None
    if found.size() != _DEGREE or len(found.ciphertext()) != 1:
        raise _no_ciphertexts()
    return found


def _no_ciphertexts() -> ProtocolError:
    return ProtocolError(
        "a message of ciphertexts is none", want="ciphertexts of one BFV vector each"
    )


def _context() -> Any:
    tenseal = package()
    return tenseal.context(
        tenseal.SCHEME_TYPE.BFV,
        poly_modulus_degree=_DEGREE,
        plain_modulus=_PLAIN,
        coeff_mod_bit_sizes=_MODULUS_BITS,
        encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC,
    )


def package() -> Any:
    """TenSEAL.

    Raises:
        MissingPackageError: the extra "he" is not installed.
    """
    try:
        import tenseal
    except ImportError:
        raise MissingPackageError(
            "an index is retrieved with a package that is not installed",
            want="tenseal",
            fix="pip install 'vfl[he]', or Form(retrieval=\"sets\")",
        ) from None
    return tenseal
