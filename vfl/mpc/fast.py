"""Mode "fast": the same protocol and the same trust, with fewer bytes and messages.

What a holder owns stays in clear with it while the other's share is zero; such a tensor, and what
is multiplied with it, are opened one way each. Other tensors are opened under one mask, both ways
at once. Every product of a tensor uses its one opening; the dealer's share of each product is
fresh. Products that go to P2 keep their scale, so nothing is divided before a function. Where a
product is divided, P0 sends the index lists of algorithm 5.1 right behind its opening.

One way: X = [X_0 X_1] with X_i in clear at P_i, and W = W_0 + W_1: P_0 computes X_0 W_0 alone, on
the rows of W that meet its columns. Of X_0 W_1 the factors are with two parties, so a mask each is
enough (Beaver 1991): P_0 opens E = X_0 - U, P_1 opens D = W_1 - V, and X_0 W_1 = X_0 D + E V + U V,
where P_0 computes X_0 D, P_1 knows E and V, and the dealer shares U V. The same with 0 and 1
exchanged. So each holder multiplies what it has in clear by W_i + D, and what it knows masked by
its V.

Ahead of time: masks, permutations and signs depend on no value, and products of masks on nothing
else. So a program is followed on shapes before it runs; P2 deals and all three draw while nobody
waits. The operations get the numbers they will have when the program runs, and with them the same
pads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vfl.core.frame import Link
from vfl.mpc.party import Dealer, Party, Question, ShareHolder, require_same
from vfl.mpc.permuted import Function
from vfl.mpc.ring import Operation, inner, matmul, product_shape
from vfl.mpc.rules import P0, P1, P2, Rules
from vfl.mpc.shares import Opened, SharedTensor, Truncation, blank, owned_by


class FastHolder(ShareHolder):
    """P0 or P1.

    Attributes:
        masks: those drawn ahead, by operation; with what they are for.
        early: what P0 opened ahead, of tensors of which its share is a pad; by operation.
        dealt: this holder's shares of products that were dealt ahead, by operation; with what is
            known of the product by then, if that is so, and of what factors.
    """

    def __init__(self, role: int, links: Mapping[int, Link], rules: Rules) -> None:
        super().__init__(role, links, rules)
        self.masks: dict[int, tuple[list[Tensor], object]] = {}
        self.early: dict[int, list[Tensor]] = {}
        self.dealt: dict[int, tuple[Tensor, bool, object]] = {}

    def deal(self, program: Callable[[Party], None]) -> None:
        program(Preprocessing(self))

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
        masks = self._masks(number, closed)
        own = theirs = self.early.pop(number, None)
        if own is None or not self.first:
            own = self._open_own(closed, masks, number, phase)
        if theirs is None or self.first:
            theirs = self._receive_opened(closed, number)
        return list(map(_opened, closed, masks, own, theirs))

    def draw_ahead(self, number: int, closed: Sequence[SharedTensor]) -> list[Opened]:
        masks = self._draw(number, closed)
        self.masks[number] = masks, _openings(closed)
        opened = [Opened(mask) for mask in masks]
        if closed and all(each.foreseen for each in closed):
            if self.first:
                self.early[number] = self._open_own(closed, masks, number, "offline")
            else:
                self.early[number] = self._receive_opened(closed, number)
        return opened

    def deal_ahead(
        self, number: int, left: SharedTensor, right: SharedTensor, operation: Operation
    ) -> None:
        z = self._dealt(number, product_shape(operation, left.share, right.share))
        assert left.opened is not None, "an operand is opened before it is multiplied"
        known = left.owned is not None and left.opened.difference is not None
        if known:
            _add_known(z, left, right, operation, self.role)
        self.dealt[number] = z, known, _factors(left, right, operation)

    def permute_ahead(self, asked: Question, function: Function) -> None:
        self.prepared[asked.number] = self._prepare(asked, function)

    def foreseen(self, asked: Question, index: int) -> Tensor | None:
        return self.prepared[asked.number].results[index] if self.first else None

    def _masks(self, number: int, closed: Sequence[SharedTensor]) -> list[Tensor]:
        """Those drawn ahead, or new ones."""
        drawn = self.masks.pop(number, None)
        if drawn is None:
            return self._draw(number, closed)
        masks, wanted = drawn
        require_same(wanted, _openings(closed), number)
        return masks

    def _draw(self, number: int, closed: Sequence[SharedTensor]) -> list[Tensor]:
        return [
            self.pad(P2, each.part(self.role).shape, "mask", index, number)
            for index, each in enumerate(closed)
        ]

    def _open_own(
        self, closed: Sequence[SharedTensor], masks: Sequence[Tensor], number: int, phase: str
    ) -> list[Tensor]:
        """Send what this holder opens, if that is anything; what it sent."""
        own = [each.part(self.role) - mask for each, mask in zip(closed, masks, strict=True)]
        if any(each.numel() for each in own):
            self.channels[self.other].send(own, number, phase)
        return own

    def _receive_opened(self, closed: Sequence[SharedTensor], number: int) -> list[Tensor]:
        """What the other holder opens."""
        shapes = [each.part(self.other).shape for each in closed]
        if any(shape.numel() for shape in shapes):
            return self.channels[self.other].receive(shapes, number)
        return [torch.empty(shape, dtype=torch.int64) for shape in shapes]

    def _product(
        self,
        number: int,
        left: SharedTensor,
        right: SharedTensor,
        operation: Operation,
        truncations: Sequence[Truncation],
        more: list[Tensor],
        where: str,
    ) -> list[Tensor]:
        parts = [self._multiplied(number, left, right, operation), *more]
        return self._truncated(parts, truncations, number, where) if truncations else parts

    def _multiplied(
        self, number: int, left: SharedTensor, right: SharedTensor, operation: Operation
    ) -> Tensor:
        _require_factors(left, right, operation)
        begun = self.dealt.pop(number, None)
        if begun is None:
            known = False
            z = self._dealt(number, product_shape(operation, left.share, right.share))
        else:
            z, known, wanted = begun
            require_same(wanted, _factors(left, right, operation), number)
        if left.owned is not None:
            if not known:
                _add_known(z, left, right, operation, self.role)
            _add_own(z, left, right, operation, self.role)
            return z
        e, d, v = left.difference(), right.difference(), right.mask()
        z += operation(e, d + v if self.first else v)
        z += operation(left.mask(), d)
        return z

    def _dealt(self, number: int, shape: torch.Size) -> Tensor:
        if self.first:
            return self.pad(P2, shape, "product", number)
        return self._from_dealer([shape], number)[0]


def _opened(shared: SharedTensor, mask: Tensor, own: Tensor, theirs: Tensor) -> SharedTensor:
    """With what a holder learned of it."""
    if shared.owned is not None:
        opened = Opened(None, theirs)
    else:
        opened = Opened(mask, theirs if shared.faced is not None else own + theirs)
    return SharedTensor(shared.share, shared.bits, opened, shared.owned, shared.faced)


def _with_opening(shared: SharedTensor, opened: Opened) -> SharedTensor:
    return replace(shared, opened=opened)


class FastDealer(Dealer):
    """P2.

    Attributes:
        masks: those drawn ahead, by operation; with what they are for.
        dealt: factors of products that P1 has already, by operation.
    """

    def __init__(self, role: int, links: Mapping[int, Link], rules: Rules) -> None:
        super().__init__(role, links, rules)
        self.masks: dict[int, tuple[list[Opened], object]] = {}
        self.dealt: dict[int, object] = {}

    def deal(self, program: Callable[[Party], None]) -> None:
        program(Preprocessing(self))

    def _share(
        self, number: int, owner: int, shape: Sequence[int], own: Tensor | None, bits: int
    ) -> SharedTensor:
        shared = super()._share(number, owner, shape, own, bits)
        return replace(shared, owned=owned_by(owner, shape))

    def _open(
        self, number: int, closed: Sequence[SharedTensor], phase: str
    ) -> Sequence[SharedTensor]:
        drawn = self.masks.pop(number, None)
        if drawn is None:
            drawn = self._draw(number, closed), None
        else:
            require_same(drawn[1], _openings(closed), number)
        return list(map(_with_opening, closed, drawn[0]))

    def _deal_product(
        self, number: int, left: SharedTensor, right: SharedTensor, operation: Operation
    ) -> None:
        dealt = self.dealt.pop(number, None)
        if dealt is None:
            self._send_product(number, left, right, operation)
        else:
            require_same(dealt, _factors(left, right, operation), number)

    def draw_ahead(self, number: int, closed: Sequence[SharedTensor]) -> list[Opened]:
        masks = self._draw(number, closed)
        self.masks[number] = masks, _openings(closed)
        return masks

    def deal_ahead(
        self, number: int, left: SharedTensor, right: SharedTensor, operation: Operation
    ) -> None:
        self._send_product(number, left, right, operation)
        self.dealt[number] = _factors(left, right, operation)

    def permute_ahead(self, asked: Question, function: Function) -> None:
        self.prepared[asked.number] = (asked, function), self._result_masks(asked)

    def foreseen(self, asked: Question, index: int) -> Tensor | None:
        return None

    def _draw(self, number: int, closed: Sequence[SharedTensor]) -> list[Opened]:
        return [
            Opened(
                self.pad(P0, each.part(P0).shape, "mask", index, number),
                second=self.pad(P1, each.part(P1).shape, "mask", index, number),
            )
            for index, each in enumerate(closed)
        ]

    def _send_product(
        self, number: int, left: SharedTensor, right: SharedTensor, operation: Operation
    ) -> None:
        _require_factors(left, right, operation)
        if left.owned is not None:
            product = _mask_product(left, right, operation)
        else:
            product = operation(torch.add(*left.masks()), torch.add(*right.masks()))
        product -= self.pad(P0, product.shape, "product", number)
        self.channels[P1].send([product], number, "offline")


def _add_known(
    z: Tensor, left: SharedTensor, right: SharedTensor, operation: Operation, holder: int
) -> None:
    """Add to a holder's share what needs its mask and the other's opening of the left only, E V."""
    masked = right.mask()
    if operation is matmul:
        far = _rows(left, 1 - holder)
        z += matmul(left.difference(), masked if right.faced is not None else masked[far])
    else:
        z[_rows(left, 1 - holder)] += inner(left.difference(), masked)


def _add_own(
    z: Tensor, left: SharedTensor, right: SharedTensor, operation: Operation, holder: int
) -> None:
    """Add to a holder's share the product of what it has in clear, X_i (W_i + D)."""
    own, clear = _rows(left, holder), left.part(holder)
    if right.faced is not None:
        z += matmul(clear, right.part(1 - holder) + right.difference())
        return
    # Opened both ways: D there is the difference of the whole, so W_i + D_j is D + V_i.
    factor = right.difference() + right.mask()
    if operation is matmul:
        z += matmul(clear, factor[own])
    else:
        z[own] += inner(clear, factor)


def _mask_product(left: SharedTensor, right: SharedTensor, operation: Operation) -> Tensor:
    """What the dealer shares: each holder's mask of the left with the other's of the right."""
    (u0, u1), (v0, v1) = left.masks(), right.masks()
    if operation is inner:
        return torch.cat([inner(u0, v1), inner(u1, v0)])
    if right.faced is None:
        v0, v1 = v0[_rows(left, 1)], v1[_rows(left, 0)]
    return matmul(u0, v1) + matmul(u1, v0)


def _require_factors(left: SharedTensor, right: SharedTensor, operation: Operation) -> None:
    """Openings must be of a kind that can be multiplied.

    Raises:
        ValueError: they are not.
    """
    known = operation is matmul or (operation is inner and right.faced is None)
    if right.owned is None and right.faced in (None, left.owned) and (left.owned is None or known):
        return
    raise ValueError("open the right factor as right.facing(left), and an owned one as the left")


def _rows(left: SharedTensor, holder: int) -> slice:
    """Of the rows that the left's columns meet, those of a holder's."""
    return slice(left.owned, None) if holder else slice(0, left.owned)


def _openings(closed: Sequence[SharedTensor]) -> list[tuple[object, ...]]:
    """What tells the openings of one operation from those of another: axes, and who opens what."""
    return [(each.shape, each.owned, each.faced) for each in closed]


def _factors(left: SharedTensor, right: SharedTensor, operation: Operation) -> tuple[object, ...]:
    """What tells one product from another."""
    return (operation, *_openings([left, right]))


class Preprocessing(Dealer):
    """Stands in for a party while a program is followed on shapes; sends nothing by itself.

    Args:
        party: whose turn it is; its count of operations stays where it is.
    """

    def __init__(self, party: FastHolder | FastDealer) -> None:
        super().__init__(party.role, {}, party.rules)
        self._number = party.number
        self._party = party

    def share(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> SharedTensor:
        self.next_number()  # nobody has values yet
        bits = self.rules.bits if bits < 0 else bits
        return SharedTensor(blank(shape), bits, owned=owned_by(owner, shape))

    def reveal(self, shared: SharedTensor, to: int, where: str) -> Tensor | None:
        self.next_number()
        return None

    def _open(
        self, number: int, closed: Sequence[SharedTensor], phase: str
    ) -> Sequence[SharedTensor]:
        return list(map(_with_opening, closed, self._party.draw_ahead(number, closed)))

    def _deal_product(
        self, number: int, left: SharedTensor, right: SharedTensor, operation: Operation
    ) -> None:
        self._party.deal_ahead(number, left, right, operation)

    def _ask(self, asked: Question, shared: SharedTensor, function: Function, where: str) -> None:
        self._party.permute_ahead(asked, function)

    def answer(self, asked: Question, index: int = 0) -> SharedTensor:
        elements = self._party.foreseen(asked, index)
        elements = blank(asked.shape) if elements is None else elements
        return SharedTensor(elements, asked.bits[index], foreseen=True)
