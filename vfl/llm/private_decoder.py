"""Transformers on shares: the owner sees no text; only secret permutations hide weights from users.

The values that the user (P1) sees in every layer are permuted, and known attacks on permuted values
apply: see docs/mpc.md. By asking many questions, the user may also compute a layer's weights; this
module does not count questions.

P0 (the owner) has the weights, P1 (the user) has the text, and P2 (the dealer) deals randomness
before the question; the protocols are those of `vfl.llm.two_party`. P1 computes norm layers and
functions on permuted values, so the weights of a norm layer are merged into the next linear layer
and stay with P0. All three parties know the architecture and the length of a text.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.errors import DataError, ProtocolError, ReusedPadError
from vfl.core.registry import require_range
from vfl.core.seeds import generator
from vfl.core.storage import weights_digest
from vfl.llm.material import MaterialStore, kind_in, new_name
from vfl.llm.shared_softmax import SharingRole
from vfl.llm.two_party import Form, Function, Growing, LocalRoles, Pick, Role, Shared
from vfl.llm.weights import Constant, LayerShape
from vfl.models.decoder import (
    APPROXIMATIONS,
    Decoder,
    DecoderLayer,
    DecoderShape,
    Encoder,
    EncoderShape,
    Rotation,
    half_turn,
)
from vfl.mpc.channel import Leak, Traffic
from vfl.mpc.ring import batched
from vfl.mpc.rules import NAMES, P0, P1, P2, Mode

_Model = TypeVar("_Model", Decoder, Encoder)
_Result = TypeVar("_Result")

#: Bits that a ring has in addition to the bits of a value: one for the sign, and one to detect that
#: a value wrapped around.
_GUARD = 2
#: Fraction bits of a sum between layers: those of an activation plus those of a weight
#: (`_normed_bits`).
_SUM = 24
#: Fraction bits in attention: of the linear layer's outputs; of queries, keys and values, which
#: have fewer bits; of the factors of rotary positions. The next line of code has the fraction bits
#: of a probability, and those of the weighted mean of values before the next linear layer. A score
#: has the fraction bits of a query plus those of a key. The ring of a norm layer's outputs must
#: also hold all low bits that are dropped before the next sum.
_ATTENTION, _QUERY, _KEY, _VALUE, _TURN = 23, 12, 8, 10, 12
_PROBABILITY, _MIXED, _MIXED_WEIGHT = 12, 12, 12
_MIXED_DROP = _VALUE + _PROBABILITY - _MIXED
_ATTENTION_RING = _ATTENTION - _VALUE + _MIXED_DROP
#: Fraction bits in the last layers, which run once per token: of the layers' inputs and of their
#: weights. A head with the same weights as the embedding uses the same shares as the embedding. If
#: the head uses these shares, the last norm's weights cannot be merged: they are multiplied before
#: the head, and the head's input is rounded again.
_LAST, _LAST_WEIGHT = 14, 16
_TIED, _TIED_WEIGHT, _GAIN = 12, 18, 12
#: Fraction bits of a value that P1 sees before P1 computes a function of it. Word vectors need more
#: bits, because their values are small until a layer has added to them (Llama 2: 0.02), and the
#: first norm layer enlarges values and errors together.
_SEEN, _WORDS_SEEN, _SCORE_SEEN = 11, 16, 14

#: P1's function that receives a text's number and its next token, and returns True to end this
#: text's answer.
OnToken = Callable[[int, int], bool]


def has_token(shape: DecoderShape, token: int) -> bool:
    """Return whether a question may contain a token; it may not contain the padding token."""
    return 0 <= token < shape.vocabulary and token != getattr(shape, "padding", -1)


def greedy(scores: Tensor) -> int:
    """Return the position of the largest score: greedy choice of a token."""
    return int(scores.argmax())


class Sampling:
    """A `Pick` that draws a token by temperature, among the k best tokens with total probability p.

    The drawn token depends on the seed and on the scores, never on the order in which the scores
    arrive.

    Args:
        temperature: divisor of the scores; below 1, likely tokens are drawn more often.
        top_k: number of most probable tokens from which to draw; 0 means all tokens.
        top_p: total probability of the tokens from which to draw: the fewest most probable tokens
            that reach it (Holtzman et al. 2020).
        seed: seed of the draws; each token takes one draw.

    Raises:
        BadOptionError: a number is out of range.

    >>> Sampling(temperature=0.7, top_k=1)(torch.tensor([0.3, 2.0, -1.0]))
    1
    """

    def __init__(
        self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0
    ) -> None:
        require_range("temperature", temperature, 1e-3)
        require_range("top_k", top_k, 0)
        require_range("top_p", top_p, 1e-6, 1)
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._draws = generator(seed, "next token")

    def __call__(self, scores: Tensor) -> int:
        """Return the position of the drawn score."""
        best, positions = scores.double().sort(descending=True)
        best = best[: self._top_k or None] / self._temperature
        chances = torch.softmax(best, -1)
        before = chances.cumsum(-1) - chances
        chances = chances[before < self._top_p]
        drawn = float(torch.rand(1, generator=self._draws, dtype=torch.float64))
        rank = torch.searchsorted(chances.cumsum(-1), drawn * float(chances.sum()), right=True)
        return int(positions[min(int(rank), len(chances) - 1)])


def scores_of(keys: Tensor, queries: Tensor) -> Tensor:
    """Multiply every query by every key.

    The axes are (groups, keys, width) and (heads, steps, width).
    """
    return batched(queries, _for_each(keys, queries).transpose(1, 2))


def mixture(values: Tensor, shares: Tensor) -> Tensor:
    """Return the mean of `values`, weighted by `shares` (probabilities).

    The axes are (groups, keys, width) and (heads, steps, keys).
    """
    return batched(shares, _for_each(values, shares))


def _for_each(groups: Tensor, heads: Tensor) -> Tensor:
    """Return, for each attention head, the tensor of the group to which the head belongs."""
    each = len(heads) // len(groups)
    return groups if each == 1 else groups.repeat_interleave(each, 0)


def gated_silu(pairs: Tensor) -> Tensor:
    """Return gated SiLU of a pair, axes (2, elements); the gates are first."""
    return F.silu(pairs[0]) * pairs[1]


def softmax(rows: Tensor, bits: int = _PROBABILITY) -> Tensor:
    """Return the softmax of each row, rounded to multiples of 2^-bits.

    The cumulative sums are rounded, so that the sum of many small probabilities does not vanish.
    """
    whole = torch.softmax(rows, -1).cumsum(-1).mul_(2.0**bits).round_()
    return torch.diff(whole, dim=-1, prepend=torch.zeros_like(whole[..., :1])).mul_(2.0**-bits)


@dataclass(slots=True)
class PrivateLayers:
    """One party's part of a transformer with shared weights.

    All three parties run its methods.

    Attributes:
        shape: the architecture.
        constants: the linear layers with shared weights, by name.
        positions: at P0, the vectors of learned positions, float64, axes (context, width); None
            elsewhere, and for other kinds of positions.
    """

    shape: DecoderShape
    constants: Mapping[str, Constant]
    positions: Tensor | None = None

    @classmethod
    def share(
        cls,
        party: Role,
        shape: DecoderShape,
        model: Decoder | Encoder | None,
        keep: Callable[[Constant], Constant] = lambda constant: constant,
    ) -> Self:
        """Share the weights layer by layer; the parties do this once per set of weights.

        Args:
            party: this party.
            shape: the architecture.
            model: the model at P0; None at other parties.
            keep: function that stores this party's part of each layer, and returns the part in the
                form that answers use.

        Raises:
            RingRangeError: a weight is too large; the error names its layer.
        """
        constants = {}
        for layer in layer_shapes(shape, party.form):
            own = () if model is None else linear_layer(model, layer.name)
            constants[layer.name] = keep(party.constant(layer, *own))
        learned = model is not None and shape.positions == "learned"
        positions = (
            model.positions.weight.detach().double()[-shape.context :]
            if model is not None and learned
            else None
        )
        return cls(shape, constants, positions)

    def answer(
        self,
        party: Role,
        prompts: Sequence[Sequence[int]],
        count: int,
        pick: Pick | None = None,
        on_token: OnToken = lambda text, token: False,
        goes_on: Callable[[bool], bool] = lambda going: True,
    ) -> list[list[int]]:
        """Return all tokens of the answers at P1 (the user), and zeros at the other parties.

        Args:
            party: this party.
            prompts: at P1, the tokens of questions of one length; at the other parties, as many
                zeros.
            count: largest number of tokens of an answer.
            pick: P1's function that picks tokens.
            on_token: P1's function that receives each token.
            goes_on: function that each party calls before each further token with its wish to
                continue; it returns the common decision.
        """
        caches = [(Growing(), Growing()) for _ in range(self.shape.layers)]
        found: list[list[int]] = [[] for _ in prompts]
        step, start, going = prompts, 0, [True] * len(prompts)
        for done in range(count):
            if done and not goes_on(any(going)):
                break
            tokens = self.next_tokens(party, step, start, caches, pick)
            for text, token in enumerate(tokens):
                if going[text]:
                    found[text].append(token)
                    going[text] = not on_token(text, token)
            start, step = start + len(step[0]), [[token] for token in tokens]
        return found

    def next_tokens(
        self,
        party: Role,
        texts: Sequence[Sequence[int]],
        start: int,
        caches: Sequence[tuple[Growing, Growing]],
        pick: Pick | None,
    ) -> list[int]:
        """Return each text's next token at P1, and zeros at the other parties.

        Parties other than P1 use only the number and the length of the texts.

        Raises:
            ProtocolError: P0 answered with a token that the model lacks.
        """
        count, steps = len(texts), len(texts[0])
        tokens = torch.tensor([token for text in texts for token in text])
        x = self._embedded(party, F.one_hot(tokens, self.shape.vocabulary), start, count)
        for index in range(self.shape.layers):
            x = self.layer(party, index, x, start, caches[index], count)
        x = x.map(lambda share: share[steps - 1 :: steps])
        scores = self._scores(party, x)
        chosen = party.choose(scores, pick, shown=_SCORE_SEEN)
        if not all(0 <= token < self.shape.vocabulary for token in chosen):
            raise ProtocolError(
                "the model owner answered with a token that the model lacks",
                want=f"each from 0 to {self.shape.vocabulary - 1}",
                fix="ask another owner: this one does not follow the protocol",
            )
        return chosen

    def _scores(self, party: Role, x: Shared) -> Shared:
        """Return the scores of all tokens from each text's vector, axes (texts, vocabulary)."""
        ring = _head_ring(party.form)
        if not is_tied(self.shape):
            last = self._normed(party, x, "norm", ring, _LAST)
            return party.multiply(last, self.constants["head"])
        last = self._normed(party, x, "norm", ring + _LAST + _GAIN - _TIED, _LAST)
        last = party.scale(last, self.constants["norm"])
        last = last.dropped(last.bits - _TIED)
        return party.multiply(last, self.constants["tokens"].transposed())

    def classify(self, party: Role, tokens: Sequence[int], segments: Sequence[int]) -> Tensor:
        """Return a text's class logits at P1, and zeros at other parties; only for encoders."""
        shape, ring = self.shape, _sum_ring(party.form)
        assert isinstance(shape, EncoderShape), "a classifier's"
        one_hot = torch.cat(
            [
                F.one_hot(torch.tensor(tokens), shape.vocabulary),
                F.one_hot(torch.tensor(segments), shape.segments),
            ],
            -1,
        )
        x = self._embedded(party, one_hot, 0, 1)
        normed = self._normed(party, x, "norm", ring + _ATTENTION_RING, shown=_WORDS_SEEN)
        for index in range(shape.layers):
            name, last = f"layers.{index}", index + 1 == shape.layers
            mixed = self._attention(party, name, normed, 0, (Growing(), Growing()), 1)
            x = self._skipped(party, f"{name}.attention", normed.within(ring)).plus(mixed)
            if last:  # the classifier uses only the output at the first token
                x = x.map(lambda share: share[:1])
            normed = self._normed(party, x, f"{name}.attention_norm", ring)
            x = self._skipped(party, f"{name}.mlp", normed).plus(self._mlp(party, name, normed))
            ring_next = ring if last else ring + _ATTENTION_RING
            normed = self._normed(party, x, f"{name}.mlp_norm", ring_next)
        pooled = party.multiply(normed, self.constants["pooler"])
        ring = _head_ring(party.form)
        found = party.apply(pooled, torch.tanh, _LAST, ring, "pooler", "elements")
        logits = party.show_all(party.multiply(found, self.constants["head"]), "classes")
        return torch.zeros(1, shape.classes) if logits is None else logits

    def layer(
        self,
        party: Role,
        index: int,
        x: Shared,
        start: int,
        caches: tuple[Growing, Growing],
        texts: int = 1,
    ) -> Shared:
        """Compute one layer for some new tokens; the result has the axes (texts * steps, width)."""
        name, ring = f"layers.{index}", _sum_ring(party.form)
        shown, wide = _SEEN if index else _WORDS_SEEN, ring + _ATTENTION_RING
        normed = self._normed(party, x, f"{name}.attention_norm", wide, shown=shown)
        x = x.plus(self._attention(party, name, normed, start, caches, texts))
        normed = self._normed(party, x, f"{name}.mlp_norm", _inner_ring(party.form))
        return x.plus(self._mlp(party, name, normed))

    def _embedded(self, party: Role, one_hot: Tensor, start: int, texts: int) -> Shared:
        tokens = self.constants["tokens"]
        ring = _sum_ring(party.form) - (_SUM - tokens.layer.bits)
        x = party.question(one_hot.shape, one_hot.double(), 0, ring, "tokens")
        x = party.multiply(x, tokens).finer(_SUM)
        own = self.positions
        steps = len(one_hot) // texts
        return party.plus_own(
            x, None if own is None else own[start : start + steps].repeat(texts, 1)
        )

    def _normed(
        self, party: Role, x: Shared, where: str, ring: int, bits: int = 0, shown: int = _SEEN
    ) -> Shared:
        norm = F.layer_norm if self.shape.norm == "layer" else F.rms_norm
        width, epsilon = self.shape.width, self.shape.epsilon
        function = partial(norm, normalized_shape=(width,), eps=epsilon)
        bits = bits or _normed_bits(width)
        return party.apply(x, function, bits, ring, where, "vectors", shown)

    def _skipped(self, party: Role, name: str, normed: Shared) -> Shared:
        """Return the input of a residual connection in an encoder's layer.

        This input is the output of a norm layer, with the norm layer's weights.
        """
        return party.scale(normed, self.constants[f"{name}_skip"])

    def _mlp(self, party: Role, name: str, normed: Shared) -> Shared:
        kind, ring = self.shape.mlp, _sum_ring(party.form)
        normed = normed.within(_inner_ring(party.form))
        inner = party.multiply(normed, self.constants[f"{name}.mlp_in"])
        function: Function = gated_silu
        rows, width = inner.share.shape
        if kind == "silu":
            inner = inner.map(lambda share: torch.stack(share.chunk(2, -1)).reshape(2, -1))
            width //= 2
        else:
            function = partial(F.gelu, approximate=APPROXIMATIONS[kind])
        order = "pairs" if kind == "silu" else "elements"
        bits = _normed_bits(self.shape.width)
        found = party.apply(inner, function, bits, ring, f"{name}.mlp", order, _SEEN)
        found = found.map(lambda share: share.reshape(rows, width))
        return party.multiply(found, self.constants[f"{name}.mlp_out"])

    def _attention(
        self,
        party: Role,
        name: str,
        normed: Shared,
        start: int,
        caches: tuple[Growing, Growing],
        texts: int,
    ) -> Shared:
        shape, ring = self.shape, _sum_ring(party.form)
        parts = party.multiply(normed, self.constants[f"{name}.attention_in"])
        steps = parts.share.shape[0] // texts
        keys, seen = shape.groups * shape.head_width, start + steps
        q, k, v = (
            replace(parts, share=self._heads(share, texts))
            for share in torch.split(parts.share, [shape.width, keys, keys], -1)
        )
        if shape.positions == "rotary":
            q, k = (_turned(party, each, start, shape) for each in (q, k))
        protected = party.form.protect == "scores"
        score_bits = party.form.score_bits if protected else party.form.inside
        score_ring = _QUERY + _KEY + score_bits + _GUARD
        q, k = (
            each.dropped(each.bits - bits).within(score_ring)
            for each, bits in ((q, _QUERY), (k, _KEY))
        )
        v = v.dropped(v.bits - _VALUE).within(ring + _MIXED_DROP)
        rows = texts * shape.heads
        axes = (rows, steps, seen)
        # For a single new token with few earlier tokens, the parts of the values that the weighted
        # mean needs are opened in the same message as the scores.
        fast = party.form.mode == "fast" and not protected
        fused = fast and steps == 1 and seen <= party.form.fused_tokens
        ahead = (caches[1], v) if fused else None
        scores = party.multiply_growing(caches[0], k, q, scores_of, axes, ahead)
        where = f"{name}.attention"
        if fused:
            flat = scores.map(lambda share: share.reshape(rows, seen))
            mixed = party.mix(
                flat, softmax, _PROBABILITY, where, caches[1], v, mixture, _MIXED_DROP, _SEEN
            )
        else:
            found = self._probabilities(party, where, scores, v.ring, start)
            axes = (rows, steps, shape.head_width)
            mixed = party.multiply_growing(caches[1], v, found, mixture, axes)
            mixed = mixed.dropped(_MIXED_DROP)
        mixed = mixed.map(
            lambda share: (
                share.reshape(texts, shape.heads, steps, -1)
                .transpose(1, 2)
                .reshape(texts * steps, shape.width)
            )
        )
        return party.multiply(mixed, self.constants[f"{name}.attention_out"])

    def _probabilities(
        self, party: Role, where: str, scores: Shared, ring: int, start: int
    ) -> Shared:
        """Return the softmax of scores, axes (texts x heads, steps, seen).

        The probability of a later token is 0.
        """
        _, steps, seen = axes = scores.share.shape
        future = torch.zeros(axes, dtype=torch.bool)
        if self.shape.causal:
            future |= torch.ones(steps, seen, dtype=torch.bool).triu(start + 1)
        if isinstance(party, SharingRole):
            now = ~future
            rows = now.reshape(-1, seen).nonzero()[:, 0]
            flat = scores.map(lambda share: share[now])
            found = party.softmax(flat, rows, _PROBABILITY, ring)
            zeros = torch.zeros(axes, dtype=torch.int64)
            return found.map(lambda share: zeros.masked_scatter(now, share))
        # The score of a later token is set far below every other score, but within the range that
        # P1 accepts, so that the token's probability is zero.
        far = -15 * 2.0 ** (scores.ring - 6 - scores.bits) * (party.role == P0)
        low = party.encode(torch.tensor(far), scores.bits, where, scores.ring)
        flat = scores.map(lambda share: share.masked_fill(future, low).reshape(-1, seen))
        found = party.apply(flat, softmax, _PROBABILITY, ring, where, "vectors", _SEEN)
        return found.map(lambda share: share.reshape(axes))

    def _heads(self, share: Tensor, texts: int) -> Tensor:
        """Return a share rearranged by heads, axes (texts * heads, steps, head width)."""
        width = self.shape.head_width
        apart = share.reshape(texts, len(share) // texts, -1, width).transpose(1, 2)
        return apart.reshape(-1, len(share) // texts, width)


def _sum_ring(form: Form) -> int:
    return _SUM + form.integer_bits + _GUARD


def _inner_ring(form: Form) -> int:
    return _SUM + form.inside + _GUARD


def _head_ring(form: Form) -> int:
    return _LAST + _LAST_WEIGHT + form.inside + _GUARD


def is_tied(shape: DecoderShape) -> bool:
    """Return whether a decoder's head uses the embedding's weights, and thus its shares."""
    return shape.tied and not isinstance(shape, EncoderShape)


def _normed_bits(width: int) -> int:
    """Return the fraction bits of a linear layer's input; a weight gets the sum's other bits.

    The error of an output has two parts: the inputs' error times the weights' norm, which is about
    1, and the weights' error times the inputs' norm, which is about sqrt(width). Weights therefore
    have more fraction bits than inputs. The sum of an attention layer has one bit less, so the
    layer's weights have one bit less.

    >>> _normed_bits(64), _normed_bits(768), _normed_bits(4096)
    (9, 8, 8)
    """
    return round((_ATTENTION - 2 - math.log2(width) / 2) / 2)


def _turned(party: Role, heads: Shared, start: int, shape: DecoderShape) -> Shared:
    """Rotate by positions (rotary embedding).

    The rotation is public, so each holder rotates its own share.
    """
    turned = Rotation.at(start, heads.share.shape[1], shape)
    cos, sin = (party.encode(each, _TURN, "positions", 1) for each in (turned.cos, turned.sin))
    share = heads.share * cos + half_turn(heads.share) * sin
    return Shared(share, heads.bits + _TURN, heads.ring, heads.known)


def layer_shapes(shape: DecoderShape, form: Form) -> list[LayerShape]:
    """Return the shapes of the linear layers, in the order in which the parties share them."""
    width, keys = shape.width, shape.groups * shape.head_width
    gated, normed = 2 if shape.mlp == "silu" else 1, _normed_bits(width)
    ring, inner_ring, head_ring = _sum_ring(form), _inner_ring(form), _head_ring(form)
    inputs = shape.vocabulary + (shape.segments if isinstance(shape, EncoderShape) else 0)
    if is_tied(shape):
        both = max(head_ring, ring - (_SUM - _TIED_WEIGHT))
        found = [LayerShape("tokens", (inputs, width), _TIED_WEIGHT, both)]
        assert _TIED + _TIED_WEIGHT == _LAST + _LAST_WEIGHT, "one ring"
    else:
        found = [LayerShape("tokens", (inputs, width), _SUM, ring)]
    for index in range(shape.layers):
        name, wide = f"layers.{index}", ring + _ATTENTION_RING
        inner = gated * shape.inner
        found += [
            LayerShape(
                f"{name}.attention_in", (width, width + 2 * keys), _ATTENTION - normed, wide
            ),
            LayerShape(f"{name}.attention_out", (width, width), _MIXED_WEIGHT, ring),
            LayerShape(f"{name}.mlp_in", (width, inner), _SUM - normed, inner_ring),
            LayerShape(f"{name}.mlp_out", (shape.inner, width), _SUM - normed, ring),
        ]
        if not shape.causal:
            skips = (f"{name}.{part}_skip" for part in ("attention", "mlp"))
            found += [LayerShape(skip, (1, width), _SUM - normed, ring) for skip in skips]
    if isinstance(shape, EncoderShape):
        return [
            *found,
            LayerShape("pooler", (width, width), _SUM - normed, ring),
            LayerShape("head", (width, shape.classes), _LAST_WEIGHT, head_ring),
        ]
    if is_tied(shape):
        return [*found, LayerShape("norm", (1, width), _GAIN, head_ring + _LAST + _GAIN - _TIED)]
    return [*found, LayerShape("head", (width, shape.vocabulary), _LAST_WEIGHT, head_ring)]


def linear_layers(model: Decoder | Encoder) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return P0's weights and biases of all linear layers by name; see `linear_layer`."""
    names = [each.name for each in layer_shapes(model.shape, Form()) if each.name != "norm"]
    return {name: linear_layer(model, name) for name in (*names, "head")}


def linear_layer(model: Decoder | Encoder, name: str) -> tuple[Tensor, Tensor | None]:
    """Return P0's weights of a layer, and its bias, with norm layers merged in.

    The weights have the axes (inputs, outputs). The weights of queries include the scaling of
    attention scores.
    """
    shape, encoder = model.shape, isinstance(model, Encoder)
    *inside, part = name.split(".")
    if inside:
        index = int(inside[1])
        layer = _layer_of(model, index)
        # In an encoder, a norm layer follows the module after which it is named.
        earlier = _layer_of(model, index - 1).mlp_norm if index else model.norm
        before = earlier if encoder else layer.attention_norm
        between = layer.attention_norm if encoder else layer.mlp_norm
        if part.endswith("_skip"):
            return _norm_weights(before if part == "attention_skip" else between)
        norm = {"attention_in": before, "mlp_in": between}.get(part)
        weight, bias = _folded(norm, getattr(layer, part))
        if part == "attention_in":
            scale = torch.ones(weight.shape[1], dtype=torch.float64)
            scale[: shape.width] = shape.head_width**-0.5
            weight, bias = weight * scale, None if bias is None else bias * scale
        return weight, bias
    if part == "norm":
        return _norm_weights(model.norm)
    if part == "tokens":
        tokens = model.tokens.weight.detach()
        if isinstance(model, Encoder):
            tokens = torch.cat([tokens, model.segments.weight.detach()])
        return tokens, None
    if isinstance(model, Encoder):
        last = _layer_of(model, -1).mlp_norm
        return _folded(last, model.pooler) if part == "pooler" else _folded(None, model.head)
    return _folded(model.norm, model.head)


def _layer_of(model: Decoder | Encoder, index: int) -> DecoderLayer:
    layer = model.layers[index]
    assert isinstance(layer, DecoderLayer), "both models have these"
    return layer


def _norm_weights(norm: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return a norm layer's factor for each column, axes (1, columns), and its offset."""
    assert isinstance(norm.weight, Tensor), "the norm layers of these models have weights"
    shift = getattr(norm, "bias", None)
    return norm.weight.detach().double()[None], None if shift is None else shift.detach().double()


def _folded(norm: nn.Module | None, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return W (g x + b) + c as one linear layer of x; g and b are the norm layer's weights."""
    weight = linear.weight.detach().double().t().contiguous()
    bias = None if linear.bias is None else linear.bias.detach().double()
    if norm is None:
        return weight, bias
    factor, shift = _norm_weights(norm)
    if shift is not None:
        moved = shift @ weight
        bias = moved if bias is None else bias + moved
    return factor.t() * weight, bias


class PrivateTransformer(Generic[_Model]):
    """The three parties of a private transformer as threads of this process.

    `vfl.mpc.private` makes such objects.

    Args:
        model: the model that P0 (the owner) has.
        form: parameters of the protocols, or the name of a mode with default parameters.
        timeout_s: seconds that a party waits for another party.
        folder: folder for the parties' dealt material (correlated randomness); None creates a
            temporary folder. A later object for the same model and form can use the material that
            is left in this folder. No material is ever used for two questions.

    Attributes:
        computes: class of the models that the object can compute.
        parties: the session of the three parties.
    """

    computes: ClassVar[type[nn.Module]]

    def __init__(
        self,
        model: _Model,
        form: Form | Mode,
        timeout_s: float = 30.0,
        folder: Path | None = None,
    ) -> None:
        form = Form(form) if isinstance(form, str) else form
        self._shape: DecoderShape = model.shape
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="vfl-mpc-")
        root = folder or Path(self._temporary.name)  # type: ignore[union-attr]
        terms = {"model": repr(model.shape), "form": repr(form)}
        self.parties = LocalRoles(form, terms, timeout_s)
        run = weights_digest({**model.state_dict(), repr(terms): torch.zeros(1)})[:32]
        self._stores = [MaterialStore(root / NAMES[role], NAMES[role], run) for role in (P0, P1)]
        self._layers = self.parties.run(
            lambda party: PrivateLayers.share(
                party, model.shape, model if party.role == P0 else None
            )
        )

    def _deal(self, kind: str, program: Callable[[PrivateLayers, Role], object]) -> None:
        name = new_name(kind)

        def prepare(party: Role) -> None:
            layers = self._layers[party.role]
            with ExitStack() as held:
                keep = None
                if party.role != P2:
                    keep = held.enter_context(self._stores[party.role].putting(name))
                party.prepare(lambda party: program(layers, party), keep)

        self.parties.run(prepare)

    def _online(self, name: str, program: Callable[[PrivateLayers, Role], _Result]) -> _Result:
        """Run the online phase of a program at all parties; return P1's result."""
        taken = [store.take(name) for store in self._stores]

        def answer(party: Role) -> object:
            layers = self._layers[party.role]
            return party.answer(lambda party: program(layers, party), taken[party.role])

        found: _Result = self.parties.run(answer, (P0, P1))[P1]  # type: ignore[assignment]
        return found

    def _left(self, kind: str) -> list[str]:
        # An interrupted dealing may have stored the material of one party only.
        own, other = (set(store.names_of(kind)) for store in self._stores)
        return sorted(own & other)

    def _require_tokens(self, tokens: Sequence[int]) -> None:
        if not tokens or not all(has_token(self._shape, token) for token in tokens):
            raise DataError(
                "a prompt must consist of tokens that the model knows",
                where="prompt",
                got=f"{len(tokens)} tokens",
                want=f"at least one, each from 0 to {self._shape.vocabulary - 1}",
            )

    def traffic(self) -> list[Traffic]:
        """Return the bytes that the parties have exchanged since the object was made."""
        return self.parties.traffic()

    def leaks(self) -> list[Leak]:
        """Return kinds and numbers of the values that each party has learned so far."""
        return self.parties.leaks()

    def close(self) -> None:
        """End the threads, and remove a temporary folder; a second call has no effect."""
        self.parties.close()
        if self._temporary:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PrivateDecoder(PrivateTransformer[Decoder]):
    """A decoder that answers token by token; see `PrivateTransformer`.

    >>> torch.manual_seed(0) and None
    >>> model = Decoder(DecoderShape(vocabulary=40, width=32, layers=1, heads=2))
    >>> with PrivateDecoder(model, Form()) as hidden:
    ...     hidden.generate([7, 3, 9], 2) == model.generate([7, 3, 9], 2)
    True
    """

    computes = Decoder

    def deal(self, prompt_tokens: int, count: int, questions: int = 1, texts: int = 1) -> None:
        """Run the offline phase.

        The dealer makes the material for questions of this length with this many next tokens.

        Args:
            prompt_tokens: number of tokens of a question.
            count: largest number of tokens of an answer.
            questions: number of questions that will be asked, one after another.
            texts: number of texts that a question contains; see `generate_all`.

        Raises:
            BadOptionError: a length exceeds the model's context.
        """
        require_range("prompt_tokens", prompt_tokens, 1)
        require_range("count", count, 1, self._shape.context - prompt_tokens + 1)
        require_range("texts", texts, 1)
        blank = [[0] * prompt_tokens] * texts
        for _ in range(questions):
            self._deal(
                kind_of_question(prompt_tokens, count, texts),
                lambda layers, party: layers.answer(party, blank, count),
            )

    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        pick: Pick = greedy,
        stop: Sequence[int] = (),
        on_token: Callable[[int], None] | None = None,
    ) -> list[int]:
        """Return the next tokens to P1 (the user) alone.

        If no stored material fits, the dealer makes new material first.

        Args:
            prompt: token numbers of P1's question.
            count: largest number of tokens of an answer.
            pick: P1's function that picks a token from scores in permuted order: `greedy`,
                `Sampling(...)` or the caller's own function.
            stop: tokens that end an answer; such a token is the last token of the answer. P0 (the
                owner) learns the length of the answer.
            on_token: function that P1's thread calls with each new token of the answer.

        Raises:
            DataError: there is no token, or the model lacks a token.
            BadOptionError: the question and its answer are longer than the model's context.
            RingRangeError: an activation is too large for the ring; the error names its layer.
        """
        each = None if on_token is None else lambda text, token: on_token(token)
        return self.generate_all([prompt], count, pick, stop, each)[0]

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        pick: Pick = greedy,
        stop: Sequence[int] = (),
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Generate for several texts.

        Texts of one length travel in common messages, as many as for one text.

        Args:
            prompts: token numbers of each text.
            count: largest number of tokens of each answer.
            pick: P1's function that picks the next token of each text, one text after another.
            stop: tokens that end an answer; such a token is part of the answer.
            on_token: function that receives a text's number and its next token.
        """
        for prompt in prompts:
            self._require_tokens(prompt)
        found: list[list[int]] = [[] for _ in prompts]
        for length in sorted({len(prompt) for prompt in prompts}):
            texts = [text for text, prompt in enumerate(prompts) if len(prompt) == length]
            kind = kind_of_question(length, count, len(texts))
            if not self._left(kind):
                self.deal(length, count, texts=len(texts))

            def each(place: int, token: int, texts: list[int] = texts) -> bool:
                if on_token is not None:
                    on_token(texts[place], token)
                return token in stop

            own = [list(prompts[text]) for text in texts]
            answers = self._ask(self._left(kind)[0], own, count, pick, each, stops=bool(stop))
            for text, answer in zip(texts, answers, strict=True):
                found[text] = answer
        return found

    def ask(self, name: str, prompt: Sequence[int], pick: Pick = greedy) -> list[int]:
        """Run the online phase with the material of a name; see `left` and `generate`.

        Raises:
            DataError: there is no token, or the model lacks a token.
            ReusedPadError: the material was already used, or was dealt for other numbers of tokens.
        """
        self._require_tokens(prompt)
        kind = kind_in(name)
        count = kind.rpartition("-")[2]
        if not count.isdecimal() or kind != kind_of_question(len(prompt), int(count), 1):
            raise ReusedPadError(
                "this dealt material (randomness) is not for a question of this length",
                where=name,
                got=f"{len(prompt)} tokens",
                want="a name that left(prompt_tokens, count) returns",
            )
        return self._ask(name, [list(prompt)], int(count), pick, lambda text, token: False)[0]

    def left(self, prompt_tokens: int, count: int) -> list[str]:
        """Return the names of unused material for one text of these lengths."""
        return self._left(kind_of_question(prompt_tokens, count, 1))

    def _ask(
        self,
        name: str,
        prompts: list[list[int]],
        count: int,
        pick: Pick,
        on_token: OnToken,
        *,
        stops: bool = False,
    ) -> list[list[int]]:
        blank = [[0] * len(prompts[0])] * len(prompts)

        def answer(layers: PrivateLayers, party: Role) -> list[list[int]]:
            own = (prompts, count, pick, on_token) if party.role == P1 else (blank, count)
            more = {"goes_on": party.tell} if stops else {}
            return layers.answer(party, *own, **more)  # type: ignore[arg-type]

        return self._online(name, answer)


def kind_of_question(prompt_tokens: int, count: int, texts: int) -> str:
    """Return the name of the kind of material that questions of these sizes need.

    >>> kind_of_question(8, 24, 1), kind_of_question(8, 24, 3)
    ('8-24', '8-24x3')
    """
    return f"{prompt_tokens}-{count}" + (f"x{texts}" if texts > 1 else "")


class PrivateEncoder(PrivateTransformer[Encoder]):
    """A classifier of texts; see `PrivateTransformer`. Only P1 (the user) learns the logits.

    >>> torch.manual_seed(0) and None
    >>> model = Encoder(EncoderShape(vocabulary=40, width=32, layers=1, heads=2)).eval()
    >>> with PrivateEncoder(model, Form()) as hidden:
    ...     logits = hidden.classify([7, 3, 9])
    >>> bool((logits - model(torch.tensor([[7, 3, 9]]))).abs().max() < 0.01)
    True
    """

    computes = Encoder

    def deal(self, tokens: int, questions: int = 1) -> None:
        """Run the offline phase, in which the dealer makes material for texts of this length.

        Raises:
            BadOptionError: a length exceeds the model's context.
        """
        require_range("tokens", tokens, 1, self._shape.context)
        blank = [0] * tokens
        for _ in range(questions):
            self._deal(f"{tokens}", lambda layers, party: layers.classify(party, blank, blank))

    def classify(self, tokens: Sequence[int], segments: Sequence[int] | None = None) -> Tensor:
        """Return logits, axes (1, classes).

        If no stored material fits, the dealer makes new material first.

        Args:
            tokens: token numbers of P1's text.
            segments: P1's number of the segment to which each token belongs; by default zeros.

        Raises:
            DataError: there is no token, or the model lacks a token or a segment.
            BadOptionError: the text is longer than the model's context.
            RingRangeError: an activation is too large for the ring; the error names its layer.
        """
        self._require_tokens(tokens)
        shape, segments = self._shape, [0] * len(tokens) if segments is None else segments
        assert isinstance(shape, EncoderShape), "a classifier's"
        if len(segments) != len(tokens) or not all(0 <= one < shape.segments for one in segments):
            raise DataError(
                "every token must belong to a segment of the model",
                where="segments",
                got=f"{len(segments)} segments",
                want=f"{len(tokens)}, each from 0 to {shape.segments - 1}",
            )
        if not self.left(len(tokens)):
            self.deal(len(tokens))
        own, blank = list(tokens), [0] * len(tokens)
        return self._online(
            self.left(len(tokens))[0],
            lambda layers, party: (
                layers.classify(party, own, segments)
                if party.role == P1
                else layers.classify(party, blank, blank)
            ),
        )

    def left(self, tokens: int) -> list[str]:
        """Return the names of unused material for texts of this length."""
        return self._left(f"{tokens}")
