"""Low-rank adapters: two small trainable matrices for each frozen weight matrix.

Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1. Frozen weights
may be stored in 8 bits, or in the 4 bits of Dettmers et al. 2023, "QLoRA", section 3.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.registry import MOST_WEIGHT, require_choice, require_range

#: The 16 values of NormalFloat4: quantiles of a normal distribution, including 0, scaled to [-1, 1]
#: (Dettmers et al. 2023, section 3; values from appendix E).
_NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_BLOCK = 64
_WORDS = 4096


class QuantisedLinear(nn.Module):
    """Computes W x + b with a frozen W, stored in blocks of 64 numbers, each with a float32 scale.

    With 8 bits, a stored number is an integer from -127 to 127; with 4 bits, it is a NormalFloat4
    (Dettmers et al. 2023, section 3). Each forward pass converts the stored weights back to
    float32. A weight takes 1.06 bytes (8 bits) or 0.56 bytes (4 bits).

    Args:
        base: the linear layer to store, in float32.
        bits: number of bits for each weight, 8 or 4.

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
        """Return the frozen weights in float32, axes (outputs, inputs)."""
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
        """Return outputs, axes (..., outputs), for inputs, axes (..., inputs)."""
        return F.linear(x, self.weight, self.bias)


class QuantisedEmbedding(nn.Module):
    """Returns rows of a frozen table E, stored in 8 bits, with one float32 scale per 64 numbers.

    A forward pass converts only the vectors of the requested words to float32. A stored number
    takes 1.06 bytes, with its part of the scale.

    Args:
        words: number of words in the table; the vectors of all words are zeros at first.
        width: width of a word's vector.

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
        """Return a quantised copy of an embedding; converts it in pieces to save memory."""
        found = cls(base.num_embeddings, base.embedding_dim).to(base.weight.device)
        for start in range(0, base.num_embeddings, _WORDS):
            found.write(start, base.weight.detach()[start : start + _WORDS])
        return found

    def write(self, start: int, vectors: Tensor) -> None:
        """Set the vectors of words `start`, `start` + 1 and so on; float32, axes (words, width)."""
        end = start + len(vectors)
        padded = F.pad(vectors, (0, self.codes.shape[1] - self.embedding_dim))
        blocks = padded.view(len(vectors), -1, _BLOCK)
        largest = blocks.abs().amax(2)
        scales = torch.where(largest > 0, largest, 1.0) / 127
        self.codes[start:end] = (blocks / scales[..., None]).round().to(torch.int8).flatten(1)
        self.scales[start:end] = scales

    @property
    def weight(self) -> Tensor:
        """Return the vectors of all words in float32, axes (words, width)."""
        return self._restored(self.codes, self.scales)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the vectors, axes (..., width), of words given by number, axes (...)."""
        return self._restored(self.codes[numbers], self.scales[numbers])

    def _restored(self, codes: Tensor, scales: Tensor) -> Tensor:
        blocks = codes.view(*codes.shape[:-1], -1, _BLOCK).to(scales.dtype) * scales[..., None]
        found: Tensor = blocks.flatten(-2)[..., : self.embedding_dim]
        return found


class LoRALinear(nn.Module):
    """Computes W x + b + (alpha / rank) B A x with frozen W and b (Hu et al. 2022, eq 3).

    B is zero at first, so that the adapted layer at first computes the same as the linear layer
    alone.

    Args:
        base: the linear layer to freeze.
        rank: number of rows of A and of columns of B.
        alpha: scale of the adapter's output (see the formula).
        bits: number of bits per frozen weight (4 or 8); 32 keeps float32.

    >>> layer = LoRALinear(nn.Linear(8, 6), rank=2, alpha=4.0)
    >>> sum(p.numel() for p in layer.parameters() if p.requires_grad)  # 2 * (8 + 6)
    28

    Raises:
        BadOptionError: the rank is below 1 or above the layer's largest rank, or `bits` is not 4, 8
            or 32.
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
        """Return outputs, axes (..., outputs), for inputs, axes (..., inputs)."""
        learned = (x @ self.a.T) @ self.b.T
        found: Tensor = self.base(x) + self.scale * learned
        return found

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return a linear layer that computes the same as layer plus adapter, up to rounding."""
        base = self.base
        layer = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
        layer.weight.copy_(base.weight + self.scale * self.b @ self.a)
        if base.bias is not None:
            layer.bias.copy_(base.bias)
        return layer


class LoRAEmbedding(nn.Module):
    """Computes E[x] + (alpha / rank) A[x] B with a frozen table E; A is zero at first.

    Args:
        base: the embedding to freeze.
        rank: number of columns of A and of rows of B.
        alpha: scale of the adapter's output (see the formula).
        bits: number of bits per frozen number of E; 32 keeps float32, and both 8 and 4 mean 8 bits.

    >>> words = LoRAEmbedding(nn.Embedding(10, 6), rank=2, alpha=4.0)
    >>> sum(p.numel() for p in words.parameters() if p.requires_grad)  # 2 * (10 + 6)
    32

    Raises:
        BadOptionError: the rank is below 1, or above the embedding's largest rank.
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
        """Return the vectors of all words, axes (words, width)."""
        return self.base.weight + self.scale * self.a @ self.b

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the vectors, axes (..., width), of words given by number, axes (...)."""
        found: Tensor = self.base(numbers) + self.scale * F.embedding(numbers, self.a) @ self.b
        return found


def adapt(module: nn.Module, rank: int, alpha: float, bits: int = 32) -> nn.Module:
    """Freeze a module's weights, and add an adapter to each embedding and linear layer.

    Args:
        module: module that the function changes in place and returns.
        rank: rank of the adapters' matrices A and B.
        alpha: their scale.
        bits: number of bits per frozen weight: 4, 8 or 32 (float32). With 4 or 8, embeddings have 8
            bits, and a forward pass converts only the vectors of its batch's words to float32.

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
