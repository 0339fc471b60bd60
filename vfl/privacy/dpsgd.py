"""DP-SGD of one half of a split network: clip each row's gradient, add noise to the sum.

Abadi et al. 2016, algorithm 1, at each party for its own half. What a half needs is the gradient of
each row's own loss at its output, which a split round brings anyway. Norms of rows are computed
without the gradients of rows where a layer allows it (Goodfellow 2015; Li et al. 2022, "ghost"),
from what went into each layer and the gradient of what came out; a second backward pass, weighted
by row, then gives the sum of the clipped gradients. Any other model gets one backward pass a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.errors import PrivacyError
from vfl.core.registry import require
from vfl.core.seeds import Secret, fingerprint

_OVER_BATCH = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True, slots=True)
class Call:
    """What went through one layer once; `version` tells whether something changed it since."""

    module: nn.Module
    inputs: Tensor
    output: Tensor
    version: int


class RowClipper:
    """Sums of clipped gradients of rows, for the weights of one model.

    Args:
        model: no row may depend on another.
        norm: bound of a row's gradient, over all weights together (2-norm).

    Raises:
        PrivacyError: a layer that normalises over the batch, with what to use instead.
        BadOptionError: a norm that bounds nothing.
    """

    def __init__(self, model: nn.Module, norm: float) -> None:
        require("clip", norm, "above 0", 0 < norm < math.inf)
        for part in model.modules():
            if isinstance(part, _OVER_BATCH):
                raise PrivacyError(
                    f"{type(part).__name__} makes a row depend on its batch, so that clipping rows"
                    " bounds nothing",
                    want="a model that treats each row on its own",
                    fix="mlp:batch_norm=no, cnn or vit; in a model of your own GroupNorm or"
                    " LayerNorm in its place",
                )
        self.norm = norm
        self._layers = [one for one in model.modules() if _own_weights(one)]
        owned = [weight for one in self._layers for weight in _own_weights(one)]
        self._shared = len({id(weight) for weight in owned}) < len(owned)
        self._calls: list[Call] | None = None
        for layer in self._layers:
            layer.register_forward_hook(self._note)

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """What goes through the layers meanwhile."""
        calls: list[Call] = []
        self._calls = calls
        try:
            yield calls
        finally:
            self._calls = None

    def sums(
        self, output: Tensor, grad: Tensor, weights: Sequence[Tensor], calls: Sequence[Call]
    ) -> list[Tensor]:
        """The sum over rows of each row's gradient, scaled down to the norm; one of each weight.

        Args:
            output: of the model, axes (rows, width); its graph stays usable.
            grad: of each row's own loss, not of a mean; axes (rows, width).
            weights: of the model, or copies that made this output.
            calls: what `recording` gave for this output.
        """
        norms = self._norms(output, grad, calls)
        if norms is None:
            return self._row_by_row(output, grad, weights)
        smallest = torch.finfo(norms.dtype).tiny
        factors = (self.norm / norms.clamp_min(smallest)).clamp(max=1.0)
        return _gradients(output, grad * factors[:, None], weights)

    def _note(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if self._calls is None:
            return
        one = inputs[0] if len(inputs) == 1 else None
        if isinstance(one, Tensor) and isinstance(output, Tensor):
            self._calls.append(Call(module, one.detach(), output, output._version))

    def _norms(self, output: Tensor, grad: Tensor, calls: Sequence[Call]) -> Tensor | None:
        """Each row's norm, axes (rows,); None where the layers do not allow it."""
        if self._shared or [call.module for call in calls] != self._order(calls):
            return None
        for call in calls:
            known = type(call.module) in _RULES and len(call.inputs) == len(output)
            if not known or call.output._version != call.version or not _plain(call.module):
                return None
        outputs = [call.output for call in calls]
        found = torch.autograd.grad(output, outputs, grad, retain_graph=True, allow_unused=True)
        squares = grad.new_zeros(len(output))
        for call, of_output in zip(calls, found, strict=True):
            if of_output is not None:
                squares += _RULES[type(call.module)](call.module, call.inputs, of_output)
        return squares.sqrt()

    def _order(self, calls: Sequence[Call]) -> list[nn.Module]:
        """The layers in the order of the calls, where each was called once."""
        position = {id(layer): at for at, layer in enumerate(self._layers)}
        called = [position[id(call.module)] for call in calls]
        once = sorted(called) == list(range(len(self._layers)))
        return [self._layers[at] for at in called] if once else []

    def _row_by_row(self, output: Tensor, grad: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        totals = [torch.zeros_like(weight) for weight in weights]
        for row in range(len(output)):
            alone = torch.zeros_like(grad)
            alone[row] = grad[row]
            found = _gradients(output, alone, weights)
            norm = math.sqrt(sum(float(one.square().sum()) for one in found))
            factor = min(1.0, self.norm / norm) if norm else 1.0
            for total, one in zip(totals, found, strict=True):
                total.add_(one, alpha=factor)
        return totals


class PrivateHalf:
    """DP-SGD of one party's half: what its optimiser is given in place of a gradient.

    Args:
        model: the half.
        norm: bound of a row's gradient.
        noise: deviation of the noise over `norm`.
        batch_size: what the sum is divided by: the expected rows of a batch, not those it has.
        secret: the party's own; the noise follows from it.
        party: keeps two halves of one secret apart.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        norm: float,
        noise: float,
        batch_size: float,
        secret: Secret,
        party: str,
    ) -> None:
        require("noise", noise, "above 0", 0 < noise < math.inf)
        self.clipper = RowClipper(model, norm)
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._noise, self._batch_size = noise, batch_size
        self._secret, self._party = secret, party

    def recording(self) -> AbstractContextManager[list[Call]]:
        """See `RowClipper.recording`."""
        return self.clipper.recording()

    def give_gradients(
        self,
        output: Tensor,
        grad: Tensor,
        calls: Sequence[Call],
        step: int,
        weights: Sequence[Tensor] | None = None,
    ) -> None:
        """Leave at the weights what the optimiser takes: noisy sums over the batch size.

        Args:
            output: of the half, axes (rows, width); rows may be 0, and the noise is there anyway.
            grad: of each row's own loss; axes (rows, width).
            calls: what `recording` gave for this output.
            step: number of the exchange.
            weights: copies that made this output; None where the half's own did.
        """
        if not len(output):
            sums = [torch.zeros_like(weight) for weight in self._weights]
        else:
            sums = self.clipper.sums(output, grad, weights or self._weights, calls)
        flat = torch.cat([one.detach().reshape(-1) for one in sums])
        # Bound to the sum: were a step repeated with other rows, equal noise would show the change.
        law = (self._party, step, repr(self.clipper.norm), repr(self._noise), fingerprint(flat))
        draws = torch.from_numpy(self._secret.normal((len(flat),), "dp_sgd", *law))
        noisy = flat.double().cpu() + self._noise * self.clipper.norm * draws
        noisy = (noisy / self._batch_size).to(flat)
        parts = torch.split(noisy, [one.numel() for one in sums])
        for weight, part in zip(self._weights, parts, strict=True):
            weight.grad = part.reshape(weight.shape)


def _own_weights(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters(recurse=False) if weight.requires_grad]


def _gradients(output: Tensor, grad: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(output, weights, grad, retain_graph=True, allow_unused=True)
    pairs = zip(found, weights, strict=True)
    return [torch.zeros_like(weight) if one is None else one for one, weight in pairs]


def _plain(module: nn.Module) -> bool:
    """Whether a layer of a known class works as its rule says."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros"
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    return True


def _linear(module: nn.Module, inputs: Tensor, grad: Tensor) -> Tensor:
    """Of y = W x + b at one or several positions of a row; the gradient of W is sum_t g_t x_t'."""
    if inputs.dim() == 2:
        inputs, grad = inputs[:, None], grad[:, None]
    return _of_positions(module, inputs.flatten(1, -2), grad.flatten(1, -2))


def _of_positions(module: nn.Module, inputs: Tensor, grad: Tensor) -> Tensor:
    """Axes (rows, positions, inputs) and (rows, positions, outputs).

    By products of positions where those are fewer than the weights, else by the gradients of rows.
    """
    squares = grad.new_zeros(len(grad))
    positions = inputs.shape[1]
    if module.weight.requires_grad:
        if positions == 1:
            squares = inputs.square().sum((1, 2)) * grad.square().sum((1, 2))
        elif positions**2 <= inputs.shape[2] * grad.shape[2]:
            squares = ((inputs @ inputs.mT) * (grad @ grad.mT)).sum((1, 2))
        else:
            squares = (grad.mT @ inputs).square().sum((1, 2))
    if module.bias is not None and module.bias.requires_grad:
        squares = squares + grad.sum(1).square().sum(1)
    return squares


def _convolution(module: nn.Module, inputs: Tensor, grad: Tensor) -> Tensor:
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
        inputs = inputs[:, :, None]
    inputs = F.pad(inputs, (before[1], after[1], before[0], after[0]))
    patches = F.unfold(inputs, kernel, dilation, 0, stride)
    return _of_positions(module, patches.mT, grad.flatten(2).mT)


def _embedding(module: nn.Module, inputs: Tensor, grad: Tensor) -> Tensor:
    """Positions of the same number share one vector's gradient; padding has none."""
    assert isinstance(module, nn.Embedding)
    numbers, grad = inputs.flatten(1), grad.flatten(1, -2)
    same = (numbers[:, :, None] == numbers[:, None, :]).to(grad)
    if module.padding_idx is not None:
        grad = grad * (numbers != module.padding_idx)[:, :, None]
    return ((grad @ grad.mT) * same).sum((1, 2))


def _normalisation(module: nn.Module, inputs: Tensor, grad: Tensor) -> Tensor:
    """Of y = gamma * n(x) + beta, where n looks at one row alone."""
    if isinstance(module, nn.LayerNorm):
        exact = F.layer_norm(inputs, module.normalized_shape, eps=module.eps)
        kept = -len(module.normalized_shape)
        scaled, shifted = (one.reshape(len(one), -1, *one.shape[kept:]).sum(1) for one in
                           (grad * exact, grad))  # fmt: skip
    else:
        assert isinstance(module, nn.GroupNorm)
        exact = F.group_norm(inputs, module.num_groups, eps=module.eps)
        scaled, shifted = (one.flatten(2).sum(2) for one in (grad * exact, grad))
    squares = grad.new_zeros(len(grad))
    for weight, gradient in ((module.weight, scaled), (module.bias, shifted)):
        if weight is not None and weight.requires_grad:
            squares = squares + gradient.flatten(1).square().sum(1)
    return squares


_RULES: Mapping[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _normalisation,
    nn.GroupNorm: _normalisation,
}


def row_norms(
    output: Tensor, grad: Tensor, calls: Sequence[Call], weights: Sequence[Tensor]
) -> Tensor:
    """The 2-norm of each row's gradient over some weights, axes (rows,).

    Without gradients of rows where every layer has a rule, else by one backward pass a row.

    Args:
        output: of a model, axes (rows, width); its graph stays usable.
        grad: of each row's own loss; axes (rows, width).
        calls: what `RowClipper.recording` gave for this output.
        weights: all of the model that are trained.
    """
    ruled = all(
        type(call.module) in _RULES
        and _plain(call.module)
        and len(call.inputs) == len(output)
        and call.output._version == call.version
        for call in calls
    )
    # Layers that were called twice, share weights or were not seen leave another count or set.
    seen = [id(one) for call in calls for one in _own_weights(call.module)]
    if not ruled or sorted(seen) != sorted(id(one) for one in weights):
        alone = torch.eye(len(output), dtype=grad.dtype, device=grad.device)
        rows = (_gradients(output, grad * one[:, None], weights) for one in alone)
        return torch.stack([torch.cat([g.reshape(-1) for g in row]).norm() for row in rows])
    outputs = [call.output for call in calls]
    found = torch.autograd.grad(output, outputs, grad, retain_graph=True, allow_unused=True)
    squares = grad.new_zeros(len(output))
    for call, of_output in zip(calls, found, strict=True):
        if of_output is not None:
            squares += _RULES[type(call.module)](call.module, call.inputs, of_output)
    return squares.sqrt()
