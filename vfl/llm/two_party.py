"""Two-party inference with an offline dealer; permutations, not cryptography, hide values from P1.

The protocols are those of chapter 6 of the split-learning thesis (2025). P1 sees the values before
every function in permuted order; of paired values, it sees which two belong together. The protocols
assume that all three parties follow them and that no two collude; P2 together with another party
would learn everything.

P0 (the model owner) has the weights, and P1 (the user) has the text. P2 (the dealer) deals
correlated randomness in two phases without seeing any part of a question: in the initialisation,
once per set of weights, and offline, once per question. Only P0 and P1 are online. They use the
result of the offline phase: their dealt material, which is a list of tensors that is read once.

A program is a function that receives a `Role`. All three parties call this function with tensors of
the same shapes. In the offline phase, before a question, no party knows P0's shares, but P1's share
is often known already: after a product with a constant, or after a function, P1's share is a dealt
random number. In mode "fast", P1 sends a message in advance if it depends only on such dealt
numbers. A function then takes one round trip, and a linear layer takes no message. Mode "thesis"
sends all messages of the protocols as the thesis prints them; errors in print are corrected.

Numbers have fixed-point form in the ring of integers modulo 2^ring, where ring is at most 64. A
message carries `ring` bits per element, packed. Products are not truncated by a protocol. Instead,
the number of fraction bits shrinks when both holders drop low bits of their shares. The result is
shared in a ring that is smaller by these bits, and is exact to one unit; a wrap-around of the
shares cannot cause a large error. If P1 only evaluates a function of a value, P1 receives only as
many upper bits of the value as the function needs.

The numbers of bits in the docstrings below are payloads of messages in the online phase, for n
elements in a ring of s bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import BadOptionError, InsecureWarning, ReusedPadError, WidthError
from vfl.core.frame import Link
from vfl.core.registry import named, require_choice, require_range
from vfl.llm.packing import pack_elements, packed_bytes, unpack_elements
from vfl.llm.weights import (
    Constant,
    Drawn,
    LayerShape,
    Matrix,
    Packed,
    multiplied,
    room_for,
    scaled,
)
from vfl.mpc.channel import Shape, split_payload
from vfl.mpc.engine import Engine, masked_product
from vfl.mpc.in_process import LocalParties
from vfl.mpc.numbers import RING, Ring
from vfl.mpc.permuted import permutation
from vfl.mpc.ring import ELEMENT_BITS, batched, decode, encode, require_integer_bits
from vfl.mpc.rules import HOLDERS, LEAST_PERMUTED, MODES, NAMES, P0, P1, P2, Mode
from vfl.mpc.shares import blank
from vfl.mpc.stream import KEY_BYTES, PadStream

_Result = TypeVar("_Result")

_ANSWER_BITS = 32
#: Number of bits beyond the shown ones in which P1 sends its share before a value is opened;
#: rounding P1's share then adds a quarter of a unit to the error.
_FIRST_MORE = 2
#: Bits before the binary point that a weight may have; the ring must also hold the bits of a
#: product.
_WEIGHT_INTEGER_BITS = 30
#: Value of the setting `Form.sharing` for float sharing.
INSECURE_FLOAT = "insecure_float"
#: Function that returns the role class of forms that are only for measurements; and the role class
#: whose softmax protects scores.
_AS_PRINTED = "vfl.llm.as_printed:role_of"
_SHARING = "vfl.llm.shared_softmax:SharingRole"
_INSECURE = "float sharing is insecure: repeated questions average out its noise"
_FIX = (
    "more bits: between layers vfl llm init --integer-bits 15, or Form(integer_bits=15); inside a "
    "layer, and of scores, --inner-bits 10"
)

#: Values that P1 does not see, not even in permuted order; "nothing" means that P1 sees all values
#: before functions, in permuted order.
Protect = Literal["nothing", "scores"]
#: Function that P1 computes on permuted values, axes (rows, width), or (2, elements) for a pair.
Function = Callable[[Tensor], Tensor]
#: P1's function that returns the position of the chosen score among scores in a secret order.
Pick = Callable[[Tensor], int]
#: Bilinear map of a factor that grows with each token, and of another factor.
Bilinear = Callable[[Tensor, Tensor], Tensor]
#: Tensor in a message (its elements, or only its axes), the bits of each element, and optionally
#: the number of low bits that are left out.
Sent = tuple[Tensor, int] | tuple[Tensor, int, int]
Wanted = tuple[Sequence[int], int] | tuple[Sequence[int], int, int]


@dataclass(frozen=True, slots=True)
class Form:
    """Parameters of the protocols; all three parties use the same.

    Attributes:
        mode: "fast", or "thesis" for the protocols of chapter 6 as the thesis prints them.
        shown_bytes: number of bytes of each element that P1 sees before a function, if the
            operation does not state a number of bits; the error is one unit of the sent value.
        first_bytes: number of bytes of each element of P1's share that P1 sends first, in thesis
            mode or if the share was not known in advance; the error is one unit of the sent value.
        integer_bits: largest number of bits before the binary point of values between layers. One
            more integer bit makes most elements of most messages of a transformer's layer one bit
            longer.
        inner_bits: number of bits before the binary point of values inside a layer, of tokens'
            scores, and of attention scores that are not protected; `integer_bits`, if that is
            smaller. These values stay small in models whose values between layers are large.
        fused_tokens: largest number of attended tokens for which fast mode joins the softmax of a
            next token with the product after it. Joining them saves two messages, but the dealer
            then sends the tokens' values once more, permuted. With 0, fast mode never joins them.
        retrieval: method by which P1 learns the index of the score that it chose: "sets", see
            `Role.choose`, or "bfv", which hides less: see `vfl.llm.as_printed`.
        sharing: "ring", or "insecure_float" in thesis mode, which discloses values if a question is
            repeated; it is for measurements, and gives a warning: see `vfl.llm.as_printed`.
        protect: "scores" computes the softmax of attention on shares, so that P1 does not even see
            permuted attention scores; only in fast mode, see `vfl.llm.shared_softmax`.
        score_bits: bits before the binary point of a protected score, at most `integer_bits`. No
            error reports a score that needs more bits, because no party sees scores.

    Raises:
        BadOptionError: a value is out of range, or two settings contradict each other.
    """

    mode: Mode = "fast"
    shown_bytes: int = 3
    first_bytes: int = 4
    integer_bits: int = 8
    inner_bits: int = 8
    fused_tokens: int = 64
    retrieval: Literal["sets", "bfv"] = "sets"
    sharing: Literal["ring", "insecure_float"] = "ring"
    protect: Protect = "nothing"
    score_bits: int = 8

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_range("shown_bytes", self.shown_bytes, 2, 8)
        require_range("first_bytes", self.first_bytes, self.shown_bytes, 8)
        require_range("integer_bits", self.integer_bits, 4, 15)
        require_range("inner_bits", self.inner_bits, 4, 15)
        require_range("fused_tokens", self.fused_tokens, 0)
        require_choice("retrieval", self.retrieval, ("sets", "bfv"))
        require_choice("sharing", self.sharing, ("ring", INSECURE_FLOAT))
        require_choice("protect", self.protect, get_args(Protect))
        require_range("score_bits", self.score_bits, 4, 15)
        if self.protect != "nothing" and self.mode != "fast":
            raise BadOptionError(
                "only fast mode computes attention's softmax on shares",
                where="option 'protect'",
                got=f"mode '{self.mode}'",
                want=f'Form(protect="{self.protect}"), or thesis mode without it',
            )
        if self.protect != "nothing" and self.score_bits > self.integer_bits:
            raise BadOptionError(
                "the ring of keys has no room for scores so large",
                where="option 'score_bits'",
                got=f"score_bits={self.score_bits}, integer_bits={self.integer_bits}",
                want="score_bits of at most integer_bits",
                fix=f"vfl llm init --integer-bits {self.score_bits}, or Form(integer_bits=...)",
            )
        if self.sharing == INSECURE_FLOAT:
            if self.mode != "thesis":
                raise BadOptionError(
                    "only thesis mode computes on floats",
                    where="option 'sharing'",
                    got=f"mode '{self.mode}'",
                    want=f'Form("thesis", sharing="{INSECURE_FLOAT}"), or ring sharing',
                )
            warnings.warn(_INSECURE, InsecureWarning, stacklevel=3)

    @property
    def inside(self) -> int:
        """Number of bits before the binary point of values inside a layer."""
        return min(self.inner_bits, self.integer_bits)


@dataclass(frozen=True, slots=True)
class Shared:
    """A shared tensor as one party stores it, int64; only the lowest `ring` bits count.

    Attributes:
        share: this party's share; empty if this party does not have a share, or does not have it
            yet.
        bits: fraction bits.
        ring: number of bits of an element.
        known: whether dealt randomness determines P1's share, so that P1 knows it in advance.
    """

    share: Tensor
    bits: int
    ring: int = ELEMENT_BITS
    known: bool = False

    def map(self, change: Callable[[Tensor], Tensor]) -> Shared:
        """Return the same values with other axes, or a selection of the values."""
        return replace(self, share=change(self.share))

    def plus(self, other: Shared) -> Shared:
        """Return the sum of two values with the same number of fraction bits.

        Raises:
            ValueError: the two operands have different numbers of fraction bits.
        """
        if self.bits != other.bits:
            raise ValueError(
                f"shares of {self.bits} and {other.bits} fraction bits cannot be added"
            )
        ring, known = min(self.ring, other.ring), self.known and other.known
        return Shared(self.share + other.share, self.bits, ring, known)

    def dropped(self, bits: int) -> Shared:
        """Return the same value with fewer fraction bits in a smaller ring, exact to one unit.

        >>> z = torch.tensor([5 << 20]); first = torch.tensor([-(2**62)])
        >>> shares = [Shared(each, 30, 64).dropped(10) for each in (first, z - first)]
        >>> int(shares[0].share + shares[1].share) % 2**54
        5120
        """
        share = _rounded(self.share, bits)
        return replace(self, share=share, bits=self.bits - bits, ring=self.ring - bits)

    def finer(self, bits: int) -> Shared:
        """Return the same value with `bits` fraction bits in a larger ring.

        The new number of fraction bits must not be smaller than the old one.

        >>> Shared(torch.tensor([5]), 10, 30).finer(12)
        Shared(share=tensor([20]), bits=12, ring=32, known=False)
        """
        more = bits - self.bits
        share = self.share if self.share.is_floating_point() else self.share << more
        return replace(self, share=share, bits=bits, ring=min(ELEMENT_BITS, self.ring + more))

    def within(self, ring: int) -> Shared:
        """Return the same value in a ring of at most `ring` bits."""
        return replace(self, ring=min(self.ring, ring))


@dataclass(slots=True)
class Growing:
    """Cached tensors of a factor that grows along axis 1 with each token, by name of the tensor."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    _room: dict[str, Tensor] = field(default_factory=dict)

    def grow(self, **new: Tensor) -> list[Tensor]:
        """Append a tensor to each named tensor along axis 1; return the grown tensors."""
        for name, more in new.items():
            before = self.parts.get(name, more[:, :0])
            start, end = before.shape[1], before.shape[1] + more.shape[1]
            room = self._room.get(name, more[:, :0])
            if room.shape[1] < end:  # double the reserved memory, so that rows are rarely copied
                room = more.new_empty(more.shape[0], 2 * end, *more.shape[2:])
                room[:, :start], self._room[name] = before, room
            room[:, start:end] = more
            self.parts[name] = room[:, :end]
        return [self.parts[name] for name in new]


@dataclass(frozen=True, eq=False, slots=True)
class _GrowingProduct:
    """One product of `Role.multiply_growing`; see that method.

    Attributes:
        number: number of the operation.
        ring: number of bits of the product's elements.
    """

    cache: Growing
    more: Shared
    shared: Shared
    product: Bilinear
    shape: Sequence[int]
    number: int
    ring: int
    ahead: tuple[Growing, Shared] | None

    @property
    def parts(self) -> list[tuple[Shared, int]]:
        """The factors that the holders open, with the bits of their elements."""
        more = [] if self.ahead is None else [(self.ahead[1], self.ahead[1].ring)]
        return [(self.more, self.ring), (self.shared, self.ring), *more]

    @property
    def wanted(self) -> list[tuple[torch.Size, int]]:
        """Axes of the factors in `parts`, with the bits of the factors' elements."""
        return [(part.share.shape, bits) for part, bits in self.parts]


class Role(Engine):
    """One of the three roles; see the module's description.

    A role stores dealt material (correlated randomness) offline, and reads it online.

    Args:
        role: P0, P1 or P2.
        links: links to the other parties, by role.
        form: parameters of the protocols, equal at all three parties.

    Attributes:
        material: dealt material (correlated randomness) that the online phase has not read yet.
        watch: function that receives the values that this party sees, with the name of their layer,
            and in thesis mode also masked values that are opened; for measurements of leakage.
    """

    watch: Callable[[str, Tensor], None] | None = None
    part = ()

    def __init__(self, role: int, links: Mapping[int, Link], form: Form) -> None:
        super().__init__(role, links, len(HOLDERS), asdict(form))
        self.form = form
        self.material: Iterator[Tensor] = iter(())
        self._keep_one: Callable[[Tensor], None] = lambda tensor: None
        self._phase = "setup"
        self._asked = 0

    def next_number(self) -> int:
        """Return the number of the next operation.

        The online phase draws no pads, so it counts its operations separately.
        """
        if self._phase != "online":
            return super().next_number()
        self._asked += 1
        return self._asked

    @property
    def offline(self) -> bool:
        """Return whether the role is in the offline phase, in which it stores material."""
        return self._phase == "offline"

    def prepare(
        self, program: Callable[[Role], object], keep: Callable[[Tensor], None] | None = None
    ) -> list[Tensor]:
        """Run the offline phase of a program; return this party's material, which is empty at P2.

        Args:
            program: program that all parties run.
            keep: function that receives the material piece by piece; with it, the method returns an
                empty list.
        """
        material: list[Tensor] = []
        self._phase, self._keep_one = "offline", keep or material.append
        program(self)
        self._phase, self._keep_one = "setup", lambda tensor: None
        return material

    def answer(self, program: Callable[[Role], object], material: Iterable[Tensor]) -> object:
        """Run the online phase of a program at P0 and P1; return the program's result.

        Args:
            program: the program whose offline phase `prepare` ran.
            material: material from `prepare`, taken from this party's store; each material serves
                one question.

        Raises:
            ReusedPadError: the material was dealt for another program.
        """
        self._phase, self.material = "online", iter(material)
        found = program(self)
        if next(self.material, None) is not None:
            raise _other_material()
        self._phase = "setup"
        return found

    def constant(
        self, layer: LayerShape, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Constant:
        """Initialise SecureMul_F (algorithm 6.1, lines 1, 2), once per set of weights.

        P0 sends the masked weights X - U to P1, with as many bits per element as the layer's ring
        has, in one message per block of rows. P0 draws the mask U from a seed that P0 and P2 share,
        and then deletes U. An empty message to P2 follows: without it, the dealer would deal
        further numbers and wait until P0 receives them.

        Raises:
            RingRangeError: a weight does not fit into the ring; the error names the weight's layer.
        """
        number = self.next_number()
        if self.role == P1:
            empty = Packed(layer.shape, layer.ring, lambda: iter(()))
            pieces = [self.channels[P0].receive_bytes(number, size) for size in empty.sizes]
            return Constant(layer, masked=replace(empty, pieces=lambda: iter(pieces)))
        seed = self.pad(P2 if self.role == P0 else P0, (KEY_BYTES // 8,), "U", number)
        mask = Drawn(seed.numpy().tobytes(), layer.shape)
        if self.role == P2:
            self.channels[P0].receive_bytes(number, 0)
            return Constant(layer, mask=mask)
        assert weight is not None, "P0 has the weights"
        kept = room_for(weight, layer.bits)
        for start, drawn in mask.blocks():
            rows = slice(start, start + len(drawn))
            exact = self.encode(weight[rows], layer.bits, layer.name, _WEIGHT_INTEGER_BITS)
            self._send(P1, number, (exact - drawn, layer.ring))
            kept[rows] = exact
        self.channels[P2].send_bytes(b"", number, self._phase)
        return Constant(layer, kept, bias)

    def question(
        self, shape: Sequence[int], values: Tensor | None, bits: int, ring: int, where: str
    ) -> Shared:
        """Share P1's own values.

        In fast mode, P1 sends P0 one message of s n bits; P1's share is a pad, and P0 learns
        nothing about the values. In thesis mode there is no message: P1's share is the value, and
        P0's share is zero.

        Args:
            shape: shape of the values.
            values: the values at P1 in the online phase; None elsewhere.
            bits: fraction bits of the values.
            ring: number of bits of the ring in which the next product takes the values.
            where: name of the values, for error messages.
        """
        number, share = self.next_number(), blank(shape)
        if self.role == P1 and not self.offline:
            assert values is not None, "P1 has its own values"
            share = self.encode(values, bits, where, ring - 1 - bits)
        shared = Shared(share, bits, ring)
        return self._shared_again(shared, "question", number) if self._fast else shared

    def _shared_again(self, shared: Shared, purpose: str, number: int) -> Shared:
        """Share values anew in fast mode, so that P1's share is a pad that P1 knows in advance.

        P1 sends one message to P0.
        """
        share = shared.share
        if self.role == P1:
            pad = self._kept(lambda: self.pad(P2, share.shape, purpose, number))
            if not self.offline:
                self._send(P0, number, (share - pad, shared.ring))
            share = pad
        elif self.role == P0 and not self.offline:
            share = share + self._receive(P1, number, (share.shape, shared.ring))[0]
        return replace(shared, share=share, known=True)

    def encode(self, values: Tensor, bits: int, where: str, integer_bits: int) -> Tensor:
        """Return real numbers as elements of the ring; see `vfl.mpc.ring.encode`."""
        return encode(values, bits, where, integer_bits, _FIX)

    def decode(self, elements: Tensor, shared: Shared) -> Tensor:
        """Return ring elements with a shared tensor's fraction bits as real numbers."""
        above = ELEMENT_BITS - shared.ring
        return decode((elements << above) >> above, shared.bits)

    def plus_own(self, shared: Shared, values: Tensor | None) -> Shared:
        """Add values that P0 knows to P0's share: a bias, or position vectors."""
        if self.role != P0 or self.offline or values is None:
            return shared
        own = self.encode(values, shared.bits, "a bias", shared.ring - 1 - shared.bits)
        return shared.map(lambda share: share + own)

    def multiply(self, shared: Shared, constant: Constant) -> Shared:
        """Run SecureMul_F(X, Y): Z = Y X in rows, with a constant X of P0 (algorithm 6.1).

        Line 4 of the algorithm in print sends P1's message to P1; here P1 sends the message to P0,
        which then knows the masked factor Y - V. P0 learns only Y - V, which is uniformly
        distributed; P1 learns nothing. The product takes one message from P1 to P0, with s bits per
        element of Y. In fast mode, the product takes no message if P1 knows its share of Y in
        advance, because P1 has sent its message offline. Offline: P2 sends P1 s bits per element of
        Z.

        The product in plain torch is ``Y @ X + bias``.
        """
        operation = partial(multiplied, turned=constant.turned)
        return self._multiply(shared, constant, operation, constant.shape)

    def scale(self, shared: Shared, constant: Constant) -> Shared:
        """Multiply each column by its own factor, axes (1, columns), as a norm layer does.

        The product in plain torch is ``Y * X + bias``.
        """
        return self._multiply(shared, constant, scaled, (constant.shape[1], constant.shape[1]))

    def _multiply(
        self,
        shared: Shared,
        constant: Constant,
        operation: Callable[[Tensor, Matrix | Tensor], Tensor],
        widths: tuple[int, int],
    ) -> Shared:
        """Compute Z = Y X for `multiply` and `scale`.

        Only P1 has the mask V of Y, so P0's share of V X is only P0's share of V U.

        Raises:
            ValueError: the weights were shared for a smaller ring.
        """
        if shared.ring > constant.layer.ring:
            name = constant.layer.name
            raise ValueError(f"{name}: shared for a ring of {constant.layer.ring} bits")
        number, rows, ring = self.next_number(), shared.share.shape[0], shared.ring
        v_shape, z_shape = (rows, widths[0]), (rows, widths[1])
        bits, early = shared.bits + constant.layer.bits, self._is_early(shared)
        share, numbers = blank(z_shape), Ring(ring)
        if self.deals:
            v = self.pad(P1, v_shape, "V", number)
            self._deal([operation(v, constant.of(P2))], "W", number, numbers=numbers)
        elif self.offline and self.first:
            theirs = self._receive(P1, number, (v_shape, ring)) if early else []
            self._keep(*theirs, *self._dealt([z_shape], "W", number, numbers))
        elif self.offline:
            v = self.pad(P2, v_shape, "V", number)
            (w,) = self._dealt([z_shape], "W", number, numbers)
            share = w + operation(v, constant.of(P1))
            self._keep(share, *([] if early else [v]))
            if early:
                self._send(P0, number, (shared.share - v, ring))
        elif self.first:
            difference = self._take() if early else self._receive(P1, number, (v_shape, ring))[0]
            share = operation(shared.share + difference, constant.of(P0)) + self._take()
        else:
            share = self._take()
            if not early:
                self._send(P0, number, (shared.share - self._take(), ring))
        known = self._fast
        return self.plus_own(Shared(share, bits, shared.ring, known), constant.bias)

    def multiply_growing(
        self,
        cache: Growing,
        more: Shared,
        shared: Shared,
        product: Bilinear,
        shape: Sequence[int],
        ahead: tuple[Growing, Shared] | None = None,
    ) -> Shared:
        """Run SecureMul_G(X, Y) (algorithm 6.2): append X' to X, then return X times Y.

        The holders P0 and P1 learn only the factors minus masks, which are uniformly distributed.
        In fast mode, P1 knows its shares of X' and Y in advance, and has sent them to P0 under
        masks. P0 then sends its shares of X' and Y under masks, in one message of s bits per
        element of X' and Y. In thesis mode, both holders open X' - U' and Y - V (the factors minus
        masks), in two messages of this size each. Offline, P2 sends P1 s bits per element of the
        product; in fast mode, P1 also sends P0 s bits per element of X' and Y.

        The product in plain torch is ``product(torch.cat(all X', 1), Y)``.

        Args:
            cache: this party's cache of this X.
            more: X', the new rows, which are appended to X along axis 1.
            shared: the shared factor Y.
            product: function that multiplies the whole X by Y.
            shape: axes of the product.
            ahead: in fast mode, another growing factor (its cache and its new rows); it is opened
                in the same message, and `mix` uses it.

        Raises:
            ValueError: the mode is "fast", and P1 does not know its shares in advance.
        """
        number, ring = self.next_number(), min(more.ring, shared.ring)
        growing = _GrowingProduct(cache, more, shared, product, shape, number, ring, ahead)
        if self._fast and not all(part.known for part, _ in growing.parts):
            raise ValueError("factors of a growing product come from products or functions")
        share = blank(shape)
        if self.deals:
            self._deal_growing(growing)
        elif self.offline:
            self._prepare_growing(growing)
        elif self._fast:
            share = self._ask_growing(growing) if self.first else self._answer_growing(growing)
        else:
            share = self._open_growing(growing)
        return Shared(share, more.bits + shared.bits, ring)

    @property
    def _fast(self) -> bool:
        return self.form.mode == "fast"

    def _deal_growing(self, of: _GrowingProduct) -> None:
        """At the dealer, share the product of the two holders' masks."""
        first, second = (
            [self.pad(peer, shape, "G", i, of.number) for i, (shape, _) in enumerate(of.wanted)]
            for peer in (P0, P1)
        )
        u0, u1 = of.cache.grow(first=first[0], second=second[0])
        w = of.product(u1, first[1]) + of.product(u0, second[1])
        if not self._fast:
            w += of.product(u0, first[1]) + of.product(u1, second[1])
        self._deal([w], "W", of.number, numbers=Ring(of.ring))
        if of.ahead is not None:
            of.ahead[0].grow(first=first[2], second=second[2])

    def _masks_of(self, of: _GrowingProduct) -> list[Tensor]:
        wanted = enumerate(of.wanted)
        return [self._mask(shape, "G", i, number=of.number) for i, (shape, _) in wanted]

    def _prepare_growing(self, of: _GrowingProduct) -> None:
        """Before a question, draw a holder's masks.

        In fast mode, P0 also receives P1's masked factors.
        """
        masks = self._masks_of(of)
        theirs = self._receive(P1, of.number, *of.wanted) if self._fast and self.first else []
        if self._fast and not self.first:
            hidden = [part.share - u for (part, _), u in zip(of.parts, masks, strict=True)]
            self._send_all(P0, of.number, hidden, of.wanted)
        self._keep(*masks, *self._dealt([of.shape], "W", of.number, Ring(of.ring)), *theirs)

    def _hidden_parts(self, of: _GrowingProduct, masks: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(of.parts, masks, strict=True)
        return [self._as_sent(part.share - u) for (part, _), u in pairs]

    def _open_growing(self, of: _GrowingProduct) -> Tensor:
        """At a holder in thesis mode, open both factors of the product, then multiply them."""
        masks, w = [self._take() for _ in of.parts], self._take()
        opened, (u, v) = self._hidden_parts(of, masks), masks[:2]
        self._send_all(P1 - self.role, of.number, opened, of.wanted)
        theirs = self._receive(P1 - self.role, of.number, *of.wanted)
        e, f = (a + b for a, b in zip(opened, theirs, strict=True))
        seen = (e, of.more.within(of.ring)), (f, of.shared.within(of.ring))
        self._watched(of.number, *seen)
        e, u = of.cache.grow(difference=e, mask=u)
        return masked_product(RING, of.product, (e, f), u, self._plus(v, f), w)

    def _ask_growing(self, of: _GrowingProduct) -> Tensor:
        """At P0 in fast mode, send both factors under masks; P1's came earlier."""
        masks, w = [self._take() for _ in of.parts], self._take()
        self._send_all(P1, of.number, self._hidden_parts(of, masks), of.wanted)
        x, d = of.cache.grow(share=of.more.share, difference=self._take())
        factors = x + d, self._take()  # two one-way products and a local one, with x and y as masks
        share = masked_product(RING, of.product, factors, x, of.shared.share, w)
        if of.ahead is not None:
            of.ahead[0].grow(share=of.ahead[1].share, difference=self._take())
        return share

    def _answer_growing(self, of: _GrowingProduct) -> Tensor:
        """At P1 in fast mode, compute the terms that P1 knows while P0's message is in transit."""
        masks, w = [self._take() for _ in of.parts], self._take()
        x, u = of.cache.grow(share=of.more.share, mask=masks[0])
        share = w + of.product(x, of.shared.share)
        if of.ahead is not None:
            of.ahead[0].grow(share=of.ahead[1].share, mask=masks[2])
        e, f, *rest = self._receive(P0, of.number, *of.wanted)
        (e,) = of.cache.grow(difference=e)
        share = masked_product(RING, of.product, (e, f), u, masks[1], share)
        if of.ahead is not None:
            of.ahead[0].grow(difference=rest[0])
        return share

    def apply(
        self,
        shared: Shared,
        function: Function,
        bits: int,
        ring: int,
        where: str,
        kind: str,
        shown: int | None = None,
    ) -> Shared:
        """Run SecureNonlinear (algorithm 6.4): a function of shared values that P1 computes.

        SecurePerm (6.3) permutes the values for P1, and P1's results back. P1 learns the values in
        a secretly permuted order. P0 learns nothing about the values. For vectors, the permutation
        moves the elements inside each vector, and also the vectors; for a pair, the two elements of
        a pair move together.

        There are two messages: P0 sends P1 the shown (upper) bits of each element, and P1 sends P0
        s bits per element of the result. If the mode is "thesis", or P1 does not know its share in
        advance, P1 first sends P0 a message with two bits more per element than are shown. Offline,
        P2 sends P0 s bits per element of the values and of the result. P0 draws its permutation
        from the key stream that it shares with P2, whereas algorithm 6.3 sends the permutation.

        The result in plain torch is ``function(values)``.

        Args:
            shared: shared values, axes (rows, width); for a function of two operands, axes (2,
                elements), one row per operand.
            function: function that P1 computes; it must give the same results for any order of the
                permuted values.
            bits: fraction bits of the result.
            ring: number of bits of the result's elements.
            where: name of the layer in the record of values that P1 saw.
            kind: unit that the permutation moves: "elements", "vectors" or "pairs".
            shown: fraction bits of the values that P1 needs; None shows all that the form allows.

        Raises:
            WidthError: the permutation moves elements or pairs, and there are too few of them to
                hide one another.
            RingRangeError: a value is too large for the ring; the error names its layer.
        """
        number, count = self.next_number(), shared.share.numel()
        rows, width = shared.share.shape
        results = width if kind == "pairs" else count
        if kind != "vectors" and results < LEAST_PERMUTED:
            raise WidthError(
                "too few values for a permutation to hide them",
                where=where,
                got=f"{results}",
                want=f"at least {LEAST_PERMUTED}",
                fix="use more rows per question, or a wider layer",
            )
        share, mine = blank((results,)), self._show(shared, kind, number, shown)
        if self.role == P2:
            self._deal_back(mine, results, ring, number)
        elif self.role == P1:
            q0, q1 = self._kept(lambda: self.pad(P2, (2, results), "q", number))
            if not self.offline:
                found = self._found(mine, shared, function, bits, ring, where)
                self._send(P0, number, (found - q0, ring))
            share = q1
        elif self.offline:
            self._keep(_back(mine, results), *self._receive(P2, number, ((results,), ring)))
        else:
            back, delta = self._take(), self._take()
            share = self._receive(P1, number, ((results,), ring))[0][back] + delta
        axes = (1, width) if kind == "pairs" else (rows, width)
        return Shared(share.reshape(axes), bits, ring, known=self._fast)

    def mix(
        self,
        scores: Shared,
        function: Function,
        bits: int,
        where: str,
        cache: Growing,
        values: Shared,
        product: Bilinear,
        drop: int,
        shown: int | None = None,
    ) -> Shared:
        """Run SecureNonlinear on one row per head, then SecureMul_G, with two messages fewer.

        Only fast mode uses this method. Let v be the values of attention and p the probabilities
        that P1 computes. P0 and P1 both know m = p - q0 (p under a mask) and the masked v, which
        was opened before. P1 has m in its own order of heads. Let u1 be P1's mask of v. From
        these values and the dealt products, P0 and P1 get shares of (v - u1) p and of u1 q0, so
        only u1 m is missing from v p. The dealer therefore shares u1 again as g0 + g1 in P1's
        order, so that each holder multiplies its share by m locally. P1's part of the result is in
        two orders of heads, the original one and P1's order. P1 sends both parts under masks
        together with m; P1's own share of the result is a pad.

        P0 and P1 receive only uniformly distributed numbers, and P1 also learns the permuted
        scores. The method sends the messages of `apply`; the last of these has 2 s' additional bits
        per element of the product, with s' from `drop`. Offline, P2 sends P0 s bits for each
        element of v and each head that uses the element.

        The result in plain torch is ``product(v, function(scores))``.

        Args:
            scores: shared attention scores, axes (heads, tokens).
            function: function of each row that P1 computes; see `apply`.
            bits: fraction bits of the function's result, which is in the ring of `values`.
            where: name of the layer in the record of values that P1 saw.
            cache: cache of v, whose last rows were added by `multiply_growing`.
            values: the last rows of v, shared; axes (groups, 1, width).
            product: function that multiplies the whole v, axes (groups, tokens, width), by
                probabilities, axes (heads, 1, tokens).
            drop: number of low bits that the holders drop from the product; s' = s - drop.
            shown: number of fraction bits of the scores that P1 needs.
        """
        number, ring, small = self.next_number(), values.ring, values.ring - drop
        heads, tokens = scores.share.shape
        count, width = heads * tokens, values.share.shape[-1]
        axes, flat, wide = (heads, 1, width), (heads, width), (count, width)
        share = blank(axes)

        def in_order(elements: Tensor) -> Tensor:
            return elements.reshape(heads, 1, tokens)

        def own_order(part: Tensor, masked: Tensor) -> Tensor:
            return batched(in_order(masked), part.reshape(heads, tokens, width))[:, 0]

        if self.role == P1:  # compute the terms that P1 knows while the scores are in transit
            pads = (((2, count), "q"), (wide, "g"), ((3, *flat), "y"))
            drawn = [self._kept(partial(self.pad, P2, each, name, number)) for each, name in pads]
            (q0, q1), g1, (r, t, y) = drawn
            w = self._kept(lambda: self._dealt([axes], "W", number, Ring(ring))[0])
            if not self.offline:
                parts = cache.parts
                known = parts["difference"] + parts["share"] - parts["mask"]
                heads_order = (w + product(known, in_order(q1))).reshape(flat)
            mine = self._show(scores, "vectors", number, shown)
            if not self.offline:
                masked = self._found(mine, scores, function, bits, ring, where) - q0
                both = _rounded(own_order(g1, masked), drop) - r, _rounded(heads_order, drop) - t
                self._send(P0, number, (masked, ring), *((each, small) for each in both))
            return Shared(y.reshape(axes), values.bits + bits - drop, small, known=True)
        mine = self._show(scores, "vectors", number, shown)
        if self.deals:
            q0, q1, back = *self._deal_back(mine, count, ring, number), _back(mine, count)
            u0, u1 = cache.parts["first"], cache.parts["second"]
            each = u1.repeat_interleave(heads // len(u1), 0).reshape(wide)[mine]
            w = product(u0, in_order(q1)) + product(u1, in_order(q0[back]))
            r, t, y = self.pad(P1, (3, *flat), "y", number)
            self._deal([w], "W", number, numbers=Ring(ring))
            unordered = r[_back(mine[::tokens] // tokens, heads)]
            g0 = each - self.pad(P1, wide, "g", number)
            self._send(P0, number, (g0, ring), (unordered + t - y, small))
        elif self.offline:
            dealt = self._receive(P2, number, ((count,), ring))
            dealt += self._receive(P2, number, (wide, ring), (flat, small))
            self._keep(_back(mine, count), *dealt, *self._dealt([axes], "W", number))
        else:
            back, delta, g0, moved, w = (self._take() for _ in range(5))
            heads_back = _back(mine[::tokens] // tokens, heads)
            whole = cache.parts["share"] + cache.parts["difference"]
            wanted = ((count,), ring), (flat, small), (flat, small)
            masked, theirs, others = self._receive(P1, number, *wanted)
            own = w + product(whole, in_order(masked[back] + delta))
            own = own.reshape(flat) + own_order(g0, masked)[heads_back]
            share = (_rounded(own, drop) + theirs[heads_back] + others + moved).reshape(axes)
        return Shared(share, values.bits + bits - drop, small, known=True)

    def show_all(self, shared: Shared, where: str) -> Tensor | None:
        """Open values to P1; the result is None at the other parties. P0 sends its share to P1.

        The opening takes one message from P0 to P1, of s bits per element.
        """
        number = self.next_number()
        if self.offline or self.role == P2:
            return None
        if self.role == P0:
            self._send(P1, number, (shared.share, shared.ring))
            return None
        (theirs,) = self._receive(P0, number, (shared.share.shape, shared.ring))
        return self._seen(theirs + shared.share, shared, where, "values")

    def choose(
        self,
        scores: Shared,
        pick: Pick | None,
        where: str = "scores",
        shown: int | None = None,
    ) -> list[int]:
        """Run SecurePrediction (algorithm 6.5): P1 picks an index in each row and learns it.

        P1 learns the scores in permuted order, and the original index of the score that it picks.
        P0 learns nothing about the index, because P1's query is uniformly distributed. The printed
        protocol retrieves the index with a BFV query (`Form.retrieval`). By default ("sets"), a
        query for subsets to two servers retrieves the index (Chor, Goldreich, Kushilevitz and Sudan
        1995, section 3.1). The dealer, which knows the permutation (6.3), acts as the second
        server: offline, it gives P1 a random set S of positions, and the masked sum of the
        permutation's entries in S. Online, P1 adds its position to S, or removes it if S contains
        it, and sends the resulting set; P0 answers with the masked sum over this set. P1 learns
        only one entry of the permutation if it follows the protocol. If P1 does not follow the
        protocol, it learns the sum over some other set instead.

        For n scores, three messages contain the shown bits of each score, then n bits, then 4 bytes
        per row. If the mode is "thesis", or P1 does not know its share in advance, a message with
        two bits more per score than are shown comes first.

        The result in plain torch is ``[pick(row) for row in scores]``, for a pick that ignores the
        order.

        Args:
            scores: shared scores, axes (rows, scores).
            pick: P1's function that returns a position in the given scores; any decoding strategy
                is possible.
            where: name of the scores in the record of values that P1 saw.
            shown: number of fraction bits of the scores that P1 needs; see `apply`.

        Returns:
            at P1 in the online phase, the indices; otherwise zeros.
        """
        number = self.next_number()
        mine = self._show(scores, "rows", number, shown)
        return self._retrieve(scores, mine, pick, where, number)

    def _retrieve(
        self, scores: Shared, mine: Tensor, pick: Pick | None, where: str, number: int
    ) -> list[int]:
        """Retrieve the index that P1 picks in each row, by sets of positions; see `choose`."""
        rows, count = scores.share.shape
        size, set_words = -(-rows * count // 8), -(-rows * count // 64)
        if self.role == P2:
            inside = _as_bits(self.pad(P1, (set_words,), "set", number), (rows, count))
            total = (indices_within(mine, rows) * inside).sum(1) - self.pad(
                P0, (rows,), "sum", number
            )
            self._send(P1, number, (total, _ANSWER_BITS))
        elif self.role == P0:
            mask = self._kept(lambda: self.pad(P2, (rows,), "sum", number))
            if not self.offline:
                query = self.channels[P1].receive_bytes(number, size)
                packed = np.unpackbits(np.frombuffer(query, np.uint8), count=rows * count)
                asked = torch.from_numpy(packed).reshape(rows, count)
                answer = (indices_within(mine, rows) * asked).sum(1) - mask
                self._send(P1, number, (answer, _ANSWER_BITS))
        elif self.offline:
            self._keep(self.pad(P2, (set_words,), "set", number))
            self._keep(*self._receive_whole(P2, number, ((rows,), _ANSWER_BITS)))
        else:
            inside, total = _as_bits(self._take(), (rows, count)), self._take()
            places = self._picked(mine, scores, pick, where)
            flipped = inside.clone()
            flipped[torch.arange(rows), places] ^= True
            packed = np.packbits(flipped.numpy().reshape(-1))
            self.channels[P0].send_bytes(packed.data, number, "online")
            (answer,) = self._receive_whole(P0, number, ((rows,), _ANSWER_BITS))
            entries = (answer - total).to(torch.int32).tolist()
            signs = inside[torch.arange(rows), places].tolist()
            return [-each if sign else each for each, sign in zip(entries, signs, strict=True)]
        return [0] * rows

    def _picked(self, mine: Tensor, scores: Shared, pick: Pick | None, where: str) -> list[int]:
        assert pick is not None, "P1 picks"
        values = self._seen(mine, scores, where).reshape(scores.share.shape)
        return [pick(row) for row in values]

    def tell(self, flag: bool) -> bool:
        """Disclose to P0 whether P1 requests more tokens.

        With False, both discard the unused material.
        """
        number = self.next_number()
        if self.offline or self.role == P2:
            return True
        if self.role == P1:
            self.channels[P0].send_bytes(memoryview(bytes([flag])), number, "online")
        else:
            flag = bool(self.channels[P1].receive_bytes(number, 1)[0])
        if not flag:
            self.material = iter(())
        return flag

    def _show(self, shared: Shared, kind: str, number: int, shown: int | None) -> Tensor:
        """Run SecurePerm (algorithm 6.3), and open the permuted values to P1.

        P1 receives only the bits that it needs.

        Returns:
            the permutation at P0 and P2; at P1 in the online phase, the permuted values in the
            ring.
        """
        count, early, ring = shared.share.numel(), self._is_early(shared), shared.ring
        low, first_low = self._low_bits(shared, shown)
        shape = (count,)
        first, then = (shape, ring - first_low, first_low), (shape, ring - low, low)
        if self.role == P2:
            r0, r1 = self.pad(P1, (2, count), "r", number)
            order = _order(self.pads[P0], shared.share.shape, kind, number)
            self._send(P0, number, (r0[order] - r1, ring))
            return order
        if self.role == P1:
            if self.offline:
                r0, r1 = self.pad(P2, (2, count), "r", number).unbind()
                if early:
                    self._send(P0, number, (shared.share.reshape(-1) - r0, ring))
                self._keep(r1, *([] if early else [r0]))
                return r1
            r1 = self._take()
            half = (1 << low) >> 1  # add one half for rounding, if low bits were dropped
            if not early:
                self._send(P0, number, (shared.share.reshape(-1) - self._take(), *first[1:]))
                half += (1 << first_low) >> 1
            (found,) = self._receive(P0, number, then)
            return torch.add(found, r1).add_(half)
        if self.offline:
            order = _order(self.pads[P2], shared.share.shape, kind, number)
            (delta,) = self._receive(P2, number, (shape, ring))
            if early:
                delta = delta + self._receive(P1, number, (shape, ring))[0][order]
            self._keep(order, delta)
            return order
        order, delta = self._take(), self._take()
        hidden = shared.share.reshape(-1)
        if not early:
            hidden = hidden + self._receive(P1, number, first)[0]
            self._watched(number, (hidden, shared))
        self._send(P1, number, (hidden[order] + delta, *then[1:]))
        return order

    def _low_bits(self, shared: Shared, shown: int | None) -> tuple[int, int]:
        """Return how many low bits are left out of a value for P1, and of P1's share for P0."""
        if shown is not None:
            low = max(0, shared.bits - shown)
            return low, max(0, low - _FIRST_MORE)
        low, first_low = (
            max(0, shared.ring - 8 * each)
            for each in (self.form.shown_bytes, self.form.first_bytes)
        )
        return low, first_low

    def _deal_back(
        self, order: Tensor, results: int, ring: int, number: int
    ) -> tuple[Tensor, Tensor]:
        """At the dealer, deal for permuting P1's results back to their order; return P1's masks.

        This is protocol SecurePerm with the inverse permutation; P1 adds the masks to its results.
        """
        q0, q1 = self.pad(P1, (2, results), "q", number)
        self._send(P0, number, (q0[_back(order, results)] - q1, ring))
        return q0, q1

    def _found(
        self, mine: Tensor, shared: Shared, function: Function, bits: int, ring: int, where: str
    ) -> Tensor:
        """At P1, evaluate a function on the values that P1 sees; return ring elements."""
        values = self._seen(mine, shared, where).reshape(shared.share.shape)
        return self.encode(function(values), bits, where, ring - 1 - bits).reshape(-1)

    def _seen(
        self, elements: Tensor, shared: Shared, where: str, what: str = "permuted values"
    ) -> Tensor:
        """Return the values that P1 sees as real numbers; count them in the ledger of leakage."""
        self.leakage.count(what, where, elements.numel(), elements.numel())
        values = self.decode(elements, shared)
        require_integer_bits(values, shared.ring - 2 - shared.bits, shared.bits, where, _FIX)
        if self.watch is not None:
            self.watch(where, values)
        return values

    def _watched(self, number: int, *opened: tuple[Tensor, Shared]) -> None:
        """Pass masked values that were opened to `watch` as real numbers, for measurements."""
        if self.watch is not None:
            for index, each in enumerate(opened):
                self.watch(f"opened {number} {index}", self.decode(*each))

    def _is_early(self, shared: Shared) -> bool:
        return shared.known and self._fast

    def _send_dealt(self, rest: Tensor, number: int, phase: str, numbers: Ring) -> None:
        self._send(P1, number, (rest, numbers.bits))

    def _receive_dealt(self, shapes: Sequence[Shape], number: int, numbers: Ring) -> list[Tensor]:
        return self._receive(P2, number, *((shape, numbers.bits) for shape in shapes))

    def _keep(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._keep_one(tensor)

    def _take(self) -> Tensor:
        found = next(self.material, None)
        if found is None:
            raise _other_material()
        return found

    def _kept(self, draw: Callable[[], Tensor]) -> Tensor:
        """Draw a tensor in the offline phase and store it; return it again in the online phase."""
        if self.offline:
            self._keep(drawn := draw())
            return drawn
        return self._take()

    def _as_sent(self, elements: Tensor) -> Tensor:
        """Return elements rounded as the other party receives them in a message.

        Sender and receiver of the message then continue with equal elements.
        """
        return elements

    def _send(self, peer: int, number: int, *parts: Sent) -> None:
        """Send several tensors in one message.

        Each tensor has its own number of bits per element.
        """
        payloads = [pack_elements(*part) for part in parts]
        whole = payloads[0] if len(payloads) == 1 else memoryview(b"".join(payloads))
        self.channels[peer].send_bytes(whole, number, self._phase)

    def _send_all(
        self, peer: int, number: int, tensors: Sequence[Tensor], wanted: Sequence[Wanted]
    ) -> None:
        self._send(peer, number, *((a, *b[1:]) for a, b in zip(tensors, wanted, strict=True)))

    def _receive(self, peer: int, number: int, *parts: Wanted) -> list[Tensor]:
        return self._receive_whole(peer, number, *parts)

    def _receive_whole(self, peer: int, number: int, *parts: Wanted) -> list[Tensor]:
        sizes = [packed_bytes(torch.Size(part[0]).numel(), part[1]) for part in parts]
        payload = self.channels[peer].receive_bytes(number, sum(sizes))
        return [
            unpack_elements(raw, torch.Size(shape).numel(), *widths).reshape(tuple(shape))
            for raw, (shape, *widths) in zip(
                split_payload(payload, sizes, None), parts, strict=True
            )
        ]


class LocalRoles(LocalParties[Role]):
    """The three parties as threads of this process.

    Args:
        form: parameters of the protocols, equal at all parties.
        terms: terms that the parties compare before they begin to compute.
        timeout_s: seconds that a party waits for a message.
    """

    def __init__(self, form: Form, terms: Mapping[str, Any], timeout_s: float = 30.0) -> None:
        kind = kind_of(form)
        super().__init__(lambda role, links: kind(role, links, form), timeout_s)
        self.agree(terms)


def kind_of(form: Form) -> type[Role]:
    """Return the class of roles that computes with a form."""
    if form.protect == "scores":
        return named(_SHARING)  # type: ignore[no-any-return]
    usual = form.sharing == "ring" and form.retrieval == "sets"
    return Role if usual else named(_AS_PRINTED)(form)


def _rounded(share: Tensor, bits: int) -> Tensor:
    if share.is_floating_point():  # floats have no ring, and are not truncated
        return share
    return share + ((1 << bits) >> 1) >> bits


def _order(pads: PadStream, shape: Sequence[int], kind: str, number: int) -> Tensor:
    """Draw a secret permutation of flat indices.

    Each position of the result gets the index of its source.
    """
    rows, width = shape
    if kind in ("vectors", "rows"):
        inside = _orders_inside(pads, rows, width, number) + width * torch.arange(rows)[:, None]
        if kind == "vectors":
            inside = inside[torch.from_numpy(permutation(pads, rows, "vectors", number))]
        return inside.reshape(-1)
    count = width if kind == "pairs" else rows * width
    order = torch.from_numpy(permutation(pads, count, "elements", number))
    return torch.cat([order, order + width]) if kind == "pairs" else order


def _back(order: Tensor, results: int) -> Tensor:
    """Return the inverse of a permutation; for pairs, the inverse for the pairs' first elements."""
    back = torch.empty(results, dtype=torch.int64)
    back[order[:results]] = torch.arange(results)
    return back


def _orders_inside(pads: PadStream, rows: int, width: int, number: int) -> Tensor:
    """Return a permutation of the elements of each vector.

    The function sorts random keys of 40 bits, for up to 2^24 elements.
    """
    keys = pads.elements64(rows * width, "inside", number).reshape(rows, width)
    low = np.uint64((1 << 24) - 1)
    keys = keys & ~low | np.arange(width, dtype=np.uint64)
    keys.sort(axis=1)
    return torch.from_numpy((keys & low).astype(np.int64))


def indices_within(order: Tensor, rows: int) -> Tensor:
    """Return each index's position within its row, for a permutation of kind "rows"."""
    return order.reshape(rows, -1) % (order.numel() // rows)


def _as_bits(elements: Tensor, shape: tuple[int, int]) -> Tensor:
    """Make uniform random sets of positions from uniform words; bool of axes `shape`."""
    words, count = elements.numpy().view(np.uint8), shape[0] * shape[1]
    return torch.from_numpy(np.unpackbits(words, count=count) > 0).reshape(shape)


def _other_material() -> ReusedPadError:
    return ReusedPadError(
        "the dealt material is for another program",
        want=f"the program that {NAMES[P0]} and {NAMES[P1]} prepared, with the same axes",
        fix="deal for this question; the rest of the other program's material will never be used",
    )
