"""A bottom for tables: periodic functions embed each number before a perceptron mixes them."""

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
    """Returns relu(W_j [sin(2 pi c_j x_j), cos(2 pi c_j x_j)] + b_j) for each number x_j of a row.

    The embedding is "PLR" of Gorishniy, Rubachev and Babenko (2022), section 3.3. The frequencies
    c_j are learned; their initial values are normal with standard deviation sigma. Every column has
    its own weights W_j.

    Args:
        columns: number of columns (numbers) in a row.
        frequencies: number of frequencies for each column.
        size: width of the embedding of one column.
        sigma: standard deviation of the initial frequencies; it assumes columns whose own standard
            deviation is 1.
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
        """Return embeddings, axes (rows, columns * size), of numbers, axes (rows, columns)."""
        angle = 2 * math.pi * self.frequency_weight * rows[:, :, None]
        waves = torch.cat([angle.sin(), angle.cos()], dim=2)
        mixed = torch.einsum("rcf,cfs->rcs", waves, self.weight) + self.bias
        return mixed.relu().flatten(1)


class _Embedded(nn.Module):
    """Concatenates a row and the embeddings of its first columns, as inputs of a perceptron."""

    def __init__(self, embedding: nn.Module, first: int, layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.first, self.layers = embedding, first, layers

    def forward(self, rows: Tensor) -> Tensor:
        embedded = self.embedding(rows[:, : self.first])
        made: Tensor = self.layers(torch.cat([rows, embedded], dim=1))
        return made


class PeriodicBottom(Layers, Bottom):
    """A perceptron over a row and periodic embeddings of its numbers (Gorishniy et al. 2022).

    A perceptron without embeddings learns functions with jumps or bends slowly, whereas trees learn
    them well. Embeddings do not help for columns that contain only zeros and ones. So put a party's
    numeric columns first, and set `first` to the number of these columns.

    Args:
        first: number of columns to embed, counted from the first column; 0 embeds all columns.
        frequencies: number of frequencies for each embedded column.
        size: width of the embedding of one column.
        sigma: standard deviation of the initial frequencies; larger frequencies fit finer details,
            and overfit sooner.
        hidden: sizes of the hidden layers, separated by dashes; "none" gives a single linear layer.
        activation: relu, leaky_relu, gelu, silu, tanh or sigmoid.
        dropout: dropout probability after each hidden activation, from 0 to below 1.

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
