"""A bottom for tables that embeds numbers before a perceptron mixes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vfl.core.errors import SpecError
from vfl.core.registry import require, require_range
from vfl.models.base import Activation, Bottom, Shape, check_size
from vfl.models.mlp import Layers

_MOST_FREQUENCIES = 1024


class PeriodicEmbedding(nn.Module):
    """relu(W_j [sin(2 pi c_j x_j), cos(2 pi c_j x_j)] + b_j) for every number x_j of a row.

    This is "PLR" of Gorishniy, Rubachev and Babenko (2022), section 3.3: c_j is learned, and
    initially normal with deviation sigma; every column has separate weights W_j.

    Args:
        columns: numbers a row.
        frequencies: frequencies of each column.
        size: numbers per embedded column.
        sigma: deviation of the first frequencies, for columns of deviation 1.
    """

    def __init__(self, columns: int, frequencies: int, size: int, sigma: float) -> None:
        super().__init__()
        bound = 1 / math.sqrt(2 * frequencies)
        self.frequency_weight = nn.Parameter(sigma * torch.randn(columns, frequencies))
        self.weight = nn.Parameter(torch.empty(columns, 2 * frequencies, size))
        self.bias = nn.Parameter(torch.empty(columns, size))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, rows: Tensor) -> Tensor:
        """From axes (rows, columns) to axes (rows, columns * size)."""
        angle = 2 * math.pi * self.frequency_weight * rows[:, :, None]
        waves = torch.cat([angle.sin(), angle.cos()], dim=2)
        mixed = torch.einsum("rcf,cfs->rcs", waves, self.weight) + self.bias
        return mixed.relu().flatten(1)


class _Embedded(nn.Module):
    """Concatenates a row and the embeddings of its first columns, for a perceptron."""

    def __init__(self, embedding: nn.Module, first: int, layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.first, self.layers = embedding, first, layers

    def forward(self, rows: Tensor) -> Tensor:
        embedded = self.embedding(rows[:, : self.first])
        made: Tensor = self.layers(torch.cat([rows, embedded], dim=1))
        return made


class PeriodicBottom(Layers, Bottom):
    """A perceptron over a row and periodic embeddings of its numbers (Gorishniy et al. 2022).

    A perceptron alone learns functions with jumps or bends slowly, while trees learn them well.
    Columns of zeros and ones gain nothing by an embedding: put a party's numbers first and say how
    many.

    Args:
        first: number of columns to embed, from the first; 0 embeds all.
        frequencies: frequencies of each embedded column.
        size: numbers per embedded column.
        sigma: deviation of the first frequencies; larger follows finer detail, and overfits sooner.
        hidden: sizes joined by dashes; "none" leaves one linear layer.
        activation: relu, leaky_relu, gelu, silu, tanh or sigmoid.
        dropout: probability after each hidden activation, 0 to below 1.

    >>> module = PeriodicBottom(first=2, frequencies=3, size=5, hidden="16").build((4,), 8)
    >>> sum(p.numel() for p in module.parameters())  # 2 * (3 + 6 * 5 + 5) + 15 * 16 + 17 * 8
    452

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        first: int = 0,
        frequencies: int = 16,
        size: int = 8,
        sigma: float = 0.1,
        hidden: str = "64-32",
        activation: Activation = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(hidden, activation, False, dropout)
        require_range("first", first, 0)
        require("sigma", f"{sigma:g}", "above 0 and at most 1000", 0 < sigma <= 1000)
        self.first = first
        self.frequencies = check_size(frequencies, "frequencies", _MOST_FREQUENCIES)
        self.size = check_size(size, "size", _MOST_FREQUENCIES)
        self.sigma = sigma

    def build(self, shape: Shape, width: int) -> nn.Module:
        if len(shape) != 1 or self.first > shape[0]:
            raise SpecError(
                "bottom 'periodic' takes rows of columns, and embeds at most all of them",
                got=f"rows of shape {shape}, first={self.first}",
                want="(columns,), and first at most that",
                fix="use mlp or cnn for pictures, or give 'first' as many as there are numbers",
            )
        first = self.first or shape[0]
        embedding = PeriodicEmbedding(first, self.frequencies, self.size, self.sigma)
        layers = nn.Sequential(*self.layers(shape[0] + first * self.size, width))
        return _Embedded(embedding, first, layers)
