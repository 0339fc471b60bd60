"""FedLite: product quantisation, with a codebook per batch and a correction of the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, StepContext
from vfl.compression.coding.bits import from_bits, pack, packed_bytes, to_bits, unpack
from vfl.compression.coding.values import GradientCode, require_finite
from vfl.compression.none import dense_bytes, dense_tensor
from vfl.core.errors import CorruptFrameError, TruncatedFrameError, WidthError
from vfl.core.frame import Payload
from vfl.core.registry import MOST_WEIGHT, require_range
from vfl.core.seeds import generator

_MOST_CLUSTERS = 4096
_MOST_PASSES = 100
_MOST_PIECES = 65536


class ProductQuantise(Codec):
    """Sends, for each piece of a row, the index of the nearest vector in a small codebook.

    The codec divides each row of the cut into `pieces` pieces of equal length. k-means over all
    pieces of a batch finds `clusters` vectors. The found vectors are the codebook, which is sent
    with the batch. The label party returns all values of the gradient at the sent (quantised) cut.
    The feature party adds `correction` x (cut - sent cut) to this gradient, which keeps cuts near
    the codebook. **A query is sent with all values as float32**, because with a codebook a row's
    sent values would depend on the other rows of its batch.

    Source: Wang, Qi, Rawat, Reddi, Waghmare, Yu, Joshi 2022, "FedLite: a scalable approach for
    federated learning on resource-constrained clients".

    The codec implements the paper's sections 4.1 (one codebook for all pieces, the paper's R = 1)
    and 4.2 (the correction, as the gradient of a squared distance).

    Args:
        pieces: number of pieces of a row (the paper's q); it must divide the width of the cut.
        clusters: number of vectors in the codebook (the paper's L).
        correction: weight of the correction (the paper's lambda), which is a mean over the batch's
            rows.
        passes: largest number of passes of k-means over the pieces.
        grad: format of a gradient: ``fp32``, ``bf16``, or 2 to 8 bits.

    Raises:
        BadOptionError: an option is out of range.

    >>> codec, training = ProductQuantise(pieces=8, clusters=4), StepContext(training=True)
    >>> len(codec.encode(torch.zeros(256, 64), training).payload)  # 4 vectors of 8, 2 bits a piece
    640
    """

    def __init__(
        self,
        pieces: int = 16,
        clusters: int = 16,
        correction: float = 0.001,
        passes: int = 10,
        grad: str = "fp32",
    ) -> None:
        require_range("pieces", pieces, 1, _MOST_PIECES)
        require_range("clusters", clusters, 2, _MOST_CLUSTERS)
        require_range("correction", correction, 0, MOST_WEIGHT)
        require_range("passes", passes, 1, _MOST_PASSES)
        self.pieces = pieces
        self.clusters = clusters
        self.correction = correction
        self.passes = passes
        self._grad = GradientCode(grad)
        self._bits = (clusters - 1).bit_length()
        self._newest: tuple[Tensor, Tensor] | None = None

    def check(self, width: int) -> None:
        if width % self.pieces:
            fits = [one for one in range(1, width + 1) if width % one == 0]
            raise WidthError(
                f"a cut of width {width} cannot be divided into {self.pieces} equal pieces",
                got=f"pieces = {self.pieces}",
                want=", ".join(map(str, fits)),
            )

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        if not context.training:
            return Encoded(dense_bytes(cut), None)
        require_finite(cut)
        if not len(cut):
            return Encoded(b"", None)
        codebook, codes = self._clustered(cut)
        self._newest = cut.clone(), codebook[codes].reshape(cut.shape)
        table = to_bits(codes.numpy().reshape(len(cut), self.pieces), self._bits)
        return Encoded(bytes(dense_bytes(codebook)) + pack(table), None)

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        if not context.training:
            return Decoded(dense_tensor(payload, rows, width), None)
        if not rows:
            return Decoded(dense_tensor(payload, 0, width), None)
        length = width // self.pieces
        head, view = 4 * self.clusters * length, memoryview(payload)
        wanted = head + packed_bytes(rows, self.pieces * self._bits)
        if len(view) != wanted:
            raise TruncatedFrameError(
                "a payload of codes has the wrong length",
                got=f"{len(view)} bytes",
                want=f"{wanted} bytes for {rows} rows of {width}",
            )
        codebook = dense_tensor(view[:head], self.clusters, length)
        bits = unpack(view[head:], rows, self.pieces * self._bits)
        codes = from_bits(bits, self._bits, self.pieces).astype(np.int64)
        if (codes >= self.clusters).any() or not torch.isfinite(codebook).all():
            raise CorruptFrameError("a payload names a vector that does not exist or is not finite")
        return Decoded(codebook[torch.from_numpy(codes)].reshape(rows, width), None)

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        return self._grad.encode(grad, None, context)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        return torch.from_numpy(self._grad.decode(payload, rows, width, None))

    def local_loss(self, cut: Tensor, context: StepContext) -> Tensor | None:
        """Return correction / 2 x the mean squared distance between a cut and its sent values."""
        if not (self.correction and context.training and len(cut)):
            return None
        sent = self._sent(cut.detach().cpu()).to(cut.device)
        return 0.5 * self.correction * (cut - sent).square().sum(dim=1).mean()

    def formula_ratio(self, width: int) -> float:
        """Return the codes' size relative to float32: pieces x ceil(log2 clusters) / (32 x width).

        The formula leaves out the size of the codebook, which all rows of a batch share.
        """
        return self.pieces * self._bits / (32 * width)

    def payload_limit(self, rows: int, width: int) -> int:
        vectors = 4 * self.clusters * width // self.pieces
        return super().payload_limit(rows, width) + vectors + rows * self.pieces * self._bits // 8

    def _sent(self, cut: Tensor) -> Tensor:
        """Return the values that are sent for a cut; the newest cut's values are stored."""
        if self._newest is not None and torch.equal(self._newest[0], cut):
            return self._newest[1]
        codebook, codes = self._clustered(cut)
        return codebook[codes].reshape(cut.shape)

    def _clustered(self, cut: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codebook, axes (clusters, length), and the codes, axes (rows x pieces,)."""
        found = cluster(cut.reshape(-1, cut.shape[1] // self.pieces), self.clusters, self.passes)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def cluster(
    points: Tensor, clusters: int, passes: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Run k-means: return centres, axes (clusters, length), and the number of each point's centre.

    A fixed public generator draws the first centres; points that are far from the centres drawn
    before are more likely (Arthur, Vassilvitskii 2007). So the same points always give the same
    centres.

    Args:
        points: the points, float32, axes (points, length), at least one.
        clusters: number of centres.
        passes: largest number of passes of Lloyd's algorithm.
    """
    scale = float(points.abs().max()) or 1.0
    values = points.double().numpy() / scale
    draw = generator(0, "fedlite")
    centres = np.zeros((clusters, values.shape[1]))
    nearest = np.full(len(values), np.inf)
    for number, chance in enumerate(torch.rand(clusters, generator=draw).double().tolist()):
        weights = nearest if number else np.ones(len(values))
        reach = np.cumsum(weights)
        at = int(np.searchsorted(reach, chance * reach[-1], side="right"))
        centres[number] = values[min(at, len(values) - 1)]
        np.minimum(nearest, np.square(values - centres[number]).sum(axis=1), out=nearest)
    codes = _nearest(values, centres)
    for _ in range(passes):
        counts = np.bincount(codes, minlength=clusters)
        sums = np.zeros_like(centres)
        np.add.at(sums, codes, values)
        centres = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
        moved = _nearest(values, centres)
        if np.array_equal(moved, codes):
            break
        codes = moved
    return (centres * scale).astype(np.float32), codes


def _nearest(values: npt.NDArray[np.float64], centres: npt.NDArray[np.float64]) -> np.ndarray:
    """Return the number of each point's nearest centre; among equally near ones, the first."""
    distances = np.square(centres).sum(axis=1) - 2 * values @ centres.T
    found: npt.NDArray[np.int64] = distances.argmin(axis=1)
    return found
