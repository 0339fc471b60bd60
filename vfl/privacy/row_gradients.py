"""Gradients of single rows, layer by layer, from what went into a layer and what came back.

A split round brings the gradient of each row's loss at a model's output. One backward pass to the
outputs of all layers then holds every row's gradient of every weight in factors (Goodfellow 2015;
Li et al. 2022, "ghost clipping"; Bu et al. 2023, "book-keeping"): norms and weighted sums of rows
follow without a second pass. Each class here is the gradients of one call of one layer; norms and
sums are of the very same numbers, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.privacy.kernel import norms_of, scaled

#: Numbers of a block of rows whose gradients stay in the processor's cache.
_BLOCK_NUMBERS = 1 << 16
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
        self._inputs, self._grad = inputs.double(), grad.double()
        self._weight, self._bias = weight, bias

    def squares(self) -> Tensor:
        of_grad = norms_of(self._grad)
        if not self._weight:
            return of_grad.square()
        # The product of norms, not of squares: one may be tiny where the other is huge.
        squares = (norms_of(self._inputs) * of_grad).square()
        return squares.addcmul(of_grad, of_grad) if self._bias else squares

    def weighted(self, factors: Tensor) -> list[Tensor]:
        inputs, grad, by = self._inputs, self._grad, factors[:, None]
        if bool((factors == 0).any()):  # 0 times infinity is 0 here
            inputs, grad = (one.masked_fill(by == 0, 0.0) for one in (inputs, grad))
        grad = grad * by
        found = [grad.T @ inputs] if self._weight else []
        return [*found, grad.sum(0)] if self._bias else found


class Positions:
    """y = W x + b at many positions of a row: the gradient of W is the sum of outer products.

    Gradients of rows are computed block by block, twice, or never where products of positions take
    fewer operations (Li et al. 2022, section 4.1).

    Args:
        inputs, grad: axes (rows, positions, inputs) and (rows, positions, outputs).
        weight, bias: whether they are trained.
    """

    def __init__(self, inputs: Tensor, grad: Tensor, weight: bool, bias: bool) -> None:
        self._inputs, self._grad = inputs, grad
        self._weight, self._bias = weight, bias
        positions, width, outputs = inputs.shape[1], inputs.shape[2], grad.shape[2]
        self._numbers = width * outputs
        of_rows = self._numbers * (2 * positions + _OPERATIONS)
        # Of float64, in copies of their own.
        self._by_products = of_rows > 6 * positions * (
            positions * (width + outputs) + self._numbers
        )

    def squares(self) -> Tensor:
        squares = self._grad.new_zeros(len(self._grad), dtype=torch.float64)
        if self._weight and self._by_products:
            inputs, grad = self._inputs.double(), self._grad.double()
            squares += ((inputs @ inputs.mT) * (grad @ grad.mT)).sum((1, 2)).clamp_min(0)
            parts = (inputs.norm(dim=2) * grad.norm(dim=2)).sum(1)
            squares += (_CANCELLED * parts).square()
        elif self._weight:
            squares += torch.cat([norms_of(one) for one in self._gradients()]).square()
        return squares + norms_of(self._of_bias()).square() if self._bias else squares

    def weighted(self, factors: Tensor) -> list[Tensor]:
        found = []
        if self._weight and self._by_products:
            inputs = self._inputs.double().masked_fill(factors[:, None, None] == 0, 0.0)
            found.append(scaled(self._grad, factors).flatten(0, 1).T @ inputs.flatten(0, 1))
        elif self._weight:
            shape = self._grad.shape[2], self._inputs.shape[2]
            found.append(_sum_of_blocks(self._gradients(), factors).reshape(shape))
        return [*found, _sum_of_blocks([self._of_bias()], factors)] if self._bias else found

    def _gradients(self) -> Iterator[Tensor]:
        """Of W, by blocks of rows, axes (rows, outputs * inputs)."""
        rows = max(1, _BLOCK_NUMBERS // self._numbers)
        for at in range(0, len(self._grad), rows):
            yield (self._grad[at : at + rows].mT @ self._inputs[at : at + rows]).flatten(1)

    def _of_bias(self) -> Tensor:
        return self._grad.double().sum(1)


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


def _of_positions(module: nn.Module, inputs: Tensor, grad: Tensor) -> LayerGradients:
    """Of a linear map; inputs and gradients have axes (rows, positions, width)."""
    weight, bias = _trained(module, "weight"), _trained(module, "bias")
    if inputs.shape[1] == 1:
        return Outer(inputs[:, 0], grad[:, 0], weight, bias)
    return Positions(inputs, grad, weight, bias)


def _linear(module: nn.Module, inputs: Tensor, grad: Tensor) -> LayerGradients:
    if inputs.dim() == 2:
        inputs, grad = inputs[:, None], grad[:, None]
    return _of_positions(module, inputs.flatten(1, -2), grad.flatten(1, -2))


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
    of_output = grad.shape[2:]
    inputs = F.pad(inputs, (before[1], after[1], before[0], after[0])).contiguous()
    rows, channels, *_ = inputs.shape
    of_row, of_channel, of_height, of_width = inputs.stride()
    # One copy for all rows, where `F.unfold` takes one a row.
    patches = inputs.as_strided(
        (rows, channels, *kernel, *of_output),
        (of_row, of_channel, dilation[0] * of_height, dilation[1] * of_width,
         stride[0] * of_height, stride[1] * of_width),
    ).reshape(rows, channels * kernel[0] * kernel[1], -1)  # fmt: skip
    found = _of_positions(module, patches.mT, grad.flatten(2).mT)
    return _Reshaped(found, module.weight.shape) if _trained(module, "weight") else found


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
