"""C3-SL: circular convolution binds several rows of a training batch into one vector."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, StepContext
from vfl.compression.coding.values import all_finite
from vfl.compression.quantise import Quantise
from vfl.core.errors import NonFiniteError
from vfl.core.frame import Payload
from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import generator

#: Most rows that may share a vector; noise grows with their number, and 64 is four times the
#: paper's.
_MOST_ROWS = 64
_LARGEST = float(np.finfo(np.float32).max)


class Bound(Codec):
    """Sends one vector for `rows` rows of a training batch: the sum of each row bound to its key.

    A key is a fixed public vector of length 1; binding is circular convolution, reading is circular
    correlation with the same key. A decoded row contains the other rows of its vector as noise,
    which is smaller for wider cuts. Gradients are sent in the same way, so both directions take
    1/rows of the bytes. Training mixes rows. **A query is sent row by row** and takes the bytes of
    the plain cut, because a prediction must not depend on the other rows of its batch.

    Source: Hsieh et al. 2022, "C3-SL: Circular convolution-based batch-wise compression for
    communication-efficient split learning", MLSP, section 3. The last vector of a batch has fewer
    rows if `rows` does not divide the batch.

    Args:
        rows: rows a vector (the paper's R).
        values: format of the vectors, and of a query: ``fp32``, ``bf16``, or 1 to 8 bits with one
            scale per vector.
        grad: format of the vectors of gradients: ``fp32``, ``bf16``, or 2 to 8 bits.
        keys: ``normal`` as in the paper; ``unitary`` keys have a flat spectrum (Plate 1995), so
            that the only noise in a decoded row comes from the other rows.

    >>> len(Bound(rows=4).encode(torch.zeros(256, 128), StepContext(training=True)).payload)
    32768
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
        if not all_finite(cut):
            raise NonFiniteError("a cut holds NaN or Inf", fix="lower the learning rate")
        return Encoded(self._vectors.encode(self._bind(cut), context).payload, None)

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        if not context.training:
            return Decoded(self._vectors.decode(payload, rows, width, context).cut, None)
        vectors = self._vectors.decode(payload, self._count(rows), width, context).cut
        return Decoded(self._read(vectors, rows), None)

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        if not all_finite(grad):
            raise NonFiniteError("a gradient holds NaN or Inf", fix="lower the learning rate")
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
        """Return 1/R, section 3.3, for b-bit values."""
        return self._vectors.formula_ratio(width) / self.rows

    def _count(self, rows: int) -> int:
        """Return the number of vectors for a number of rows."""
        return -(-rows // self.rows)

    def _spectra(self, width: int) -> npt.NDArray[np.complex128]:
        """Return Fourier transforms of the keys, axes (rows a vector, frequencies)."""
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
        """Return vectors of axes (vectors, width), for values of axes (rows, width)."""
        rows, width = values.shape
        filled = np.zeros((self._count(rows), self.rows, width))
        filled.reshape(len(filled) * self.rows, width)[:rows] = values.numpy()
        spectra = np.fft.rfft(filled, axis=2)
        return _real((spectra * self._spectra(width)).sum(axis=1), width)

    def _read(self, vectors: Tensor, rows: int) -> Tensor:
        """Return values of axes (rows, width), for vectors of axes (vectors, width)."""
        width = vectors.shape[1]
        spectra = np.fft.rfft(vectors.numpy().astype(np.float64), axis=1)[:, None, :]
        read = _real(spectra * self._spectra(width).conj(), width)
        return read.flatten(0, 1)[:rows].clone()


def _real(spectra: npt.NDArray[np.complex128], width: int) -> Tensor:
    """Return vectors with these spectra, clipped to the range of float32."""
    values = np.fft.irfft(spectra, n=width, axis=-1)
    return torch.from_numpy(np.clip(values, -_LARGEST, _LARGEST).astype(np.float32))
