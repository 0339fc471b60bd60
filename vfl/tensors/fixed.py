"""Fixed-precision tensors: real numbers as integers, local or as shares, with gradients.

A real number x is represented by the integer round(x 2^bits). A product of two such integers has
the sum of both factors' fraction bits. Dividing it back to the tensor's precision takes a round of
messages between the holders. The class delays this division until the next product or `get` needs
it; sums, signs and selections do not need it. Gradients are recorded on a separate tape of this
class, because torch's tape would need floats. `vfl.tensors.arithmetic`, `vfl.tensors.functions` and
`vfl.tensors.layers` define the operations.
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

#: Operations some of whose operands are indices; indices are not converted to fixed precision.
_WITH_PLACES = frozenset({"__getitem__", "gather", "index_select"})
#: Function that maps the gradient of a result to the gradient of an operand (vector-Jacobian
#: product).
Vjp = Callable[["FixedPrecisionTensor"], "FixedPrecisionTensor"]


class FixedPrecisionTensor(ChainTensor):
    """Real numbers with a given number of fraction bits.

    Args:
        child: the ring elements (integers) that represent the numbers.
        bits: number of fraction bits of the elements.
        precision: number of fraction bits of the original numbers; a product is divided until it
            has this number again.
    """

    kind = "a fixed-precision tensor"
    #: Functions of this class by name of the torch operation; `vfl.tensors.methods` adds the
    #: operations of `vfl.tensors.layers`.
    operations: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def __init__(self, child: Ring, bits: int, precision: int) -> None:
        self.link(child)
        self.bits, self.precision, self._shape = bits, precision, child.shape
        self._gradient: FixedPrecisionTensor | None = None
        self._tape: tuple[tuple[FixedPrecisionTensor, Vjp, int], ...] = ()
        self._changes = 0
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
        # The text of torch's own error may contain values.
        except (RuntimeError, IndexError, TypeError):
            raise UserError(
                "these operands cannot be combined, or an option is not supported here",
                where=name,
                got=", ".join(axes(each.shape) for each in args if isinstance(each, Tensor)),
                fix="compare shapes and options; docs/tensors.md lists what is supported",
            ) from None

    def lifted(self, value: Any) -> Any:
        """Convert a public torch tensor to this class; return other values unchanged."""
        if _is_list(value):
            return [self.lifted(each) for each in value]
        if isinstance(value, PointerTensor):
            raise UserError(
                "one operation cannot combine a pointer and a shared tensor",
                got=repr(value),
                fix="share it: vfl.tensors.fix_precision(pointer).share(...)",
            )
        if isinstance(value, Tensor) and not isinstance(value, ChainTensor):
            bits = self.precision if value.dtype.is_floating_point else 0
            return public(value, bits, self.precision)
        return value

    def get(self, requester: str = ME) -> FixedPrecisionTensor:
        """Return a local tensor of at most `precision` fraction bits, if the holders allow it.

        Raises:
            ConsentError: a holder does not allow the requester to read its share.
            LostPeerError: a holder's process has ended.
        """
        # Without this division, the lower bits of a product would disclose its factors.
        told = self.divided()
        result = FixedPrecisionTensor(Here(told.child.reveal(requester)), told.bits, told.precision)
        return result.requires_grad_(self._wants_grad)

    def float_precision(self) -> Tensor:
        """Return the values as a torch tensor of floats; the elements must be local."""
        if not isinstance(self.child, Here):
            self.refuse("float_precision before get")
        return decode(self.child.elements, self.bits).float()

    def share(self, *holders: Any, dealer: Any, mac: bool = False) -> FixedPrecisionTensor:
        """Split the local elements into additive shares for 2 to 8 workers.

        Args:
            holders: workers that each receive one share.
            dealer: worker that deals the correlated randomness for products; it receives no value
                of the tensor.
            mac: whether shares have MACs (message authentication codes), by which holders detect a
                false share.
        """
        if not isinstance(self.child, Here):
            self.refuse("share of a shared tensor")
        ring = Session.of(holders, dealer, mac).split(self.child.elements)
        result = FixedPrecisionTensor(ring, self.bits, self.precision)
        return result.requires_grad_(self._wants_grad)

    def pointers(self) -> Sequence[PointerTensor]:
        """Return pointers to all tensors at workers that together represent this tensor."""
        return self.child.pointers if isinstance(self.child, Shares) else []

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Return whether the tensor records gradients."""
        return self._wants_grad or bool(self._tape)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether operations on this tensor record gradients."""
        self._wants_grad = requires_grad
        return self

    @property  # type: ignore[override]
    def grad(self) -> FixedPrecisionTensor | None:
        """The gradient of this tensor, in the same representation as the tensor."""
        return self._gradient

    @grad.setter
    def grad(self, value: FixedPrecisionTensor | None) -> None:
        self._gradient = value

    def backward(self) -> None:  # type: ignore[override]
        """Compute the gradients of this scalar.

        The gradients are added to the leaf tensors on which the scalar depends.
        """
        if self.numel() != 1:
            raise UserError("backward needs a single value", got=axes(self._shape), want="one")
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
                waiting.extend((each, False) for each, *_ in tensor._tape if each.requires_grad)
        one = public(torch.ones(self._shape, dtype=torch.int64), 0, self.precision)
        grads = {id(self): one}
        with torch.no_grad():
            for tensor in reversed(order):
                grad = grads.pop(id(tensor))
                if tensor._wants_grad and not tensor._tape:
                    before = tensor._gradient
                    tensor._gradient = grad if before is None else before + grad
                for operand, vjp, changes in tensor._tape:
                    if operand._changes != changes:
                        self.refuse("backward through a tensor that was changed in place later")
                    if operand.requires_grad:
                        part = vjp(grad)
                        before = grads.get(id(operand))
                        grads[id(operand)] = part if before is None else before + part

    def divided(self, bits: int | None = None) -> FixedPrecisionTensor:
        """Return the tensor divided to at most `bits` fraction bits (by default, its precision).

        The division takes one round of messages, and happens only once, because the tensor stores
        the result. The division discloses no value.
        """
        wanted = self.precision if bits is None else bits
        if self.bits <= wanted:
            return self
        if self._divided is None or self._divided.bits != wanted:
            child = self.child.divide(self.bits - wanted)
            self._divided = FixedPrecisionTensor(child, wanted, self.precision)
        found = self._divided
        # The stored result has no tape: with one, a cycle of references would keep the tensor in
        # memory.
        if torch.is_grad_enabled() and self.requires_grad:
            found = FixedPrecisionTensor(found.child, wanted, self.precision)
            found.record((self, lambda g: g))
        return found

    def record(self, *tape: tuple[FixedPrecisionTensor, Vjp]) -> None:
        """Let gradients of this tensor flow to the tape's operands, if gradients are recorded."""
        if torch.is_grad_enabled():
            self._tape = tuple(
                (each, vjp, each._changes) for each, vjp in tape if each.requires_grad
            )

    def become(self, other: FixedPrecisionTensor) -> Self:
        """Replace this tensor's values in place by those of another tensor of the same shape.

        If gradients are recorded, the tensor's gradients then flow to the other tensor's operands.
        """
        if other.shape != self._shape:
            self.refuse(f"an operation in place from {axes(self._shape)} to {axes(other.shape)}")
        self.link(other.child)
        self.bits, self._divided = other.bits, None
        self._changes += 1
        if torch.is_grad_enabled():
            self._tape = other._tape
        return self

    def before_change(self) -> FixedPrecisionTensor:
        """Return a tensor of the present values and tape, as the operand of a change in place."""
        if self._wants_grad and not self._tape:
            self.refuse("an operation in place on a leaf that records gradients")
        found = FixedPrecisionTensor(self.child, self.bits, self.precision)
        found._divided, found._tape = self._divided, self._tape
        return found

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<fixed precision {axes(self._shape)}, {self.bits} bits: {self.child!r}>"


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value)


def public(values: Tensor, bits: int, precision: int) -> FixedPrecisionTensor:
    """Encode public values with a given number of fraction bits.

    Raises:
        RingRangeError, NonFiniteError: a value does not fit into the ring, or is not finite.
    """
    return FixedPrecisionTensor(Here(elements_of(values, bits, precision)), bits, precision)
