"""Layers and losses of fixed-precision tensors, and the table of all operations by name.

No function here discloses a value. Rounds follow from the parts of a layer: see
`vfl.tensors.arithmetic`, `vfl.tensors.functions`, and docs/results/tensor_operations.csv.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vfl.tensors import arithmetic as ar
from vfl.tensors import functions as fn
from vfl.tensors.arithmetic import (
    FP,
    add,
    chosen,
    convolved,
    different,
    gathered,
    less,
    matmul,
    mean,
    mul,
    negated,
    picked,
    reshape,
    square,
    sub,
    total,
    whole,
)
from vfl.tensors.convolution import Geometry
from vfl.tensors.shares import Here

#: Value of the padding of images for max pooling, below every value that a tensor can represent.
_LOWEST = -(2.0**25)


def linear(x: FP, weight: FP, bias: FP | None = None) -> FP:
    """Return x weight^T + bias."""
    found = matmul(x, ar.transposed(weight))
    return found if bias is None else add(found, bias)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)[:2] * (2 // len(value))


def conv2d(
    x: FP,
    weight: FP,
    bias: FP | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> FP:
    """Return a convolution; images and filters are opened under masks in one round of messages."""
    if isinstance(padding, str):
        FP.refuse("conv2d with a padding by name")
    geometry = Geometry(
        tuple(x.shape), tuple(weight.shape), _pair(stride), _pair(padding), _pair(dilation), groups
    )
    found = convolved(x, weight, "conv2d", geometry)
    return found if bias is None else add(found, reshape(bias, -1, 1, 1))


def _windows(
    x: FP, size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], around: float
) -> FP:
    """Return the pooling windows of images; axes (rows, channels, height, width, elements)."""
    if any(padding):
        x = ar.padded(x, (padding[1], padding[1], padding[0], padding[0]), value=around)
    return gathered(
        x, lambda at: at.unfold(2, size[0], stride[0]).unfold(3, size[1], stride[1]).flatten(4)
    )


def avg_pool2d(
    x: FP,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> FP:
    """Return the mean of each pooling window; takes no message, unless it must divide a product."""
    if ceil_mode or (not count_include_pad and padding):
        FP.refuse("avg_pool2d with ceil_mode or without its padding")
    size = _pair(kernel_size)
    seen = _windows(x, size, _pair(stride or kernel_size), _pair(padding), 0.0)
    return mul(total(seen, 4), 1 / (divisor_override or math.prod(size)))


def max_pool2d(
    x: FP,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> FP:
    """Return the largest value of each pooling window; see `largest` for the rounds of messages."""
    if ceil_mode or return_indices or _pair(dilation) != (1, 1):
        FP.refuse("max_pool2d with ceil_mode, dilation or indices")
    size = _pair(kernel_size)
    seen = _windows(x, size, _pair(stride or kernel_size), _pair(padding), _LOWEST)
    return ar.largest(seen, 4)[0]


def adaptive_avg_pool2d(x: FP, output_size: Any) -> FP:
    """Return the means of pooling windows of equal size that divide the image."""
    wanted = [size or x.shape[at - 2] for at, size in enumerate(_pair(output_size))]
    size = [x.shape[at - 2] // each for at, each in enumerate(wanted)]
    if any(x.shape[at - 2] % each for at, each in enumerate(wanted)):
        FP.refuse("adaptive_avg_pool2d to a size that does not divide the image's")
    return avg_pool2d(x, size)


# Normalisation.


def _normalised(x: FP, dims: Sequence[int], eps: float) -> tuple[FP, FP, FP]:
    """Normalise along axes to mean 0, variance 1; return the result, the mean and the variance."""
    middle = mean(x, dims, keepdim=True)
    apart = sub(x, middle)
    variance = mean(square(apart), dims, keepdim=True)
    # The added number keeps the variance above 0 despite rounding, because the square root needs a
    # positive argument.
    found = mul(apart, fn.rsqrt(add(variance, max(eps, 2.0**-x.precision))))
    return found, middle, variance


def layer_norm(
    x: FP,
    normalized_shape: Sequence[int],
    weight: FP | None = None,
    bias: FP | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> FP:
    """Normalise over the last axes; the variance of the elements may be at most 2^16."""
    dims = tuple(range(-len(tuple(normalized_shape)), 0))
    found = _normalised(x, dims, eps)[0]
    found = found if weight is None else mul(found, weight)
    return found if bias is None else add(found, bias)


def batch_norm(
    x: FP,
    running_mean: Any = None,
    running_var: Any = None,
    weight: FP | None = None,
    bias: FP | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> FP:
    """Normalise over all axes except the second; the variances may be at most 2^16.

    In training, the function updates the running mean and the running variance, which are shared
    tensors like the parameters.
    """
    kept = (1, -1, *[1] * (x.dim() - 2))
    if training or running_mean is None:
        dims = [0, *range(2, x.dim())]
        found, middle, variance = _normalised(x, dims, eps)
        if running_mean is not None:
            count = x.numel() // x.shape[1]
            with torch.no_grad():
                _move(running_mean, middle, momentum, 1.0)
                _move(running_var, variance, momentum, count / max(count - 1, 1))
    else:
        root = fn.rsqrt(add(reshape(running_var, *kept), max(eps, 2.0**-x.precision)))
        found = mul(sub(x, reshape(running_mean, *kept)), root)
    found = found if weight is None else mul(found, reshape(weight, *kept))
    return found if bias is None else add(found, reshape(bias, *kept))


def _move(running: Any, value: FP, momentum: float, factor: float) -> None:
    if not isinstance(running, FP) or isinstance(running.child, Here):
        FP.refuse("batch_norm that keeps a public mean; share the module, or track no statistics")
    value = ar.detached(reshape(value, *running.shape))
    step = sub(mul(value, factor), running)
    running.become(add(running, mul(step, momentum)))


def dropout(x: FP, p: float = 0.5, training: bool = True) -> FP:
    """Set elements to zero at random positions; the positions are public."""
    if not training or p == 0:
        return x
    kept = torch.rand(x.shape) >= p
    return mul(mul(x, whole(kept, x)), 1 / (1 - p))


# Losses.


def _reduced(values: FP, reduction: str, count: float | None = None) -> FP:
    if reduction == "none":
        return values
    if reduction == "sum":
        return total(values)
    if reduction != "mean":
        FP.refuse("a loss with another reduction than mean, sum or none")
    return mul(total(values), 1 / (count or values.numel()))


def mse_loss(
    a: Any,
    b: Any,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    weight: None = None,
) -> FP:
    """Return the squared differences, reduced to their mean or sum as in torch."""
    ar.refuse_options("mse_loss", size_average=size_average, reduce=reduce, weight=weight)
    a, b = ar.both(a, b)
    if a.shape != b.shape:
        FP.refuse("mse_loss of unequal shapes")
    return _reduced(square(sub(a, b)), reduction)


def l1_loss(
    a: Any,
    b: Any,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    weight: None = None,
) -> FP:
    """Return the absolute differences, reduced to their mean or sum as in torch."""
    ar.refuse_options("l1_loss", size_average=size_average, reduce=reduce, weight=weight)
    return _reduced(ar.absolute(sub(a, b)), reduction)


def one_hot(labels: FP, classes: int) -> FP:
    """Convert integer labels to one-hot rows.

    If the labels are shared, they are compared with every class.
    """
    places = torch.arange(classes)
    if isinstance(labels.child, Here):
        return whole(labels.child.elements[..., None] == places, labels)
    return negated(different(fn.unsqueezed(labels, labels.dim()), whole(places, labels)))


#: The index that torch ignores by default as a label; no valid label has this value.
_IGNORED = -100


def nll_loss(
    scores: FP,
    target: FP,
    weight: None = None,
    size_average: None = None,
    ignore_index: int = _IGNORED,
    reduce: None = None,
    reduction: str = "mean",
) -> FP:
    """Return the negated log-probabilities at the labels, which are public or shared integers."""
    ar.refuse_options("nll_loss", weight=weight, size_average=size_average, reduce=reduce)
    if ignore_index != _IGNORED:
        FP.refuse("nll_loss with an ignored label")
    classes = gathered(scores, lambda at: at.movedim(1, -1))
    found = ar.neg(total(mul(classes, one_hot(target, scores.shape[1])), -1))
    return _reduced(found, reduction)


def cross_entropy(
    scores: FP,
    target: FP,
    weight: None = None,
    size_average: None = None,
    ignore_index: int = _IGNORED,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> FP:
    """Return the cross-entropy for labels.

    The labels are public or shared integers, or rows of probabilities. Labels that are shared as
    rows, such as one-hot rows, need no comparison of integers.
    """
    ar.refuse_options("cross_entropy", weight=weight, size_average=size_average, reduce=reduce)
    if label_smoothing or ignore_index != _IGNORED:
        FP.refuse("cross_entropy with label smoothing or an ignored label")
    dim = 1 if scores.dim() > 1 else 0
    logarithms = fn.log_softmax(scores, dim)
    if target.shape != scores.shape:
        return nll_loss(logarithms, target, reduction=reduction)
    found = ar.neg(total(mul(logarithms, target), dim))
    return _reduced(found, reduction)


def binary_cross_entropy_with_logits(
    scores: FP,
    target: FP,
    weight: None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: None = None,
) -> FP:
    """Return max(x, 0) - x y + log(1 + exp(-|x|))."""
    given = {"weight": weight, "pos_weight": pos_weight, "size_average": size_average}
    ar.refuse_options("binary_cross_entropy_with_logits", **given, reduce=reduce)
    with torch.no_grad():
        above = less(0, scores)
        magnitude = mul(scores, sub(mul(above, 2), whole(torch.ones(()), scores)))
        low = ar.maximum(ar.neg(magnitude), -64.0)
        tail = fn.log(add(fn.exp(low), 1.0))
        found = add(sub(mul(scores, above), mul(scores, target)), tail)
    plain = ar.detached(scores)
    value = ar.with_gradient(found, (scores, lambda g: mul(g, sub(fn.sigmoid(plain), target))))
    return _reduced(value, reduction)


def binary_cross_entropy(
    values: FP,
    target: FP,
    weight: None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> FP:
    """Return -y log(p) - (1 - y) log(1 - p), for p from 2^-precision to 1 - 2^-precision."""
    given = {"weight": weight, "size_average": size_average, "reduce": reduce}
    ar.refuse_options("binary_cross_entropy", **given)
    both = ar.stack([values, sub(1.0, values)])
    hits = ar.stack([target, sub(whole(torch.ones(()), target), target)])
    return _reduced(ar.neg(total(mul(fn.log(both), hits), 0)), reduction)


# Operations that have several return types in torch under one name.


def _extreme(smallest: bool) -> Callable[..., Any]:
    def operation(a: FP, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, FP):
            return ar.minimum(a, dim) if smallest else ar.maximum(a, dim)
        if dim is None:
            return ar.largest(reshape(a, -1), 0, smallest=smallest)[0]
        found = ar.largest(a, dim, smallest=smallest, places=True)
        kind: Any = torch.return_types.min if smallest else torch.return_types.max
        return kind([_kept(each, dim, keepdim) for each in found])

    return operation


def _extreme_values(smallest: bool) -> Callable[..., FP]:
    def operation(a: FP, dim: Any = (), keepdim: bool = False) -> FP:
        dims = [dim] if isinstance(dim, int) else list(dim) or list(range(a.dim()))
        for each in sorted((one % a.dim() for one in dims), reverse=True):
            a = _kept(ar.largest(a, each, smallest=smallest)[0], each, keepdim)
        return a

    return operation


def _extreme_place(smallest: bool) -> Callable[..., FP]:
    def operation(a: FP, dim: int | None = None, keepdim: bool = False) -> FP:
        if dim is None:
            a, dim = reshape(a, -1), 0
        found = ar.largest(ar.detached(a), dim, smallest=smallest, places=True)[1]
        assert found is not None, "places were asked for"
        return fn.unsqueezed(found, dim) if keepdim else found

    return operation


def _kept(a: Any, dim: int, keepdim: bool) -> Any:
    return fn.unsqueezed(a, dim) if keepdim else a


def _gather(a: FP, dim: int, index: Any, **_: Any) -> FP:
    """Return the elements at public indices along an axis."""
    if isinstance(index, FP):
        FP.refuse("gather at shared places")
    return gathered(a, lambda at: at.gather(dim, index))


def _where(condition: FP, a: Any, b: Any) -> FP:
    return chosen(condition, a, b)


def _var(
    a: FP,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: int | None = None,
) -> FP:
    dims = ar.dimensions(a, dim)
    count = math.prod(a.shape[each] for each in dims)
    less_by = int(unbiased) if correction is None else correction
    squares = square(sub(a, mean(a, dims, keepdim=True)))
    return mul(total(squares, dims, keepdim), 1 / (count - less_by))


def _addcdiv(a: FP, b: FP, c: FP, *, value: float = 1) -> FP:
    return add(a, mul(fn.div(b, c), value))


def _addcmul(a: FP, b: FP, c: FP, *, value: float = 1) -> FP:
    """Return a + value b c.

    For a small `value`, the product is scaled before its fraction bits are cut off, since Adam's
    squared gradients need these bits.
    """
    found = square(b) if b is c else mul(b, c)
    return add(a, ar.scaled_briefly(found, value) if abs(value) <= 1 / 8 else mul(found, value))


def _lerp(a: FP, b: FP, weight: Any) -> FP:
    return add(a, mul(sub(b, a), weight))


def _in_place(operation: Callable[..., FP]) -> Callable[..., FP]:
    """Return the operation that also replaces its first operand's values by its result."""

    def changed(a: FP, *args: Any, **kwargs: Any) -> FP:
        before = a.before_change() if torch.is_grad_enabled() else a
        others = [before if each is a else each for each in args]
        return a.become(operation(before, *others, **kwargs))

    return changed


def _with_inplace(operation: Callable[..., FP]) -> Callable[..., FP]:
    """Add torch's option `inplace` to an operation."""

    def run(a: FP, *args: Any, inplace: bool = False, **kwargs: Any) -> FP:
        return (_in_place(operation) if inplace else operation)(a, *args, **kwargs)

    return run


def _copied(a: FP, other: FP, *_: Any) -> FP:
    copied = ar.expand(other, a.shape)
    return ar.with_gradient(copied, (other, lambda g: ar.summed_to(g, other.shape)))


def _turned(operation: Callable[[Any, Any], FP]) -> Callable[[Any, Any], FP]:
    return lambda a, b: operation(b, a)


def _sizes(shape: Sequence[Any]) -> torch.Size:
    return torch.Size(shape if isinstance(shape[0], int) else shape[0])


def _same(a: FP, *_: Any, **__: Any) -> FP:
    return a


def _zeros(a: FP, *, dtype: None = None, **_: Any) -> FP:
    ar.refuse_options("zeros_like", dtype=dtype)
    return mul(ar.detached(a), 0)


def _moving(name: str) -> Callable[..., FP]:
    """Return an operation of torch that only moves or copies elements."""
    operation = getattr(torch.Tensor, name)
    return lambda a, *args, **kwargs: gathered(a, lambda at: operation(at, *args, **kwargs))


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    # Sums and products.
    "add": add, "__radd__": add, "sub": sub, "rsub": _turned(sub), "__rsub__": _turned(sub),
    "mul": mul, "__rmul__": mul, "neg": ar.neg, "square": square, "pow": ar.power,
    "__pow__": ar.power, "matmul": matmul, "mm": matmul, "bmm": matmul,
    "__rmatmul__": _turned(matmul), "sum": total, "mean": mean, "var": _var,
    "addcmul": _addcmul, "addcdiv": _addcdiv, "lerp": _lerp,
    # Moves.
    **{name: _moving(name) for name in (
        "flatten", "transpose", "permute", "squeeze", "unsqueeze", "movedim", "flip", "roll",
        "narrow", "select", "index_select",
    )},
    "t": lambda a: ar.transposed(a) if a.dim() == 2 else a, "reshape": reshape, "view": reshape,
    "expand": lambda a, *sizes: ar.expand(a, _sizes(sizes)), "__getitem__": picked,
    "gather": _gather, "stack": ar.stack, "cat": ar.cat, "pad": ar.padded,
    "detach": ar.detached, "clone": lambda a, **_: ar.mapped(a, lambda g: g, "clone"),
    "float": _same, "double": _same, "zeros_like": _zeros,
    # Comparisons and selection.
    "lt": less, "gt": _turned(less), "ge": lambda a, b: negated(less(a, b)),
    "le": lambda a, b: negated(less(b, a)), "ne": different,
    "eq": lambda a, b: negated(different(a, b)), "where": _where,
    "masked_fill": lambda a, mask, value: chosen(mask, value, a),
    "maximum": ar.maximum, "minimum": ar.minimum, "max": _extreme(False), "min": _extreme(True),
    "amax": _extreme_values(False), "amin": _extreme_values(True),
    "argmax": _extreme_place(False), "argmin": _extreme_place(True),
    "abs": ar.absolute, "sign": ar.sign, "clamp": ar.clamp, "relu": _with_inplace(ar.relu),
    "hardtanh": _with_inplace(
        lambda a, min_val=-1.0, max_val=1.0: ar.clamp(a, min_val, max_val)
    ),
    "leaky_relu": _with_inplace(
        lambda a, negative_slope=0.01: chosen(less(a, 0), mul(a, negative_slope), a)
    ),
    # Functions.
    "div": fn.div, "__rtruediv__": _turned(fn.div), "reciprocal": fn.reciprocal, "exp": fn.exp,
    "log": fn.log, "sqrt": fn.sqrt, "rsqrt": fn.rsqrt, "sigmoid": fn.sigmoid, "tanh": fn.tanh,
    "erf": fn.erf, "gelu": fn.gelu, "silu": _with_inplace(fn.silu), "softmax": fn.softmax,
    "log_softmax": fn.log_softmax,
    # Layers and losses.
    "linear": linear, "conv2d": conv2d, "avg_pool2d": avg_pool2d, "max_pool2d": max_pool2d,
    "adaptive_avg_pool2d": adaptive_avg_pool2d, "layer_norm": layer_norm,
    "batch_norm": batch_norm, "dropout": _with_inplace(dropout), "mse_loss": mse_loss,
    "l1_loss": l1_loss, "nll_loss": nll_loss, "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    # In place.
    "add_": _in_place(add), "sub_": _in_place(sub), "mul_": _in_place(mul),
    "div_": _in_place(fn.div), "zero_": _in_place(_zeros), "sqrt_": _in_place(fn.sqrt),
    "addcmul_": _in_place(_addcmul), "addcdiv_": _in_place(_addcdiv), "lerp_": _in_place(_lerp),
    "copy_": _in_place(_copied),
}  # fmt: skip
