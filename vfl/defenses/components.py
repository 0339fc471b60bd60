"""Principal components of random features: a bottom that is fitted once and then never changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_BLOCK_ROWS = 4096
#: Number of float64 arrays of each size that `fit` holds at once. The first number counts arrays of
#: axes (features, features), including the workspace of the eigendecomposition. The second number
#: counts arrays that hold one block of rows.
_SQUARES, _BLOCKS = 8, 5


def fit_bytes(rows: int, columns: int, features: int) -> int:
    """Return the largest memory in bytes of `Components.fit` and of a batch's forward pass.

    Args:
        rows: batch size.
        columns: number of input columns.
        features: see `Components`.
    """
    values = features or columns
    fitted = 8 * (_SQUARES * values**2 + _BLOCKS * _BLOCK_ROWS * values)
    return fitted + 4 * (3 * columns * features + rows * (columns + 2 * values))


class Components(nn.Module):
    """The first principal components of relu((x - mean) W) for inputs x, or of x itself.

    The entries of W are normal random numbers with variance 2 / columns. Random features follow the
    idea of Rahimi and Recht 2008; the variance is that of He et al. 2015. One factor scales all
    components, so that their mean variance is 1. If there are fewer components than `width`, the
    remaining outputs are 0.

    Args:
        width: number of components.
        features: number of columns of W; 0 computes the components of the inputs themselves.
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
        """Return the components, axes (rows, width), of inputs of axes (rows, ...)."""
        if self.axes.is_meta:  # meta tensors have no values to check; `fit_bytes` counts the memory
            return inputs.new_empty(len(inputs), len(self.offset))
        return self._featured(inputs) @ self.axes - self.offset

    def fit(self, inputs: Tensor, draw: torch.Generator) -> None:
        """Compute all buffers from training inputs of axes (rows, ...), in blocks of rows."""
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
        """Store the components of largest variance; each one's largest entry is made positive."""
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
        """Resize the buffers to the saved sizes, which depend on the inputs that `fit` received."""
        for name in ("center", "weights", "axes"):
            if (saved := state.get(prefix + name)) is not None:
                setattr(self, name, torch.empty_like(saved).to(self.offset))
        super()._load_from_state_dict(state, prefix, *rest)


def principal(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the principal components of rows of axes (rows, features), the largest variance first.

    Returns:
        The centred rows; the variance along each direction; and the directions, axes (features,
        components). There are at most as many components as rows. All results are float64, because
        squaring the values halves the number of correct digits.
    """
    centred = (rows - rows.mean(0)).double()
    if len(rows) < centred.shape[1]:  # avoids a large (features, features) matrix
        _, spread, directions = torch.linalg.svd(centred, full_matrices=False)
        return centred, spread.square() / len(rows), directions.T
    return centred, *strongest_first(centred.T @ centred / len(rows))


def strongest_first(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return a symmetric matrix's eigenvalues, largest first, and its eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(covariance)
    return values.flip(0), vectors.flip(1)
