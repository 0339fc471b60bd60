"""Two parties online, a dealer ahead; what P1 sees is hidden by an order, not by cryptography.

The protocols of chapter 6 (thesis of split learning, 2025). P1 sees the multiset of the values
before every function, and which two make a pair. All three follow the protocol and no two collude;
P2 with either of the others learns everything.

P0 owns the weights, P1 the text. P2 deals in two phases and sees nothing of a question:
initialisation, once per weights, and offline, once per question. Online are P0 and P1 alone, with
what the offline phase left each of them: its material, a list of tensors that is read once.

A program is a function of a `Role`. All three call it with the same shapes; offline nobody has a
value of P0's, and what P1 holds is often known already: behind a constant product or a function its
share is a number that was dealt. In mode "fast" P1 says whatever depends on nothing else ahead of
time, so that a function takes one round trip and a linear layer none; in mode "thesis" everything
is said as printed, with the printed errors mended.

Numbers: fixed point in the ring 2^ring, ring at most 64, and a message carries that many bits. No
product is truncated. A scale shrinks when both holders drop low bits of their shares: what is left
is a sharing in a ring as much smaller, exact to one unit, and no wrap can become a huge error. Of
values that are only looked at, P1 is sent the upper `shown_bytes` of the ring alone.

Bytes below are payloads, online; n elements, s = ceil(ring / 8) bytes of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import ReusedPadError, WidthError
from vfl.core.frame import Link
from vfl.core.registry import require_choice, require_range
from vfl.mpc.party import Peer
from vfl.mpc.permuted import permutation
from vfl.mpc.ring import ELEMENT_BITS, decode, encode, matmul, require_room
from vfl.mpc.rules import MODES, NAMES, P0, P1, P2, Mode
from vfl.mpc.shares import blank
from vfl.mpc.stream import PadStream
from vfl.mpc.trio import LocalParties

_Result = TypeVar("_Result")

#: Fewer elements are not hidden by an order among them.
LEAST_PERMUTED = 32
_ANSWER_BYTES = 4
#: Bits before the point that a weight may have; a product's are for the ring to hold.
_WEIGHT_ROOM = 30
_FIX = "answer with a model whose weights and activations are smaller"

#: f on values of axes (rows, width), which come permuted, or (2, elements) for a pair.
Function = Callable[[Tensor], Tensor]
#: A bilinear map of what grows and what it is multiplied with.
Bilinear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Form:
    """What the parties agree on.

    Attributes:
        mode: "fast", or "thesis" for chapter 6 as printed.
        shown_bytes: of an element that P1 looks at; its error is 2^(ring - bits - 8 shown_bytes).
        first_bytes: of P1's share of it in thesis mode, and where the share was not known ahead.
    """

    mode: Mode = "fast"
    shown_bytes: int = 3
    first_bytes: int = 4

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_range("shown_bytes", self.shown_bytes, 2, 8)
        require_range("first_bytes", self.first_bytes, self.shown_bytes, 8)


@dataclass(frozen=True, slots=True)
class Shared:
    """A shared tensor as one party has it: int64, of which the low `ring` bits count.

    Attributes:
        share: blank where this party does not know it (yet).
        bits: of the fraction.
        ring: bits of an element.
        known: whether P1's share follows from what was dealt, so that it is there ahead.
    """

    share: Tensor
    bits: int
    ring: int = ELEMENT_BITS
    known: bool = False

    def map(self, change: Callable[[Tensor], Tensor]) -> Shared:
        """The same with other axes, or some of the elements."""
        return replace(self, share=change(self.share))

    def plus(self, other: Shared) -> Shared:
        """The sum; of one scale.

        Raises:
            ValueError: the two have different fractions.
        """
        if self.bits != other.bits:
            raise ValueError(f"shares of {self.bits} and {other.bits} fraction bits do not join")
        ring, known = min(self.ring, other.ring), self.known and other.known
        return Shared(self.share + other.share, self.bits, ring, known)

    def dropped(self, bits: int) -> Shared:
        """The same value with fewer fraction bits in a smaller ring, exact to one unit.

        >>> z = torch.tensor([5 << 20]); first = torch.tensor([-(2**62)])
        >>> shares = [Shared(each, 30, 64).dropped(10) for each in (first, z - first)]
        >>> int(shares[0].share + shares[1].share) % 2**54
        5120
        """
        return replace(self, share=self.share >> bits, bits=self.bits - bits, ring=self.ring - bits)

    def within(self, ring: int) -> Shared:
        """The same in a ring that is no larger."""
        return replace(self, ring=min(self.ring, ring))


@dataclass(frozen=True, slots=True)
class Constant:
    """A weight of P0's, after initialisation.

    Attributes:
        name: of the layer.
        shape: (inputs, outputs).
        bits: of its fraction.
        weight, bias: at P0 alone.
        masked: E = X - U, at P0 and P1.
        mask: U, at P2 alone.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    masked: Tensor | None = None
    mask: Tensor | None = None


@dataclass(slots=True)
class Growing:
    """What a cache has gathered of a factor that grows by rows (axis 1), by name of the part."""

    parts: dict[str, Tensor] = field(default_factory=dict)

    def grow(self, **new: Tensor) -> list[Tensor]:
        """Append to each part; the whole parts in that order."""
        for name, more in new.items():
            before = self.parts.get(name)
            self.parts[name] = more if before is None else torch.cat([before, more], 1)
        return [self.parts[name] for name in new]


class Role(Peer):
    """One of the three; see the module.

    Args:
        role: P0, P1 or P2.
        links: to the others, by role.
        form: the same at all three.

    Attributes:
        material: what the offline phase gathers, or what the online phase has left to read.
        watch: at P1, told of the values it sees and of their layer; for who measures leakage.
    """

    watch: Callable[[str, Tensor], None] | None = None

    def __init__(self, role: int, links: Mapping[int, Link], form: Form) -> None:
        super().__init__(role, links, asdict(form))
        self.form = form
        self.material: list[Tensor] = []
        self._phase = "setup"
        self._read = self._asked = 0

    def next_number(self) -> int:
        """Online P2 does not count, and nobody draws a pad: operations there have own numbers."""
        if self._phase != "online":
            return super().next_number()
        self._asked += 1
        return self._asked

    @property
    def offline(self) -> bool:
        """Whether material is gathered."""
        return self._phase == "offline"

    def prepare(self, program: Callable[[Role], object]) -> list[Tensor]:
        """The offline phase of a program; the material it leaves this party, none at P2."""
        self._phase, self.material = "offline", []
        program(self)
        material, self.material, self._phase = self.material, [], "setup"
        return material

    def answer(self, program: Callable[[Role], object], material: Sequence[Tensor]) -> object:
        """The online phase of a program, at P0 and P1; what the program gives.

        Args:
            program: the one that was prepared.
            material: what `prepare` gave, taken from its store; never a second time.

        Raises:
            ReusedPadError: the material is of another program.
        """
        self._phase, self.material, self._read = "online", list(material), 0
        found = program(self)
        if self._read != len(self.material):
            raise _other_material()
        self.material, self._phase = [], "setup"
        return found

    def constant(
        self,
        name: str,
        shape: tuple[int, int],
        bits: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Constant:
        """Initialisation of SecureMul_F (algorithm 6.1, lines 1 and 2), once per weights.

        P1 learns X - U. One message, P0 to P1, 8 bytes an element; U is a pad of P0 and P2.

        Raises:
            RingRangeError: a weight does not fit; it names the layer.
        """
        number = self.next_number()
        if self.role == P2:
            return Constant(name, shape, bits, mask=self.pad(P0, shape, "U", number))
        if self.role == P1:
            (masked,) = self.channels[P0].receive([shape], number)
            return Constant(name, shape, bits, masked=masked)
        assert weight is not None, "P0 has the weights"
        exact = encode(weight, bits, name, _WEIGHT_ROOM, _FIX)
        masked = exact - self.pad(P2, shape, "U", number)
        self.channels[P1].send([masked], number, "setup")
        return Constant(name, shape, bits, exact, bias, masked)

    def question(
        self, shape: Sequence[int], values: Tensor | None, bits: int, ring: int, where: str
    ) -> Shared:
        """P1's own values as shares.

        fast: one message, P1 to P0, s n bytes; P1's share is a pad. P0 learns nothing.
        thesis: none; P1's share is the value, P0's is zero.

        Args:
            shape: of the values.
            values: at P1, online.
            bits: of their fraction.
            ring: of the product they are for.
            where: what they are, for messages.
        """
        number = self.next_number()
        if self.form.mode == "thesis":
            own = self.role == P1 and not self.offline
            share = encode(_given(values), bits, where, ring - 1 - bits) if own else None
            zeros = torch.zeros(tuple(shape), dtype=torch.int64)
            return Shared(zeros if share is None else share, bits, ring)
        share = blank(shape)
        if self.role == P1:
            share = self._kept(lambda: self.pad(P2, shape, "question", number))
            if not self.offline:
                exact = encode(_given(values), bits, where, ring - 1 - bits)
                self._send(P0, [exact - share], element_bytes(ring), number)
        elif self.role == P0 and not self.offline:
            (share,) = self._receive(P1, [shape], element_bytes(ring), number)
        return Shared(share, bits, ring, known=True)

    def plus_own(self, shared: Shared, values: Tensor | None) -> Shared:
        """Add what P0 has in plaintext to its share: a bias, or vectors of positions."""
        if self.role != P0 or self.offline or values is None:
            return shared
        own = encode(values, shared.bits, "a bias", shared.ring - 1 - shared.bits, _FIX)
        return shared.map(lambda share: share + own)

    def multiply(self, shared: Shared, constant: Constant) -> Shared:
        """SecureMul_F(X, Y) with X a constant of P0 (algorithm 6.1): here Z = Y X, a row a vector.

        The printed line 4 sends P1's message to P1; it goes to P0, who recovers Y - V. P0 learns Y
        - V, uniform; P1 nothing. One message, P1 to P0, of s bytes an element of Y; in fast mode
        none where P1's share of Y is known ahead, for then it was sent offline. Offline: P2 to P1
        8 bytes an element of Z.

        The plain reference is ``Y @ X + bias``.
        """
        number, rows, size = self.next_number(), shared.share.shape[0], element_bytes(shared.ring)
        v_shape, z_shape = (rows, constant.shape[0]), (rows, constant.shape[1])
        bits, early = shared.bits + constant.bits, self._is_early(shared)
        share = blank(z_shape)
        if self.role == P2:
            v = self.pad(P0, v_shape, "V", number) + self.pad(P1, v_shape, "V", number)
            w = matmul(v, _given(constant.mask)) - self.pad(P0, z_shape, "W", number)
            self.channels[P1].send([w], number, "offline")
        elif self.role == P1:
            if self.offline:
                v = self.pad(P2, v_shape, "V", number)
                (w,) = self.channels[P2].receive([z_shape], number)
                share = matmul(v, _given(constant.masked)) + w
                self._keep(share, *([] if early else [v]))
                if early:
                    self._send(P0, [shared.share - v], size, number)
            else:
                share = self._take()
                if not early:
                    self._send(P0, [shared.share - self._take()], size, number)
        elif self.offline:
            v, w = self.pad(P2, v_shape, "V", number), self.pad(P2, z_shape, "W", number)
            theirs = self._receive(P1, [v_shape], size, number)[0] if early else 0
            self._keep(theirs - v, matmul(v, _given(constant.masked)) + w)
        else:
            difference, product = self._take(), self._take()
            if not early:
                difference = difference + self._receive(P1, [v_shape], size, number)[0]
            share = matmul(shared.share + difference, _given(constant.weight)) + product
        known = self.form.mode == "fast"
        return self.plus_own(Shared(share, bits, shared.ring, known), constant.bias)

    def multiply_growing(
        self, cache: Growing, more: Shared, shared: Shared, product: Bilinear, shape: Sequence[int]
    ) -> Shared:
        """SecureMul_G(X, Y) where X grows by X' each time (algorithm 6.2); the product of all X.

        Both holders learn uniform differences only. fast: what P1 holds of X' and Y is known ahead
        and was sent masked, so P0 sends X' and Y masked: one message of s bytes an element of X'
        and Y. thesis: both open X' - U' and Y - V: two messages, each of that size. Offline: P2 to
        P1 8 bytes an element of the product; in fast mode P1 to P0 s an element of X' and Y.

        The plain reference is ``product(torch.cat(all X', 1), Y)``.

        Args:
            cache: this party's, of this X.
            more: X', appended on axis 1.
            shared: Y.
            product: of the whole X with Y.
            shape: of the product.

        Raises:
            ValueError: fast mode, and P1's shares depend on the question.
        """
        number, ring = self.next_number(), min(more.ring, shared.ring)
        fast, size = self.form.mode == "fast", element_bytes(ring)
        x_shape, y_shape = more.share.shape, shared.share.shape
        if fast and not (more.known and shared.known):
            raise ValueError("both factors of a growing product come from products or functions")
        share, own = blank(shape), [more.share, shared.share]
        if self.role == P2:
            u0, v0 = (
                self.pad(P0, each, "G", i, number) for i, each in enumerate((x_shape, y_shape))
            )
            u1, v1 = (
                self.pad(P1, each, "G", i, number) for i, each in enumerate((x_shape, y_shape))
            )
            u0, u1 = cache.grow(first=u0, second=u1)
            w = product(u1, v0) + product(u0, v1)
            if not fast:
                w += product(u0, v0) + product(u1, v1)
            w -= self.pad(P0, shape, "W", number)
            self.channels[P1].send([w], number, "offline")
        elif self.offline:
            masks = [
                self.pad(P2, each, "G", i, number) for i, each in enumerate((x_shape, y_shape))
            ]
            if self.role == P0:
                theirs = self._receive(P1, [x_shape, y_shape], size, number) if fast else []
                self._keep(*masks, self.pad(P2, shape, "W", number), *theirs)
            else:
                if fast:
                    self._send(P0, [a - b for a, b in zip(own, masks, strict=True)], size, number)
                self._keep(*masks, *self.channels[P2].receive([shape], number))
        else:
            u, v, w = self._take(), self._take(), self._take()
            opened = [more.share - u, shared.share - v]
            if not fast:
                self._send(P1 - self.role, opened, size, number)
                theirs = self._receive(P1 - self.role, [x_shape, y_shape], size, number)
                e, f = (a + b for a, b in zip(opened, theirs, strict=True))
                e, u = cache.grow(difference=e, mask=u)
                share = w + product(e, f + v if self.role == P0 else v) + product(u, f)
            elif self.role == P0:
                self._send(P1, opened, size, number)
                x, d = cache.grow(share=more.share, difference=self._take())
                share = w + product(x + d, shared.share) + product(x, self._take())
            else:
                e, f = self._receive(P0, [x_shape, y_shape], size, number)
                x, e, u = cache.grow(share=more.share, difference=e, mask=u)
                share = w + product(x, shared.share) + product(u, f) + product(e, v)
        return Shared(share, more.bits + shared.bits, ring)

    def apply(
        self, shared: Shared, function: Function, bits: int, ring: int, where: str, kind: str
    ) -> Shared:
        """SecureNonlinear (algorithm 6.4), with SecurePerm (6.3) there and back.

        P1 learns the values in an order it does not know. P0 learns nothing. Of vectors the order
        is one inside each vector, then one of the vectors; of a pair both elements move together.

        fast: two messages, P0 to P1 of `shown_bytes` an element and P1 to P0 of s an element of the
        result; where P1's share is not known ahead, and in thesis mode, a third, P1 to P0, of
        `first_bytes` an element. Offline: P2 to P0 8 bytes an element of both; P0's order is drawn
        from its stream with P2, which algorithm 6.3 sends.

        The plain reference is ``function(values)``.

        Args:
            shared: axes (rows, width); of a pair (2, elements).
            function: what P1 computes; it may not depend on the order of what is permuted.
            bits: fraction bits of the result.
            ring: bits of its elements.
            where: the layer, for the account of what P1 saw.
            kind: "elements", "vectors" or "pairs".

        Raises:
            WidthError: elements or pairs, and too few to hide one another.
            RingRangeError: a value is too large; it names the layer.
        """
        number, count = self.next_number(), shared.share.numel()
        rows, width = shared.share.shape
        results = width if kind == "pairs" else count
        if kind != "vectors" and results < LEAST_PERMUTED:
            raise WidthError(
                "too few values to hide among one another",
                where=where,
                got=f"{results}",
                want=f"at least {LEAST_PERMUTED}",
                fix="ask with more rows, or with a wider layer",
            )
        share, mine = blank((results,)), self._show(shared, kind, number)
        if self.role == P2:
            self._deal_back(mine, results, number)
        elif self.role == P1:
            q0, q1 = self._kept(lambda: self.pad(P2, (2, results), "q", number))
            if not self.offline:
                values = self._seen(mine, shared, where).reshape(rows, width)
                found = encode(function(values), bits, where, ring - 1 - bits, _FIX).reshape(-1)
                self._send(P0, [found - q0], element_bytes(ring), number)
            share = q1
        elif self.offline:
            self._keep(_back(mine, results), *self.channels[P2].receive([(results,)], number))
        else:
            back, delta = self._take(), self._take()
            share = self._receive(P1, [(results,)], element_bytes(ring), number)[0][back] + delta
        axes = (1, width) if kind == "pairs" else (rows, width)
        return Shared(share.reshape(axes), bits, ring, known=self.form.mode == "fast")

    def choose(
        self, scores: Shared, pick: Callable[[Tensor], int] | None, where: str = "scores"
    ) -> int | None:
        """SecurePrediction (algorithm 6.5): an index that P1 picks from permuted scores, at P1.

        P1 learns the permuted scores and its index. P0 learns nothing: the query is uniform. The
        printed protocol fetches the index with a BFV query; here the dealer, who knows the order
        already (6.3), is the second server of a query by subsets (Chor, Goldreich, Kushilevitz and
        Sudan 1995, section 3.1): offline it gives P1 a random set S and the sum of the order over
        S, masked; online P1 sends S with its position flipped, P0 answers with the masked sum. An
        honest P1 learns one entry. One that does not follow the protocol learns another sum.

        n scores; fast: three messages of `shown_bytes` n, ceil(n / 8) and 4 bytes; thesis, or where
        P1's share is not known ahead: a fourth before them, of `first_bytes` n.

        The plain reference is ``pick(scores)`` for a pick that ignores order.

        Args:
            scores: axes (1, scores).
            pick: at P1: a position of the scores it is given, by any strategy of decoding.
            where: what the scores are, for the account of what P1 saw.
        """
        number, count = self.next_number(), scores.share.numel()
        mine, set_words = self._show(scores, "elements", number), -(-count // 64)
        if self.role == P2:
            inside = _as_bits(self.pad(P1, (set_words,), "set", number), count)
            total = (mine[inside].sum() - self.pad(P0, (1,), "sum", number)).reshape(1)
            self.channels[P1].send([total], number, "offline")
        elif self.role == P0:
            mask = self._kept(lambda: self.pad(P2, (1,), "sum", number))
            if not self.offline:
                query = self.channels[P1].receive_bytes(number, -(-count // 8))
                packed = np.unpackbits(np.frombuffer(query, np.uint8), count=count).astype(bool)
                answer = (mine[torch.from_numpy(packed)].sum() - mask).reshape(1)
                self._send(P1, [answer], _ANSWER_BYTES, number)
        elif self.offline:
            self._keep(self.pad(P2, (set_words,), "set", number))
            self._keep(*self.channels[P2].receive([(1,)], number))
        else:
            inside, total = _as_bits(self._take(), count), self._take()
            values = self._seen(mine, scores, where)
            assert pick is not None, "P1 picks"
            place = pick(values)
            asked = inside.numpy().copy()
            asked[place] ^= True
            self.channels[P0].send_bytes(np.packbits(asked).data, number, "online")
            (answer,) = self._receive(P0, [(1,)], _ANSWER_BYTES, number)
            entry = int((answer - total).to(torch.int32))
            return -entry if inside[place] else entry
        return None

    def _show(self, shared: Shared, kind: str, number: int) -> Tensor:
        """SecurePerm (algorithm 6.3), the result opened to P1, each with the bytes it needs.

        Returns:
            The order at P0 and P2; at P1, online, the permuted values in the ring.
        """
        count, early = shared.share.numel(), self._is_early(shared)
        ring, form = shared.ring, self.form
        low, first = (max(0, ring - 8 * each) for each in (form.shown_bytes, form.first_bytes))
        size, first_size = (
            min(each, element_bytes(ring)) for each in (form.shown_bytes, form.first_bytes)
        )
        if self.role == P2:
            r0, r1 = self.pad(P1, (2, count), "r", number)
            order = _order(self.pads[P0], shared.share.shape, kind, number)
            self.channels[P0].send([r0[order] - r1], number, "offline")
            return order
        if self.role == P1:
            if self.offline:
                r0, r1 = self.pad(P2, (2, count), "r", number).unbind()
                if early:
                    self._send(P0, [shared.share.reshape(-1) - r0], element_bytes(ring), number)
                self._keep(r1, *([] if early else [r0]))
                return r1
            r1 = self._take()
            if not early:
                hidden = shared.share.reshape(-1) - self._take()
                self._send(P0, [hidden], first_size, number, first)
            (found,) = self._receive(P0, [(count,)], size, number, low)
            half = (1 << low) >> 1  # of what may have been cut off
            return torch.add(found, r1).add_(half)
        if self.offline:
            order = _order(self.pads[P2], shared.share.shape, kind, number)
            (delta,) = self.channels[P2].receive([(count,)], number)
            if early:
                delta = delta + self._receive(P1, [(count,)], element_bytes(ring), number)[0][order]
            self._keep(order, delta)
            return order
        order, delta = self._take(), self._take()
        hidden = shared.share.reshape(-1)
        if not early:
            hidden = hidden + self._receive(P1, [(count,)], first_size, number, first)[0]
        self._send(P1, [hidden[order] + delta], size, number, low)
        return order

    def _deal_back(self, order: Tensor, results: int, number: int) -> None:
        """SecurePerm of P1's results, by the inverse order."""
        q0, q1 = self.pad(P1, (2, results), "q", number)
        self.channels[P0].send([q0[_back(order, results)] - q1], number, "offline")

    def _seen(self, elements: Tensor, shared: Shared, where: str) -> Tensor:
        """What P1 sees, as reals."""
        self.leakage.count("permuted values", where, elements.numel(), elements.numel())
        above = ELEMENT_BITS - shared.ring
        values = decode((elements << above) >> above, shared.bits)
        require_room(values, shared.ring - 2 - shared.bits, shared.bits, where, _FIX)
        if self.watch is not None:
            self.watch(where, values)
        return values

    def _is_early(self, shared: Shared) -> bool:
        return shared.known and self.form.mode == "fast"

    def _keep(self, *tensors: Tensor) -> None:
        self.material += tensors

    def _take(self) -> Tensor:
        if self._read >= len(self.material):
            raise _other_material()
        self._read += 1
        return self.material[self._read - 1]

    def _kept(self, draw: Callable[[], Tensor]) -> Tensor:
        """What is drawn offline and read online."""
        if self.offline:
            self._keep(drawn := draw())
            return drawn
        return self._take()

    def _send(
        self, peer: int, tensors: Sequence[Tensor], size: int, number: int, low: int = 0
    ) -> None:
        whole = torch.cat([each.reshape(-1) for each in tensors])
        self.channels[peer].send_bytes(pack_elements(whole, size, low), number, self._phase)

    def _receive(
        self, peer: int, shapes: Sequence[Sequence[int]], size: int, number: int, low: int = 0
    ) -> list[Tensor]:
        counts = [torch.Size(shape).numel() for shape in shapes]
        payload = self.channels[peer].receive_bytes(number, size * sum(counts))
        parts = torch.split(unpack_elements(payload, size, low), counts)
        return [part.reshape(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


class LocalRoles(LocalParties[Role]):
    """The three as threads of this process.

    Args:
        form: the same for all.
        terms: what the parties compare before they begin.
        timeout_s: how long a party waits for a message.
    """

    def __init__(self, form: Form, terms: Mapping[str, Any], timeout_s: float = 30.0) -> None:
        super().__init__(lambda role, links: Role(role, links, form), timeout_s)
        self.agree(terms)


def element_bytes(ring: int) -> int:
    """Bytes of an element of a ring.

    >>> element_bytes(64), element_bytes(40), element_bytes(38)
    (8, 5, 5)
    """
    return -(-ring // 8)


def pack_elements(elements: Tensor, size: int, low: int = 0) -> memoryview:
    """So many bytes of each element, above its `low` lowest bits.

    >>> bytes(pack_elements(torch.tensor([0x01020304]), 2, low=8)).hex()
    '0302'
    """
    raw = np.ascontiguousarray((elements.reshape(-1) >> low).numpy().astype("<i8", copy=False))
    return np.ascontiguousarray(raw.view(np.uint8).reshape(-1, 8)[:, :size]).reshape(-1).data


def unpack_elements(payload: memoryview, size: int, low: int = 0) -> Tensor:
    """The elements of `pack_elements`, with zeros elsewhere; int64 of one axis."""
    raw = np.zeros((len(payload) // size, 8), np.uint8)
    raw[:, :size] = np.frombuffer(payload, np.uint8).reshape(-1, size)
    return torch.from_numpy(raw.view("<i8").reshape(-1).astype(np.int64, copy=False)) << low


def _order(pads: PadStream, shape: Sequence[int], kind: str, number: int) -> Tensor:
    """A secret order of flat indices: at each place stands the index its element comes from."""
    rows, width = shape
    if kind == "vectors":
        inside = _orders_inside(pads, rows, width, number) + width * torch.arange(rows)[:, None]
        return inside[torch.from_numpy(permutation(pads, rows, "vectors", number))].reshape(-1)
    count = width if kind == "pairs" else rows * width
    order = torch.from_numpy(permutation(pads, count, "elements", number))
    return torch.cat([order, order + width]) if kind == "pairs" else order


def _back(order: Tensor, results: int) -> Tensor:
    """The inverse order; of pairs, that of their first elements."""
    back = torch.empty(results, dtype=torch.int64)
    back[order[:results]] = torch.arange(results)
    return back


def _orders_inside(pads: PadStream, rows: int, width: int, number: int) -> Tensor:
    """Of each vector one; as `permutation` with sort keys of 40 bits, for up to 2^24 elements."""
    keys = pads.elements64(rows * width, "inside", number).reshape(rows, width)
    low = np.uint64((1 << 24) - 1)
    keys = keys & ~low | np.arange(width, dtype=np.uint64)
    keys.sort(axis=1)
    return torch.from_numpy((keys & low).astype(np.int64))


def _as_bits(elements: Tensor, count: int) -> Tensor:
    """A uniform set from uniform words; bool of axes (count,)."""
    return torch.from_numpy(np.unpackbits(elements.numpy().view(np.uint8), count=count) > 0)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "who needs it has it"
    return tensor


def _other_material() -> ReusedPadError:
    return ReusedPadError(
        "what was dealt was dealt for another program",
        want=f"the program that {NAMES[P0]} and {NAMES[P1]} prepared, with the same axes",
        fix="deal for this question; what is left of the other is not used again",
    )
