"""Row gradients: for each row of a batch, the gradient of every weight, computed layer by layer.

A training step of split learning sends the gradient of each row's loss at a model's output. From
these gradients, one backward pass to the outputs of all layers gives every row's gradient of every
weight as factors of a product (Goodfellow 2015; Li et al. 2022, "ghost clipping"; Bu et al. 2023,
"book-keeping"). Norms and weighted sums over rows can be computed from these factors, without a
second pass. Each class of this module represents the row gradients of one call of one layer; it
computes norms, or upper bounds of norms, and weighted sums from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.privacy.kernel import norm_bounds, norms_of, scaled

#: Number of elements of a block of row gradients that fits into the processor's cache.
_BLOCK_NUMBERS = 1 << 18
#: Largest number of values for which a layer's row gradients stay in memory between the computation
#: of norms and the computation of sums.
_MOST_KEPT = 1 << 22
#: Estimated time to read and convert one number of a row gradient, in units of one multiplication.
_OPERATIONS = 32
#: If a norm is computed from products of positions, large float64 terms of opposite sign may
#: cancel. A norm is therefore increased by this fraction of the sum of the norms of each position's
#: outer product; the increase exceeds the rounding error.
_CANCELLED = 2.0**-20


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one layer.

    `version` shows whether code changed the output tensor in place after the call.
    """

    module: nn.Module
    inputs: Tensor
    output: Tensor
    version: int


class Recorder:
    """Recorder of the inputs and outputs of layers.

    Args:
        layers: layers whose weights are trained.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        self._names = sorted(map(id, layers))
        self._calls: list[Call] | None = None
        for layer in layers:
            layer.register_forward_hook(self._note)

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Record the calls of the layers inside this context."""
        calls: list[Call] = []
        self._calls = calls
        try:
            yield calls
        finally:
            self._calls = None

    def ruled(self, calls: Sequence[Call], rows: int) -> bool:
        """Return whether the rules apply to these layer calls.

        The rules apply if every layer is known and is called once, with rows on axis 0.
        """
        if sorted(id(call.module) for call in calls) != self._names:
            return False
        return all(len(call.inputs) == rows and _has_rule(call) for call in calls)

    def _note(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if self._calls is None:
            return
        one = inputs[0] if len(inputs) == 1 else None
        if isinstance(one, Tensor) and one.dim() > 1 and isinstance(output, Tensor):
            self._calls.append(Call(module, one.detach(), output, output._version))


def _has_rule(call: Call) -> bool:
    unchanged = call.output.requires_grad and call.output._version == call.version
    exact = call.output.dtype is not torch.float64  # the products of the two norms may underflow
    return unchanged and exact and type(call.module) in RULES and _plain(call.module)


def _plain(module: nn.Module) -> bool:
    """Return whether a layer of a known class computes what the class's rule assumes."""
    names = {"weight"} if isinstance(module, nn.Embedding) else {"weight", "bias"}
    if module._parameters.keys() != names or "forward" in vars(module):
        return False
    hooks = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    others = (getattr(hook, "__self__", None) for hook in module._forward_hooks.values())
    if any(hooks) or not all(isinstance(one, Recorder) for one in others):
        return False  # forward hooks may change the layer's values
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros"
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)
    return True


class LayerGradients(Protocol):
    """The gradients of one layer's weights for every row."""

    def squares(self) -> Tensor:
        """Return an upper bound of each row's squared gradient norm over all weights of the layer.

        The result is float64, axes (rows,).
        """
        ...

    def weighted(self, factors: Tensor) -> list[Tensor]:
        """Return the sum of row gradients times factors, float64, for each trained weight.

        Args:
            factors: float64, axes (rows,); a factor of 0 leaves out a row, even a row that contains
                NaN or infinity.
        """
        ...


class Explicit:
    """Row gradients that are stored as tensors.

    Args:
        gradients: row gradients of each trained weight, axes (rows, *shape of the weight).
    """

    def __init__(self, gradients: list[Tensor]) -> None:
        self._gradients = gradients

    def squares(self) -> Tensor:
        return torch.stack([norms_of(one) for one in self._gradients]).square().sum(0)

    def weighted(self, factors: Tensor) -> list[Tensor]:
        return [factors @ _kept(one.flatten(1).double(), factors) for one in self._gradients]


def _kept(values: Tensor, factors: Tensor) -> Tensor:
    """Return values, axes (rows, ...), with rows of factor 0 set to 0.

    The product 0 * infinity would be NaN.
    """
    if bool((factors > 0).all()):
        return values
    return values.masked_fill((factors == 0).reshape(-1, *(1,) * (values.dim() - 1)), 0.0)


class Outer:
    """Row gradients of y = W x + b, one position per row: W's gradient is the outer product g x'.

    Args:
        inputs, grad: inputs and gradients of the outputs, axes (rows, inputs) and (rows, outputs).
        weight, bias: whether the weight and the bias are trained.
    """

    def __init__(self, inputs: Tensor, grad: Tensor, weight: bool, bias: bool) -> None:
        self._inputs, self._grad = inputs.double(), grad.double()
        self._weight, self._bias = weight, bias

    def squares(self) -> Tensor:
        of_grad = norms_of(self._grad)
        if not self._weight:
            return of_grad.square()
        # The two norms are multiplied before squaring, because one may be tiny while the other is
        # huge.
        squares = (norms_of(self._inputs) * of_grad).square()
        return squares.addcmul(of_grad, of_grad) if self._bias else squares

    def weighted(self, factors: Tensor) -> list[Tensor]:
        grad = _kept(self._grad, factors) * factors[:, None]
        found = [grad.T @ _kept(self._inputs, factors)] if self._weight else []
        return [*found, grad.sum(0)] if self._bias else found


class Positions:
    """Row gradients of y = W x at many positions of a row.

    Each row gradient is a sum of outer products over positions. A bias is treated as the weight of
    a further input with the constant value 1. Row gradients are computed in blocks of rows; if they
    are too large to store, they are computed a second time for the sum. If products between pairs
    of positions need fewer operations, row gradients are not computed at all (Li et al. 2022,
    section 4.1).

    Args:
        layer: layer that owns the weight W.
        inputs: function that maps a slice of rows to the layer's inputs, axes (rows, positions,
            inputs).
        grad: gradients of the outputs, axes (rows, outputs, positions).
        width: number of inputs, including the constant input of a bias.
        bias: whether the last input is the constant input of a bias.
    """

    def __init__(
        self,
        layer: nn.Module,
        inputs: Callable[[slice], Tensor],
        grad: Tensor,
        width: int,
        bias: bool,
    ) -> None:
        self._inputs, self._grad, self._bias = inputs, grad, bias
        outputs, positions = grad.shape[1:]
        self._shape, numbers = (outputs, width), outputs * width
        of_rows = numbers * (2 * positions + _OPERATIONS)
        # The factor 6: a multiplication in float64, with its copies to float64, costs as much as
        # about 6 multiplications in float32.
        of_products = 6 * positions * (positions * (width + outputs) + numbers)
        self._by_products = of_rows > of_products
        self._memory: Tensor | None = None
        if not self._by_products and len(grad) * numbers <= _MOST_KEPT:
            self._memory = _memory_of(layer, (len(grad), *self._shape), grad)

    def squares(self) -> Tensor:
        if not self._by_products:
            return torch.cat([norm_bounds(one) for one in self._gradients()]).square()
        inputs, grad = self._inputs(slice(None)).double(), self._grad.double()
        squares = ((inputs @ inputs.mT) * (grad.mT @ grad)).sum((1, 2)).clamp_min(0)
        parts = (inputs.norm(dim=2) * grad.norm(dim=1)).sum(1)
        found: Tensor = squares + (_CANCELLED * parts).square()
        return found

    def weighted(self, factors: Tensor) -> list[Tensor]:
        if self._by_products:
            inputs = _kept(self._inputs(slice(None)).double(), factors)
            grad = scaled(self._grad.mT, factors)
            total = grad.flatten(0, 1).T @ inputs.flatten(0, 1)
        else:
            at, total = 0, factors.new_zeros(math.prod(self._shape))
            for block in self._gradients(again=True):
                by = factors[at : at + len(block)]
                at += len(block)
                total += by @ _kept(block.flatten(1).double(), by)
            total = total.view(self._shape)
        if not self._bias:
            return [total]
        parts = [total[:, :-1], total[:, -1]]
        return [one for one in parts if one.numel()]

    def _gradients(self, *, again: bool = False) -> Iterator[Tensor]:
        """Yield the row gradients in blocks of rows, axes (rows, outputs, inputs).

        The next block may overwrite the memory of this block, so use each block before the next.
        """
        rows = max(1, _BLOCK_NUMBERS // math.prod(self._shape))
        for start in range(0, len(self._grad), rows):
            at = slice(start, start + rows)
            if self._memory is None:
                yield torch.bmm(self._grad[at], self._inputs(at))
                continue
            block = self._memory[at]
            if not again:
                torch.bmm(self._grad[at], self._inputs(at), out=block)
            yield block


#: Memory for each layer's row gradients, reused in every step and freed with the layer, because
#: fresh memory pages would take more time than the arithmetic.
_MEMORY: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def _memory_of(layer: nn.Module, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return memory of a shape, type and device; the next call for this layer overwrites it."""
    kept, count = _MEMORY.get(layer), math.prod(shape)
    fits = kept is not None and (kept.dtype, kept.device) == (like.dtype, like.device)
    if kept is None or not fits or kept.numel() < count:
        kept = _MEMORY[layer] = like.new_empty(count)
    return kept[:count].view(shape)


class Lookups:
    """Row gradients of an embedding table.

    A vector's gradient is the sum over the positions that use this vector.

    Args:
        numbers: indices of the looked-up vectors, axes (rows, positions).
        grad: gradients of the looked-up vectors, axes (rows, positions, width).
        table: shape of the embedding table.
        padding: index whose embedding vector is not trained.
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
    weight, bias = _trained(module, "weight"), _trained(module, "bias")
    if inputs.dim() == 2:
        return Outer(inputs, grad, weight, bias)
    inputs = inputs.flatten(1, -2)
    inputs = inputs if weight else inputs[:, :, :0]
    inputs = F.pad(inputs, (0, 1), value=1.0) if bias else inputs
    return Positions(module, inputs.__getitem__, grad.flatten(1, -2).mT, inputs.shape[2], bias)


def _convolution(module: nn.Module, inputs: Tensor, grad: Tensor) -> LayerGradients:
    """Treat a convolution as a linear layer on the input patch of every output position."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    if inputs.dim() == 3:
        inputs = inputs[:, :, None]
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
    weight, bias = _trained(module, "weight"), _trained(module, "bias")
    padding = (before[1], after[1], before[0], after[0])
    how = (tuple(inputs.shape[1:]), kernel, dilation, stride, padding)
    taken = _patches(*how, weight, bias, inputs.device)
    # The patches index this tensor: each row's input numbers, after the two constants 0 and 1.
    numbers = F.pad(F.pad(inputs.flatten(1), (1, 0), value=1.0), (1, 0))

    def patches(at: slice) -> Tensor:
        return numbers[at].index_select(1, taken.view(-1)).view(-1, *taken.shape)

    return Positions(module, patches, grad.flatten(2), taken.shape[1], bias)


@lru_cache(maxsize=256)
def _patches(
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    dilation: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    weight: bool,
    bias: bool,
    device: torch.device,
) -> Tensor:
    """Return the indices of the numbers that a convolution reads, axes (positions, inputs).

    Index 0 is the padding value 0, and index 1 is the constant input 1 of a bias, the last input of
    every position.
    """
    numbers = torch.arange(2, math.prod(shape) + 2, dtype=torch.float64).view(1, *shape)
    found = F.unfold(F.pad(numbers, padding), kernel, dilation, 0, stride)[0].T.long()
    found = found if weight else found[:, :0]
    return (F.pad(found, (0, 1), value=1) if bias else found).contiguous().to(device)


def _embedding(module: nn.Module, inputs: Tensor, grad: Tensor) -> LayerGradients:
    assert isinstance(module, nn.Embedding)
    shape = tuple(module.weight.shape)
    return Lookups(inputs.flatten(1).long(), grad.flatten(1, -2), shape, module.padding_idx)


def _normalisation(module: nn.Module, inputs: Tensor, grad: Tensor) -> LayerGradients:
    """Return row gradients of y = gamma * n(x) + beta, where n normalises within one row."""
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


#: Rules that give row gradients from a layer's inputs and the gradients of its output, by the
#: layer's class. Each rule covers only the layer's parameters named `weight` and `bias`.
RULES: Mapping[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], LayerGradients]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _normalisation,
    nn.GroupNorm: _normalisation,
}


def gradients_of(call: Call, grad: Tensor) -> LayerGradients:
    """Return a layer's row gradients, computed by the layer's rule from its output's gradients."""
    return RULES[type(call.module)](call.module, call.inputs, grad)
