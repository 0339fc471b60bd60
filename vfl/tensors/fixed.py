"""Fixed-precision tensors: reals as ring elements here or as shares, with gradients.

A real x stands as round(x 2^bits). A product has the fractions of both factors; it is divided back
to the tensor's precision, which takes a round, when the next product or `get` needs it, for sums,
signs and choices do not. Gradients go through a tape of its own: torch's would need floats.
What the operations are: `vfl.tensors.arithmetic`, `vfl.tensors.functions` and `vfl.tensors.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vfl.core.errors import UserError
from vfl.mpc.ring import decode
from vfl.tensors.base import ChainTensor, axes
from vfl.tensors.pointers import ME, PointerTensor
from vfl.tensors.shares import Here, Ring, Session, Shares, elements_of

#: Operands of these are places, and stay as they are.
_WITH_PLACES = frozenset({"__getitem__", "gather", "index_select"})
#: From a result's gradient to an operand's.
Vjp = Callable[["FixedPrecisionTensor"], "FixedPrecisionTensor"]


class FixedPrecisionTensor(ChainTensor):
    """Reals with so many bits after the point.

    Args:
        child: their ring elements.
        bits: fraction bits of them.
        precision: fraction bits that products are divided back to.
    """

    kind = "a fixed-precision tensor"
    #: By their names; `vfl.tensors.methods` puts in those of `vfl.tensors.layers`.
    operations: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def __init__(self, child: Ring, bits: int, precision: int) -> None:
        self.link(child)
        self.bits, self.precision, self._shape = bits, precision, child.shape
        self._gradient: FixedPrecisionTensor | None = None
        self._tape: tuple[tuple[FixedPrecisionTensor, Vjp], ...] = ()
        self._divided: FixedPrecisionTensor | None = None

    @classmethod
    def operate(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See `ChainTensor.operate`."""
        short = name.rpartition(".")[2]
        operation = cls.operations.get(short)
        if operation is None:
            cls.refuse(name)
        flat = [each for value in args for each in (value if _is_list(value) else [value])]
        like = next(each for each in flat if isinstance(each, FixedPrecisionTensor))
        taken = [each if short in _WITH_PLACES else like.lifted(each) for each in args]
        named = {
            key: value if short in _WITH_PLACES else like.lifted(value)
            for key, value in kwargs.items()
        }
        try:
            return operation(*taken, **named)
        except (RuntimeError, IndexError, TypeError):  # whose text may hold values
            raise UserError(
                "these operands do not go together, or an option is not supported here",
                where=name,
                got=", ".join(axes(each.shape) for each in args if isinstance(each, Tensor)),
                fix="compare shapes and options; docs/tensors.md lists what is supported",
            ) from None

    def lifted(self, value: Any) -> Any:
        """A public torch tensor as one of these; anything else as it is."""
        if _is_list(value):
            return [self.lifted(each) for each in value]
        if isinstance(value, PointerTensor):
            raise UserError(
                "a pointer and a shared tensor meet",
                got=repr(value),
                fix="share it: pointer.fix_precision().share(...)",
            )
        if isinstance(value, Tensor) and not isinstance(value, ChainTensor):
            bits = self.precision if value.dtype.is_floating_point else 0
            return public(value, bits, self.precision)
        return value

    def get(self, requester: str = ME) -> FixedPrecisionTensor:
        """The same, its elements here, if every holder lets you; only so many bits as `precision`.

        Raises:
            ConsentError: one does not.
            LostPeerError: one has ended.
        """
        told = self.divided()  # lower bits of a product would show its factors
        result = FixedPrecisionTensor(Here(told.child.reveal(requester)), told.bits, told.precision)
        return result.requires_grad_(self._wants_grad)

    def float_precision(self) -> Tensor:
        """As a torch tensor, of elements that are here."""
        if not isinstance(self.child, Here):
            self.refuse("float_precision before get")
        return decode(self.child.elements, self.bits).float()

    def share(self, *holders: Any, dealer: Any, mac: bool = False) -> FixedPrecisionTensor:
        """Additive shares at 2 to 8 workers; the elements leave here.

        Args:
            holders: each gets a share.
            dealer: deals what products need, and sees no value.
            mac: whether shares carry MACs, so that a holder that lies is found.
        """
        if not isinstance(self.child, Here):
            self.refuse("share of a shared tensor")
        ring = Session.of(holders, dealer, mac).split(self.child.elements)
        result = FixedPrecisionTensor(ring, self.bits, self.precision)
        return result.requires_grad_(self._wants_grad)

    def pointers(self) -> Sequence[PointerTensor]:
        """To everything at workers that this tensor is made of."""
        return self.child.pointers if isinstance(self.child, Shares) else []

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients flow here."""
        return self._wants_grad or bool(self._tape)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let gradients flow here."""
        self._wants_grad = requires_grad
        return self

    @property  # type: ignore[override]
    def grad(self) -> FixedPrecisionTensor | None:
        """The gradient, shared as the tensor is."""
        return self._gradient

    @grad.setter
    def grad(self, value: FixedPrecisionTensor | None) -> None:
        self._gradient = value

    def backward(self) -> None:  # type: ignore[override]
        """Gradients of a scalar, added to those of the leaves it depends on."""
        if self.numel() != 1:
            raise UserError("backward of more than one value", got=axes(self._shape), want="one")
        order: list[FixedPrecisionTensor] = []
        seen: set[int] = set()
        waiting = [(self, False)]
        while waiting:
            tensor, done = waiting.pop()
            if done:
                order.append(tensor)
            elif id(tensor) not in seen:
                seen.add(id(tensor))
                waiting.append((tensor, True))
                waiting.extend((each, False) for each, _ in tensor._tape if each.requires_grad)
        one = public(torch.ones(self._shape, dtype=torch.int64), 0, self.precision)
        grads = {id(self): one}
        with torch.no_grad():
            for tensor in reversed(order):
                grad = grads.pop(id(tensor))
                if tensor._wants_grad and not tensor._tape:
                    before = tensor._gradient
                    tensor._gradient = grad if before is None else before + grad
                for operand, vjp in tensor._tape:
                    if operand.requires_grad:
                        part = vjp(grad)
                        before = grads.get(id(operand))
                        grads[id(operand)] = part if before is None else before + part

    def divided(self, bits: int | None = None) -> FixedPrecisionTensor:
        """The same with at most so many fraction bits, else as many as products are divided to.

        One round, once: the result is kept. Nothing is disclosed.
        """
        wanted = self.precision if bits is None else bits
        if self.bits <= wanted:
            return self
        if self._divided is None or self._divided.bits != wanted:
            child = self.child.divide(self.bits - wanted)
            self._divided = FixedPrecisionTensor(child, wanted, self.precision)
        found = self._divided
        if torch.is_grad_enabled() and self.requires_grad:  # a tape would keep it alive in a circle
            found = FixedPrecisionTensor(found.child, wanted, self.precision)
            found._tape = ((self, lambda g: g),)
        return found

    def become(self, other: FixedPrecisionTensor) -> Self:
        """Take over another's values, in place."""
        self.link(other.child)
        self.bits, self._divided = other.bits, None
        return self

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<fixed precision {axes(self._shape)}, {self.bits} bits: {self.child!r}>"


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value)


def public(values: Tensor, bits: int, precision: int) -> FixedPrecisionTensor:
    """Values that everybody may know, with fraction bits.

    Raises:
        RingRangeError: a value does not fit.
    """
    return FixedPrecisionTensor(Here(elements_of(values, bits, precision)), bits, precision)
