"""Low-rank adapters: two thin trainable matrices beside each frozen one.

Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1. Frozen weights
may have 8 bits or the 4 bits of Dettmers et al. 2023, "QLoRA", section 3.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.registry import MOST_WEIGHT, require_choice, require_range

#: NormalFloat4: quantiles of a normal distribution including 0, scaled to [-1, 1] (Dettmers et al.
#: 2023, section 3, and the values of its appendix E).
_NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_BLOCK = 64
_WORDS = 4096


class QuantisedLinear(nn.Module):
    """W x + b, W frozen in blocks of 64 numbers with a float32 scale each.

    8 bits are integers from -127 to 127, 4 bits are NormalFloat4 (Dettmers et al. 2023, section 3).
    Weights become float32 again when they are used. A weight takes 1.06 or .56 bytes.

    Args:
        base: the layer in float32.
        bits: 8 or 4.

    Raises:
        BadOptionError: other bits.

    >>> layer = QuantisedLinear(nn.Linear(64, 8), bits=4)
    >>> sum(b.numel() * b.element_size() for b in layer.buffers() if b.dim() < 3)  # 256 + 8 x 4
    288
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, base: nn.Linear, bits: int) -> None:
        super().__init__()
        require_choice("bits", str(bits), ("8", "4"))
        self.bits, self.in_features, self.out_features = bits, base.in_features, base.out_features
        self.bias = base.bias
        flat = F.pad(base.weight.detach().flatten(), (0, -base.weight.numel() % _BLOCK))
        blocks = flat.view(-1, _BLOCK)
        largest = blocks.abs().amax(1)
        scales = torch.where(largest > 0, largest, 1.0)
        if bits == 8:
            codes = (blocks / scales[:, None] * 127).round().to(torch.int8)
            scales = scales / 127
        else:
            levels = blocks.new_tensor(_NORMAL_FLOAT)
            middles = (levels[1:] + levels[:-1]) / 2
            whole = torch.bucketize(blocks / scales[:, None], middles)
            codes = (whole[:, ::2] * 16 + whole[:, 1::2]).to(torch.uint8)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @property
    def weight(self) -> Tensor:
        """The frozen weights in float32, axes (outputs, inputs)."""
        if self.bits == 8:
            blocks = self.codes.float()
        else:
            levels = self.scales.new_tensor(_NORMAL_FLOAT)
            pairs = torch.stack([self.codes // 16, self.codes % 16], 2)
            blocks = levels[pairs.flatten(1).long()]
        flat = (blocks * self.scales[:, None]).flatten()
        size = self.out_features * self.in_features
        return flat[:size].view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """Axes (..., inputs) in, (..., outputs) out."""
        return F.linear(x, self.weight, self.bias)


class QuantisedEmbedding(nn.Module):
    """E[x], E frozen with 8 bits a number and a float32 scale for every 64 numbers of a word.

    A pass converts only the requested words to float32; a number takes 1.06 bytes.

    Args:
        words: number of words in the table; vectors are zeros at first.
        width: numbers of a word.

    >>> words = QuantisedEmbedding(10, 64)
    >>> sum(b.numel() * b.element_size() for b in words.buffers())  # 10 x (64 + 4)
    680
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = words, width
        blocks = -(-width // _BLOCK)
        self.register_buffer("codes", torch.zeros(words, blocks * _BLOCK, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(words, blocks))

    @classmethod
    def of(cls, base: nn.Embedding) -> QuantisedEmbedding:
        """Yield an embedding's table a few words at a time, so that no second copy exists."""
        found = cls(base.num_embeddings, base.embedding_dim).to(base.weight.device)
        for start in range(0, base.num_embeddings, _WORDS):
            found.write(start, base.weight.detach()[start : start + _WORDS])
        return found

    def write(self, start: int, vectors: Tensor) -> None:
        """Set words from number `start` on; axes (words, width), float32."""
        end = start + len(vectors)
        padded = F.pad(vectors, (0, self.codes.shape[1] - self.embedding_dim))
        blocks = padded.view(len(vectors), -1, _BLOCK)
        largest = blocks.abs().amax(2)
        scales = torch.where(largest > 0, largest, 1.0) / 127
        self.codes[start:end] = (blocks / scales[..., None]).round().to(torch.int8).flatten(1)
        self.scales[start:end] = scales

    @property
    def weight(self) -> Tensor:
        """All words' vectors in float32, axes (words, tokens)."""
        return self._restored(self.codes, self.scales)

    def forward(self, numbers: Tensor) -> Tensor:
        """Axes (...) in, (..., tokens) out."""
        return self._restored(self.codes[numbers], self.scales[numbers])

    def _restored(self, codes: Tensor, scales: Tensor) -> Tensor:
        blocks = codes.view(*codes.shape[:-1], -1, _BLOCK).to(scales.dtype) * scales[..., None]
        found: Tensor = blocks.flatten(-2)[..., : self.embedding_dim]
        return found


class LoRALinear(nn.Module):
    """W x + b + (alpha / rank) B A x, W and b frozen (Hu et al. 2022, eq 3).

    B is initially zero, so that the model first computes the same as before.

    Args:
        base: the frozen layer.
        rank: rows of A and columns of B.
        alpha: scale of the learned part.
        bits: bits of the frozen weights; 32 does not change them.

    >>> layer = LoRALinear(nn.Linear(8, 6), rank=2, alpha=4.0)
    >>> sum(p.numel() for p in layer.parameters() if p.requires_grad)  # 2 * (8 + 6)
    28

    Raises:
        BadOptionError: a rank below 1 or above what the layer has; bits that are not 4, 8 or 32.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, bits: int = 32) -> None:
        super().__init__()
        require_range("rank", rank, 1, min(base.in_features, base.out_features))
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        frozen = base.requires_grad_(requires_grad=False)
        self.base = frozen if bits == 32 else QuantisedLinear(frozen, bits)
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
        bits: bits of a frozen vector; 32 keeps float32, and both 8 and 4 mean 8.

    >>> words = LoRAEmbedding(nn.Embedding(10, 6), rank=2, alpha=4.0)
    >>> sum(p.numel() for p in words.parameters() if p.requires_grad)  # 2 * (10 + 6)
    32

    Raises:
        BadOptionError: the rank is below 1, or above the embedding's rank.
    """

    def __init__(
        self, base: nn.Embedding | QuantisedEmbedding, rank: int, alpha: float, bits: int = 32
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = base.num_embeddings, base.embedding_dim
        require_range("rank", rank, 1, min(base.num_embeddings, base.embedding_dim))
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        require_choice("bits", str(bits), ("32", "8", "4"))
        base.requires_grad_(requires_grad=False)
        if bits != 32 and isinstance(base, nn.Embedding):
            base = QuantisedEmbedding.of(base)
        self.base = base
        self.scale = alpha / rank
        of = base.scales if isinstance(base, QuantisedEmbedding) else base.weight
        self.a = nn.Parameter(of.new_zeros(base.num_embeddings, rank))
        self.b = nn.Parameter(of.new_empty(rank, base.embedding_dim).normal_())

    @property
    def weight(self) -> Tensor:
        """All words' vectors, axes (words, tokens)."""
        return self.base.weight + self.scale * self.a @ self.b

    def forward(self, numbers: Tensor) -> Tensor:
        """Axes (...) in, (..., tokens) out."""
        found: Tensor = self.base(numbers) + self.scale * F.embedding(numbers, self.a) @ self.b
        return found


def adapt(module: nn.Module, rank: int, alpha: float, bits: int = 32) -> nn.Module:
    """The module with every weight frozen and an adapter at each embedding and linear layer.

    Args:
        module: module that is changed in place.
        rank: rank of the adapters.
        alpha: their scale.
        bits: bits of the frozen weights, 4, 8 or 32. With 4 or 8, embeddings have 8 bits, and a
            pass restores only the words of its batch.

    >>> layers = adapt(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), 1, 1.0)
    >>> [name for name, each in layers.named_parameters() if each.requires_grad]
    ['0.a', '0.b', '2.a', '2.b']
    """
    module.requires_grad_(requires_grad=False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child, rank, alpha, bits))
            elif isinstance(child, nn.Embedding | QuantisedEmbedding):
                setattr(parent, name, LoRAEmbedding(child, rank, alpha, bits))
    return module
