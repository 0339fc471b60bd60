"""A decoder whose owner sees no text, and whose weights only secret orders hide from the asker.

What the asker (P1) sees of every layer is permuted, and known attacks on permuted values apply: see
docs/mpc.md. It may also solve a layer by asking often; nothing here counts questions.

P0 owns the weights, P1 the text, P2 deals before the question; the protocols are those of
`vfl.mpc.two_party`. Norms and functions are P1's work on permuted values, so a norm's weights go
into the linear layer behind it and stay P0's. All know the architecture and how long a text is.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.errors import DataError
from vfl.core.registry import require_range
from vfl.core.storage import Seal, weights_digest
from vfl.models.decoder import Decoder, DecoderShape, Rotation, half_turn
from vfl.mpc.channel import Leak, Traffic
from vfl.mpc.material import MaterialStore
from vfl.mpc.ring import encode
from vfl.mpc.rules import NAMES, P0, P1, P2
from vfl.mpc.two_party import Constant, Form, Function, Growing, LocalRoles, Role, Shared

#: Fraction bits. Between layers values have 30 in a ring of 40, so they stay below 2^8; behind a
#: norm 14. Attention needs 64 bits: 14 + 14 of queries, keys and values, of which 14 are dropped,
#: 13 of a probability and 13 of the weight behind it.
_SUM, _SUM_RING, _NORMED, _WEIGHT = 30, 40, 14, 16
_ATTENTION_WEIGHT, _FACTOR, _ATTENTION_RING = 14, 14, 50
_PROBABILITY, _MIXED_WEIGHT, _TURN = 13, 13, 12

#: At P1: the position of the chosen score, of scores in an order it does not know.
Pick = Callable[[Tensor], int]


def greedy(scores: Tensor) -> int:
    """The largest score's position."""
    return int(scores.argmax())


def scores_of(keys: Tensor, queries: Tensor) -> Tensor:
    """Every query with every key; axes (groups, keys, width), (heads, steps, width)."""
    grouped = keys.repeat_interleave(len(queries) // len(keys), 0)
    return queries @ grouped.transpose(1, 2)


def mixture(values: Tensor, shares: Tensor) -> Tensor:
    """Values by the share of each; axes (groups, keys, width), (heads, steps, keys)."""
    return shares @ values.repeat_interleave(len(shares) // len(values), 0)


def gated_silu(pairs: Tensor) -> Tensor:
    """Axes (2, elements), gates first."""
    return F.silu(pairs[0]) * pairs[1]


def softmax(rows: Tensor) -> Tensor:
    """Along each row."""
    return torch.softmax(rows, -1)


@dataclass(slots=True)
class PrivateLayers:
    """One party's view of a decoder after initialisation; its methods are programs for all three.

    Attributes:
        shape: the architecture.
        constants: linear layers by name.
        positions: at P0 the vectors of learned positions, scaled as between layers.
    """

    shape: DecoderShape
    constants: Mapping[str, Constant]
    positions: Tensor | None = None

    @classmethod
    def share(cls, party: Role, shape: DecoderShape, model: Decoder | None) -> PrivateLayers:
        """Initialisation, once per weights; the model is P0's, None elsewhere.

        Raises:
            RingRangeError: a weight is too large; it names the layer.
        """
        own = {} if model is None else linear_layers(model)
        constants = {
            name: party.constant(name, axes, bits, *own.get(name, ()))
            for name, axes, bits in layer_shapes(shape)
        }
        learned = model is not None and shape.positions == "learned"
        positions = (
            model.positions.weight.detach().double() if model is not None and learned else None
        )
        return cls(shape, constants, positions)

    def answer(self, party: Role, asked: Asked) -> list[int]:
        """All tokens of an answer, at P1; zeros elsewhere."""
        caches = [(Growing(), Growing()) for _ in range(self.shape.layers)]
        found: list[int] = []
        step, start = asked.prompt, 0
        for _ in range(asked.count):
            found.append(self.next_token(party, step, start, caches, asked.pick) or 0)
            start, step = start + len(step), found[-1:]
        return found

    def next_token(
        self,
        party: Role,
        tokens: Sequence[int],
        start: int,
        caches: Sequence[tuple[Growing, Growing]],
        pick: Pick | None,
    ) -> int | None:
        """What follows some tokens, at P1; at others their number is all that counts."""
        shape, steps = self.shape, len(tokens)
        one_hot = F.one_hot(torch.tensor(tokens), shape.vocabulary).double()
        x = party.question((steps, shape.vocabulary), one_hot, 0, _SUM_RING, "tokens")
        x = party.multiply(x, self.constants["tokens"])
        x = party.plus_own(
            x, None if self.positions is None else self.positions[start : start + steps]
        )
        for index in range(shape.layers):
            x = self.layer(party, index, x, start, caches[index])
        last = self._normed(party, x.map(lambda share: share[-1:]), "norm", _SUM_RING)
        return party.choose(party.multiply(last, self.constants["head"]), pick)

    def layer(
        self, party: Role, index: int, x: Shared, start: int, caches: tuple[Growing, Growing]
    ) -> Shared:
        """One layer of some new tokens; axes (steps, width)."""
        shape, constants, name = self.shape, self.constants, f"layers.{index}"
        normed = self._normed(party, x, f"{name}.attention_norm", 64)
        parts = party.multiply(normed, constants[f"{name}.attention_in"])
        mixed = self._attention(party, name, parts, start, caches)
        mixed = party.multiply(mixed, constants[f"{name}.attention_out"])
        x = x.plus(mixed.dropped(mixed.bits - _SUM).within(_SUM_RING))
        normed = self._normed(party, x, f"{name}.mlp_norm", _SUM_RING)
        inner = party.multiply(normed, constants[f"{name}.mlp_in"])
        function: Function = F.gelu
        kind, axes = "elements", inner.share.shape
        if shape.mlp == "silu":
            function, kind, axes = gated_silu, "pairs", torch.Size((axes[0], axes[1] // 2))
            inner = inner.map(lambda share: torch.stack(share.chunk(2, -1)).reshape(2, -1))
        found = party.apply(inner, function, _NORMED, _SUM_RING, f"{name}.mlp", kind)
        found = found.map(lambda share: share.reshape(axes))
        return x.plus(party.multiply(found, constants[f"{name}.mlp_out"]))

    def _normed(self, party: Role, x: Shared, where: str, ring: int) -> Shared:
        norm = F.layer_norm if self.shape.norm == "layer" else F.rms_norm
        function = partial(norm, normalized_shape=(self.shape.width,), eps=1e-5)
        return party.apply(x, function, _NORMED, ring, where, "vectors")

    def _attention(
        self, party: Role, name: str, parts: Shared, start: int, caches: tuple[Growing, Growing]
    ) -> Shared:
        shape, steps = self.shape, parts.share.shape[0]
        keys, seen = shape.groups * shape.head_width, start + steps
        q, k, v = (
            replace(parts, share=self._heads(share))
            for share in torch.split(parts.share, [shape.width, keys, keys], -1)
        )
        if shape.positions == "rotary":
            q, k = (_turned(each, start) for each in (q, k))
        q, k, v = (each.dropped(each.bits - _FACTOR) for each in (q, k, v))
        q, k = (each.within(_SUM_RING) for each in (q, k))
        axes = (shape.heads, steps, seen)
        scores = party.multiply_growing(caches[0], k, q, scores_of, axes)
        future = torch.ones(steps, seen, dtype=torch.bool).triu(start + 1)
        # Far below every score, and within what P1 accepts: it becomes a probability of zero.
        low = -(1 << scores.ring - 3) if party.role == P0 else 0
        rows = scores.map(lambda share: share.masked_fill(future, low).reshape(-1, seen))
        found = party.apply(
            rows, softmax, _PROBABILITY, _ATTENTION_RING, f"{name}.attention", "vectors"
        )
        found = found.map(lambda share: share.reshape(axes))
        axes = (shape.heads, steps, shape.head_width)
        mixed = party.multiply_growing(caches[1], v, found, mixture, axes)
        return mixed.map(lambda share: share.transpose(0, 1).reshape(steps, shape.width))

    def _heads(self, share: Tensor) -> Tensor:
        return share.reshape(len(share), -1, self.shape.head_width).transpose(0, 1).contiguous()


def _turned(heads: Shared, start: int) -> Shared:
    """Rotary positions, which are public: each holder turns its share."""
    _, steps, width = heads.share.shape
    turned = Rotation.at(start, steps, width)
    cos, sin = (encode(each, _TURN, "positions") for each in (turned.cos, turned.sin))
    share = heads.share * cos + half_turn(heads.share) * sin
    return Shared(share, heads.bits + _TURN, heads.ring, heads.known)


def layer_shapes(shape: DecoderShape) -> list[tuple[str, tuple[int, int], int]]:
    """Linear layers in the order in which they are shared: name, (inputs, outputs), bits."""
    width, keys = shape.width, shape.groups * shape.head_width
    gated = 2 if shape.mlp == "silu" else 1
    found = [("tokens", (shape.vocabulary, width), _SUM)]
    for index in range(shape.layers):
        name = f"layers.{index}"
        found += [
            (f"{name}.attention_in", (width, width + 2 * keys), _ATTENTION_WEIGHT),
            (f"{name}.attention_out", (width, width), _MIXED_WEIGHT),
            (f"{name}.mlp_in", (width, gated * shape.inner), _WEIGHT),
            (f"{name}.mlp_out", (shape.inner, width), _WEIGHT),
        ]
    return [*found, ("head", (width, shape.vocabulary), _WEIGHT)]


def linear_layers(model: Decoder) -> dict[str, tuple[Tensor, Tensor | None]]:
    """P0's weights, axes (inputs, outputs), and biases, norms folded in; by name.

    The scale of attention goes into the queries' weights.
    """
    shape = model.shape
    found: dict[str, tuple[Tensor, Tensor | None]] = {
        "tokens": (model.tokens.weight.detach().double(), None),
        "head": _folded(model.norm, model.head),
    }
    for index, layer in enumerate(model.layers):
        name = f"layers.{index}"
        weight, bias = _folded(layer.attention_norm, layer.attention_in)  # type: ignore[arg-type]
        scale = torch.ones(weight.shape[1], dtype=torch.float64)
        scale[: shape.width] = shape.head_width**-0.5
        found[f"{name}.attention_in"] = weight * scale, None if bias is None else bias * scale
        found[f"{name}.mlp_in"] = _folded(layer.mlp_norm, layer.mlp_in)  # type: ignore[arg-type]
        for part in ("attention_out", "mlp_out"):
            found[f"{name}.{part}"] = _folded(None, getattr(layer, part))
    return found


def _folded(norm: nn.Module | None, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """W (g x + b) + c as one linear layer of x."""
    weight = linear.weight.detach().double().t().contiguous()
    bias = None if linear.bias is None else linear.bias.detach().double()
    if norm is None:
        return weight, bias
    shift = getattr(norm, "bias", None)
    if shift is not None:
        moved = shift.detach().double() @ weight
        bias = moved if bias is None else bias + moved
    assert isinstance(norm.weight, Tensor), "norms of a decoder have weights"
    return norm.weight.detach().double()[:, None] * weight, bias


@dataclass(frozen=True, slots=True)
class Asked:
    """A question: at P1 the tokens, elsewhere as many zeros.

    Attributes:
        prompt: token ids.
        count: of tokens to answer.
        pick: at P1.
    """

    prompt: Sequence[int]
    count: int
    pick: Pick | None = None


class PrivateDecoder:
    """The three roles as threads of this process; made by `vfl.mpc.private`, a context manager.

    Args:
        model: P0's.
        form: mode and widths of messages.
        timeout_s: how long a party waits for another.
        folder: of the parties' material; without it a temporary one. What was dealt in it and not
            used can be used by a later session of the same model and form, and nothing twice.

    Attributes:
        parties: the session of the three.

    >>> torch.manual_seed(0) and None
    >>> model = Decoder(DecoderShape(vocabulary=40, width=32, layers=1, heads=2))
    >>> with PrivateDecoder(model, Form()) as hidden:
    ...     hidden.generate([7, 3, 9], 2) == model.generate([7, 3, 9], 2)
    True
    """

    def __init__(
        self, model: Decoder, form: Form, timeout_s: float = 30.0, folder: Path | None = None
    ) -> None:
        self._shape = model.shape
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="vfl-mpc-")
        root = folder or Path(self._temporary.name)  # type: ignore[union-attr]
        terms = {"decoder": repr(model.shape), "form": repr(form)}
        self.parties = LocalRoles(form, terms, timeout_s)
        run = weights_digest({**model.state_dict(), repr(terms): torch.zeros(1)})[:32]
        self._stores = [
            MaterialStore(root / NAMES[role], Seal("offline material", NAMES[role], run))
            for role in (P0, P1)
        ]
        self._layers = self.parties.run(
            lambda party: PrivateLayers.share(
                party, model.shape, model if party.role == P0 else None
            )
        )

    def deal(self, prompt_tokens: int, count: int, questions: int = 1) -> None:
        """The offline phase: material for questions of that length and that many next tokens.

        Raises:
            BadOptionError: lengths beyond the model's context.
        """
        require_range("prompt_tokens", prompt_tokens, 1)
        require_range("count", count, 1, self._shape.context - prompt_tokens + 1)
        asked = Asked([0] * prompt_tokens, count)
        for _ in range(questions):
            name = f"{prompt_tokens}-{count}-{secrets.token_hex(8)}"

            def prepare(party: Role, name: str = name) -> None:
                layers = self._layers[party.role]
                material = party.prepare(lambda party: layers.answer(party, asked))
                if party.role != P2:
                    self._stores[party.role].put(name, material)

            self.parties.run(prepare)

    def generate(self, prompt: Sequence[int], count: int, pick: Pick = greedy) -> list[int]:
        """The next tokens, which P1 alone learns; dealt for now if nothing is left that fits.

        Args:
            prompt: P1's token ids.
            count: of tokens to answer.
            pick: P1's strategy, on permuted scores.

        Raises:
            DataError: no token, or one the model does not have.
            BadOptionError: more than the model's context.
            RingRangeError: an activation is too large; it names the layer.
        """
        if not prompt or not all(0 <= token < self._shape.vocabulary for token in prompt):
            raise DataError(
                "a prompt has tokens of the model",
                where="prompt",
                got=f"{len(prompt)} tokens",
                want=f"at least one, each from 0 to {self._shape.vocabulary - 1}",
            )
        if not self.left(len(prompt), count):
            self.deal(len(prompt), count)
        return self.ask(self.left(len(prompt), count)[0], prompt, pick)

    def ask(self, name: str, prompt: Sequence[int], pick: Pick = greedy) -> list[int]:
        """The online phase with material of a name; see `left` and `generate`.

        Raises:
            ReusedPadError: it was used before, or dealt for something else.
        """
        count = int(name.split("-")[1])
        taken = [store.take(name) for store in self._stores]

        def answer(party: Role) -> list[int]:
            own = party.role == P1
            asked = Asked(list(prompt) if own else [0] * len(prompt), count, pick if own else None)
            layers = self._layers[party.role]
            found = party.answer(lambda party: layers.answer(party, asked), taken[party.role])
            assert isinstance(found, list), "the program gives tokens"
            return found

        return self.parties.run(answer, (P0, P1))[P1]

    def left(self, prompt_tokens: int, count: int) -> list[str]:
        """Names of questions of that kind that were dealt and not asked."""
        kind = f"{prompt_tokens}-{count}-"
        theirs = self._stores[P1].names()  # a dealing that was cut off may have left one of two
        return [
            each for each in self._stores[P0].names() if each.startswith(kind) and each in theirs
        ]

    def material_bytes(self) -> int:
        """On the disks of both holders, of what is left."""
        return sum(store.size_bytes() for store in self._stores)

    def traffic(self) -> list[Traffic]:
        """Bytes between the parties since the beginning."""
        return self.parties.traffic()

    def leaks(self) -> list[Leak]:
        """What each party has seen since the beginning."""
        return self.parties.leaks()

    def close(self) -> None:
        """End the threads, and remove a temporary folder; closing twice is harmless."""
        self.parties.close()
        if self._temporary:
            self._temporary.cleanup()

    def __enter__(self) -> PrivateDecoder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
