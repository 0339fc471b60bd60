"""C3-SL: circular convolution combines several rows of a training batch into one vector."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, StepContext
from vfl.compression.coding.values import require_finite
from vfl.compression.quantise import Quantise
from vfl.core.frame import Payload
from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import generator

#: Largest number of rows that one vector may combine. The noise in decoded rows grows with this
#: number; 64 is four times the paper's largest number.
_MOST_ROWS = 64
_LARGEST = float(np.finfo(np.float32).max)


class Bound(Codec):
    """Sends one vector per `rows` rows of a training batch: the sum of rows, each bound to a key.

    A key is a fixed public vector of length 1. Binding a row is circular convolution of the row
    with its key; decoding is circular correlation of the vector with the same key. In a decoded
    row, the other rows in its vector appear as noise, which is smaller for wider cuts. The codec
    encodes gradients in the same way, so both cuts and gradients take 1/rows of the bytes. So, in
    training, the codec mixes rows. **The codec sends a query row by row** in the number format of
    `values`, because a prediction must not depend on other rows of its batch.

    Source: Hsieh et al. 2022, "C3-SL: Circular convolution-based batch-wise compression for
    communication-efficient split learning", MLSP, section 3. If `rows` does not divide the batch
    size, the last vector of a batch combines fewer rows.

    Args:
        rows: number of rows that one vector combines (the paper's R).
        values: number format of the vectors, and of the rows of a query: ``fp32``, ``bf16``, or 1
            to 8 bits with one scale per vector.
        grad: number format of the vectors that combine gradients: ``fp32``, ``bf16``, or 2 to 8
            bits.
        keys: kind of the keys: ``normal``: random numbers with a normal distribution, as in the
            paper. ``unitary``: keys with a flat spectrum (Plate 1995); with these, only the other
            rows of its vector cause noise in a decoded row.

    >>> len(Bound(rows=4).encode(torch.zeros(256, 128), StepContext(training=True)).payload)
    32768

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        rows: int = 4,
        values: str = "fp32",
        grad: str = "fp32",
        keys: Literal["normal", "unitary"] = "normal",
    ) -> None:
        require_range("rows", rows, 2, _MOST_ROWS)
        require_choice("keys", keys, ("normal", "unitary"))
        self.rows = rows
        self.keys = keys
        self._vectors = Quantise(values, scale="row", grad=grad)
        self._keys: npt.NDArray[np.complex128] = np.zeros((0, 0), np.complex128)

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        if not context.training:
            return Encoded(self._vectors.encode(cut, context).payload, None)
        require_finite(cut)
        return Encoded(self._vectors.encode(self._bind(cut), context).payload, None)

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        if not context.training:
            return Decoded(self._vectors.decode(payload, rows, width, context).cut, None)
        vectors = self._vectors.decode(payload, self._count(rows), width, context).cut
        return Decoded(self._read(vectors, rows), None)

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        require_finite(grad, "a gradient")
        if not context.training:
            return self._vectors.encode_grad(grad, None, context)
        return self._vectors.encode_grad(self._bind(grad), None, context)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        if not context.training:
            return self._vectors.decode_grad(payload, None, rows, width, context)
        vectors = self._vectors.decode_grad(payload, None, self._count(rows), width, context)
        return self._read(vectors, rows)

    def formula_ratio(self, width: int) -> float:
        """Return 1/rows (section 3.3 of the paper), times b/32 for values of b bits."""
        return self._vectors.formula_ratio(width) / self.rows

    def _count(self, rows: int) -> int:
        """Return how many vectors a batch with this number of rows needs."""
        return -(-rows // self.rows)

    def _spectra(self, width: int) -> npt.NDArray[np.complex128]:
        """Return the Fourier transforms of the keys, axes (rows in a vector, frequencies)."""
        if self._keys.shape != (self.rows, width // 2 + 1):
            drawn = torch.randn(
                self.rows, width, generator=generator(0, "c3sl", self.rows, width)
            ).double()
            keys = drawn / drawn.norm(dim=1, keepdim=True).clamp(min=1e-12)
            self._keys = np.fft.rfft(keys.numpy(), axis=1)
            if self.keys == "unitary":
                self._keys /= np.maximum(np.abs(self._keys), 1e-12)
        return self._keys

    def _bind(self, values: Tensor) -> Tensor:
        """Combine rows, axes (rows, width), into vectors, axes (vectors, width)."""
        rows, width = values.shape
        filled = np.zeros((self._count(rows), self.rows, width))
        filled.reshape(len(filled) * self.rows, width)[:rows] = values.numpy()
        spectra = np.fft.rfft(filled, axis=2)
        return _real((spectra * self._spectra(width)).sum(axis=1), width)

    def _read(self, vectors: Tensor, rows: int) -> Tensor:
        """Decode vectors, axes (vectors, width), into rows, axes (rows, width)."""
        width = vectors.shape[1]
        spectra = np.fft.rfft(vectors.numpy().astype(np.float64), axis=1)[:, None, :]
        read = _real(spectra * self._spectra(width).conj(), width)
        return read.flatten(0, 1)[:rows].clone()


def _real(spectra: npt.NDArray[np.complex128], width: int) -> Tensor:
    """Return real vectors, given their spectra, clipped to the range of float32."""
    values = np.fft.irfft(spectra, n=width, axis=-1)
    return torch.from_numpy(np.clip(values, -_LARGEST, _LARGEST).astype(np.float32))
