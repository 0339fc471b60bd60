"""Transformers of plain torch modules, whose every part can be computed on shares.

A decoder has the parts of GPT-2 (learned positions, LayerNorm, GELU) and of LLaMA (rotary
positions, RMSNorm, gated SiLU, grouped-query attention), chosen one by one; a classifier is BERT's
encoder. `vfl.mpc.private` takes both, `vfl.llm.pretrained` reads weights of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.errors import BadOptionError
from vfl.core.registry import require_choice, require_range

Cache = list[tuple[Tensor, Tensor]]
#: Of GELU, as torch names them.
APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The architecture.

    Attributes:
        vocabulary: tokens.
        width: of a token's vector.
        layers: how many.
        heads: of queries; each has width / heads numbers.
        groups: heads of keys and values; fewer than `heads` is grouped-query attention.
        inner: width of the MLP.
        context: the longest text.
        positions: "learned" vectors, or "rotary" (Su et al. 2021, eq 34).
        norm: "layer" (Ba et al. 2016) or "rms" (Zhang and Sennrich 2019).
        mlp: "gelu", "gelu_tanh" (its approximation, of GPT-2), or "silu" with a gate (Shazeer 2020,
            SwiGLU).
        tied: whether the head's weights are the embedding's.
        bias: whether linear layers have one.
        epsilon: of the norms.
        theta: base of rotary positions.
        stretch: of rotary positions beyond the context of the training (Llama 3.1); 1 is none.
        stretch_low, stretch_high: wavelengths longer than trained / low are stretched whole,
            shorter than trained / high not at all.
        trained: the context of the training.

    Raises:
        BadOptionError: sizes that do not divide one another, or a part of another name.
    """

    vocabulary: int
    width: int = 64
    layers: int = 2
    heads: int = 4
    groups: int = 0
    inner: int = 0
    context: int = 128
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    mlp: Literal["gelu", "gelu_tanh", "silu"] = "gelu"
    tied: bool = True
    bias: bool = True
    epsilon: float = 1e-5
    theta: float = 10000.0
    stretch: float = 1.0
    stretch_low: float = 1.0
    stretch_high: float = 4.0
    trained: int = 8192

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "context"):
            require_range(name, getattr(self, name), 1)
        object.__setattr__(self, "groups", self.groups or self.heads)
        object.__setattr__(self, "inner", self.inner or 4 * self.width)
        require_choice("positions", self.positions, ("learned", "rotary"))
        require_choice("norm", self.norm, ("layer", "rms"))
        require_choice("mlp", self.mlp, ("gelu", "gelu_tanh", "silu"))
        for name in ("theta", "stretch", "stretch_low"):
            require_range(name, getattr(self, name), 1e-3)
        require_range("stretch_high", self.stretch_high, 1.001 * self.stretch_low)
        even = self.positions == "learned" or self.head_width % 2 == 0
        if self.width % self.heads or self.heads % self.groups or not even:
            raise BadOptionError(
                "the heads do not divide the width, or the groups the heads",
                where="option 'heads'",
                got=f"width {self.width}, heads {self.heads}, groups {self.groups}",
                want="width a multiple of heads, heads of groups; rotary needs even heads",
            )

    @property
    def head_width(self) -> int:
        """Numbers of a head."""
        return self.width // self.heads

    @property
    def causal(self) -> bool:
        """Whether a token looks at those before it only."""
        return True


@dataclass(slots=True)
class Rotation:
    """Rotary positions: what a head's two halves are multiplied with; axes (steps, head width)."""

    cos: Tensor = field(repr=False)
    sin: Tensor = field(repr=False)

    @staticmethod
    def at(start: int, steps: int, shape: DecoderShape) -> Rotation:
        """Of so many positions from `start` on; float64."""
        width = shape.head_width
        speed = shape.theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        # Turns within the trained context say how much of a wave it holds.
        turns = shape.trained * speed / (2 * torch.pi)
        kept = (turns - shape.stretch_low) / (shape.stretch_high - shape.stretch_low)
        speed = speed * (1 / shape.stretch + (1 - 1 / shape.stretch) * kept.clamp(0, 1))
        positions = torch.arange(start, start + steps, dtype=torch.float64)
        angles = (positions[:, None] * speed).repeat(1, 2)
        return Rotation(angles.cos(), angles.sin())


def half_turn(heads: Tensor) -> Tensor:
    """(a, b) becomes (-b, a), a and b the halves of the last axis.

    >>> half_turn(torch.tensor([1, 2, 3, 4])).tolist()
    [-3, -4, 1, 2]
    """
    first, second = heads.chunk(2, -1)
    return torch.cat([-second, first], -1)


class DecoderLayer(nn.Module):
    """Attention and an MLP, each behind a norm and added to what came in."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self._shape = shape
        width, keys = shape.width, shape.groups * shape.head_width
        gated = 2 if shape.mlp == "silu" else 1
        self.attention_norm = _norm(shape)
        self.attention_in = nn.Linear(width, width + 2 * keys, bias=shape.bias)
        self.attention_out = nn.Linear(width, width, bias=shape.bias)
        self.mlp_norm = _norm(shape)
        self.mlp_in = nn.Linear(width, gated * shape.inner, bias=shape.bias)
        self.mlp_out = nn.Linear(shape.inner, width, bias=shape.bias)

    def forward(
        self, x: Tensor, start: int, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Axes (texts, steps, width); and keys and values of all steps so far."""
        found, kept = self.attention(self.attention_norm(x), start, before)
        x = x + found
        return x + self.mlp(self.mlp_norm(x)), kept

    def attention(
        self, x: Tensor, start: int, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What each step takes from those it looks at; as `forward`."""
        shape, (texts, steps, _) = self._shape, x.shape
        keys = shape.groups * shape.head_width
        parts = self.attention_in(x).split([shape.width, keys, keys], -1)
        q, k, v = (part.view(texts, steps, -1, shape.head_width).transpose(1, 2) for part in parts)
        if shape.positions == "rotary":
            turned = Rotation.at(start, steps, shape)
            cos, sin = turned.cos.to(x), turned.sin.to(x)
            q, k = (each * cos + half_turn(each) * sin for each in (q, k))
        if before is not None:
            k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
        seen = torch.ones(steps, k.shape[2], dtype=torch.bool, device=x.device)
        keys_of, values_of = (
            each.repeat_interleave(shape.heads // shape.groups, 1) for each in (k, v)
        )
        mask = seen.tril(start) if shape.causal else seen
        found = F.scaled_dot_product_attention(q, keys_of, values_of, attn_mask=mask)
        return self.attention_out(found.transpose(1, 2).reshape(texts, steps, -1)), (k, v)

    def mlp(self, x: Tensor) -> Tensor:
        """What each step makes of itself."""
        inner = self.mlp_in(x)
        if self._shape.mlp == "silu":
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate=APPROXIMATIONS[self._shape.mlp])
        found: Tensor = self.mlp_out(inner)
        return found


class Decoder(nn.Module):
    """The model: token ids in, logits of the next token after each out.

    Args:
        shape: its architecture.

    >>> model = Decoder(DecoderShape(vocabulary=50, width=32, layers=1))
    >>> model(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 50])
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        if shape.positions == "learned":
            self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList([DecoderLayer(shape) for _ in range(shape.layers)])
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits, axes (texts, steps, vocabulary).

        Args:
            tokens: int64, axes (texts, steps).
            cache: of a layer each: keys and values so far; empty at first, changed in place.
        """
        cache = [] if cache is None else cache
        start = cache[0][0].shape[2] if cache else 0
        x = self.tokens(tokens)
        if self.shape.positions == "learned":
            x = x + self.positions(torch.arange(start, start + tokens.shape[1], device=x.device))
        for index, layer in enumerate(self.layers):
            before = cache[index] if index < len(cache) else None
            x, kept = layer(x, start, before)
            cache[index : index + 1] = [kept]
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most probable next tokens, one after the other (greedy decoding)."""
        cache: Cache = []
        found: list[int] = []
        step = torch.tensor([list(prompt)])
        for _ in range(count):
            found.append(int(self(step, cache)[0, -1].argmax()))
            step = torch.tensor([found[-1:]])
        return found


@dataclass(frozen=True, slots=True)
class EncoderShape(DecoderShape):
    """The architecture of a classifier; positions are learned, and there is no head of tokens.

    Attributes:
        segments: texts that may stand in one question, such as a pair of sentences.
        classes: it tells apart.
    """

    segments: int = 2
    classes: int = 2

    @property
    def causal(self) -> bool:
        """False: every token looks at all."""
        return False

    def __post_init__(self) -> None:
        super(EncoderShape, self).__post_init__()
        for name in ("segments", "classes"):
            require_range(name, getattr(self, name), 1)
        require_choice("positions", self.positions, ("learned",))


class Encoder(nn.Module):
    """BERT for classification (Devlin et al. 2019): token ids in, logits of the classes out.

    Every step looks at all others, and a norm stands behind what it adds up, not before.

    Args:
        shape: its architecture.

    >>> model = Encoder(EncoderShape(vocabulary=50, width=32, layers=1, classes=3))
    >>> model(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3])
    """

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.segments = nn.Embedding(shape.segments, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.norm = _norm(shape)
        self.layers = nn.ModuleList([DecoderLayer(shape) for _ in range(shape.layers)])
        self.pooler = nn.Linear(shape.width, shape.width)
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Logits, axes (texts, classes).

        Args:
            tokens: int64, axes (texts, steps); the first is the one that is classified.
            segments: of each token, likewise; zeros if not given.
        """
        segments = torch.zeros_like(tokens) if segments is None else segments
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.norm(self.tokens(tokens) + self.segments(segments) + positions)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer), "made above"
            x = layer.attention_norm(x + layer.attention(x, 0, None)[0])
            x = layer.mlp_norm(x + layer.mlp(x))
        logits: Tensor = self.head(torch.tanh(self.pooler(x[:, 0])))
        return logits


def _norm(shape: DecoderShape) -> nn.Module:
    kind = nn.LayerNorm if shape.norm == "layer" else nn.RMSNorm
    return kind(shape.width, eps=shape.epsilon)
