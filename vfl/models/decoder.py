"""Transformers of plain torch modules: decoders, text encoders and picture encoders.

One class for the architecture of a block covers the published families, from GPT-2 to Gemma 3, BERT
and CLIP. The attributes of `BlockShape` state where norms are, how a token's position enters, and
to which tokens a token attends. `vfl.models.pretrained` reads the published weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vfl.core.errors import BadOptionError
from vfl.core.registry import require_choice, require_range

#: For each name of a GELU activation, the value of torch's argument `approximate`.
APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), an approximation of GELU (Hendrycks & Gimpel 2016, section 2)."""
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


#: For each name of an MLP: its activation, and whether it has a gate (a second linear layer, whose
#: output multiplies the activation).
_MLPS: Mapping[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (F.gelu, False),
    "gelu_tanh": (_gelu_tanh, False),
    "quick_gelu": (quick_gelu, False),
    "relu": (F.relu, False),
    "silu": (F.silu, True),
    "gated_gelu": (F.gelu, True),
    "gated_gelu_tanh": (_gelu_tanh, True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The architecture of a stack of transformer blocks.

    Attributes:
        width: width of a token's vector.
        layers: number of blocks; 0 for a table of word vectors.
        heads: number of attention heads for queries.
        groups: number of attention heads for keys and values; 0 means as many as `heads`, a smaller
            number means grouped-query attention.
        head_width: width of an attention head; 0 means width / heads.
        inner: width of the MLP; 0 means 4 x width.
        positions: "learned" position vectors, or "rotary" positions (Su et al. 2021, eq 34).
        norm: "layer" (Ba et al. 2016) or "rms" (Zhang and Sennrich 2019).
        norms_at: place of the norms: "before" attention and MLP; "after" the residual sum (BERT);
            or "both" before and after attention and MLP (Gemma 2).
        parallel: whether attention and MLP read the same input, and their outputs are added
            (GPT-NeoX).
        head_norm: whether queries and keys are normalised, separately in each head (Qwen 3).
        mlp: the MLP's activation: "gelu", "gelu_tanh" (approximation in GPT-2), "quick_gelu" or
            "relu"; or with a gate (Shazeer 2020), "silu" (SwiGLU), "gated_gelu" or
            "gated_gelu_tanh" (GEGLU).
        bias: whether linear layers have a bias.
        causal: whether a token attends only to itself and earlier tokens.
        epsilon: constant added to the variance in the norms.
        scale: factor by which attention scores are multiplied; 0 means head_width ** -0.5.
        cap: limit c of attention scores s, which become c tanh(s / c) (Gemma 2); 0 sets no limit.
        windows: for each block, the number of tokens to which a token attends, including itself; 0
            means all tokens. An empty sequence means 0 for every block.
        theta: base of the frequencies of rotary positions.
        window_theta: base of the frequencies in blocks with a window; there, positions are not
            stretched (Gemma 3). 0 uses `theta` and `stretch` in these blocks too.
        rotated: share of a head's entries that rotary positions change.
        stretch: factor by which rotary positions are stretched beyond the context length of the
            model's training (Llama 3.1); 1 means no stretch.
        stretch_low, stretch_high: frequencies with at most `stretch_low` periods in the trained
            context are stretched by the whole factor; frequencies with at least `stretch_high`
            periods are not stretched.
        trained: context length with which the model was trained.
        slowed: divisors of the frequencies of rotary positions, one per frequency (YaRN; Peng et
            al. 2023, section 3.2); with an empty sequence, no frequency is divided.
        turn_scale: factor by which the entries that rotary positions change are multiplied (YaRN,
            section 3.4).

    Raises:
        BadOptionError: a size does not divide another size, or an option has an unknown value.
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    groups: int = 0
    head_width: int = 0
    inner: int = 0
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    norms_at: Literal["before", "after", "both"] = "before"
    parallel: bool = False
    head_norm: bool = False
    mlp: str = "gelu"
    bias: bool = True
    causal: bool = True
    epsilon: float = 1e-5
    scale: float = 0.0
    cap: float = 0.0
    windows: tuple[int, ...] = ()
    theta: float = 10000.0
    window_theta: float = 0.0
    rotated: float = 1.0
    stretch: float = 1.0
    stretch_low: float = 1.0
    stretch_high: float = 4.0
    trained: int = 8192
    slowed: tuple[float, ...] = ()
    turn_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("width", "heads"):
            require_range(name, getattr(self, name), 1)
        require_range("layers", self.layers, 0)
        object.__setattr__(self, "groups", self.groups or self.heads)
        object.__setattr__(self, "inner", self.inner or 4 * self.width)
        whole = self.head_width or self.width % self.heads == 0
        object.__setattr__(self, "head_width", self.head_width or self.width // self.heads)
        for name in ("windows", "slowed"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        require_choice("positions", self.positions, ("learned", "rotary"))
        require_choice("norm", self.norm, ("layer", "rms"))
        require_choice("norms_at", self.norms_at, ("before", "after", "both"))
        require_choice("mlp", self.mlp, tuple(_MLPS))
        for name in ("theta", "stretch", "stretch_low"):
            require_range(name, getattr(self, name), 1e-3)
        require_range("stretch_high", self.stretch_high, 1.001 * self.stretch_low)
        even = self.positions == "learned" or self.turned % 2 == 0
        if not whole or self.heads % self.groups or not even:
            raise BadOptionError(
                "width, heads, groups and rotary positions of a transformer do not fit together",
                where="option 'heads'",
                got=f"width {self.width}, heads {self.heads}, groups {self.groups}",
                want="width a multiple of heads, heads of groups; rotary positions turn an even "
                "number of a head's values",
            )
        if len(self.slowed) not in (0, self.turned // 2):
            raise BadOptionError(
                "either all frequencies of rotary positions have divisors, or none",
                where="option 'slowed'",
                got=f"{len(self.slowed)} divisors",
                want=f"{self.turned // 2}",
            )
        if len(self.windows) not in (0, self.layers):
            raise BadOptionError(
                "either all blocks have windows, or none",
                where="option 'windows'",
                got=f"{len(self.windows)} windows",
                want=f"{self.layers}",
            )

    @property
    def queries(self) -> int:
        """Return the total width of all query heads."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Return the total width of all key heads."""
        return self.groups * self.head_width

    @property
    def gated(self) -> bool:
        """Return whether the MLP has a gate."""
        return _MLPS[self.mlp][1]

    @property
    def turned(self) -> int:
        """Return how many first entries of a head rotary positions change."""
        return int(self.head_width * self.rotated)

    def window(self, layer: int) -> int:
        """Return the number of tokens to which a token attends in a block; 0 means all tokens."""
        return self.windows[layer] if self.windows else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape(BlockShape):
    """The architecture of a decoder.

    Attributes:
        vocabulary: number of different tokens.
        context: largest number of tokens in a text.
        tied: whether the head (last layer) uses the embedding's weights.
        embedding_scale: factor by which a token's vector is multiplied (Gemma); the head does not
            use this factor.
        head_cap: limit c of the logits l, which become c tanh(l / c); 0 sets no limit.
        head_bias: whether the head has a bias.

    Raises:
        BadOptionError: see `BlockShape`.
    """

    vocabulary: int
    context: int = 128
    tied: bool = True
    embedding_scale: float = 1.0
    head_cap: float = 0.0
    head_bias: bool = False

    def __post_init__(self) -> None:
        super(DecoderShape, self).__post_init__()
        for name in ("vocabulary", "context", "layers"):
            require_range(name, getattr(self, name), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorShape(BlockShape):
    """The shape of a table of word vectors, without blocks (Mikolov et al. 2013; Pennington 2014).

    Attributes:
        vocabulary: number of different words.
        context: largest number of words in a text; in practice, there is no limit.
    """

    vocabulary: int
    layers: int = 0
    heads: int = 1
    context: int = 1 << 16


@dataclass(slots=True)
class Rotation:
    """Rotary positions: cosines and sines that rotate entries of a head; axes (steps, turned)."""

    cos: Tensor = field(repr=False)
    sin: Tensor = field(repr=False)

    @staticmethod
    def at(start: int, steps: int, shape: BlockShape, layer: int = 0) -> Rotation:
        """Return the rotation of `steps` positions, the first one being `start`; float64."""
        width, theta, stretch = shape.turned, shape.theta, shape.stretch
        slowed, scale = shape.slowed, shape.turn_scale
        if shape.window_theta and shape.window(layer):
            theta, stretch, slowed, scale = shape.window_theta, 1.0, (), 1.0
        speed = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        # A frequency is stretched more if fewer of its periods fit into the context of the
        # training.
        turns = shape.trained * speed / (2 * torch.pi)
        kept = (turns - shape.stretch_low) / (shape.stretch_high - shape.stretch_low)
        speed = speed * (1 / stretch + (1 - 1 / stretch) * kept.clamp(0, 1))
        if slowed:
            speed = speed / torch.tensor(slowed, dtype=torch.float64)
        positions = torch.arange(start, start + steps, dtype=torch.float64)
        angles = (positions[:, None] * speed).repeat(1, 2)
        return Rotation(scale * angles.cos(), scale * angles.sin())

    def turn(self, heads: Tensor) -> Tensor:
        """Return queries or keys after the rotation; axes (..., steps, head width)."""
        cos, sin = self.cos.to(heads), self.sin.to(heads)
        first, rest = heads[..., : cos.shape[1]], heads[..., cos.shape[1] :]
        first = first * cos + half_turn(first) * sin
        return torch.cat([first, rest], -1) if rest.shape[-1] else first


def half_turn(heads: Tensor) -> Tensor:
    """Return (-b, a) for (a, b), where a and b are the two halves of the last axis.

    >>> half_turn(torch.tensor([1, 2, 3, 4])).tolist()
    [-3, -4, 1, 2]
    """
    first, second = heads.chunk(2, -1)
    return torch.cat([-second, first], -1)


@dataclass(slots=True)
class KeyValues:
    """A block's keys and values of earlier tokens; axes (texts, heads, steps, head width)."""

    keys: Tensor | None = field(default=None, repr=False)
    values: Tensor | None = field(default=None, repr=False)

    @property
    def steps(self) -> int:
        """Return the number of stored tokens."""
        return 0 if self.keys is None else self.keys.shape[2]

    def rows(self, rows: Tensor) -> KeyValues:
        """Return keys and values of the selected texts, in this order; texts may repeat."""
        if self.keys is None or self.values is None:
            return KeyValues()
        return KeyValues(self.keys[rows], self.values[rows])

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; return the keys and values of all tokens."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys, self.values = keys, values
        return keys, values


class DecoderLayer(nn.Module):
    """A block: attention and an MLP, each with a norm and a residual connection.

    Args:
        shape: architecture of the stack of blocks.
        index: index of this block in the model.

    Attributes:
        cache: keys and values of earlier tokens; None outside of a `cached` block.
        checkpointed: whether the backward pass repeats the block's forward pass; see
            `checkpointed`.
    """

    cache: KeyValues | None = None
    checkpointed: bool = False

    def __init__(self, shape: BlockShape, index: int = 0) -> None:
        super().__init__()
        self._shape, self._index = shape, index
        width, queries = shape.width, shape.queries
        self.attention_norm = _norm(shape)
        self.attention_in = nn.Linear(width, queries + 2 * shape.keys, bias=shape.bias)
        self.attention_out = nn.Linear(queries, width, bias=shape.bias)
        self.mlp_norm = _norm(shape)
        self.mlp_in = nn.Linear(width, (1 + shape.gated) * shape.inner, bias=shape.bias)
        self.mlp_out = nn.Linear(shape.inner, width, bias=shape.bias)
        if shape.head_norm:
            self.query_norm = _norm(shape, shape.head_width)
            self.key_norm = _norm(shape, shape.head_width)
        if shape.norms_at == "both":
            self.attention_out_norm, self.mlp_out_norm = _norm(shape), _norm(shape)

    def forward(
        self, x: Tensor, cache: KeyValues | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Return the block's output, axes (texts, steps, width).

        Args:
            x: vectors of the tokens, axes (texts, steps, width).
            cache: keys and values of earlier tokens, to which the function appends; None uses the
                block's own `cache`.
            real: mask of axes (texts, steps), False for padding tokens, to which no token attends.
        """
        cache = self.cache if cache is None else cache
        if self.checkpointed and cache is None and torch.is_grad_enabled() and not x.is_meta:
            # A block draws no random numbers, so the repeated forward pass needs no state of a
            # generator.
            found: Tensor = checkpoint(
                self._computed, x, cache, real, use_reentrant=False, preserve_rng_state=False
            )
            return found
        return self._computed(x, cache, real)

    def _computed(self, x: Tensor, cache: KeyValues | None, real: Tensor | None) -> Tensor:
        at = self._shape.norms_at
        if at == "after":
            x = self.attention_norm(x + self.attention(x, cache, real))
            made: Tensor = self.mlp_norm(x + self.mlp(x))
            return made
        found = self.attention(self.attention_norm(x), cache, real)
        if self._shape.parallel:
            return x + found + self.mlp(self.mlp_norm(x))
        x = x + (self.attention_out_norm(found) if at == "both" else found)
        found = self.mlp(self.mlp_norm(x))
        return x + (self.mlp_out_norm(found) if at == "both" else found)

    def attention(
        self, x: Tensor, cache: KeyValues | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Return the attention output of each token; `forward` describes the arguments."""
        shape, (texts, steps, _) = self._shape, x.shape
        start = 0 if cache is None else cache.steps
        parts = self.attention_in(x).split([shape.queries, shape.keys, shape.keys], -1)
        q, k, v = (part.view(texts, steps, -1, shape.head_width).transpose(1, 2) for part in parts)
        if shape.head_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if shape.positions == "rotary":
            turned = Rotation.at(start, steps, shape, self._index)
            q, k = turned.turn(q), turned.turn(k)
        if cache is not None:
            k, v = cache.add(k, v)
        keys_of, values_of = (
            each.repeat_interleave(shape.heads // shape.groups, 1) for each in (k, v)
        )
        mask = self._mask(start, steps, k.shape[2], x.device)
        if real is not None:
            mask = mask & real[:, None, None, :]
        mixed = _attend(q, keys_of, values_of, mask, shape)
        found: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(texts, steps, -1))
        return found

    def mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's output for each token."""
        act, gated = _MLPS[self._shape.mlp]
        inner = self.mlp_in(x)
        if gated:
            gate, up = inner.chunk(2, -1)
            inner = act(gate) * up
        else:
            inner = act(inner)
        found: Tensor = self.mlp_out(inner)
        return found

    def _mask(self, start: int, steps: int, seen: int, device: torch.device) -> Tensor:
        """Return a mask, True where a token may attend to another; axes (steps, seen)."""
        mask = torch.ones(steps, seen, dtype=torch.bool, device=device)
        if self._shape.causal:
            mask = mask.tril(start)
            if window := self._shape.window(self._index):
                mask = mask.triu(start - window + 1)
        return mask


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shape: BlockShape) -> Tensor:
    if not shape.cap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scale or None)
    scores = q @ k.transpose(2, 3) * (shape.scale or shape.head_width**-0.5)
    scores = _capped(scores, shape.cap).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


class _Stack(nn.Module):
    """Base class of decoders and encoders: a stack of blocks that transform token vectors."""

    shape: BlockShape
    layers: nn.ModuleList

    def embedded(self, inputs: Tensor, start: int = 0) -> Tensor:
        """Return the vectors that enter the first block, axes (rows, steps, width)."""
        raise NotImplementedError

    def _through(self, x: Tensor, layers: int, real: Tensor | None = None) -> Tensor:
        for layer in self.layers[:layers]:
            x = layer(x, real=real)
        return x

    def last(self, x: Tensor) -> Tensor:
        """Apply the layers after the last block: the final norm, if the model has one."""
        return x

    def hidden(
        self, inputs: Tensor, layer: int | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states after some blocks, axes (rows, steps, width).

        Args:
            inputs: tokens or pictures of the rows.
            layer: number of blocks to run; 0 returns the embedding, None runs all blocks and the
                final norm.
            real: mask of axes (rows, steps), False for padding tokens. None means that no token is
                padding.

        Raises:
            BadOptionError: the stack has fewer blocks than `layer`.
        """
        most = self.shape.layers
        if layer is not None:
            require_range("layer", layer, 0, most)
        x = self._through(self.embedded(inputs), most if layer is None else layer, real)
        return self.last(x) if layer in (None, most) else x


class Decoder(_Stack):
    """A language model: maps token ids to the logits of the token after each of them.

    Args:
        shape: its architecture.

    >>> model = Decoder(DecoderShape(vocabulary=50, width=32, layers=1))
    >>> model(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 50])
    """

    shape: DecoderShape

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        if shape.positions == "learned":
            self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList([DecoderLayer(shape, each) for each in range(shape.layers)])
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=shape.head_bias)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, axes (texts, steps, vocabulary); in `cached`, `tokens` continue a text.

        Args:
            tokens: token ids, int64, axes (texts, steps).
        """
        first = self.layers[0].cache
        start = first.steps if isinstance(first, KeyValues) else 0
        x = self._through(self.embedded(tokens, start), self.shape.layers)
        return _capped(self.head(self.norm(x)), self.shape.head_cap)

    def embedded(self, inputs: Tensor, start: int = 0) -> Tensor:
        """Return the vectors of tokens, axes (texts, steps, width)."""
        x: Tensor = self.tokens(inputs)
        if self.shape.embedding_scale != 1:
            x = x * self.shape.embedding_scale
        if self.shape.positions == "learned":
            x = x + self.positions(torch.arange(start, start + inputs.shape[1], device=x.device))
        return x

    def last(self, x: Tensor) -> Tensor:
        """Apply the final norm."""
        found: Tensor = self.norm(x)
        return found

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the most probable next tokens; see the function `generate`."""
        return generate(self, prompt, count)


def checkpointed(module: nn.Module) -> nn.Module:
    """Let every block keep only its input for the backward pass, which computes the rest again.

    Gradients are the same bit for bit; a training step computes each block's forward pass twice.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.

    Args:
        module: a model or a part of a model; the function changes its blocks in place.
    """
    for each in module.modules():
        if isinstance(each, DecoderLayer):
            each.checkpointed = True
    return module


@contextmanager
def cached(model: nn.Module) -> Iterator[list[KeyValues]]:
    """Let every block of a model store keys and values, so that each token is processed only once.

    In a split model, the party that runs a block stores the block's keys and values. Yields the
    list of all blocks' caches.
    """
    layers = [each for each in model.modules() if isinstance(each, DecoderLayer)]
    caches = [KeyValues() for _ in layers]
    for layer, cache in zip(layers, caches, strict=True):
        layer.cache = cache
    try:
        yield caches
    finally:
        for layer in layers:
            layer.cache = None


@torch.no_grad()
def generate(model: nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """Return the most probable next tokens, one after another (greedy decoding).

    Args:
        model: a model that maps token ids to logits: a `Decoder`, or a model that `vfl.split` has
            divided between parties.
        prompt: tokens.
        count: number of tokens to generate.
    """
    found: list[int] = []
    device = next(model.parameters()).device
    step = torch.tensor([list(prompt)], device=device)
    with cached(model):
        for _ in range(count):
            found.append(int(model(step)[0, -1].argmax()))
            step = torch.tensor([found[-1:]], device=device)
    return found


class Vectors(_Stack):
    """A table of word vectors, such as GloVe's, without transformer blocks.

    Args:
        shape: its sizes.

    >>> Vectors(VectorShape(vocabulary=9, width=4)).hidden(torch.tensor([[3, 1]])).shape
    torch.Size([1, 2, 4])
    """

    shape: VectorShape

    def __init__(self, shape: VectorShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList()

    def embedded(self, inputs: Tensor, start: int = 0) -> Tensor:
        """Return the vectors of words, axes (texts, steps, width)."""
        found: Tensor = self.tokens(inputs)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape(DecoderShape):
    """The architecture of a text encoder: learned positions, and classes instead of next tokens.

    Attributes:
        segments: largest number of texts in one input, such as 2 for a pair of sentences; 0 means
            no segment vectors.
        classes: number of classes of the head; 0 means no head.
        pooled: activation between the two layers of the head; "tanh" (BERT) or "relu" (DistilBERT).
        padding: id of the padding token; in RoBERTa, the rows of the position table up to this
            number are unused. -1 means that positions do not depend on padding tokens.

    Raises:
        BadOptionError: see `BlockShape`.
    """

    norms_at: Literal["before", "after", "both"] = "after"
    causal: bool = False
    segments: int = 2
    classes: int = 2
    pooled: Literal["tanh", "relu"] = "tanh"
    padding: int = -1

    def __post_init__(self) -> None:
        super(EncoderShape, self).__post_init__()
        for name in ("segments", "classes"):
            require_range(name, getattr(self, name), 0)
        require_choice("positions", self.positions, ("learned",))
        require_choice("pooled", self.pooled, ("tanh", "relu"))


class Encoder(_Stack):
    """BERT for classification (Devlin et al. 2019): maps token ids to logits of the classes.

    Every token attends to all tokens; norms are after the residual sums instead of before each
    block.

    Args:
        shape: its architecture.

    >>> model = Encoder(EncoderShape(vocabulary=50, width=32, layers=1, classes=3))
    >>> model(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3])
    """

    shape: EncoderShape

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        if shape.segments:
            self.segments = nn.Embedding(shape.segments, shape.width)
        self.positions = nn.Embedding(shape.context + (shape.padding >= 0), shape.width)
        self.norm = _norm(shape)
        self.layers = nn.ModuleList([DecoderLayer(shape, each) for each in range(shape.layers)])
        if shape.classes:
            self.pooler = nn.Linear(shape.width, shape.width)
            self.head = nn.Linear(shape.width, shape.classes)

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Return logits, axes (texts, classes); without a head, all hidden states (see `hidden`).

        Args:
            tokens: token ids, int64, axes (texts, steps); the head reads the first token's state.
            segments: segment number of each token, with the axes of `tokens`; None means segment 0.
            real: mask with the axes of `tokens`, False for padding; None means no padding.
        """
        x = self._through(self.embedded(tokens, segments=segments), self.shape.layers, real)
        if not self.shape.classes:
            return x
        pooled = torch.tanh if self.shape.pooled == "tanh" else torch.relu
        logits: Tensor = self.head(pooled(self.pooler(x[:, 0])))
        return logits

    def embedded(self, inputs: Tensor, start: int = 0, segments: Tensor | None = None) -> Tensor:
        """Return the token vectors after the first norm, axes (texts, steps, width)."""
        x = self.tokens(inputs)
        if self.shape.segments:
            x = x + self.segments(torch.zeros_like(inputs) if segments is None else segments)
        places = torch.arange(start, start + inputs.shape[1], device=inputs.device)
        if self.shape.padding >= 0:
            counted = (inputs != self.shape.padding).long()
            places = counted.cumsum(1) * counted
        found: Tensor = self.norm(x + self.positions(places))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureShape(BlockShape):
    """The architecture of a picture encoder (Dosovitskiy et al. 2021, section 3.1).

    Attributes:
        size: height and width of a picture, in pixels.
        patch: height and width of a patch, in pixels; it must divide `size`.
        channels: number of channels of a picture.
        patch_bias: whether the layer that embeds patches adds a bias.
        first_norm: whether a norm precedes the first block (CLIP).
        classes: number of classes of the head; 0 means no head.
        mean, deviation: mean and standard deviation with which the model's training normalised each
            channel of pictures in [0, 1]; the model itself does not normalise its inputs.

    Raises:
        BadOptionError: see `BlockShape`; or the patches do not divide the picture, or a channel has
            no mean or standard deviation.
    """

    causal: bool = False
    size: int = 224
    patch: int = 16
    channels: int = 3
    patch_bias: bool = True
    first_norm: bool = False
    classes: int = 0
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        super(PictureShape, self).__post_init__()
        for name in ("size", "patch", "channels", "layers"):
            require_range(name, getattr(self, name), 1)
        require_range("classes", self.classes, 0)
        for name in ("mean", "deviation"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.size % self.patch or not len(self.mean) == len(self.deviation) == self.channels:
            raise BadOptionError(
                "the patches do not divide the picture evenly, or a channel has no mean",
                where="option 'size'",
                got=f"size {self.size}, patch {self.patch}, {len(self.mean)} means",
                want=f"size a multiple of patch, {self.channels} means and deviations",
            )


class PictureEncoder(_Stack):
    """ViT (Dosovitskiy et al. 2021) and CLIP's picture tower: encoders with patches as tokens.

    Args:
        shape: its architecture.

    >>> shape = PictureShape(size=8, patch=4, width=32, layers=1, classes=10)
    >>> PictureEncoder(shape)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """

    shape: PictureShape

    def __init__(self, shape: PictureShape) -> None:
        super().__init__()
        self.shape = shape
        steps = (shape.size // shape.patch) ** 2 + 1
        self.patches = nn.Conv2d(
            shape.channels, shape.width, shape.patch, shape.patch, bias=shape.patch_bias
        )
        self.first = nn.Parameter(torch.zeros(shape.width))
        self.positions = nn.Embedding(steps, shape.width)
        if shape.first_norm:
            self.first_norm = _norm(shape)
        self.layers = nn.ModuleList([DecoderLayer(shape, each) for each in range(shape.layers)])
        self.norm = _norm(shape)
        if shape.classes:
            self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return logits, axes (pictures, classes); without a head, the first token's final state.

        Args:
            pictures: pictures after normalisation, axes (pictures, channels, size, size).
        """
        x = self.hidden(pictures)[:, 0]
        return self.head(x) if self.shape.classes else x

    def embedded(self, inputs: Tensor, start: int = 0) -> Tensor:
        """Return vectors of the first token and all patches, axes (pictures, steps, width)."""
        patches = self.patches(inputs).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(inputs), 1, -1), patches], 1) + self.positions.weight
        return self.first_norm(x) if self.shape.first_norm else x

    def last(self, x: Tensor) -> Tensor:
        """Apply the final norm."""
        found: Tensor = self.norm(x)
        return found


def _norm(shape: BlockShape, width: int = 0) -> nn.Module:
    kind = nn.LayerNorm if shape.norm == "layer" else nn.RMSNorm
    return kind(width or shape.width, eps=shape.epsilon)
