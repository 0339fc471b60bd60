"""A client's part of a round: gradient steps on its own rows with clipping, and noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core import seeds
from vfl.core.seeds import Secret
from vfl.horizontal.plan import NoisePlan, update_sensitivity
from vfl.horizontal.settings import HorizontalSettings
from vfl.models import Shape, make_bottom
from vfl.privacy import kernel
from vfl.privacy.dpsgd import RowClipper
from vfl.privacy.premise import prove
from vfl.privacy.row_gradients import Call

#: Number of gradient norms that a client remembers; it drops the oldest norms.
_MOST_NORMS = 100_000


@dataclass(frozen=True, slots=True)
class ClientState:
    """State that a client keeps between rounds; the state never leaves the client.

    Attributes:
        norms: gradient norms of rows in the client's steps so far, float32, axes (rows,).
        norm: current clip norm, if it is a percentile or follows a quantile; 0 before the first
            round.
    """

    norms: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Update:
    """The weight changes that a client sends to the server after a round.

    Attributes:
        layers: weight changes; the key is a layer's index, the value a flat tensor. Layers that are
            left out are not sent.
        within: if the server adds noise, 1 if the 2-norm of all weight changes together was at most
            the server's clip norm; otherwise 0.
        moved: sensitivity of the update: its largest possible change (2-norm) if one row had
            another value.
        deviation: standard deviation of the noise that must be added before the update leaves the
            client.
    """

    layers: Mapping[int, Tensor]
    within: int = 0
    moved: float = 0.0
    deviation: float = 0.0


def build_model(settings: HorizontalSettings, shape: Shape, outputs: int) -> nn.Module:
    """Build the network with its initial weights, which are the same at all clients."""
    with seeds.scoped(seeds.derive(settings.seed, "model")):
        return make_bottom(settings.model).build(shape, outputs)


def layers_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the weights of each layer of a model, for all layers that have weights."""
    found = [list(module.parameters(recurse=False)) for module in model.modules()]
    return [weights for weights in found if weights]


def flat(weights: list[nn.Parameter]) -> Tensor:
    """Return a copy of a layer's weights, axes (numbers,)."""
    return torch.cat([one.detach().reshape(-1) for one in weights])


@torch.no_grad()
def load(model: nn.Module, layers: Mapping[int, Tensor]) -> None:
    """Load flat weights into a model; the keys of the mapping are the indices of the layers."""
    for number, weights in enumerate(layers_of(model)):
        parts = torch.split(layers[number], [one.numel() for one in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.copy_(part.view_as(weight))


class ClientTrainer:
    """Trains the network on the rows of one client.

    Args:
        settings: settings of the training.
        plan: noise plan.
        inputs: inputs, axes (rows, *shape).
        labels: labels, axes (rows,), int64.
        outputs: number of classes.
        model: model to train, if several clients in one process share one model object.

    Raises:
        PrivacyError: the model mixes rows, so that the gradient of a single row cannot be clipped.
    """

    def __init__(
        self,
        settings: HorizontalSettings,
        plan: NoisePlan,
        inputs: Tensor,
        labels: Tensor,
        outputs: int,
        model: nn.Module | None = None,
    ) -> None:
        self.settings, self.plan = settings, plan
        self.inputs, self.labels = inputs, labels
        self.model = model or build_model(settings, tuple(inputs.shape[1:]), outputs)
        self.weights = [one for layer in layers_of(self.model) for one in layer]
        clips_rows = settings.clip != "none" and settings.noise != "server"
        self.clipper = RowClipper(self.model, 1.0) if clips_rows else None
        if self.clipper is not None:
            prove(self.clipper, self.model, [inputs.shape[1:]], f"model '{settings.model}'")

    def update(
        self,
        layers: Mapping[int, Tensor],
        state: ClientState,
        round_number: int,
        secret: Secret,
        norm: float = math.inf,
    ) -> tuple[Update, ClientState]:
        """Return the weight changes after the local steps of a round, before any noise.

        The caller must add noise of the standard deviation `Update.deviation`.

        Args:
            layers: weights at the start of the round.
            state: state of the client after the previous round.
            round_number: number of the round, on which random draws depend.
            secret: the client's own secret, from which the draw of rows is derived.
            norm: clip norm of the whole update, if the server adds noise.
        """
        settings = self.settings
        load(self.model, layers)
        self._begin = [one.detach().double() for one in self.weights]
        self._moved = [torch.zeros_like(one) for one in self._begin]
        self.model.train()
        used: list[float] = []
        for step, rows in enumerate(self._batches(round_number, secret)):
            if self.clipper is None:
                self._plain_step(rows)
                continue
            size = float(settings.batch_size if settings.noise == "steps" else len(rows))
            state, used_norm = self._clipped_step(rows, size, state, (round_number, step), secret)
            used.append(used_norm)
        sizes = [len(layer) for layer in layers_of(self.model)]
        moved = iter(self._moved)
        changes = {
            number: torch.cat([next(moved).reshape(-1) for _ in range(size)])
            for number, size in enumerate(sizes)
        }
        if settings.noise == "server":
            return _clipped(changes, norm), state
        if settings.layers < 1:
            changes = _most_changed(changes, layers, settings.layers)
        if settings.noise != "client":
            return Update(_as_sent(changes)), state
        batch = min(settings.batch_size, len(self.labels))
        moved_by = update_sensitivity(used, settings.learning_rate, batch, settings.sensitivity)
        deviation = self.plan.multiplier * moved_by
        return Update(_as_sent(changes), moved=moved_by, deviation=deviation), state

    def _batches(self, round_number: int, secret: Secret) -> Iterator[Tensor]:
        """Yield the row indices of each local step.

        The rows are reordered in every pass over the data, or drawn independently for each step.
        """
        settings, rows = self.settings, len(self.labels)
        if settings.noise == "steps":
            rate = settings.batch_size / rows
            for step in range(settings.local_steps):
                draws = secret.uniform((rows,), "horizontal rows", round_number, step)
                yield torch.from_numpy(np.flatnonzero(draws < rate))
            return
        draw = torch.Generator().manual_seed(secret.number("horizontal rows", round_number))
        size = min(settings.batch_size, rows)
        left = torch.zeros(0, dtype=torch.int64)
        for _ in range(settings.local_steps):
            if len(left) < size:
                left = torch.randperm(rows, generator=draw)
            yield left[:size]
            left = left[size:]

    def _plain_step(self, rows: Tensor) -> None:
        loss = F.cross_entropy(self.model(self.inputs[rows]), self.labels[rows])
        grads = torch.autograd.grad(loss, self.weights)
        self._descend(list(grads))

    def _clipped_step(
        self, rows: Tensor, size: float, state: ClientState, at: tuple[int, int], secret: Secret
    ) -> tuple[ClientState, float]:
        """Run one step with clipped row gradients.

        The function returns the new state of the client, and the clip norm that it used.
        """
        assert self.clipper is not None
        settings = self.settings
        norms = torch.zeros(0, dtype=torch.float64)
        norm, count = state.norm or settings.clip_norm, sum(one.numel() for one in self.weights)
        total = torch.zeros(count, dtype=torch.float64)
        calls: list[Call] = []
        if len(rows):
            with self.clipper.recording() as calls:
                output = self.model(self.inputs[rows])
            loss = F.cross_entropy(output, self.labels[rows], reduction="sum")
            (grad,) = torch.autograd.grad(loss, [output], retain_graph=True)
            if settings.clip == "percentile":
                norms = self.clipper.row_norms(output, grad, self.weights, calls)[0]
                seen = np.concatenate([state.norms, norms.float().numpy()])[-_MOST_NORMS:]
                norm = float(np.percentile(seen, settings.percentile))
                state = ClientState(seen, norm)
        norm = min(max(norm, kernel.LEAST_NORM), kernel.MOST_NORM)
        noisy = settings.noise == "steps"
        law = kernel.NoisySum(norm, self.plan.multiplier * norm, count)
        if len(rows):
            bounds = torch.tensor([law.bound if noisy else norm], dtype=torch.float64)
            total, (norms,) = self.clipper.sums(output, grad, self.weights, calls, bounds)
        if noisy:
            total = kernel.release([law], total, secret, "horizontal noise", "steps", *at)
        self._descend(kernel.shared_out(total / size, self._begin))
        if settings.clip == "quantile" and (settings.noise == "steps" or at[1] == 0):
            # If the client adds noise once, after all its steps, only the first step may count rows
            # for the quantile: the gradients of later steps depend on all rows of the first step.
            state = ClientState(state.norms, self._next_norm(norms, norm, size, at, secret))
        return state, norm

    def _next_norm(
        self, norms: Tensor, norm: float, size: float, at: tuple[int, int], secret: Secret
    ) -> float:
        """Return the next clip norm, from a noisy count of the rows within the current norm.

        A row that is added changes the count by 1/2, and a row that is replaced by 1.
        """
        moved = 0.5 if self.settings.noise == "steps" else 1.0
        deviation, purpose = self.plan.counts * moved or None, ("horizontal noise", "count", *at)
        share = kernel.share_within((norms <= norm)[None], size, deviation, secret, *purpose)
        return followed(norm, float(share), self.settings.percentile / 100)

    @torch.no_grad()
    def _descend(self, grads: Sequence[Tensor]) -> None:
        """Change the weights by one gradient step, and add the step's changes to a float64 total.

        In float32, an attacker could choose initial weights so large that rounding errors of the
        weight changes exceed the effect of one row.
        """
        for weight, begin, moved, grad in zip(
            self.weights, self._begin, self._moved, grads, strict=True
        ):
            moved.sub_(grad.double(), alpha=self.settings.learning_rate)
            weight.copy_(begin + moved)


def followed(norm: float, share_within: float, quantile: float) -> float:
    """Move a clip norm one step towards a quantile of the gradient norms.

    The result is C exp(-0.2 (b - gamma)), where b is the fraction of norms within the clip norm C
    (Andrew et al. 2021, section 3.1).

    >>> round(followed(1.0, share_within=1.0, quantile=0.5), 4)  # all are within: smaller
    0.9048
    """
    return norm * math.exp(-kernel.QUANTILE_RATE * (share_within - quantile))


def add_noise(update: Update, secret: Secret, round_number: int) -> Update:
    """Return the update with its noise added; only this form may leave the client.

    The noise depends on the weight changes, so two different updates never get the same noise.
    """
    if not update.deviation:
        return update
    total = torch.cat([one.double() for one in update.layers.values()])
    law = kernel.NoisySum(update.moved, update.deviation, len(total))
    # Rounding to the grid also raises the sensitivity, so the noise must be larger than the update
    # states; the grid step of the larger noise is at most twice this step.
    law = replace(law, deviation=update.deviation * (1 + 2 * law.step * law.count**0.5 / law.norm))
    noisy = kernel.release([law], total, secret, "horizontal noise", round_number)
    parts = torch.split(noisy, [len(one) for one in update.layers.values()])
    return Update(_as_sent(dict(zip(update.layers, parts, strict=True))), update.within)


def _as_sent(changes: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {number: one.float() for number, one in changes.items()}


def whole_norm(changes: Mapping[int, Tensor]) -> float:
    """Return the 2-norm of the changes of all layers together."""
    return float(kernel.norms_of(torch.cat(list(changes.values()))[None]))


def _clipped(changes: Mapping[int, Tensor], norm: float) -> Update:
    """Clip the weight changes of all layers together to a norm."""
    length = whole_norm(changes)
    factor = float(kernel.clip_factors(torch.tensor([length]), norm))
    within = int(length <= norm)
    return Update(_as_sent({number: one * factor for number, one in changes.items()}), within)


def _most_changed(
    changes: Mapping[int, Tensor], layers: Mapping[int, Tensor], share: float
) -> dict[int, Tensor]:
    """Return the layers whose weights changed most, at least one.

    The most changed layers are those with the lowest correlation between new and old weights.
    """

    def correlation(number: int) -> float:
        old = layers[number].double()
        new = old + changes[number]
        return float(F.cosine_similarity(old - old.mean(), new - new.mean(), dim=0))

    order = sorted(changes, key=correlation)
    kept = sorted(order[: max(1, round(share * len(order)))])
    return {number: changes[number] for number in kept}
