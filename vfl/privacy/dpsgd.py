"""DP-SGD of one half of a split network: clip each row's gradient, add noise to the sum.

Abadi et al. 2016, algorithm 1, at each party for its own half. What a half needs is the gradient of
each row's own loss at its output, which a split round brings anyway. Norms of rows are computed
without the gradients of rows where a layer allows it (Goodfellow 2015; Li et al. 2022, "ghost"),
from what went into each layer and the gradient of what came out; the same gradient, weighted by
row, then gives the layer's sum of clipped gradients. Any other model gets a backward pass a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.errors import PrivacyError
from vfl.core.registry import require
from vfl.core.seeds import Secret, fingerprint

#: What a clip norm bounds: all weights of a half together, or each layer's by themselves.
Group = Literal["half", "layer"]
#: How fast a clip norm follows a quantile (Andrew et al. 2021, section 3.1).
_QUANTILE_RATE = 0.2
#: Noise of the counts that a quantile needs, over that of the gradients, in sensitivities.
_COUNTS_NOISE = 10.0
_OVER_BATCH = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True, slots=True)
class Call:
    """What went through one layer once; `version` tells whether something changed it since."""

    module: nn.Module
    inputs: Tensor
    output: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Branches:
    """Rows of a half that lie at branches of its party.

    Attributes:
        count: of branches.
        clipped: whether the mean gradient of a branch's rows is clipped as one, so that the noise
            hides a branch; else each branch clips rows, and adds noise to its own sum before
            anybody has it.
        at: branch of each row of the batches that are on their way, by step.
    """

    count: int
    clipped: bool
    at: dict[int, Tensor] = field(default_factory=dict)


class RowClipper:
    """Sums of clipped gradients of rows, for the weights of one model.

    Args:
        model: no row may depend on another.
        norm: bound of a row's gradient, over all weights together (2-norm).
        by: "half" clips them together; "layer" clips each of n layers to norm / sqrt(n), which
            bounds them together by the same norm.

    Attributes:
        norms: of each group of weights, float64, axes (groups,).

    Raises:
        PrivacyError: a layer that normalises over the batch, with what to use instead.
        BadOptionError: a norm that bounds nothing.
    """

    def __init__(self, model: nn.Module, norm: float, by: Group = "half") -> None:
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
        self._layers = [one for one in model.modules() if _own_weights(one)]
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        owner = {id(w): at for at, one in enumerate(self._layers) for w in _own_weights(one)}
        owned = sum(len(_own_weights(one)) for one in self._layers)
        self._shared = len(self._weights) < owned
        groups = max(1, len(self._layers)) if by == "layer" else 1
        #: Of each weight, in the order of the model's.
        self.group_of = [owner[id(weight)] if by == "layer" else 0 for weight in self._weights]
        self.norms = torch.full((groups,), norm / math.sqrt(groups), dtype=torch.float64)
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
        self,
        output: Tensor,
        grad: Tensor,
        weights: Sequence[Tensor],
        calls: Sequence[Call],
        units: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """The sum over rows of each row's gradient, scaled down to the norms; one of each weight.

        Args:
            output: of the model, axes (rows, width); its graph stays usable.
            grad: of each row's own loss, not of a mean; axes (rows, width).
            weights: of the model, or copies that made this output.
            calls: what `recording` gave for this output.
            units: number of the unit each row is of, axes (rows,); the mean gradient of a unit's
                rows is then clipped in place of each row's.

        Returns:
            The sums, and the norms before clipping, axes (groups, rows or units).
        """
        if units is not None:
            shares = [units == one for one in sorted(set(units.tolist()))]
            parts = [grad * (one / one.sum()).to(grad)[:, None] for one in shares]
            return self._one_by_one(output, parts, weights)
        found = self._of_outputs(output, grad, calls)
        if found is None:
            return self._one_by_one(output, _alone(grad), weights)
        squares = grad.new_zeros(len(self._layers), len(output))
        at = {id(layer): index for index, layer in enumerate(self._layers)}
        for call, of_output in zip(calls, found, strict=True):
            if of_output is not None:
                rule = _RULES[type(call.module)]
                squares[at[id(call.module)]] = rule(call.module, call.inputs, of_output)
        norms = (squares if len(self.norms) > 1 else squares.sum(0, keepdim=True)).sqrt()
        factors = self._factors(norms)
        sums = [torch.zeros_like(one) for one in weights]
        by_id = {id(weight): index for index, weight in enumerate(self._weights)}
        for call, of_output in zip(calls, found, strict=True):
            if of_output is None:
                continue
            places = [by_id[id(weight)] for weight in _own_weights(call.module)]
            factor = factors[self.group_of[places[0]]]
            weighted = _scaled(of_output, factor.reshape(-1, *(1,) * (of_output.dim() - 1)))
            mine = [weights[place] for place in places]
            for place, one in zip(places, _gradients(call.output, weighted, mine), strict=True):
                sums[place] = one
        return sums, norms

    def _factors(self, norms: Tensor) -> Tensor:
        """What scales gradients down to the norms; 0 where a norm is no number."""
        smallest = torch.finfo(norms.dtype).tiny
        factors = (self.norms[:, None].to(norms) / norms.clamp_min(smallest)).clamp(max=1.0)
        return factors.masked_fill(~norms.isfinite(), 0.0)

    def _note(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if self._calls is None:
            return
        one = inputs[0] if len(inputs) == 1 else None
        if isinstance(one, Tensor) and isinstance(output, Tensor):
            self._calls.append(Call(module, one.detach(), output, output._version))

    def _of_outputs(
        self, output: Tensor, grad: Tensor, calls: Sequence[Call]
    ) -> Sequence[Tensor | None] | None:
        """The gradient of each layer's output; None where the layers do not allow norms of it."""
        if self._shared or [call.module for call in calls] != self._order(calls):
            return None
        for call in calls:
            known = type(call.module) in _RULES and len(call.inputs) == len(output)
            if not known or call.output._version != call.version or not _plain(call.module):
                return None
        outputs = [call.output for call in calls]
        return torch.autograd.grad(output, outputs, grad, retain_graph=True, allow_unused=True)

    def _order(self, calls: Sequence[Call]) -> list[nn.Module]:
        """The layers in the order of the calls, where each was called once."""
        position = {id(layer): at for at, layer in enumerate(self._layers)}
        called = [position[id(call.module)] for call in calls]
        once = sorted(called) == list(range(len(self._layers)))
        return [self._layers[at] for at in called] if once else []

    def _one_by_one(
        self, output: Tensor, grads: Iterable[Tensor], weights: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """By one backward pass a row or unit."""
        totals = [torch.zeros_like(weight) for weight in weights]
        norms = []
        for grad in grads:
            found = _gradients(output, grad, weights)
            squares = grad.new_zeros(len(self.norms), 1)
            for group, one in zip(self.group_of, found, strict=True):
                squares[group] += one.square().sum()
            norms.append(squares.sqrt())
            factors = self._factors(norms[-1])
            for total, group, one in zip(totals, self.group_of, found, strict=True):
                total.add_(_scaled(one, factors[group]))
        return totals, torch.cat(norms, 1)


class PrivateHalf:
    """DP-SGD of one party's half: what its optimiser is given in place of a gradient.

    Args:
        model: the half.
        norm: bound of a row's gradient; where it follows a quantile, the one to start from.
        noise: deviation of the noise over the sensitivity, of all that is drawn here together.
        batch_size: what the sum is divided by: the expected rows of a batch, not those it has; or
            the expected branches, where those are clipped.
        secret: the party's own; the noise follows from it.
        party: keeps two halves of one secret apart.
        by: see `RowClipper`.
        quantile: the share of rows whose gradients should be left as they are. Each group's norm
            follows it by a noisy count of each step (Andrew et al. 2021); None keeps the norms.
        branches: where its rows lie at branches, or the rows of another half of the same network;
            the other one's branches are clipped here too.
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
        by: Group = "half",
        quantile: float | None = None,
        branches: Branches | None = None,
    ) -> None:
        require("noise", noise, "above 0", 0 < noise < math.inf)
        self.branches = branches
        self.clipper = RowClipper(model, norm, by)
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        # n groups of noise s sqrt(n), each in units of its own norm, are one of noise s.
        self._noise = noise * math.sqrt(len(self.clipper.norms))
        self._quantile, self.batch_size = quantile, batch_size
        #: Told the step, and what was left at the weights; an audit looks on.
        self.watch: Callable[[int, Sequence[Tensor]], None] = lambda step, noisy: None
        if quantile is not None:
            require("quantile", quantile, "between 0 and 1", 0 < quantile < 1)
            # With counts of 10 times the noise, 1/s^2 of both is what it was of the sums alone.
            self._counts_noise = _COUNTS_NOISE * self._noise
            self._noise /= math.sqrt(1 - _COUNTS_NOISE**-2)
        self._secret, self._party = secret, party

    def recording(self) -> AbstractContextManager[list[Call]]:
        """See `RowClipper.recording`."""
        return self.clipper.recording()

    def state(self) -> list[float]:
        """The norms, where they follow a quantile; for a checkpoint."""
        return [] if self._quantile is None else self.clipper.norms.tolist()

    def restore(self, norms: Sequence[float]) -> None:
        """Restore what `state` gave."""
        if norms:
            self.clipper.norms = torch.tensor(norms, dtype=torch.float64)

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
        clipper, branches, weights = self.clipper, self.branches, weights or self._weights
        parts: dict[str, Tensor] = {self._party: grad}
        units = None if branches is None else branches.at.pop(step)
        if units is not None and branches is not None and not branches.clipped:
            parts = {
                f"{self._party}, branch {one}": grad * units.eq(one).to(grad)[:, None]
                for one in range(branches.count)
            }
            units = None
        noisy, norms = torch.zeros(()), grad.new_zeros(len(clipper.norms), 0)
        sizes = torch.tensor([one.numel() for one in weights])
        deviations = (self._noise * clipper.norms)[clipper.group_of].repeat_interleave(sizes)
        for name, part in parts.items():
            sums = [torch.zeros_like(weight) for weight in weights]
            if len(output):
                sums, norms = clipper.sums(output, part, weights, calls, units)
            flat = torch.cat([one.detach().reshape(-1) for one in sums])
            draws = self._draws("dp_sgd", step, flat, name)
            noisy = noisy + flat.double().cpu() + deviations * draws
        noisy = (noisy / self.batch_size).to(flat)
        split = torch.split(noisy, sizes.tolist())
        left = [one.reshape(of.shape) for one, of in zip(split, self._weights, strict=True)]
        for weight, one in zip(self._weights, left, strict=True):
            weight.grad = one
        self.watch(step, left)
        if self._quantile is not None:
            self._follow(norms.detach().double().cpu(), step)

    def _follow(self, norms: Tensor, step: int) -> None:
        """Move each norm towards the quantile (Andrew et al. 2021, section 3.1).

        A row counts as plus or minus a half, so that counts of n groups move by sqrt(n) / 2.
        """
        assert self._quantile is not None, "only where norms follow one"
        counts = (norms <= self.clipper.norms[:, None]).sum(1) - norms.shape[1] / 2
        noisy = counts + self._counts_noise / 2 * self._draws("clip_norm", step, counts)
        share = noisy / self.batch_size + 0.5
        self.clipper.norms *= torch.exp(_QUANTILE_RATE * (self._quantile - share))

    def _draws(self, purpose: str, step: int, noised: Tensor, name: str = "") -> Tensor:
        """Standard normal draws for a step.

        Bound to what they are added to: were a step repeated with other rows, equal noise would
        show the change.
        """
        law = (name or self._party, step, repr(self.clipper.norms.tolist()), repr(self._noise))
        bound = (*law, fingerprint(noised))
        return torch.from_numpy(self._secret.normal((len(noised),), purpose, *bound))


def _own_weights(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters(recurse=False) if weight.requires_grad]


def _gradients(output: Tensor, grad: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(output, weights, grad, retain_graph=True, allow_unused=True)
    pairs = zip(found, weights, strict=True)
    return [torch.zeros_like(weight) if one is None else one for one, weight in pairs]


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """A gradient times a factor; 0 times infinity is 0."""
    return (grad * factor).masked_fill(factor == 0, 0.0)


def _alone(grad: Tensor) -> Iterator[Tensor]:
    """Each row's gradient, the others' being 0."""
    for row in range(len(grad)):
        alone = torch.zeros_like(grad)
        alone[row] = grad[row]
        yield alone


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
