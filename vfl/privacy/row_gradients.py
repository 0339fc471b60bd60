"""Gradients of single rows, layer by layer, from what went into a layer and what came back.

A split round brings the gradient of each row's loss at a model's output. One backward pass to the
outputs of all layers then holds every row's gradient of every weight in factors (Goodfellow 2015;
Li et al. 2022, "ghost clipping"; Bu et al. 2023, "book-keeping"): norms and weighted sums of rows
follow without a second pass. Each class here is the gradients of one call of one layer; norms and
sums are of the very same numbers, in float64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.privacy.kernel import norms_of, scaled

#: Numbers of a block of rows whose gradients stay in the processor's cache.
_BLOCK_NUMBERS = 1 << 16
#: Numbers of all rows' gradients of a layer that are kept for the sum.
_MOST_KEPT = 1 << 22
#: What reading and converting one number of a row's gradient takes, in multiplications.
_OPERATIONS = 32
#: Float64 products of positions may cancel; a norm is never taken for less than this share of
#: the sum of its parts' norms, which exceeds the rounding of any of them.
_CANCELLED = 2.0**-20


class LayerGradients(Protocol):
    """Every row's gradient of the weights of one layer."""

    def squares(self) -> Tensor:
        """The square of each row's norm over all weights of the layer; float64, axes (rows,)."""
        ...

    def weighted(self, factors: Tensor) -> list[Tensor]:
        """The sum over rows, each times its factor; float64, one of each trained weight.

        Args:
            factors: float64, axes (rows,); 0 leaves a row out, also one that is not finite.
        """
        ...


class Explicit:
    """Gradients as they are.

    Args:
        gradients: of each trained weight, axes (rows, *shape of the weight).
    """

    def __init__(self, gradients: list[Tensor]) -> None:
        self._gradients = gradients

    def squares(self) -> Tensor:
        return torch.stack([norms_of(one) for one in self._gradients]).square().sum(0)

    def weighted(self, factors: Tensor) -> list[Tensor]:
        flat = ((one.flatten(1), one.shape[1:]) for one in self._gradients)
        return [_sum_of_blocks([one], factors).reshape(shape) for one, shape in flat]


def _sum_of_blocks(gradients: Iterable[Tensor], factors: Tensor) -> Tensor:
    """The sum over rows that come in blocks, axes (rows, numbers), each times its factor."""
    some_are_out, at, total = bool((factors == 0).any()), 0, torch.zeros(())
    for block in gradients:
        by = factors[at : at + len(block)]
        at += len(block)
        # 0 times infinity is 0 here.
        values = scaled(block, (by != 0).double()) if some_are_out else block.double()
        total = total.to(values) + by @ values
    return total


class Outer:
    """y = W x + b at one position of a row: the gradient of W is the outer product g x'.

    Args:
        inputs, grad: axes (rows, inputs) and (rows, outputs).
        weight, bias: whether they are trained.
    """

    def __init__(self, inputs: Tensor, grad: Tensor, weight: bool, bias: bool) -> None:
        self._inputs, self._grad = inputs, grad
        self._weight, self._bias = weight, bias

    def squares(self) -> Tensor:
        of_grad = norms_of(self._grad)
        if not self._weight:
            return of_grad.square()
        # The product of norms, not of squares: one may be tiny where the other is huge.
        squares = (norms_of(self._inputs) * of_grad).square()
        return squares.addcmul(of_grad, of_grad) if self._bias else squares

    def weighted(self, factors: Tensor) -> list[Tensor]:
        inputs, by = _float64("inputs", self._inputs), factors[:, None]
        grad = _float64("gradients", self._grad)
        if bool((factors == 0).any()):  # 0 times infinity is 0 here
            inputs, grad = (one.masked_fill_(by == 0, 0.0) for one in (inputs, grad))
        grad *= by
        found = [grad.T @ inputs] if self._weight else []
        return [*found, grad.sum(0)] if self._bias else found


class Positions:
    """y = W x + b at many positions of a row: the gradient of W is the sum of outer products.

    Gradients of rows are computed block by block, and once more for the sum where they are too many
    to keep; or never where products of positions take fewer operations (Li et al. 2022, section
    4.1).

    Args:
        layer: whose gradients these are.
        inputs: gives those of some rows, axes (rows, positions, inputs).
        grad: axes (rows, positions, outputs).
        width: how many inputs.
        weight, bias: whether they are trained.
    """

    def __init__(
        self,
        layer: nn.Module,
        inputs: Callable[[slice], Tensor],
        grad: Tensor,
        width: int,
        weight: bool,
        bias: bool,
    ) -> None:
        self._inputs, self._grad = inputs, grad
        self._weight, self._bias = weight, bias
        positions, outputs = grad.shape[1:]
        self._shape, numbers = (outputs, width), outputs * width
        of_rows = numbers * (2 * positions + _OPERATIONS)
        # Of float64, in copies of their own.
        of_products = 6 * positions * (positions * (width + outputs) + numbers)
        self._by_products = of_rows > of_products
        self._kept: Tensor | None = None
        if weight and not self._by_products and len(grad) * numbers <= _MOST_KEPT:
            count, kept = len(grad) * numbers, _GRADIENTS.get(layer)
            if (
                kept is None
                or kept.numel() < count
                or (kept.dtype, kept.device)
                != (
                    grad.dtype,
                    grad.device,
                )
            ):
                kept = _GRADIENTS[layer] = grad.new_empty(count)
            self._kept = kept[:count].view(len(grad), numbers)

    def squares(self) -> Tensor:
        squares = self._grad.new_zeros(len(self._grad), dtype=torch.float64)
        if self._weight and self._by_products:
            inputs, grad = self._inputs(slice(None)).double(), self._grad.double()
            squares += ((inputs @ inputs.mT) * (grad @ grad.mT)).sum((1, 2)).clamp_min(0)
            parts = (inputs.norm(dim=2) * grad.norm(dim=2)).sum(1)
            squares += (_CANCELLED * parts).square()
        elif self._weight:
            squares += torch.cat([norms_of(one) for one in self._gradients()]).square()
        return squares + norms_of(self._of_bias()).square() if self._bias else squares

    def weighted(self, factors: Tensor) -> list[Tensor]:
        found = []
        if self._weight and self._by_products:
            inputs = self._inputs(slice(None)).double()
            inputs = inputs.masked_fill(factors[:, None, None] == 0, 0.0)
            found.append(scaled(self._grad, factors).flatten(0, 1).T @ inputs.flatten(0, 1))
        elif self._weight:
            sums = _sum_of_blocks(self._gradients(again=True), factors)
            found.append(sums.reshape(self._shape))
        return [*found, _sum_of_blocks([self._of_bias()], factors)] if self._bias else found

    def _gradients(self, *, again: bool = False) -> Iterator[Tensor]:
        """Of W, by blocks of rows, float64, axes (rows, outputs * inputs); each until the next."""
        rows = max(1, _BLOCK_NUMBERS // math.prod(self._shape))
        for start in range(0, len(self._grad), rows):
            at = slice(start, start + rows)
            grad = self._grad[at].mT
            if self._kept is None:
                block = _scratch("products", (len(grad), *self._shape), grad)
            else:
                block = self._kept[at].view(-1, *self._shape)
            if self._kept is None or not again:
                torch.bmm(grad, self._inputs(at), out=block)
            yield _float64("block", block.flatten(1))

    def _of_bias(self) -> Tensor:
        return self._grad.sum(1, dtype=torch.float64)


_KEPT = threading.local()
#: Memory for the gradients of a layer's rows, while the layer is there.
_GRADIENTS: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def _scratch(
    name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Memory of this thread that is used again: fresh pages would cost more than the arithmetic.

    Args:
        name: of the use; what an earlier call gave for it is overwritten.
        shape: of the tensor.
        like: gives the device, and the type without `dtype`.
        dtype: of the tensor.
    """
    key, count = (name, dtype or like.dtype, like.device), math.prod(shape)
    if not hasattr(_KEPT, "memory"):
        _KEPT.memory = {}
    kept: Tensor | None = _KEPT.memory.get(key)
    if kept is None or kept.numel() < count:
        kept = torch.empty(count, dtype=dtype or like.dtype, device=like.device)
        _KEPT.memory[key] = kept
    return kept[:count].view(*shape)


def _float64(name: str, values: Tensor) -> Tensor:
    """A copy in float64 in the scratch memory of that name."""
    return _scratch(name, values.shape, values, torch.float64).copy_(values)


class Lookups:
    """Vectors of a table: the gradient of a vector is the sum over the positions that took it.

    Args:
        numbers: axes (rows, positions); grad: axes (rows, positions, width).
        table: shape of the weight.
        padding: number whose vector is not trained.
    """

    def __init__(
        self, numbers: Tensor, grad: Tensor, table: tuple[int, ...], padding: int | None
    ) -> None:
        rows = torch.arange(len(numbers), device=numbers.device)[:, None].expand_as(numbers)
        taken = (
            torch.ones_like(numbers, dtype=torch.bool) if padding is None else numbers != padding
        )
        keys = (rows * table[0] + numbers)[taken]
        found, at = torch.unique(keys, return_inverse=True)
        self._values = grad.new_zeros(len(found), table[1], dtype=torch.float64)
        self._values.index_add_(0, at, grad[taken].double())
        self._row, self._number = found // table[0], found % table[0]
        self._rows, self._table = len(numbers), table

    def squares(self) -> Tensor:
        squares = self._values.new_zeros(self._rows)
        squares.index_add_(0, self._row, self._values.square().sum(1))
        return squares

    def weighted(self, factors: Tensor) -> list[Tensor]:
        total = self._values.new_zeros(self._table)
        return [total.index_add_(0, self._number, scaled(self._values, factors[self._row]))]


def _trained(module: nn.Module, name: str) -> bool:
    weight = getattr(module, name, None)
    return weight is not None and weight.requires_grad


def _linear(module: nn.Module, inputs: Tensor, grad: Tensor) -> LayerGradients:
    trained = _trained(module, "weight"), _trained(module, "bias")
    if inputs.dim() == 2:
        return Outer(inputs, grad, *trained)
    flat = inputs.flatten(1, -2)
    return Positions(module, flat.__getitem__, grad.flatten(1, -2), flat.shape[2], *trained)


def _convolution(module: nn.Module, inputs: Tensor, grad: Tensor) -> LayerGradients:
    """A linear layer at every position, of the patch that is there."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    kernel, dilation, stride = (
        (1,) * (2 - len(one)) + one for one in (module.kernel_size, module.dilation, module.stride)
    )
    if isinstance(module.padding, str):
        around = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        around = around if module.padding == "same" else [0, 0]
        before = [one // 2 for one in around]
        after = [one - one // 2 for one in around]
    else:
        before = after = [0] * (2 - len(module.padding)) + list(module.padding)
    if inputs.dim() == 3:
        inputs, grad = inputs[:, :, None], grad[:, :, None]
    padding = tuple(before)
    if before != after:
        inputs, padding = F.pad(inputs, (before[1], after[1], before[0], after[0])), (0, 0)

    def patches(at: slice) -> Tensor:
        return F.unfold(inputs[at], kernel, dilation, padding, stride).mT

    trained = _trained(module, "weight"), _trained(module, "bias")
    width = inputs.shape[1] * kernel[0] * kernel[1]
    found = Positions(module, patches, grad.flatten(2).mT, width, *trained)
    return _Reshaped(found, module.weight.shape) if trained[0] else found


class _Reshaped:
    """Gradients of a matrix, which the layer keeps in another shape."""

    def __init__(self, gradients: LayerGradients, shape: torch.Size) -> None:
        self._gradients, self._shape = gradients, shape

    def squares(self) -> Tensor:
        return self._gradients.squares()

    def weighted(self, factors: Tensor) -> list[Tensor]:
        first, *rest = self._gradients.weighted(factors)
        return [first.reshape(self._shape), *rest]


def _embedding(module: nn.Module, inputs: Tensor, grad: Tensor) -> LayerGradients:
    assert isinstance(module, nn.Embedding)
    shape = tuple(module.weight.shape)
    return Lookups(inputs.flatten(1).long(), grad.flatten(1, -2), shape, module.padding_idx)


def _normalisation(module: nn.Module, inputs: Tensor, grad: Tensor) -> LayerGradients:
    """Of y = gamma * n(x) + beta, where n looks at one row alone."""
    grad = grad.double()
    if isinstance(module, nn.LayerNorm):
        exact = F.layer_norm(inputs, module.normalized_shape, eps=module.eps)
        kept = -len(module.normalized_shape)
        gradients = [one.reshape(len(one), -1, *one.shape[kept:]).sum(1) for one in
                     (grad * exact, grad)]  # fmt: skip
    else:
        assert isinstance(module, nn.GroupNorm)
        exact = F.group_norm(inputs, module.num_groups, eps=module.eps)
        pairs_of = (grad * exact, grad)
        gradients = [one.reshape(*one.shape[:2], -1).sum(2) for one in pairs_of]
    pairs = zip(("weight", "bias"), gradients, strict=True)
    return Explicit([one for name, one in pairs if _trained(module, name)])


#: How gradients of rows follow from a layer's inputs and the gradient of its output. Each rule
#: knows the weights `weight` and `bias` of its layer, and no others.
RULES: Mapping[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], LayerGradients]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _normalisation,
    nn.GroupNorm: _normalisation,
}
