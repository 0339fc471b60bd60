"""DP-SGD for one party's model in a split network: clip row gradients; add noise to their sum.

Source: Abadi et al. 2016, algorithm 1. Each party applies the algorithm to its own model, the
bottom or the top model. At the output of this model, DP-SGD needs the gradient of each row's own
loss; every training step of split learning sends these gradients anyway. From these gradients at
the output, the module computes each row's weight gradients layer by layer (see
`vfl.privacy.row_gradients`). If a layer has no rule in that module, the model needs one backward
pass per row. `vfl.privacy.kernel` computes norms, sums and noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from vfl.core.errors import NonFiniteError, PrivacyError
from vfl.core.registry import require
from vfl.core.seeds import Secret
from vfl.privacy import kernel
from vfl.privacy.row_gradients import Call, LayerGradients, Recorder, gradients_of

#: Weights that one clip norm covers: "half", all weights of the model together; "layer", the
#: weights of each layer separately.
Group = Literal["half", "layer"]
#: Noise multiplier of the row counts that estimate a quantile, divided by the noise multiplier of
#: the gradients.
_COUNTS_NOISE = 10.0
_OVER_BATCH = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


#: Result of one forward pass: the output of a model, the gradient of each row's own loss with
#: respect to this output, and the layer calls that `recording` recorded.
Pass = tuple[Tensor, Tensor, Sequence[Call]]


@dataclass(frozen=True, slots=True)
class Branches:
    """Rows of a party's model, grouped by the branch (such as a bank office) that owns each row.

    Attributes:
        count: number of branches.
        clipped: whether the mean gradient of a branch's rows is clipped as one unit (see
            `dp.clip_by`), so that the noise hides a whole branch. If false, each branch clips its
            rows' gradients and adds noise to its own sum before any other branch receives this sum.
        at: branch of each row in every batch whose gradients have not arrived yet; the key is the
            batch's step.
    """

    count: int
    clipped: bool
    at: dict[int, Tensor] = field(default_factory=dict)


class RowClipper:
    """Clips the gradient of every row of a batch, with respect to the weights of one model.

    Args:
        model: the model; each row of its output must depend on one row only, see
            `vfl.privacy.premise.prove`.
        norm: bound of a row's gradient (2-norm) over all weights together.
        by: "half" clips the gradient of all layers together; "layer" clips the gradient of each of
            n layers to norm / sqrt(n), which gives the same bound for all layers together.

    Attributes:
        model: the same.
        trusts_rules: whether the rules for layers give correct row gradients; None until `prove`
            has tested them.
        norms: clip norm of each group of weights (all weights, or one layer's weights), float64,
            axes (groups,).
        sizes: number of weights of each group, axes (groups,).

    Raises:
        PrivacyError: a layer normalises over the batch; the error suggests a replacement.
        BadOptionError: the clip norm is too small or too large for float32 numbers.
    """

    def __init__(self, model: nn.Module, norm: float, by: Group = "half") -> None:
        kernel.require_norm("clip", norm)
        for part in model.modules():
            if isinstance(part, _OVER_BATCH):
                raise PrivacyError(
                    f"{type(part).__name__} makes a row depend on its batch, so that clipping rows"
                    " bounds nothing",
                    want="a model in which each row's output depends on this row alone",
                    fix="mlp:batch_norm=no, cnn or vit; in a model of your own GroupNorm or"
                    " LayerNorm in its place",
                )
        self.model = model
        self.trusts_rules: bool | None = None
        self._layers = [one for one in model.modules() if _own_weights(one)]
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        owned = [_own_weights(layer) for layer in self._layers]
        self._shared = len(self._weights) < sum(map(len, owned))
        owner = {id(one): at for at, own in reversed([*enumerate(owned)]) for one in own}
        groups = max(1, len(self._layers)) if by == "layer" else 1
        self._group_of_layer = [at if by == "layer" else 0 for at in range(len(owned))]
        self._size_of_layer = [sum(one.numel() for one in own) for own in owned]
        #: Number of the group to which each weight belongs, in the order of the model's parameters.
        self.group_of = [owner[id(weight)] if by == "layer" else 0 for weight in self._weights]
        self.norms = torch.full((groups,), norm / math.sqrt(groups), dtype=torch.float64)
        self.sizes = [0] * groups
        for group, weight in zip(self.group_of, self._weights, strict=True):
            self.sizes[group] += weight.numel()
        self._recorder = Recorder(self._layers)

    def recording(self) -> AbstractContextManager[list[Call]]:
        """Record the calls of the model's layers inside this context."""
        return self._recorder.recording()

    def row_norms(
        self, output: Tensor, grad: Tensor, weights: Sequence[Tensor], calls: Sequence[Call]
    ) -> Tensor:
        """Return each row's gradient norm (2-norm) in each group; float64, axes (groups, rows).

        Args:
            output: output of the model, axes (rows, width); its graph is not freed.
            grad: gradient of each row's own loss, not of the mean loss; axes (rows, width).
            weights: weights of the model, or copies from which this output was computed.
            calls: layer calls that `recording` recorded for this output.
        """
        layers = self._of_layers(output, grad, calls)
        if layers is not None:
            return self._norms(layers)
        rows = (self._norms_of(gradients(output, one, weights)) for one in _alone(grad))
        return torch.stack(list(rows), 1)

    def sums(
        self,
        output: Tensor,
        grad: Tensor,
        weights: Sequence[Tensor],
        calls: Sequence[Call],
        bounds: Tensor | None = None,
        units: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the rows' clipped gradients, and the gradients' norms before clipping.

        Args:
            output: see `row_norms`.
            grad: see `row_norms`.
            weights: see `row_norms`.
            calls: see `row_norms`.
            bounds: bound of the gradient norm in each group, axes (groups,); by default the
                clipper's norms.
            units: number of the unit (such as a branch) of each row, axes (rows,). With this
                argument, the mean gradient of a unit's rows is clipped instead of each row's
                gradient.

        Returns:
            The sum of clipped gradients, concatenated over all weights, axes (numbers,); and the
            norms before clipping, axes (groups, rows or units). The sum and the norms are float64.

        Raises:
            NonFiniteError: a value inside the model is not finite, and the model has a layer
                without a rule, so clipping cannot bound the row.
        """
        if [one.shape for one in weights] != [one.shape for one in self._weights]:
            raise ValueError("the weights have other shapes than those of the model")
        bounds = (self.norms if bounds is None else bounds).to(grad.device)
        if units is not None:
            shares = [units == one for one in sorted(set(units.tolist()))]
            parts = [grad * (one / one.sum()).to(grad)[:, None] for one in shares]
            return self._one_by_one(output, parts, weights, bounds)
        layers = self._of_layers(output, grad, calls)
        if layers is None:
            return self._one_by_one(output, _alone(grad), weights, bounds)
        return self._clipped(layers, bounds)

    def sums_of_passes(
        self, passes: Sequence[Pass], weights: Sequence[Tensor], bounds: Tensor
    ) -> Tensor:
        """Return the sum of clipped gradients of rows that passed through the model one at a time.

        The float32 rounding of a row's gradient then does not depend on the other rows of the
        batch.

        Args:
            passes: output, gradient and layer calls of each row's own forward pass.
            weights: see `row_norms`.
            bounds: bound of the gradient norm in each group.
        """
        whole = torch.zeros(sum(self.sizes), dtype=torch.float64)
        one_position = all(
            type(call.module) is nn.Linear and call.inputs.dim() == 2
            for *_, calls in passes for call in calls
        )  # fmt: skip
        followed = [self._passed_back(*one) for one in passes] if one_position else [None]
        if not followed or None in followed:
            return sum((self.sums(*one[:2], weights, one[2], bounds)[0] for one in passes), whole)
        calls = zip(*(each for each in followed if each is not None), strict=True)
        layers = {}
        for of_layer in calls:
            inputs, grads = ([one.inputs for one, _ in of_layer], [grad for _, grad in of_layer])
            call = replace(of_layer[0][0], inputs=torch.cat(inputs))
            layers[call.module] = gradients_of(call, torch.cat(grads))
        return self._clipped([layers.get(layer) for layer in self._layers], bounds)[0]

    def _clipped(
        self, layers: Sequence[LayerGradients | None], bounds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the result of `sums` from the row gradients of each layer."""
        norms = self._norms(layers)
        factors = kernel.clip_factors(norms, bounds[:, None])
        parts = []
        for found, group, size in zip(
            layers, self._group_of_layer, self._size_of_layer, strict=True
        ):
            parts += [factors.new_zeros(size)] if found is None else found.weighted(factors[group])
        return torch.cat([one.reshape(-1) for one in parts]), norms

    def follows_rules(self, calls: Sequence[Call], rows: int) -> bool:
        """Return whether every layer has a rule for row gradients at this batch size."""
        ruled = bool(self.trusts_rules and not self._shared and calls)
        return ruled and self._recorder.ruled(calls, rows)

    def _of_layers(
        self, output: Tensor, grad: Tensor, calls: Sequence[Call]
    ) -> list[LayerGradients | None] | None:
        """Return the row gradients of each layer; None for a layer that does not affect the output.

        If some layer has no rule for row gradients, the function returns None instead of a list.
        """
        found = self._passed_back(output, grad, calls)
        if found is None:
            return None
        by_layer = {call.module: gradients_of(call, of_output) for call, of_output in found}
        return [by_layer.get(layer) for layer in self._layers]

    def _passed_back(
        self, output: Tensor, grad: Tensor, calls: Sequence[Call]
    ) -> list[tuple[Call, Tensor]] | None:
        """Return the layer calls that affect the output, each with the gradient of its own output.

        If the rules for row gradients cannot be used, the function returns None instead of a list.
        """
        if not self.follows_rules(calls, len(output)):
            return None
        outputs = [call.output for call in calls]
        found = torch.autograd.grad(output, outputs, grad, retain_graph=True, allow_unused=True)
        return [(call, one) for call, one in zip(calls, found, strict=True) if one is not None]

    def _norms(self, layers: Sequence[LayerGradients | None]) -> Tensor:
        squares: list[Tensor | float] = [0.0] * len(self.norms)
        for found, group in zip(layers, self._group_of_layer, strict=True):
            if found is not None:
                squares[group] = squares[group] + found.squares()
        one = next(each for each in squares if isinstance(each, Tensor))
        return torch.stack([torch.zeros_like(one) + each for each in squares]).sqrt()

    def _norms_of(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of one row's gradient in each group of weights, axes (groups,)."""
        squares = gradients[0].new_zeros(len(self.norms), dtype=torch.float64)
        for group, one in zip(self.group_of, gradients, strict=True):
            squares[group] += one.double().square().sum()
        return squares.sqrt()

    def _one_by_one(
        self, output: Tensor, grads: Iterable[Tensor], weights: Sequence[Tensor], bounds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the result of `sums` by one backward pass for each row or unit.

        Raises:
            NonFiniteError: a value inside the model is not finite for one row, and this value makes
                the gradients of all rows NaN. Leaving out the whole batch instead of raising would
                reveal that this row is in the batch.
        """
        totals = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
        norms: list[Tensor] = []
        for grad in grads:
            found = gradients(output, grad, weights)
            norms.append(self._norms_of(found))
            if not norms[-1].isfinite().all() and not _finite(
                gradients(output, torch.zeros_like(grad), weights)
            ):
                raise NonFiniteError(
                    "a value inside the model is not finite, so clipping cannot bound its row",
                    want="finite activations of every row",
                    fix="scale the inputs, or use layers for which clipping has a rule",
                )
            factors = kernel.clip_factors(norms[-1], bounds)
            for total, group, one in zip(totals, self.group_of, found, strict=True):
                total.add_(kernel.scaled(one[None], factors[group : group + 1])[0])
        return torch.cat([one.reshape(-1) for one in totals]), torch.stack(norms, 1)


class PrivateHalf:
    """DP-SGD for one party's model: the optimiser receives noisy sums of clipped gradients.

    Args:
        model: the party's model.
        norm: bound of a row's gradient norm; if the bound follows a quantile, this is the first
            value of the bound.
        noise: standard deviation of the noise divided by the sensitivity; this ratio holds for all
            sums together that this object releases in one step.
        batch_size: number by which the sum of gradients is divided: the expected number of rows in
            a batch, not the actual number; or the expected number of branches, if branches are
            clipped.
        secret: the party's own secret, from which the noise is derived.
        party: name in the noise's derivation, so that two models with the same secret get different
            noise.
        by: see `RowClipper`.
        quantile: fraction of the rows whose gradient norms should stay below the clip norm. Each
            group's clip norm follows this quantile by a noisy count of rows in each step (Andrew et
            al. 2021); None keeps the clip norms constant.
        branches: branches that own the rows; they may be the branches of this party or of another
            party. Either each branch is clipped as one unit, or each branch's sum of clipped row
            gradients gets its own noise; see `Branches.clipped`.
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
        kernel.require_noise("noise", noise)
        self.branches = branches
        self.clipper = RowClipper(model, norm, by)
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        # Noise with multiplier s sqrt(n) on each of n groups, measured in units of the group's own
        # clip norm, is equivalent to one group with noise multiplier s.
        self._noise = noise * math.sqrt(len(self.clipper.norms))
        self._quantile, self.batch_size = quantile, batch_size
        #: An audit may replace this function, which receives the step and the noisy gradients of
        #: the weights.
        self.watch: Callable[[int, Sequence[Tensor]], None] = lambda step, noisy: None
        if quantile is not None:
            require("quantile", quantile, "between 0 and 1", 0 < quantile < 1)
            # The row counts get 10 times the noise multiplier of the gradient sums. The noise of
            # the gradient sums is reduced below, so that the sum of 1/s^2 over counts and sums
            # equals 1/s^2 of the sums alone with noise multiplier s.
            self._counts_noise = _COUNTS_NOISE * self._noise
            self._noise /= math.sqrt(1 - _COUNTS_NOISE**-2)
        self._secret, self._party = secret, party

    def recording(self) -> AbstractContextManager[list[Call]]:
        """See `RowClipper.recording`."""
        return self.clipper.recording()

    def state(self) -> list[float]:
        """Return the clip norms for a checkpoint; an empty list if they are constant."""
        return [] if self._quantile is None else self.clipper.norms.tolist()

    def restore(self, norms: Sequence[float]) -> None:
        """Restore the clip norms from the result of `state`."""
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
        """Set each weight's `grad` to the noisy sum of clipped gradients divided by the batch size.

        Args:
            output: output of the model, axes (rows, width); noise is added even for 0 rows.
            grad: gradient of each row's own loss; axes (rows, width).
            calls: layer calls that `recording` recorded for this output.
            step: number of the training step.
            weights: copies of the weights from which this output was computed; None if they are the
                model's own weights.
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
        laws = [
            kernel.NoisySum(norm, self._noise * norm, size)
            for norm, size in zip(clipper.norms.tolist(), clipper.sizes, strict=True)
        ]
        bounds = torch.tensor([law.bound for law in laws], dtype=torch.float64)
        noisy, norms = torch.zeros(()), grad.new_zeros(len(laws), 0)
        for name, part in parts.items():
            total = torch.zeros(sum(clipper.sizes), dtype=torch.float64)
            if len(output):
                total, norms = clipper.sums(output, part, weights, calls, bounds, units)
            noisy = noisy + kernel.release(laws, total, self._secret, "dp_sgd", name, step)
        left = kernel.shared_out(noisy / self.batch_size, self._weights)
        for weight, one in zip(self._weights, left, strict=True):
            weight.grad = one
        self.watch(step, left)
        if self._quantile is not None:
            self._follow(norms.cpu(), step)

    def _follow(self, norms: Tensor, step: int) -> None:
        """Move each clip norm towards the quantile (Andrew et al. 2021, section 3.1).

        A row changes each group's count of small gradients by plus or minus 1/2, so one row moves
        the vector of the n groups' counts by sqrt(n) / 2 (2-norm).
        """
        assert self._quantile is not None, "only if norms follow a quantile"
        within, deviation = norms <= self.clipper.norms[:, None], self._counts_noise / 2
        purpose = "clip_norm", self._party, step
        share = kernel.share_within(within, self.batch_size, deviation, self._secret, *purpose)
        norms = self.clipper.norms * torch.exp(kernel.QUANTILE_RATE * (self._quantile - share))
        self.clipper.norms = norms.clamp(kernel.LEAST_NORM, kernel.MOST_NORM)


def _own_weights(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters(recurse=False) if weight.requires_grad]


def gradients(output: Tensor, grad: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of each weight by one backward pass, and keep the autograd graph.

    For a weight that does not affect the output, the gradient is 0.
    """
    found = torch.autograd.grad(output, weights, grad, retain_graph=True, allow_unused=True)
    pairs = zip(found, weights, strict=True)
    return [torch.zeros_like(weight) if one is None else one for one, weight in pairs]


def _finite(values: Sequence[Tensor]) -> bool:
    return all(bool(one.isfinite().all()) for one in values)


def _alone(grad: Tensor) -> Iterator[Tensor]:
    """Yield, for each row, a copy of the gradient with all other rows set to 0."""
    for row in range(len(grad)):
        alone = torch.zeros_like(grad)
        alone[row] = grad[row]
        yield alone
