"""Low-rank adapters: a pretrained model learns by two thin matrices beside each frozen one.

Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.registry import MOST_WEIGHT, require_range


class LoRALinear(nn.Module):
    """W x + b + (alpha / rank) B A x, W and b frozen (Hu et al. 2022, eq 3).

    B is zero at first, so that the model begins as it was.

    Args:
        base: the frozen layer.
        rank: rows of A and columns of B.
        alpha: the scale of what is learned.

    >>> layer = LoRALinear(nn.Linear(8, 6), rank=2, alpha=4.0)
    >>> sum(p.numel() for p in layer.parameters() if p.requires_grad)  # 2 * (8 + 6)
    28

    Raises:
        BadOptionError: a rank below 1 or above what the layer has.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        require_range("rank", rank, 1, min(base.in_features, base.out_features))
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        self.base = base.requires_grad_(requires_grad=False)
        self.scale = alpha / rank
        self.a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Axes (..., inputs) in, (..., outputs) out."""
        learned = (x @ self.a.T) @ self.b.T
        found: Tensor = self.base(x) + self.scale * learned
        return found

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One plain layer that computes the same up to rounding."""
        base = self.base
        layer = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
        layer.weight.copy_(base.weight + self.scale * self.b @ self.a)
        if base.bias is not None:
            layer.bias.copy_(base.bias)
        return layer


class LoRAEmbedding(nn.Module):
    """E[x] + (alpha / rank) A[x] B, E frozen; A is zero at first.

    Args:
        base: the frozen embedding.
        rank: columns of A and rows of B.
        alpha: the scale of what is learned.

    >>> words = LoRAEmbedding(nn.Embedding(10, 6), rank=2, alpha=4.0)
    >>> sum(p.numel() for p in words.parameters() if p.requires_grad)  # 2 * (10 + 6)
    32

    Raises:
        BadOptionError: a rank below 1 or above what the embedding has.
    """

    def __init__(self, base: nn.Embedding, rank: int, alpha: float) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = base.num_embeddings, base.embedding_dim
        require_range("rank", rank, 1, min(base.num_embeddings, base.embedding_dim))
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        self.base = base.requires_grad_(requires_grad=False)
        self.scale = alpha / rank
        self.a = nn.Parameter(base.weight.new_zeros(base.num_embeddings, rank))
        self.b = nn.Parameter(base.weight.new_empty(rank, base.embedding_dim).normal_())

    @property
    def weight(self) -> Tensor:
        """All words' vectors, axes (words, tokens)."""
        return self.base.weight + self.scale * self.a @ self.b

    def forward(self, numbers: Tensor) -> Tensor:
        """Axes (...) in, (..., tokens) out."""
        found: Tensor = self.base(numbers) + self.scale * F.embedding(numbers, self.a) @ self.b
        return found


def adapt(module: nn.Module, rank: int, alpha: float) -> nn.Module:
    """The module with every weight frozen and an adapter at each embedding and linear layer.

    >>> layers = adapt(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), 1, 1.0)
    >>> [name for name, each in layers.named_parameters() if each.requires_grad]
    ['0.a', '0.b', '2.a', '2.b']
    """
    module.requires_grad_(requires_grad=False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child, rank, alpha))
            elif isinstance(child, nn.Embedding):
                setattr(parent, name, LoRAEmbedding(child, rank, alpha))
    return module
