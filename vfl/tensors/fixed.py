"""Fixed-precision tensors: reals as ring elements here or as shares, with gradients.

A real x stands as round(x 2^bits). A product has the fractions of both factors, and is divided
back to the tensor's precision. Gradients go through a tape of its own: torch's would need floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from vfl.core.errors import UserError
from vfl.core.registry import require_range
from vfl.mpc.ring import decode
from vfl.tensors.base import ChainTensor, axes
from vfl.tensors.pointers import ME, PointerTensor
from vfl.tensors.shares import Here, Ring, Session, Shares, elements_of

BITS = 16
_FACTOR_BITS = 20
#: The logistic curve less 1/2 on [-8, 8], by odd powers of x / 8; off by at most 0.009.
_SIGMOID_END, _SIGMOID = 8.0, (1.87314, -6.15703, 12.89511, -12.94011, 4.83731)
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

    def __init__(self, child: Ring, bits: int, precision: int) -> None:
        self.link(child)
        self.bits, self.precision, self._shape = bits, precision, child.shape
        self._gradient: FixedPrecisionTensor | None = None
        self._tape: tuple[tuple[FixedPrecisionTensor, Vjp], ...] = ()

    @classmethod
    def operate(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See `ChainTensor.operate`."""
        operation = _OPERATIONS.get(name.rpartition(".")[2])
        if operation is None:
            cls.refuse(name)
        flat = [each for value in args for each in (value if _is_list(value) else [value])]
        like = next(each for each in flat if isinstance(each, FixedPrecisionTensor))
        taken = [like.lifted(each) for each in args]
        named = {key: like.lifted(value) for key, value in kwargs.items()}
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
        """The same, its elements here, if every holder lets you.

        Raises:
            ConsentError: one does not.
            LostPeerError: one has ended.
        """
        here = Here(self.child.reveal(requester))
        result = FixedPrecisionTensor(here, self.bits, self.precision)
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
                    tensor._gradient = grad if before is None else _add(before, grad)
                for operand, vjp in tensor._tape:
                    if operand.requires_grad:
                        part = vjp(grad)
                        before = grads.get(id(operand))
                        grads[id(operand)] = part if before is None else _add(before, part)

    def become(self, other: FixedPrecisionTensor) -> Self:
        """Take over another's values, in place."""
        self.link(other.child)
        self.bits = other.bits
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


def fix_precision(tensor: Any, bits: int = BITS) -> Any:
    """Reals as fixed-precision numbers; of a pointer, see `share`.

    Args:
        tensor: a torch tensor, or a pointer whose values its worker will share.
        bits: after the point, 8 to 20.
    """
    require_range("bits", bits, 8, 20)
    if isinstance(tensor, PointerTensor):
        return Unshared(tensor, bits)
    return public(tensor, bits, bits).requires_grad_(tensor.requires_grad)


class Unshared:
    """What a pointer's worker is going to share.

    Args:
        pointer: to a torch tensor.
        bits: after the point.
    """

    def __init__(self, pointer: PointerTensor, bits: int) -> None:
        self.pointer, self.bits = pointer, bits

    def __repr__(self) -> str:
        return f"<{self.bits} bits, not shared yet: {self.pointer!r}>"

    def share(self, *holders: Any, dealer: Any, mac: bool = False) -> FixedPrecisionTensor:
        """The worker splits its values among the holders; its rule goes with every share."""
        session, owner = Session.of(holders, dealer, mac), self.pointer.location
        if owner.remote != dealer.remote:
            raise UserError(
                "the tensor is in another process than the holders, or they are and it is not",
                got=repr(self.pointer),
                fix="take holders that are elsewhere as it is, or get() it first if you may",
            )
        result = FixedPrecisionTensor(
            session.split_at(self.pointer, self.bits), self.bits, self.bits
        )
        return result.requires_grad_(self.pointer.requires_grad)


# Arithmetic. `FP` is short for the class in this part.

FP = FixedPrecisionTensor


def _new(child: Ring, bits: int, like: FP, *tape: tuple[FP, Vjp]) -> FP:
    found = FP(child, bits, like.precision)
    if torch.is_grad_enabled():
        found._tape = tuple(each for each in tape if each[0].requires_grad)
    return found


def _map(a: FP, vjp: Vjp, name: str, *parameters: Any) -> FP:
    return _new(a.child.linear(name, *parameters), a.bits, a, (a, vjp))


def _finer(a: FP, bits: int) -> FP:
    if bits == a.bits:
        return a
    shifted = a.child.linear("scale", 1 << (bits - a.bits))
    return _new(shifted, bits, a, (a, lambda g: g))


def _summed_to(a: FP, shape: torch.Size) -> FP:
    if a.shape == shape:
        return a
    return _map(a, lambda g: _expand(g, a.shape), "sum_to", shape)


def _expand(a: FP, shape: torch.Size) -> FP:
    return _map(a, lambda g: _summed_to(g, a.shape), "expand", shape)


def _number(value: float, like: FP) -> FP:
    return public(torch.tensor(value, dtype=torch.float64), like.precision, like.precision)


def _add(a: Any, b: Any, alpha: float = 1) -> FP:
    a, b = _both(a, b)
    if alpha != 1:
        b = _mul(b, alpha)
    bits = max(a.bits, b.bits)
    a, b = _finer(a, bits), _finer(b, bits)
    tape = ((a, lambda g: _summed_to(g, a.shape)), (b, lambda g: _summed_to(g, b.shape)))
    if isinstance(a.child, Here) and not isinstance(b.child, Here):
        child = b.child.plus(a.child.elements)
    elif isinstance(b.child, Here):
        child = a.child.plus(b.child.elements)
    else:
        child = a.child.linear("add", others=[b.child])
    return _new(child, bits, a, *tape)


def _both(a: Any, b: Any) -> tuple[FP, FP]:
    like = a if isinstance(a, FP) else b
    return tuple(each if isinstance(each, FP) else _number(each, like) for each in (a, b))  # type: ignore[return-value]


def _neg(a: FP) -> FP:
    return _map(a, _neg, "scale", -1)


def _sub(a: Any, b: Any, alpha: float = 1) -> FP:
    return _add(a, b, -alpha) if isinstance(a, FP) or alpha != 1 else _add(_neg(b), a)


def _scaled(a: FP, factor: float) -> FP:
    """Times a public number, of which so many leading bits count."""
    whole = float(factor).is_integer() and abs(factor) < 2.0**_FACTOR_BITS
    shift = 0 if whole else _FACTOR_BITS - math.frexp(factor)[1]
    times = round(factor * 2.0**shift)
    a = _fraction(a) if shift else a
    child = a.child.linear("scale", times)
    child = child.divide(shift) if shift else child
    return _new(child, a.bits, a, (a, lambda g: _scaled(g, factor)))


def _mul(a: Any, b: Any) -> FP:
    if not isinstance(a, FP):
        a, b = b, a
    if not isinstance(b, FP):
        return _scaled(a, float(b))
    return _times(
        a,
        b,
        "mul",
        lambda g: _summed_to(_mul(g, b), a.shape),
        lambda g: _summed_to(_mul(g, a), b.shape),
    )


def _fraction(a: FP) -> FP:
    return _finer(a, max(a.bits, a.precision))


def _times(a: FP, b: FP, operation: str, to_a: Vjp, to_b: Vjp) -> FP:
    """A bilinear map, and the division back to the precision."""
    bits = a.bits + b.bits
    if isinstance(b.child, Here):
        child = a.child.linear("by", b.child.elements, operation, False)
    elif isinstance(a.child, Here):
        child = b.child.linear("by", a.child.elements, operation, True)
    else:
        child = a.child.product(b.child, operation)
    if bits > a.precision:
        child, bits = child.divide(bits - a.precision), a.precision
    return _new(child, bits, a, (a, to_a), (b, to_b))


def _matmul(a: FP, b: FP) -> FP:
    if a.dim() == 1:
        return _reshape(_matmul(_reshape(a, 1, -1), b), *b.shape[1:])
    if b.dim() == 1:
        return _reshape(_matmul(a, _reshape(b, -1, 1)), *a.shape[:-1])
    return _times(a, b, "matmul", lambda g: _matmul(g, _t(b)), lambda g: _matmul(_t(a), g))


def _t(a: FP) -> FP:
    return _new(a.child.transposed(), a.bits, a, (a, _t))


def _reshape(a: FP, *shape: Any) -> FP:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return _map(a, lambda g: _reshape(g, a.shape), "reshape", _resolved(a.shape, sizes))


def _resolved(shape: torch.Size, sizes: Sequence[int]) -> tuple[int, ...]:
    """With the length that -1 stands for."""
    if -1 not in sizes:
        return tuple(sizes)
    rest = -math.prod(sizes)
    return tuple(shape.numel() // max(rest, 1) if size == -1 else size for size in sizes)


def _gather(a: FP, pick: Callable[[Tensor], Tensor]) -> FP:
    """Elements in another order, some of them, or some several times."""
    indices = pick(torch.arange(a.numel()).reshape(a.shape))

    def back(g: FP) -> FP:
        return _map(g, lambda h: _gather(h, pick), "spread", indices, a.shape)

    return _map(a, back, "gather", indices)


def _sum(a: FP, dim: Any = None, keepdim: bool = False) -> FP:
    dims = tuple(range(a.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    kept = torch.Size(
        1 if at in {each % a.dim() for each in dims} else size for at, size in enumerate(a.shape)
    )
    dims = tuple(each % a.dim() for each in dims)
    return _map(a, lambda g: _expand(_reshape(g, kept), a.shape), "sum", dims, keepdim)


def _mean(a: FP, dim: Any = None, keepdim: bool = False) -> FP:
    total = _sum(a, dim, keepdim)
    return _mul(total, total.numel() / a.numel())


def _detached(a: FP) -> FP:
    return FP(a.child, a.bits, a.precision)


def _square(a: FP) -> FP:
    found = _times(_detached(a), _detached(a), "mul", _neg, _neg)
    return _new(found.child, found.bits, a, (a, lambda g: _mul(_mul(a, 2), g)))


def _pow(a: FP, exponent: int) -> FP:
    if exponent == 1:
        return a
    if not isinstance(exponent, int) or exponent < 1:
        FP.refuse("a power that is no positive whole number")
    half = _square(_pow(a, exponent // 2)) if exponent > 2 else a
    return _square(a) if exponent == 2 else _mul(half, a) if exponent % 2 else half


def _lt(a: Any, b: Any) -> FP:
    less = _sub(a, b)
    return _new(less.child.negative(), 0, less)


def _not(a: FP) -> FP:
    return _sub(public(torch.ones((), dtype=torch.int64), 0, a.precision), a)


def _ne(a: Any, b: Any) -> FP:
    apart = _sub(a, b)
    below, above = _unbound(_lt(_stack([apart, _neg(apart)]), 0))
    return _add(below, above)


def _relu(a: FP, inplace: bool = False) -> FP:
    positive = _lt(0, a)
    return _times(a, positive, "mul", lambda g: _mul(g, positive), lambda g: g)


def _sigmoid(a: FP) -> FP:
    """An odd polynomial within (-8, 8), 0 and 1 beyond."""
    with torch.no_grad():
        bounds = _stack([_sub(_fraction(a), -_SIGMOID_END), _sub(_SIGMOID_END, _fraction(a))])
        below, above = _unbound(_lt(bounds, 0))
        inside = _sub(_not(below), above)
        scaled = _mul(_mul(a, inside), 1 / _SIGMOID_END)
        squared = _square(scaled)
        *rest, highest = _SIGMOID
        curve = _add(_mul(squared, highest), rest[-1])
        for coefficient in reversed(rest[:-1]):
            curve = _add(_mul(curve, squared), coefficient)
        value = _add(_mul(curve, scaled), _mul(_sub(above, below), 0.5))
        value = _add(value, 0.5)
    slope = None

    def back(g: FP) -> FP:
        nonlocal slope
        slope = _sub(value, _square(value)) if slope is None else slope
        return _mul(g, slope)

    return _new(value.child, value.bits, a, (a, back))


def _stack(parts: Sequence[FP], dim: int = 0) -> FP:
    first, *others = parts

    def at(index: int) -> Vjp:
        return lambda g: _gather(g, lambda indices: indices.select(dim, index))

    child = first.child.linear("stack", dim, others=[each.child for each in others])
    return _new(child, first.bits, first, *((each, at(index)) for index, each in enumerate(parts)))


def _unbound(a: FP) -> list[FP]:
    return [_index(a, at) for at in range(a.shape[0])]


def _index(a: FP, index: Any) -> FP:
    return _gather(a, lambda indices: indices[index])


def _linear(x: FP, weight: FP, bias: FP | None = None) -> FP:
    found = _matmul(x, _t(weight))
    return found if bias is None else _add(found, bias)


def _windows(x: FP, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> FP:
    """Axes (rows, high, wide, channels, *size); zeros around."""
    if any(padding):
        around = (padding[1], padding[1], padding[0], padding[0])
        high, wide = x.shape[-2:]
        inner = (
            ...,
            slice(padding[0], padding[0] + high),
            slice(padding[1], padding[1] + wide),
        )
        x = _map(x, lambda g: _index(g, inner), "pad", around)
    return _gather(
        x,
        lambda at: (
            at.unfold(2, size[0], stride[0]).unfold(3, size[1], stride[1]).permute(0, 2, 3, 1, 4, 5)
        ),
    )


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)[:2] * (2 // len(value))


def _conv2d(
    x: FP,
    weight: FP,
    bias: FP | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> FP:
    if _pair(dilation) != (1, 1) or groups != 1 or isinstance(padding, str):
        FP.refuse("conv2d with dilation, groups or a padding by name")
    seen = _windows(x, weight.shape[2:], _pair(stride), _pair(padding))
    rows, high, wide = seen.shape[:3]
    flat = _reshape(seen, rows * high * wide, -1)
    found = _linear(flat, _reshape(weight, weight.shape[0], -1), bias)
    ordered = _reshape(found, rows, high, wide, -1)
    return _gather(ordered, lambda at: at.permute(0, 3, 1, 2))


def _avg_pool2d(
    x: FP,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: None = None,
) -> FP:
    if ceil_mode or not count_include_pad or divisor_override:
        FP.refuse("avg_pool2d with ceil_mode or another divisor")
    size = _pair(kernel_size)
    seen = _windows(x, size, _pair(stride or kernel_size), _pair(padding))
    return _gather(_mean(seen, (4, 5)), lambda at: at.permute(0, 3, 1, 2))


def _mse_loss(a: FP, b: FP, *_: Any, reduction: str = "mean", **__: Any) -> FP:
    a, b = _both(a, b)
    if reduction not in ("mean", "sum") or a.shape != b.shape:
        FP.refuse("mse_loss of unequal shapes, or without reduction")
    squares = _square(_sub(a, b))
    return _mean(squares) if reduction == "mean" else _sum(squares)


def _div(a: FP, b: Any) -> FP:
    if isinstance(b, FP) or not isinstance(a, FP):
        FP.refuse("division by a tensor")
    return _mul(a, 1 / b)


def _in_place(operation: Callable[..., FP]) -> Callable[..., FP]:
    return lambda a, *args, **kwargs: a.become(operation(a, *args, **kwargs))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _add, "__radd__": _add, "sub": _sub, "rsub": lambda a, b: _sub(b, a),
    "__rsub__": lambda a, b: _sub(b, a), "mul": _mul, "__rmul__": _mul, "neg": _neg, "div": _div,
    "square": _square, "pow": _pow, "__pow__": _pow,
    "matmul": _matmul, "mm": _matmul, "__rmatmul__": lambda a, b: _matmul(b, a),
    "t": _t, "reshape": _reshape, "view": _reshape, "expand": lambda a, *s: _expand(
        a, torch.Size(s if isinstance(s[0], int) else s[0])
    ),
    "flatten": lambda a, start_dim=0, end_dim=-1: _gather(
        a, lambda at: at.flatten(start_dim, end_dim)
    ),
    "transpose": lambda a, one, two: _gather(a, lambda at: at.transpose(one, two)),
    "permute": lambda a, *dims: _gather(a, lambda at: at.permute(*dims)),
    "squeeze": lambda a, *dims: _gather(a, lambda at: at.squeeze(*dims)),
    "unsqueeze": lambda a, dim: _gather(a, lambda at: at.unsqueeze(dim)),
    "__getitem__": _index, "stack": _stack,
    "sum": _sum, "mean": _mean, "relu": _relu, "sigmoid": _sigmoid,
    "lt": _lt, "gt": lambda a, b: _lt(b, a), "ge": lambda a, b: _not(_lt(a, b)),
    "le": lambda a, b: _not(_lt(b, a)), "ne": _ne, "eq": lambda a, b: _not(_ne(a, b)),
    "linear": _linear, "conv2d": _conv2d, "avg_pool2d": _avg_pool2d, "mse_loss": _mse_loss,
    "detach": _detached,
    "clone": lambda a, **_: _map(a, lambda g: g, "clone"),
    "zeros_like": lambda a, **_: _mul(_detached(a), 0),
    "add_": _in_place(_add), "sub_": _in_place(_sub), "mul_": _in_place(_mul),
    "zero_": _in_place(lambda a: _mul(_detached(a), 0)),
}  # fmt: skip
