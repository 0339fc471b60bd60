"""Principal components of random features: a bottom that is computed and never trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_BLOCK_ROWS = 4096
#: Arrays of float64 that `fit` holds at once: of axes (features, features), with the workspace of
#: the decomposition, and of a block's rows.
_SQUARES, _BLOCKS = 8, 5


def fit_bytes(rows: int, columns: int, features: int) -> int:
    """The most bytes that `Components.fit`, and a pass over a batch afterwards, allocate.

    Args:
        rows: rows of a batch.
        columns: columns of the inputs.
        features: see `Components`.
    """
    values = features or columns
    fitted = 8 * (_SQUARES * values**2 + _BLOCKS * _BLOCK_ROWS * values)
    return fitted + 4 * (3 * columns * features + rows * (columns + 2 * values))


class Components(nn.Module):
    """The first principal components of relu((x - mean) W), or of x itself.

    W is random and normal with variance 2 / columns (Rahimi & Recht 2008 in spirit, He et al. 2015
    for the variance). All components are scaled by one factor so that their mean variance is 1; if
    there are fewer than `width`, the rest of the output is 0.

    Args:
        width: components.
        features: columns of W; 0 uses the number of inputs.
    """

    center: Tensor
    weights: Tensor
    axes: Tensor
    offset: Tensor

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.register_buffer("center", torch.zeros(1))
        self.register_buffer("weights", torch.zeros(1, features))
        self.register_buffer("axes", torch.zeros(features or 1, width))
        self.register_buffer("offset", torch.zeros(width))

    def forward(self, inputs: Tensor) -> Tensor:
        """Components of rows of axes (rows, ...), axes (rows, width)."""
        if self.axes.is_meta:  # meta tensors have no fitted values, and `fit_bytes` counts them
            return inputs.new_empty(len(inputs), len(self.offset))
        return self._featured(inputs) @ self.axes - self.offset

    def fit(self, inputs: Tensor, draw: torch.Generator) -> None:
        """Set everything from training inputs of axes (rows, ...), in blocks of rows."""
        columns = inputs[0].numel()
        self.center = inputs.flatten(1).mean(dim=0).to(self.offset)
        random = torch.randn(columns, self.features, generator=draw) * (2 / columns) ** 0.5
        self.weights = random.to(self.offset)
        mean = sum((z.sum(dim=0) for z in self._blocks(inputs)), start=torch.zeros(())) / len(
            inputs
        )
        scatter = sum(
            ((z - mean).T @ (z - mean) for z in self._blocks(inputs)), start=torch.zeros(())
        )
        self._keep(mean, scatter / len(inputs))

    def _keep(self, mean: Tensor, covariance: Tensor) -> None:
        """Take the largest components, each with its largest entry positive."""
        variances, vectors = strongest_first(covariance)
        width = min(len(self.offset), len(variances))
        axes = vectors[:, :width]
        axes = axes * axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
        scale = variances[:width].mean().clamp_min(1e-12).rsqrt()
        padded = torch.zeros(len(mean), len(self.offset), dtype=mean.dtype)
        padded[:, :width] = axes * scale
        self.axes, self.offset = padded.to(self.offset), (mean @ padded).to(self.offset)

    def _featured(self, inputs: Tensor) -> Tensor:
        centred = inputs.flatten(1) - self.center
        return torch.relu(centred @ self.weights) if self.features else centred

    def _blocks(self, inputs: Tensor) -> Iterator[Tensor]:
        for start in range(0, len(inputs), _BLOCK_ROWS):
            block = inputs[start : start + _BLOCK_ROWS]
            yield self._featured(block.to(self.offset)).double().cpu()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Resize the buffers to the loaded sizes, which depend on the inputs of `fit`."""
        for name in ("center", "weights", "axes"):
            if (saved := state.get(prefix + name)) is not None:
                setattr(self, name, torch.empty_like(saved).to(self.offset))
        super()._load_from_state_dict(state, prefix, *rest)


def principal(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The principal components of rows of axes (rows, features), the strongest first.

    Returns:
        The result is the centred rows; the variance along each direction; and the directions, axes
        (features, components), of which there are no more than rows. All float64: squares lose half
        of the digits.
    """
    centred = (rows - rows.mean(0)).double()
    if len(rows) < centred.shape[1]:  # a large picture has a covariance of many gigabytes
        _, spread, directions = torch.linalg.svd(centred, full_matrices=False)
        return centred, spread.square() / len(rows), directions.T
    return centred, *strongest_first(centred.T @ centred / len(rows))


def strongest_first(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a matrix, and its eigenvectors as columns, largest first."""
    values, vectors = torch.linalg.eigh(covariance)
    return values.flip(0), vectors.flip(1)
