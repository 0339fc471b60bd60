"""Each party's part of the shared weights, in blocks of rows, so that memory never has all rows.

The model owner (P0) stores its weights as integers in a file that is mapped into memory. P1 (the
user) stores the masked weights, packed, and reads one block at a time. P2 (the dealer) stores one
seed per matrix, and draws the mask from the seed for each dealing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import RunFolderError
from vfl.core.storage import Seal, checked_span, private_folder, read_sealed, write_sealed
from vfl.llm.packing import packed_bytes, unpack_elements
from vfl.mpc.ring import ELEMENT_BITS, matmul, reads_in_place
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.stream import KEY_BYTES, PadStream

#: Largest number of elements in a block of whole rows; with 8 bytes each, a block fits into a
#: processor's cache.
BLOCK = 1 << 18
#: Integer types of stored weights, the smallest type first.
_TYPES = (torch.int16, torch.int32, torch.int64)


class Matrix(Protocol):
    """A matrix of ring elements that is computed or read in blocks of rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """Axes (rows, columns)."""

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each block in order: the number of its first row, and its rows as int64."""


def spans(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return, for each block of a matrix, the first row and the row after the last.

    >>> spans((1000, 1024))
    [(0, 256), (256, 512), (512, 768), (768, 1000)]
    """
    rows, columns = shape
    each = max(1, BLOCK // max(columns, 1))
    return [(start, min(start + each, rows)) for start in range(0, rows, each)]


@dataclass(frozen=True, slots=True)
class Whole:
    """A matrix of integers of any type, in memory or mapped from a file."""

    elements: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Axes (rows, columns) of the matrix."""
        rows, columns = self.elements.shape
        return rows, columns

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """See `Matrix`; the blocks have the integer type in which the elements are stored."""
        for start, end in spans(self.shape):
            yield start, self.elements[start:end]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A uniform random mask that is drawn from a seed (AES-128 in counter mode).

    It masks one matrix, once: a new sharing of the weights uses a new seed.

    >>> mask = Drawn(bytes(32), (3, 2))
    >>> [torch.equal(a, b) for (_, a), (_, b) in zip(mask.blocks(), mask.blocks())]
    [True]
    """

    seed: bytes
    shape: tuple[int, int]

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """See `Matrix`; each call draws the same elements again."""
        stream = PadStream(self.seed)
        for number, (start, end) in enumerate(spans(self.shape)):
            elements = stream.elements64((end - start) * self.shape[1], "U", number)
            yield start, torch.from_numpy(elements.view("int64")).reshape(-1, self.shape[1])

    def __repr__(self) -> str:
        return f"Drawn(..., {self.shape})"


@dataclass(frozen=True, slots=True)
class Packed:
    """Masked weights in blocks, with a fixed number of bits each, in memory or in a file."""

    shape: tuple[int, int]
    bits: int
    pieces: Callable[[], Iterator[bytes | memoryview]]

    @property
    def sizes(self) -> list[int]:
        """Sizes of the blocks, in bytes."""
        columns = self.shape[1]
        return [
            packed_bytes((end - start) * columns, self.bits) for start, end in spans(self.shape)
        ]

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """See `Matrix`; the bits above the packed bits are zero."""
        for (start, end), piece in zip(spans(self.shape), self.pieces(), strict=True):
            count = (end - start) * self.shape[1]
            elements = unpack_elements(memoryview(piece), count, self.bits)
            yield start, elements.reshape(-1, self.shape[1])


class LayerShape(NamedTuple):
    """Shape and bits of a linear layer before its weights are shared.

    Attributes:
        name: name of the layer.
        shape: numbers of inputs and outputs.
        bits: fraction bits of a weight.
        ring: number of bits of an element of the products with this layer's weights.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    ring: int = ELEMENT_BITS


@dataclass(frozen=True, slots=True)
class Constant:
    """A linear layer with P0's weights, as one party stores it after the initialisation.

    Attributes:
        layer: name, axes and numbers of bits of the layer.
        weight, bias: weight and bias at P0, None elsewhere; the weight has the smallest type that
            fits it.
        masked: at P1, the masked weight E = X - U; None elsewhere. With float sharing and in tests,
            `masked` and `mask` may be tensors.
        mask: at P2, the mask U; None elsewhere.
        turned: whether inputs and outputs of the weight are exchanged: a decoder's head uses the
            embedding's weights in this way.
    """

    layer: LayerShape
    weight: Tensor | None = None
    bias: Tensor | None = None
    masked: Matrix | Tensor | None = None
    mask: Matrix | Tensor | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of inputs and outputs, after the exchange if `turned` is set."""
        inputs, outputs = self.layer.shape
        return (outputs, inputs) if self.turned else (inputs, outputs)

    def of(self, role: int) -> Matrix | Tensor:
        """Return the factor by which a role multiplies: weight, masked weight or mask."""
        found = {P0: self.weight, P1: self.masked, P2: self.mask}[role]
        assert found is not None, "each role has its own factor"
        return found

    def transposed(self) -> Constant:
        """Return the same weights with exchanged inputs and outputs, and without a bias."""
        return replace(self, bias=None, turned=not self.turned)


def multiplied(left: Tensor, right: Matrix | Tensor, *, turned: bool = False) -> Tensor:
    """Return the product in the ring, computed block by block of the right operand.

    Args:
        left: int64, axes (rows, inner).
        right: axes (inner, columns), or (columns, inner) if turned.
        turned: whether the right operand must be transposed for the product.

    >>> two = Whole(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16))
    >>> multiplied(torch.tensor([[1, 10]]), two).tolist()
    [[31, 42]]
    >>> multiplied(torch.tensor([[1, 10]]), two, turned=True).tolist()
    [[21, 43]]
    """
    if isinstance(right, Tensor) and not turned and reads_in_place(len(left), right):
        return matmul(left, right)  # the blocks only limit how much memory is copied at once
    matrix = Whole(right) if isinstance(right, Tensor) else right
    rows, columns = matrix.shape
    if turned:
        found = torch.empty(len(left), rows, dtype=torch.int64)
        for start, block in matrix.blocks():
            found[:, start : start + len(block)] = matmul(left, block.t())
        return found
    found = torch.zeros(len(left), columns, dtype=torch.int64)
    for start, block in matrix.blocks():
        found += matmul(left[:, start : start + len(block)], block)
    return found


def scaled(left: Tensor, right: Matrix | Tensor) -> Tensor:
    """Multiply each column by its own factor; axes (rows, columns) and (1, columns)."""
    if not isinstance(right, Tensor):
        ((_, right),) = right.blocks()
    return left * right


def room_for(weight: Tensor, bits: int) -> Tensor:
    """Return uninitialised memory for a weight, of the smallest integer type that fits it."""
    ends = torch.aminmax(weight) if weight.numel() else (0.0, 0.0)
    most = max(abs(float(end)) for end in ends) * 2.0**bits + 1
    kind = next((each for each in _TYPES if most < torch.iinfo(each).max), torch.int64)
    return torch.empty(weight.shape, dtype=kind)


class WeightStore:
    """One party's part of a sharing of the weights, in one sealed file per matrix.

    Args:
        folder: folder for this sharing of the weights; only the folder's owner may read it.
        party: party that owns the store.
        setup: identifier of the sharing of the weights.
    """

    def __init__(self, folder: Path, party: str, setup: str) -> None:
        self._folder, self._party, self._setup = folder, party, setup
        private_folder(folder)

    def put(self, constant: Constant) -> Constant:
        """Store a party's part of a layer; return the part, as mapped from its file."""
        name = constant.layer.name
        if isinstance(constant.masked, Packed):
            self._write(f"{name}.masked", constant.masked.pieces())
        if isinstance(constant.mask, Drawn):
            self._write(f"{name}.seed", iter([constant.mask.seed]))
        if constant.weight is not None:
            elements = constant.weight.numpy()
            self._write(
                f"{name}.weight",
                (elements[start:end].tobytes() for start, end in spans(elements.shape)),
            )
        if constant.bias is not None:
            self._write(f"{name}.bias", iter([constant.bias.double().numpy().tobytes()]))
        return self.get(constant.layer)

    def get(self, layer: LayerShape) -> Constant:
        """Read the stored part of a layer, mapped from its file.

        Raises:
            RunFolderError: a file is missing or damaged, or belongs to another party or another
                sharing of the weights.
        """
        weight: Tensor | None = None
        bias: Tensor | None = None
        masked: Packed | None = None
        mask: Drawn | None = None
        if self._path(f"{layer.name}.seed").exists():
            seed = self._read(f"{layer.name}.seed", KEY_BYTES)
            mask = Drawn(seed, layer.shape)
        elif self._path(f"{layer.name}.weight").exists():
            weight = self._mapped(layer)
            if self._path(f"{layer.name}.bias").exists():
                outputs = layer.shape[1]
                raw = self._read(f"{layer.name}.bias", 8 * outputs)
                bias = torch.frombuffer(bytearray(raw), dtype=torch.float64)
        else:
            masked = self._packed(layer)
        return Constant(layer, weight, bias, masked, mask)

    def _packed(self, layer: LayerShape) -> Packed:
        path = self._path(f"{layer.name}.masked")

        @cache  # each process checks a file at most once; only dealings need masked weights
        def start() -> int:
            checked = checked_span(path, self._seal(path.name))
            self._require(len(checked) == sum(found.sizes), path)
            return checked.start

        def pieces() -> Iterator[bytes]:
            at = start()
            with path.open("rb") as file:
                file.seek(at)
                for size in found.sizes:
                    yield file.read(size)

        found = Packed(layer.shape, layer.ring, pieces)
        return found

    def _mapped(self, layer: LayerShape) -> Tensor:
        path = self._path(f"{layer.name}.weight")
        checked = checked_span(path, self._seal(path.name))
        count = layer.shape[0] * layer.shape[1]
        item, rest = divmod(len(checked), max(count, 1))
        kinds = {2: np.int16, 4: np.int32, 8: np.int64}
        self._require(rest == 0 and item in kinds, path)
        mapped = np.memmap(path, kinds[item], "c", checked.start, layer.shape)
        return torch.from_numpy(np.asarray(mapped))

    def _read(self, name: str, size: int) -> bytes:
        path = self._path(name)
        found = read_sealed(path, self._seal(name))
        self._require(len(found) == size, path)
        return found

    def _write(self, name: str, pieces: Iterator[bytes | memoryview]) -> None:
        write_sealed(self._path(name), map(bytes, pieces), self._seal(name))

    def _seal(self, name: str) -> Seal:
        return Seal(f"shared weights {name}", self._party, self._setup)

    def _path(self, name: str) -> Path:
        return self._folder / name

    @staticmethod
    def _require(fits: bool, path: Path) -> None:
        if not fits:
            raise RunFolderError(
                "shared weights have a different size",
                where=os.fspath(path),
                fix="remove setup.json from this party's store, and deal again: the parties then "
                "share the weights again",
            )
