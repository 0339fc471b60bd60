"""Mode "fast": the same protocol and the same trust as in mode "thesis", with less traffic.

A holder's own values stay in plaintext at this holder, and the other holder's share of them is
zero. A tensor of a holder's plaintext values, and the other factor of a product with it, are each
opened in one direction only: to the other holder. All other tensors are opened under one mask, in
both directions at once. All products with a tensor use its single opening; the dealer shares each
product of masks anew. Products whose values go to P2 keep their number of fraction bits, so no
division precedes a function. If a product is divided, P0 sends the index lists of algorithm 5.1
right after its opening of the factors.

In one direction: let X = [X_0 X_1], where P_i knows X_i in plaintext, and let W = W_0 + W_1 be a
shared right factor. P_0 computes X_0 W_0 alone, from the rows of W_0 that belong to its columns.
Different parties know the two factors of X_0 W_1 in plaintext, so one mask per factor is enough
(Beaver 1991). P_0 opens E = X_0 - U, P_1 opens D = W_1 - V, and X_0 W_1 = X_0 D + E V + U V. P_0
computes X_0 D, P_1 computes E V from the E that it received and its mask V, and the dealer shares U
V. The product X_1 W_0 is computed in the same way, with exchanged roles of P_0 and P_1. Each holder
i therefore multiplies its plaintext by W_i + D, and the opening that it received by its own mask V.

Ahead of time: masks, permutations and signs depend on no value, and products of masks depend only
on masks. So all three parties follow a program on shapes before it runs: P2 deals, and all parties
draw their pads, before the values arrive. In the run on shapes, operations get the same numbers as
in the later run of the program on values, and with the numbers the same pads.

Pipelined: P2 needs no result of the questions (requests for functions) that holders send, so it
does not wait for a question. P2 deals for later operations, one slice of a product at a time, and
answers a question as soon as both holders have sent it (`FastDealer.pipelined`). The messages are
the same as without dealing ahead, and disclose no more. Only their order between P2 and P1 depends
on time, so P1 stores early frames until their operations begin (`Channel.keeps_early`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from vfl.core.frame import Link
from vfl.mpc.channel import Polled, pack
from vfl.mpc.engine import masked_product
from vfl.mpc.permuted import Function, from_upper_bytes, upper_bytes
from vfl.mpc.ring import ELEMENT_BYTES, Operation, inner, matmul
from vfl.mpc.rules import P0, P1, P2, Rules
from vfl.mpc.shares import Opened, SharedTensor, blank, owned_by
from vfl.mpc.three_party.party import Dealer, Party, Product, Question, ShareHolder

#: Number of elements in a slice of a dealt product. P2 looks for questions after each slice; on a
#: link of 80 Mbit/s, it does so every 26 ms.
_SLICE = 2**15
#: Largest number of bytes that P2 deals while a question waits; P1 stores these bytes in memory.
_AHEAD_BYTES = 1 << 26


class Fast(Party):
    """A party in fast mode; all three parties can do some steps of operations ahead of time."""

    def deal(self, program: Callable[[Party], None]) -> None:
        program(Preprocessing(self))

    @abstractmethod
    def open_ahead(self, number: int, closed: Sequence[SharedTensor]) -> list[Opened]:
        """Draw the masks for an opening, and open those tensors that are pads, ahead of time."""

    @abstractmethod
    def multiply_ahead(self, product: Product) -> None:
        """Deal a product ahead of time, and compute those of its terms that need no later value."""

    @abstractmethod
    def ask_ahead(self, asked: Question, function: Function) -> Sequence[Tensor]:
        """Draw the pads of a question to P2; P0 also draws its shares of the results."""


class FastHolder(Fast, ShareHolder):
    """P0 or P1, the holders of shares, in fast mode."""

    def _share(
        self, number: int, owner: int, shape: Sequence[int], own: Tensor | None, bits: int
    ) -> SharedTensor:
        if owner == P2:
            return super()._share(number, owner, shape, own, bits)
        share = torch.zeros(tuple(shape), dtype=torch.int64) if own is None else own
        return SharedTensor(share, bits, owned=owned_by(owner, shape))

    def _open(
        self, number: int, closed: Sequence[SharedTensor], phase: str
    ) -> Sequence[SharedTensor]:
        drawn: tuple[list[Tensor], list[Tensor] | None] = self.drawn_ahead(
            "open", number, _openings(closed), lambda: (self._draw(number, closed), None)
        )
        masks, own = drawn
        theirs = own
        if own is None or not self.first:
            own = self._open_own(closed, masks, number, phase)
        if theirs is None or self.first:
            theirs = self._receive_opened(closed, number)
        return list(map(_opened, closed, masks, own, theirs))

    def open_ahead(self, number: int, closed: Sequence[SharedTensor]) -> list[Opened]:
        masks, early = self._draw(number, closed), None
        # P0's share of P2's future answer is a pad, so P0 can open it before the value exists.
        if closed and all(each.foreseen for each in closed):
            if self.first:
                early = self._open_own(closed, masks, number, "offline")
            else:
                early = self._receive_opened(closed, number)
        self.ahead["open", number] = _openings(closed), (masks, early)
        return [Opened(mask) for mask in masks]

    def multiply_ahead(self, product: Product) -> None:
        z, left = self._drawn(product), product.left
        assert left.opened is not None, "an operand is opened before it is multiplied"
        known = left.owned is not None and left.opened.difference is not None
        if known:
            _add_known(z, product, self.role)
        self.ahead["product", product.number] = _factors(product), (z, known)

    def ask_ahead(self, asked: Question, function: Function) -> Sequence[Tensor]:
        prepared = self._prepare(asked, function)
        self.ahead["ask", asked.number] = (asked, function), prepared
        return prepared.results

    def _draw(self, number: int, closed: Sequence[SharedTensor]) -> list[Tensor]:
        return [
            self.pad(P2, each.part(self.role).shape, "mask", index, number)
            for index, each in enumerate(closed)
        ]

    def _open_own(
        self, closed: Sequence[SharedTensor], masks: Sequence[Tensor], number: int, phase: str
    ) -> list[Tensor]:
        """Send this holder's openings, if it has any, and return these openings."""
        own = [each.part(self.role) - mask for each, mask in zip(closed, masks, strict=True)]
        if any(each.numel() for each in own):
            self.channels[self.other].send(own, number, phase)
        return own

    def _receive_opened(self, closed: Sequence[SharedTensor], number: int) -> list[Tensor]:
        """Receive the other holder's openings."""
        shapes = [each.part(self.other).shape for each in closed]
        if any(shape.numel() for shape in shapes):
            return self.channels[self.other].receive(shapes, number)
        return [torch.empty(shape, dtype=torch.int64) for shape in shapes]

    def _product(self, product: Product, more: list[Tensor]) -> list[Tensor]:
        parts = [self._multiplied(product), *more]
        if not product.truncations:
            return parts
        return self._truncated(parts, product.truncations, product.number, product.where)

    def _multiplied(self, product: Product) -> Tensor:
        _require_factors(product)
        z, known = self.drawn_ahead(
            "product",
            product.number,
            _factors(product),
            lambda: (self._drawn(product), False),
        )
        left, right, operation = product.left, product.right, product.operation
        if left.owned is not None:
            if not known:
                _add_known(z, product, self.role)
            _add_own(z, product, self.role)
            return z
        e, d, v = left.difference(), right.difference(), right.mask()
        masked = d + v if self.first else v
        z += masked_product(self.numbers, operation, (e, d), left.mask(), masked)
        return z

    def _drawn(self, product: Product) -> Tensor:
        if self.first:
            return self.pad(P2, product.shape, "product", product.number)
        shape, size = product.shape, product.dealt_bytes(self.rules)
        count = math.prod(shape[1:])
        parts = [
            self._dealt_slice((rows.stop - rows.start) * count, size, product.number)
            for rows in dealt_slices(shape)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(shape)

    def _dealt_slice(self, count: int, size: int, number: int) -> Tensor:
        if size == ELEMENT_BYTES:
            return self._from_dealer([(count,)], number)[0]
        payload = self.channels[P2].receive_bytes(number, size * count)
        return from_upper_bytes(payload, size, 1 << 8 * (ELEMENT_BYTES - size) - 1)


def _opened(shared: SharedTensor, mask: Tensor, own: Tensor, theirs: Tensor) -> SharedTensor:
    """Return the tensor with a record of the openings that a holder received."""
    if shared.owned is not None:
        opened = Opened(None, theirs)
    else:
        opened = Opened(mask, theirs if shared.faced is not None else own + theirs)
    return _with_opening(shared, opened)


def _with_opening(shared: SharedTensor, opened: Opened) -> SharedTensor:
    return replace(shared, opened=opened)


def dealt_slices(shape: Sequence[int]) -> list[slice]:
    """Return the rows of each message of a dealt product.

    A message has at most 2^15 elements, but at least one row.

    >>> dealt_slices((500, 100))
    [slice(0, 327, None), slice(327, 500, None)]
    """
    size = max(1, _SLICE // max(1, math.prod(shape[1:])))
    return [slice(start, min(start + size, shape[0])) for start in range(0, shape[0], size)]


class FastDealer(Fast, Dealer):
    """P2, which deals and evaluates functions, in fast mode."""

    def __init__(self, role: int, links: Mapping[int, Link], rules: Rules) -> None:
        super().__init__(role, links, rules)
        self._links: tuple[Link, Link] | None = None
        self._can_poll: dict[int, Polled] = {}
        self._polled: dict[int, Polled] = {}
        self._asked: deque[tuple[Question, SharedTensor, Function, str]] = deque()
        self._ahead_bytes = 0

    @contextmanager
    def pipelined(self) -> Iterator[None]:
        polled = {} if self._polled else self._links_to_poll()
        if not polled:
            yield
            return
        self._polled = polled
        try:
            yield
            while self._asked:
                self._answer_oldest()
        finally:
            self._polled = {}
            self._asked.clear()

    def _links_to_poll(self) -> dict[int, Polled]:
        """Return the links to both holders if both can be polled, else none.

        If a link was replaced, both links are checked again.
        """
        links = self.channels[P0].link, self.channels[P1].link
        if self._links != links:
            first, second = self._links = links
            self._can_poll = {}
            if isinstance(first, Polled) and isinstance(second, Polled):
                # Without this, a deadlock is possible: P1 may wait for P0, P0 may wait until P2
                # reads P0's question, and P2 may wait until P1 reads its share.
                second.read_beside([first])
                self._can_poll = {P0: first, P1: second}
        return self._can_poll

    def _ask(self, asked: Question, shared: SharedTensor, function: Function, where: str) -> None:
        if not self._asked:
            self._ahead_bytes = 0
        self._asked.append((asked, shared, function, where))
        if self._polled:
            self._answer_what_has_come()
        else:
            self._answer_oldest()

    def _answer_what_has_come(self) -> None:
        while self._asked and (
            self._ahead_bytes >= _AHEAD_BYTES
            or all(self.channels[holder].has_come(link) for holder, link in self._polled.items())
        ):
            self._answer_oldest()

    def _answer_oldest(self) -> None:
        super()._ask(*self._asked.popleft())
        self._ahead_bytes = 0

    def _share(
        self, number: int, owner: int, shape: Sequence[int], own: Tensor | None, bits: int
    ) -> SharedTensor:
        shared = super()._share(number, owner, shape, own, bits)
        return replace(shared, owned=owned_by(owner, shape))

    def _open(
        self, number: int, closed: Sequence[SharedTensor], phase: str
    ) -> Sequence[SharedTensor]:
        masks = self.drawn_ahead(
            "open", number, _openings(closed), lambda: self._draw(number, closed)
        )
        return list(map(_with_opening, closed, masks))

    def _deal_product(self, product: Product) -> None:
        self.drawn_ahead(
            "product", product.number, _factors(product), lambda: self._send_product(product)
        )

    def open_ahead(self, number: int, closed: Sequence[SharedTensor]) -> list[Opened]:
        masks = self._draw(number, closed)
        self.ahead["open", number] = _openings(closed), masks
        return masks

    def multiply_ahead(self, product: Product) -> None:
        self._send_product(product)
        self.ahead["product", product.number] = _factors(product), None

    def ask_ahead(self, asked: Question, function: Function) -> Sequence[Tensor]:
        self.ahead["ask", asked.number] = (asked, function), self._result_masks(asked)
        return []

    def _draw(self, number: int, closed: Sequence[SharedTensor]) -> list[Opened]:
        return [
            Opened(
                self.pad(P0, each.part(P0).shape, "mask", index, number),
                second=self.pad(P1, each.part(P1).shape, "mask", index, number),
            )
            for index, each in enumerate(closed)
        ]

    def _send_product(self, product: Product) -> None:
        _require_factors(product)
        factors, size = _mask_factors(product), product.dealt_bytes(self.rules)
        pad = self.pad(P0, product.shape, "product", product.number)
        for rows in dealt_slices(product.shape):
            share = _mask_product(product.operation, factors, rows).sub_(pad[rows])
            payload = pack([share]) if size == ELEMENT_BYTES else upper_bytes(share, size)
            self.channels[P1].send_bytes(payload, product.number, "offline")
            self._ahead_bytes += len(payload)
            self._answer_what_has_come()


def _add_known(z: Tensor, product: Product, holder: int) -> None:
    """Add E V to a holder's share.

    E is the left factor's opening that the holder received, and V its mask of the right factor.
    """
    left, right, far = product.left, product.right, _rows(product.left, 1 - holder)
    masked = right.mask()
    if product.operation is matmul:
        z += matmul(left.difference(), masked if right.faced is not None else masked[far])
    else:
        z[far] += inner(left.difference(), masked)


def _add_own(z: Tensor, product: Product, holder: int) -> None:
    """Add X_i (W_i + D) to a holder's share, where X_i is the holder's own plaintext."""
    right, own, clear = product.right, _rows(product.left, holder), product.left.part(holder)
    if right.faced is not None:
        z += matmul(clear, right.part(1 - holder) + right.difference())
        return
    # If the right factor was opened in both directions, D is the opening of the whole tensor, so
    # W_i + D_j is D + V_i.
    factor = right.difference() + right.mask()
    if product.operation is matmul:
        z += matmul(clear, factor[own])
    else:
        z[own] += inner(clear, factor)


def _mask_factors(product: Product) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of masks; the dealer shares the products of the masks of each pair.

    If holders own columns of the left factor, the mask of each holder is multiplied by the mask of
    the other holder.

    The products of the pairs are added; for a transposed left factor with owned columns (`inner`)
    they are stacked.
    """
    left, right = product.left, product.right
    (u0, u1), (v0, v1) = left.masks(), right.masks()
    if left.owned is None:
        return [(u0 + u1, v0 + v1)]
    if product.operation is not inner and right.faced is None:
        v0, v1 = v0[_rows(left, 1)], v1[_rows(left, 0)]
    return [(u0, v1), (u1, v0)]


def _mask_product(
    operation: Operation, factors: Sequence[tuple[Tensor, Tensor]], rows: slice
) -> Tensor:
    """Compute some rows of the product of masks that the dealer shares."""
    if operation is not inner:
        found = [operation(u[rows], v if operation is matmul else v[rows]) for u, v in factors]
        return found[0] if len(found) == 1 else found[0].add_(found[1])
    parts, start = [], 0
    for u, v in factors:
        end = start + u.shape[1]
        if start < rows.stop and rows.start < end:
            parts.append(inner(u[:, max(rows.start - start, 0) : rows.stop - start], v))
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _require_factors(product: Product) -> None:
    """Require factors whose openings fit each other in a product.

    Raises:
        ValueError: the openings of the factors do not fit each other.
    """
    left, right, operation = product.left, product.right, product.operation
    known = operation is matmul or (operation is inner and right.faced is None)
    if right.owned is None and right.faced in (None, left.owned) and (left.owned is None or known):
        return
    raise ValueError(
        "open the right factor as right.facing(left), and an owned factor as the left one"
    )


def _rows(left: SharedTensor, holder: int) -> slice:
    """Return the rows of the right factor by which the product multiplies the party's left columns.

    Args:
        left: the left factor; P0 owns its first `owned` columns in plaintext, P1 the others.
        holder: 0 for P0, or 1 for P1.
    """
    return slice(left.owned, None) if holder else slice(0, left.owned)


def _openings(closed: Sequence[SharedTensor]) -> list[tuple[object, ...]]:
    """Return a key for openings.

    The key consists of the tensors' axes, and of who opens which part of them.
    """
    return [(each.shape, each.owned, each.faced) for each in closed]


def _factors(product: Product) -> tuple[object, ...]:
    """Return a key for a product.

    The key includes the divisions, which limit the precision of the dealt part.
    """
    scales = product.left.bits, product.right.bits, *product.truncations
    return (product.operation, *scales, *_openings([product.left, product.right]))


class Preprocessing(Dealer):
    """Stands in for a party while a program runs on shapes only; it sends no message itself.

    Args:
        party: party for which the program runs; its count of operations does not change.
    """

    def __init__(self, party: Fast) -> None:
        super().__init__(party.role, {}, party.rules)
        self._number = party.number
        self._party = party
        self._results: dict[int, Sequence[Tensor]] = {}

    def share(
        self,
        owner: int,
        shape: Sequence[int],
        values: Tensor | None,
        where: str,
        bits: int = -1,
        scale: str = "",
    ) -> SharedTensor:
        self.next_number()  # a run on shapes has no values
        bits = self.rules.bits if bits < 0 else bits
        return SharedTensor(blank(shape), bits, owned=owned_by(owner, shape))

    def _revealed(self, number: int, shared: SharedTensor, to: int | None) -> None:
        return None

    def _open(
        self, number: int, closed: Sequence[SharedTensor], phase: str
    ) -> Sequence[SharedTensor]:
        return list(map(_with_opening, closed, self._party.open_ahead(number, closed)))

    def _deal_product(self, product: Product) -> None:
        self._party.multiply_ahead(product)

    def _ask(self, asked: Question, shared: SharedTensor, function: Function, where: str) -> None:
        self._results[asked.number] = self._party.ask_ahead(asked, function)

    def answer(self, asked: Question, index: int = 0) -> SharedTensor:
        results = self._results[asked.number]
        share = results[index] if results else blank(asked.shape)
        return SharedTensor(share, asked.bits[index], foreseen=True)
