"""Two methods of the thesis that `vfl llm` does not use: float sharing, and a query under BFV.

`python -m benchmarks.decoder` measures both methods and, for comparison, the methods that `vfl llm`
uses.

# Float sharing

**Insecure**: this class shares floats, as in the thesis (section 6.3.5.2), for measurements and
attacks.

A number x is shared as D and x - D, where the mask D is normal with E D^2 = L^2 E x^2 (equations
6-11 and 6-12; L is `SCALE`). A share with such a mask is not uniform, so it discloses something
about x. A party that receives x - D n times, for the same x and a new mask D each time, can average
the n messages. The error of this average is L / sqrt(n) times the root mean square of x (equation
6-13, with the factor E x^2 that the thesis omits). For a product, both parties open x - U, where
the mask U is the sum of a mask of each party, so the error is sqrt(2) times as large.

The dealer, which makes the masks, does not know how large the values are. The dealer assumes that
activations have mean square 1, and that weights have mean square 1 / (number of inputs). A float
takes 4 bytes in a message, as in Tables 6.1 and 6.2.

# An index, privately retrieved by homomorphic encryption: the query of algorithm 6.5 (thesis, 2025)

The answer is a sum of products of the query and the permutation, and the user knows the query. For
up to 1,024 scores, dividing the answer by the query reveals the whole permutation; for more scores,
an attacker gets 1,024 equations for each digit of the entries, and as many from the noise. SEAL
does not add flooding noise that would hide this, and the printed protocol does not mention noise
flooding. `Form.retrieval` is therefore "sets" by default, a method that also needs fewer bytes; the
query under BFV is only for measurements.

To get one entry of a permutation, the user encrypts X^position as a polynomial (BFV: Fan and
Vercauteren 2012). This polynomial consists of parts of 1,024 coefficients; all parts but one are
zero. The owner multiplies each part by a polynomial, the sum over i of this part's entry i times
X^-i, and adds the products. The constant coefficient of the sum is the wanted entry. The other
coefficients would disclose other entries of the permutation, so the owner adds uniform random
numbers to these coefficients. The owner learns nothing about the position.

Messages are small: of the two polynomials of a ciphertext, the user sends one, and a seed for the
other (symmetric encryption). Entries are retrieved as several digits of 5 bits each. The products
of such digits have so little noise that a modulus of 24 bits is enough for a sum of a million
products. At polynomial degree 1024, moduli of up to 27 bits have 128 bits of security
(homomorphicencryption.org, 2018).
"""

from __future__ import annotations

import math
import secrets
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import MissingPackageError, ProtocolError
from vfl.llm.two_party import (
    INSECURE_FLOAT,
    Form,
    Pick,
    Role,
    Sent,
    Shared,
    Wanted,
    indices_within,
)
from vfl.llm.weights import Constant, LayerShape, Matrix
from vfl.mpc.ring import require_integer_bits
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.stream import PadStream

#: Ratio of a mask's size to a value's size (L) in the example of the thesis.
SCALE = 100.0
_FLOAT_BITS = 32
#: Purposes of the pads that stay integers, because the query by sets needs them; pads of all other
#: purposes are floats here (`Role.choose`).
_WHOLE = ("set", "sum")
_DEGREE, _MODULUS_BITS, _DIGIT_BITS = 1024, 24, 5
#: Largest length of a permutation whose entries can be retrieved.
_MOST = 2**20
_LENGTH = struct.Struct("<I")
#: Size in bytes of a polynomial before the library compresses it, and bytes that the library adds.
_POLYNOMIAL, _MORE = 8 * _DEGREE, 1024


def normal(pads: PadStream, count: int, *purpose: str | int) -> np.ndarray:
    """Draw standard normal numbers (Box and Muller 1958) from a stream that two parties share.

    >>> both = [normal(PadStream(bytes(32)), 3, "D") for _ in range(2)]
    >>> bool((both[0] == both[1]).all()), both[0].shape
    (True, (3,))
    """
    pairs = -(-count // 2)
    drawn = (pads.elements64(2 * pairs, *purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log1p(-drawn[:pairs])), 2 * np.pi * drawn[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


class FloatRole(Role):
    """A `Role` on floats for the thesis mode of `Form`: float64 in memory, float32 in messages."""

    def pad(self, peer: int, shape: Sequence[int], *purpose: str | int) -> Tensor:
        """Draw normal numbers whose deviation is `SCALE` times the assumed size of a value."""
        if purpose[0] in _WHOLE:
            return super().pad(peer, shape, *purpose)
        drawn = normal(self.pads[peer], math.prod(shape), *purpose)
        spread = SCALE / math.sqrt(shape[0]) if purpose[0] == "U" else SCALE
        return torch.from_numpy(spread * drawn).reshape(tuple(shape))

    def question(
        self, shape: Sequence[int], values: Tensor | None, bits: int, ring: int, where: str
    ) -> Shared:
        """Run `Role.question` on floats; the zeros that P0 has as its share are also masked."""
        return super().question(shape, values, bits, ring, where).map(Tensor.double)

    def encode(self, values: Tensor, bits: int, where: str, integer_bits: int) -> Tensor:
        """Return the values themselves as float64; float sharing needs no encoding."""
        require_integer_bits(values.double(), integer_bits, bits, where)
        return values.detach().double()

    def decode(self, elements: Tensor, shared: Shared) -> Tensor:
        """Return the elements themselves; float sharing needs no decoding."""
        return elements

    def constant(
        self, layer: LayerShape, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Constant:
        """Run `Role.constant` on floats: send one message, and store the mask of the weights."""
        number = self.next_number()
        if self.role == P1:
            (masked,) = self._receive(P0, number, (layer.shape, layer.ring))
            return Constant(layer, masked=masked)
        mask = self.pad(P2 if self.role == P0 else P0, layer.shape, "U", number)
        if self.role == P2:
            return Constant(layer, mask=mask)
        assert weight is not None, "P0 has the weights"
        exact = self.encode(weight, layer.bits, layer.name, layer.ring - 1 - layer.bits)
        self._send(P1, number, (exact - mask, layer.ring))
        return Constant(layer, exact, bias)

    def multiply(self, shared: Shared, constant: Constant) -> Shared:
        """Run `Role.multiply` on floats."""

        def product(left: Tensor, right: Matrix | Tensor) -> Tensor:
            assert isinstance(right, Tensor), "kept whole"
            return left @ (right.t() if constant.turned else right)

        return self._multiply(shared, constant, product, constant.shape)

    def _low_bits(self, shared: Shared, shown: int | None) -> tuple[int, int]:
        return 0, 0

    def _as_sent(self, elements: Tensor) -> Tensor:
        return elements.float().double()

    def _send(self, peer: int, number: int, *parts: Sent) -> None:
        super()._send(peer, number, *map(_as_words, parts))

    def _receive(self, peer: int, number: int, *parts: Wanted) -> list[Tensor]:
        found = super()._receive(peer, number, *((shape, _FLOAT_BITS) for shape, *_ in parts))
        if self._phase == "online":
            count = sum(each.numel() for each in found)
            self.leakage.count("values under noise", "float sharing", count, count)
        return [each.int().view(torch.float32).double() for each in found]


def _as_words(part: Sent) -> Sent:
    """Return a float32 as its 32 bits; integers stay unchanged."""
    if not part[0].is_floating_point():
        return part
    return part[0].float().contiguous().view(torch.int32).long(), _FLOAT_BITS


class BfvRole(Role):
    """A `Role` that retrieves an index by homomorphic encryption, without dealt randomness."""

    def _retrieve(
        self, scores: Shared, mine: Tensor, pick: Pick | None, where: str, number: int
    ) -> list[int]:
        rows, count = scores.share.shape
        if self.role == P2:
            return [0] * rows
        if self.offline:
            # Checked offline, so that a missing package shows before a question.
            package()
            return [0] * rows
        channel = self.channels[P1 - self.role]
        if self.role == P0:
            query = channel.receive_bytes(number, 0, most_query_bytes(rows, count))
            answered = answer(bytes(query), indices_within(mine, rows).numpy())
            channel.send_bytes(memoryview(answered), number, "online")
            return [0] * rows
        keys, places = Keys(), self._picked(mine, scores, pick, where)
        channel.send_bytes(memoryview(keys.query(places, count)), number, "online")
        found = channel.receive_bytes(number, 0, most_answer_bytes(rows, count))
        return keys.read(bytes(found), rows, count)


class FloatBfvRole(FloatRole, BfvRole):
    """A `Role` on floats that also retrieves indices by BFV."""


def role_of(form: Form) -> type[Role]:
    """Return the class that runs a party's role in a form of this module."""
    if form.sharing == INSECURE_FLOAT:
        return FloatBfvRole if form.retrieval == "bfv" else FloatRole
    return BfvRole


class Keys:
    """The user's BFV keys for one query."""

    def __init__(self) -> None:
        seal, context = package(), _context()
        self._key = seal.KeyGenerator(context).secret_key()

    def query(self, places: Sequence[int], count: int) -> bytes:
        """Encrypt each position as a query polynomial; each permutation has `count` entries."""
        seal = package()
        encryptor, found = seal.Encryptor(_context(), self._key), []
        with _scratch() as file:
            for place in places:
                asked, power = divmod(place, _DEGREE)
                for part in range(_parts(count)):
                    plain = seal.Plaintext(f"1x^{power}" if part == asked else "0")
                    found.append(_saved(encryptor.encrypt_symmetric(plain), file))
        return _framed(found)

    def read(self, answer: bytes, rows: int, count: int) -> list[int]:
        """Decrypt the entries in an answer; each permutation has `count` entries.

        Raises:
            ProtocolError: the answer does not have `rows` rows.
        """
        seal, digits = package(), _digits(count)
        decryptor = seal.Decryptor(_context(), self._key)
        values = []
        with _scratch() as file:
            for part in _unframed(answer, rows * digits, 2 * _POLYNOMIAL + _MORE):
                plain = seal.Plaintext()
                decryptor.decrypt(_loaded(part, file), plain)
                values.append(plain.data(0) if plain.coeff_count() else 0)
        weights = 1 << _DIGIT_BITS * np.arange(digits)
        return [int(each) for each in np.reshape(values, (rows, digits)) @ weights]


def answer(query: bytes, order: np.ndarray) -> bytes:
    """Run the owner's part: retrieve the entry at each encrypted position, without decrypting.

    Args:
        query: a user's query with the same number of rows as `order`.
        order: one permutation per row, int64, axes (rows, count).

    Raises:
        ProtocolError: the message does not have the shape of a query.
    """
    rows, count = order.shape
    parts, digits = _parts(count), _digits(count)
    asked = _unframed(query, rows * parts, _POLYNOMIAL + _MORE)
    shifts = _DIGIT_BITS * np.arange(digits)
    # The library refuses products with the zero polynomial, so `_products` leaves them out. For
    # each digit, some polynomial remains: the digits of padding are not zero, and a permutation
    # without padding has an entry whose digit is not zero.
    padded = np.full((rows, parts * _DEGREE), (1 << shifts).sum())
    padded[:, :count] = order
    values = padded.reshape(rows * parts, 1, _DEGREE) >> shifts[:, None] & _mask()
    # The factor for part p is the sum of the part's entries i times X^-i; X^-i is -X^(1024 - i).
    factors = np.concatenate([values[..., :1], -values[..., :0:-1] & _mask()], -1)
    found = []
    with _scratch() as file:
        for row in range(rows):
            own = slice(row * parts, (row + 1) * parts)
            loaded = [_loaded(each, file) for each in asked[own]]
            try:
                found += [_saved(each, file) for each in _products(loaded, factors[own])]
            # The library raises this error for a ciphertext that contains no secret.
            except (ValueError, RuntimeError):
                raise _no_ciphertexts() from None
    return _framed(found)


def _products(asked: Sequence[Any], factors: np.ndarray) -> list[Any]:
    """Return each digit's sum of products over the parts.

    The axes of `factors` are (parts, digits, degree).
    """
    seal, context = package(), _context()
    evaluator = seal.Evaluator(context)
    products: list[list[Any]] = [[] for _ in factors[0]]
    for ciphertext, digits in zip(asked, factors, strict=True):
        evaluator.transform_to_ntt_inplace(ciphertext)
        for digit, of_digit in zip(digits, products, strict=True):
            if digit.any():
                factor, product = _plaintext(digit), seal.Ciphertext()
                evaluator.transform_to_ntt_inplace(factor, context.first_parms_id())
                evaluator.multiply_plain(ciphertext, factor, product)
                of_digit.append(product)
    found = []
    for of_digit in products:
        total = seal.Ciphertext()
        evaluator.add_many(of_digit, total)
        evaluator.transform_from_ntt_inplace(total)
        others = np.frombuffer(secrets.token_bytes(_DEGREE), np.uint8) & _mask()
        others[0] = 0
        evaluator.add_plain_inplace(total, _plaintext(others))
        found.append(total)
    return found


def most_query_bytes(rows: int, count: int) -> int:
    """Return the largest size of a query, in bytes."""
    return rows * _parts(count) * (_LENGTH.size + _POLYNOMIAL + _MORE)


def most_answer_bytes(rows: int, count: int) -> int:
    """Return the largest size of an answer, in bytes."""
    return rows * _digits(count) * (_LENGTH.size + 2 * _POLYNOMIAL + _MORE)


def _parts(count: int) -> int:
    assert count <= _MOST, "the noise of more operations would reach the entries"
    return -(-count // _DEGREE)


def _digits(count: int) -> int:
    return max(1, -(-(count - 1).bit_length() // _DIGIT_BITS))


def _mask() -> int:
    return (1 << _DIGIT_BITS) - 1


def _plaintext(coefficients: np.ndarray) -> Any:
    """Make a polynomial in the library's text notation; the lowest coefficient comes first."""
    terms = _terms()[coefficients, np.arange(_DEGREE)]
    return package().Plaintext(" + ".join(terms[::-1].tolist()))


@cache
def _terms() -> np.ndarray:
    """Return the library's text for each pair of a digit and a power of X."""
    powers = ["", *(f"x^{power}" for power in range(1, _DEGREE))]
    return np.array(
        [[f"{digit:X}{power}" for power in powers] for digit in range(_mask() + 1)], "O"
    )


def _framed(parts: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _unframed(payload: bytes, count: int, most: int) -> list[bytes]:
    start, parts = 0, []
    for _ in range(count):
        head = payload[start : start + _LENGTH.size]
        size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        start += _LENGTH.size + size
        if not 0 < size <= most or start > len(payload):
            raise _no_ciphertexts()
        parts.append(payload[start - size : start])
    if start != len(payload):
        raise _no_ciphertexts()
    return parts


@contextmanager
def _scratch() -> Iterator[str]:
    """Open a temporary file, because the library reads and writes ciphertexts only as files."""
    with tempfile.TemporaryDirectory(prefix="vfl-bfv-") as folder:
        yield str(Path(folder) / "ciphertext")


def _saved(ciphertext: Any, file: str) -> bytes:
    ciphertext.save(file)
    return Path(file).read_bytes()


def _loaded(part: bytes, file: str) -> Any:
    """Load a ciphertext for this module's BFV parameters; the library validates it."""
    found = package().Ciphertext()
    Path(file).write_bytes(part)
    try:
        found.load(_context(), file)
    except (ValueError, RuntimeError, IndexError, TypeError):
        raise _no_ciphertexts() from None
    if found.size() != 2 or found.is_ntt_form():
        raise _no_ciphertexts()
    return found


def _no_ciphertexts() -> ProtocolError:
    return ProtocolError(
        "a message contains no valid ciphertexts", want="BFV ciphertexts of two polynomials each"
    )


@cache
def _context() -> Any:
    seal = package()
    parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.BFV)
    parameters.set_poly_modulus_degree(_DEGREE)
    parameters.set_coeff_modulus(seal.CoeffModulus.Create(_DEGREE, [_MODULUS_BITS]))
    parameters.set_plain_modulus(1 << _DIGIT_BITS)
    # The library refuses parameters with less than 128 bits of security.
    return seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)


@cache
def package() -> Any:
    """Return the module of Microsoft SEAL that the package TenSEAL contains.

    Raises:
        MissingPackageError: the extra "he" of vfl (TenSEAL) is not installed.
    """
    try:
        from tenseal import sealapi
    except ImportError:
        raise MissingPackageError(
            "private retrieval of an index needs a package that is not installed",
            want="tenseal",
            fix="pip install 'vfl[he]', or Form(retrieval=\"sets\")",
        ) from None
    return sealapi
