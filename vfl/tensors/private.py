"""Learning with noise from workers' rows: DP-SGD at the worker, and votes of teachers (PATE).

The rows never leave their workers. `PrivateTraining` lets a worker draw a batch of its own rows,
clip each row's gradient and add noise to the sum (Abadi et al. 2016), by `vfl.privacy`. Only noisy
gradients leave the worker, and only within the privacy budget that the worker's owner granted.
`pate` labels public rows by the votes of teacher networks (Papernot et al. 2018): an aggregator
counts the votes, adds noise to the counts and reveals the class with the largest noisy count.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vfl.core.errors import ConsentError, UserError
from vfl.core.registry import require, require_choice
from vfl.core.seeds import Secret
from vfl.privacy import PrivacyStatement, kernel
from vfl.privacy.accountants import GaussianSteps, epsilon_by, epsilon_of, steps_for
from vfl.privacy.dpsgd import Pass, RowClipper
from vfl.privacy.premise import prove
from vfl.tensors.base import axes
from vfl.tensors.budgets import MOST_KINDS
from vfl.tensors.foreseen import UNFIT
from vfl.tensors.pointers import Held, PointerTensor, Ref, Votes

#: Layers that the description of a network in a request may contain, and the arguments of each
#: layer.
_LAYERS: Mapping[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "linear": (nn.Linear, ("in_features", "out_features")),
    "conv2d": (nn.Conv2d, ("in_channels", "out_channels", "kernel_size", "stride", "padding")),
    "relu": (nn.ReLU, ()),
    "tanh": (nn.Tanh, ()),
    "sigmoid": (nn.Sigmoid, ()),
    "flatten": (nn.Flatten, ()),
    "avg_pool2d": (nn.AvgPool2d, ("kernel_size", "stride", "padding")),
}
_MOST_WEIGHTS = 1 << 28
#: Number of future noise steps that a budget records on disk as taken in advance; if the worker is
#: killed, the budget of the steps that it did not take is lost.
_RESERVE = 64
_SECRET_NOISE = "each worker keeps the secret of its noise"
_SECRET_VOTES = "the aggregator discloses the votes to no one"
#: Facts of a training's privacy guarantee, without its epsilon; other guarantees differ in some.
_OF_TRAINING = PrivacyStatement(
    protects="records",
    against="an observer of every gradient that leaves a worker",
    unit="record",
    per="training",
    relation="add or remove",
    adversary="partner",
    accountant="rdp",
    assumes=(_SECRET_NOISE, "each record is at only one worker"),
)
#: For each loss, a function of outputs and labels, axes (rows, width); it returns the gradient of
#: each row's loss with respect to the output.
_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": lambda out, truth: (out - truth.reshape(out.shape)) * (2 / out.shape[1:].numel()),
    "cross_entropy": lambda out, truth: out.softmax(1) - _one_hot(truth, *out.shape),
    "bce": lambda out, truth: out.sigmoid() - truth.reshape(out.shape),
}


def _one_hot(truth: Tensor, rows: int, width: int) -> Tensor:
    """Return one-hot rows for labels.

    An unknown class gives zeros, because an error would reveal it.
    """
    return (truth.reshape(rows, 1) == torch.arange(width)).float()


def described(module: nn.Module) -> list[Any]:
    """Describe a network of known layers as plain data, for a request to a worker.

    Raises:
        UserError: the network has an unsupported layer, or is another module than such a layer or
            an `nn.Sequential` of them.
    """
    layers = list(module) if isinstance(module, nn.Sequential) else [module]
    found = []
    for layer in layers:
        name = next((name for name, (kind, _) in _LAYERS.items() if type(layer) is kind), None)
        if name is None or getattr(layer, "groups", 1) != 1:
            raise UserError(
                "a worker cannot build a layer of this class",
                got=type(layer).__name__,
                want=f"nn.Sequential of {', '.join(_LAYERS)}",
            )
        made = [getattr(layer, each) for each in _LAYERS[name][1]]
        weights = [each is not None for each in layer._parameters.values()]
        found.append([name, made, *(weights[1:] if len(weights) > 1 else [])])
    return found


def built(layers: Sequence[Any]) -> nn.Sequential:
    """Build a network from a description; its initial weights are arbitrary.

    Raises:
        UserError: the description is invalid.
    """
    try:
        made: list[nn.Module] = []
        for name, values, *bias in layers:
            kind, names = _LAYERS[name]
            options = dict(zip(names, values, strict=True))
            flat = [one for each in values for one in (each if isinstance(each, tuple) else [each])]
            whole = all(type(each) is int and 0 <= each < 1 << 20 for each in flat)
            if not whole or math.prod(each or 1 for each in flat) > _MOST_WEIGHTS:
                raise ValueError("sizes")
            made.append(kind(**options, **({"bias": bool(bias[0])} if bias else {})))
        return nn.Sequential(*made)
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise UserError("a worker cannot build a network from this description") from None


@dataclass(slots=True)
class Budget:
    """Privacy budget of one table for trainings with noise.

    Attributes:
        epsilon, delta: epsilon and delta that one row of the table may cost, over all uses of the
            table together.
        spent: noise steps that trainings have taken.
        version: torch's counter of in-place changes to the table, at the time of the grant.
        keep: function that writes the given noise steps to disk; it is called before the steps are
            taken.
    """

    epsilon: float
    delta: float
    spent: list[GaussianSteps] = field(default_factory=list)
    version: int = 0
    keep: Callable[[Sequence[GaussianSteps]], None] = lambda spent: None
    _left: int | None = None
    _reserved: int = 0

    def take(self, noise: float, rate: float, where: str, steps: int = 1) -> None:
        """Count noise steps before they are taken; count either all of them or none.

        Raises:
            ConsentError: the steps would cost more epsilon than the owner granted, or the budget
                has too many kinds of steps.
        """
        last = self.spent[-1] if self.spent else None
        if last is None or (last.noise, last.sampling_rate) != (noise, rate):
            if len(self.spent) == MOST_KINDS:
                raise ConsentError(
                    "this table's budget has too many kinds of steps",
                    where=where,
                    got=f"{MOST_KINDS} pairs of noise and rate",
                    fix="train with the noise and the batch size of earlier steps",
                )
            self.spent.append(GaussianSteps(noise, 0, rate))
            self._left, self._reserved = None, 0
        if self._left is None:
            self._left = self._affordable() - self.spent[-1].steps
        if self._left < steps:
            raise ConsentError(
                "the privacy budget that its owner granted is spent",
                where=where,
                got=f"{sum(each.steps for each in self.spent)} steps",
                want=f"epsilon {self.epsilon:g} at delta {self.delta:g}",
                fix="train with more noise or fewer steps from the start, or ask the table's owner",
            )
        self._left -= steps
        self.spent[-1] = replace(self.spent[-1], steps=self.spent[-1].steps + steps)
        # Writing to disk in every step would double the time of a training step.
        if self.spent[-1].steps > self._reserved:
            self._reserved = self.spent[-1].steps + min(_RESERVE, self._left)
            self.keep([*self.spent[:-1], replace(self.spent[-1], steps=self._reserved)])

    def settle(self) -> None:
        """Write the noise steps that were taken to disk; drop the steps that were only reserved."""
        if self._reserved:
            self.keep(self.spent)

    def _affordable(self) -> int:
        """Return how many steps of the latest noise and rate the budget allows after the others."""
        *before, new = self.spent
        if not before:
            rate, noise = new.sampling_rate, new.noise
            return steps_for(self.epsilon, self.delta, noise, rate)
        low, high = 0, 1

        def fits(steps: int) -> bool:
            return (
                epsilon_by([*before, replace(new, steps=steps)], self.delta, "rdp") <= self.epsilon
            )

        while high < 1 << 20 and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def promise_of(budget: Budget) -> PrivacyStatement:
    """Return the privacy guarantee of a budget for each record, whatever the budget is spent on.

    For a teacher, removing a record changes one vote, just as changing the record's value does.
    """
    return replace(
        _OF_TRAINING,
        against="an observer of every gradient and label that leaves a worker",
        epsilon=budget.epsilon,
        delta=budget.delta,
        assumes=(_SECRET_NOISE, _SECRET_VOTES),
    )


class Plan:
    """The network of one training at a worker, with clip norm, noise and sampling rate."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.model = built(request["layers"])
        self.clip, self.noise = float(request["clip"]), float(request["noise"])
        self.rate, self.loss = float(request["rate"]), str(request["loss"])
        require_choice("loss", self.loss, tuple(_LOSSES))
        self.clipper = RowClipper(self.model, self.clip)
        self.weights = list(self.model.parameters())
        self.sizes = [each.numel() for each in self.weights]
        self.secret, self.step = Secret.fresh(), 0
        self._proved: set[torch.Size] = set()

    @property
    def law(self) -> kernel.NoisySum:
        """The law of the noise that is added to the clipped gradient sum of a batch."""
        return kernel.NoisySum(self.clip, self.noise * self.clip, sum(self.sizes))

    def gradients(
        self, inputs: Tensor, labels: Tensor, weights: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Draw a batch; return its noisy gradient sum divided by the expected batch size.

        Args:
            inputs: all rows.
            labels: labels of the rows.
            weights: weights at which to compute the gradients; by default, the current weights of
                the plan's network.

        Raises:
            ValueError: the shapes of the weights differ from the shapes of the network's weights.
        """
        # Test the network with each new shape of inputs, because torch treats an input that lacks
        # one axis as a single row.
        if inputs.shape[1:] not in self._proved:
            prove(self.clipper, self._rows_out, [inputs.shape[1:]], "the network to train")
            self._proved.add(inputs.shape[1:])
        self.step += 1
        if weights is not None:
            self._load(weights)
        rows = torch.from_numpy(self.secret.uniform((len(inputs),), "rows", self.step))
        taken = (rows < self.rate).nonzero()[:, 0]
        total = torch.zeros(self.law.count, dtype=torch.float64)
        if len(taken):
            total = self._clipped_sum(inputs[taken], labels[taken])
        noisy = kernel.release([self.law], total, self.secret, "noise", self.step)
        noisy /= self.rate * len(inputs)
        return kernel.shared_out(noisy, self.weights)

    @torch.no_grad()
    def _load(self, weights: Sequence[Tensor]) -> None:
        """Load weights that the leader chose; their shapes must equal those of the network."""
        if [each.shape for each in weights] != [each.shape for each in self.weights]:
            raise ValueError("weights")
        for weight, new in zip(self.weights, weights, strict=True):
            weight.copy_(new)

    def _rows_out(self, batch: Tensor) -> Tensor:
        output: Tensor = self.model(batch)
        return output.flatten(1) if output.dim() > 1 else output[:, None]

    def _clipped_sum(self, batch: Tensor, truth: Tensor) -> Tensor:
        """Return the sum of the batch's clipped gradients, computed row by row.

        Rows do not pass through the network together, because the rounding of a row's products
        would then depend on the row's position in the batch. An attacker who chooses the weights
        could make this rounding decide every row's gradient.
        """
        passes: list[Pass] = []
        for row, one in zip(torch.split(batch, 1), torch.split(truth, 1), strict=True):
            with self.clipper.recording() as calls:
                output = self._rows_out(row.clone())
            passes.append((output, _LOSSES[self.loss](output.detach(), one).to(output), calls))
        bounds = torch.tensor([self.law.bound], dtype=torch.float64)
        return self.clipper.sums_of_passes(passes, self.weights, bounds)


def sanitised_gradients(worker: Any, request: Mapping[str, Any]) -> list[Tensor]:
    """Return the noisy gradients of a batch of a worker's rows; every requester may read them.

    Args:
        worker: worker that stores the rows.
        request: request of `PrivateTraining`; its weights are tensors, or the numbers of tensors at
            this worker.

    Raises:
        ConsentError: the owner granted no training with noise on these rows, the granted privacy
            budget is spent, the rows were changed after the grant, or a weight is not public.
    """
    plan: Plan | None = worker.plans.get(request["plan"])
    if plan is None:
        plan = worker.plans[request["plan"]] = Plan(request)
    tables = [worker.held_at(request[name].number) for name in ("inputs", "labels")]
    inputs, labels = (each.value for each in tables)
    if len(inputs) != len(labels):
        raise UserError("inputs and labels differ in length", where=worker.name)
    for name, held in zip(("inputs", "labels"), tables, strict=True):
        if held.rule.hides:
            _budget(worker, request[name].number, held).take(plan.noise, plan.rate, worker.name)
    given = [_weight(worker, each) for each in request["weights"]]
    try:
        return plan.gradients(inputs, labels, given)
    except UNFIT:  # the text of torch's own error may contain values
        raise UserError(
            "the network does not fit these rows",
            where=worker.name,
            got=f"{axes(inputs.shape)} and labels {axes(labels.shape)}",
            fix="compare the first and the last layer, and the loss",
        ) from None


def _weight(worker: Any, given: Any) -> Tensor:
    """Return a weight that all requesters may read; refuse other weights.

    The gradients that a worker returns disclose facts about the weights.
    """
    if not isinstance(given, Ref):
        assert isinstance(given, Tensor), "a request holds tensors"
        return given
    held = worker.held_at(given.number)
    if held.rule.hides:
        raise ConsentError(
            f"{worker.name} refuses gradients that would disclose a weight that is not public",
            where=f"a weight {axes(held.value.shape)} at {worker.name}",
            fix="train weights that you sent to the worker yourself",
        )
    found: Tensor = held.value
    return found


def _budget(worker: Any, number: int, held: Held) -> Budget:
    budget = worker.budgets.get(number)
    if budget is None:
        raise ConsentError(
            f"{worker.name} grants no training with noise on this table",
            where=f"a tensor {axes(held.value.shape)} at {worker.name}",
            fix=f"its owner may call {worker.name}.grant(tag, epsilon=...) for a tensor with a tag",
        )
    # A change of the table after the grant may have made every row depend on one record.
    if held.value._version != budget.version:
        raise ConsentError(
            "this table was changed after its owner granted training with noise",
            where=f"a tensor {axes(held.value.shape)} at {worker.name}",
            fix="the table's owner must load and grant it again; to change values, use"
            " tensor.clone()",
        )
    found: Budget = budget
    return found


class PrivateTraining:
    """DP-SGD over several workers: in each step, a random worker computes a noisy gradient.

    Args:
        module: `nn.Sequential` of layers that workers know; its weights are in this process, or, if
            there is only one table, at the table's worker.
        inputs: pointers to the training rows, one pointer for each worker.
        labels: pointers to the labels of these rows, one pointer for each worker.
        loss: loss function: "mse", "cross_entropy" or "bce" (binary cross-entropy of logits).
        clip: clip norm (2-norm) of each row's gradient.
        noise: standard deviation of the noise on a gradient sum, divided by `clip`.
        batch_size: expected number of rows in a batch; each row is drawn independently.

    >>> (alice,) = __import__("vfl").tensors.virtual("alice")
    >>> x, y = (alice.load(torch.ones(50, each), tag=f"{each}") for each in (3, 1))
    >>> for each in (3, 1):
    ...     alice.grant(f"{each}", epsilon=1.0)
    >>> model = nn.Sequential(nn.Linear(3, 1))
    >>> training = PrivateTraining(model, [x], [y], noise=4.0, batch_size=5)
    >>> training.step()
    >>> round(training.statement(1e-5).epsilon, 2)
    0.14
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[PointerTensor],
        labels: Sequence[PointerTensor],
        *,
        loss: str = "mse",
        clip: float = 1.0,
        noise: float = 1.1,
        batch_size: int = 32,
    ) -> None:
        require("inputs", len(inputs), "as many as labels", len(inputs) == len(labels) > 0)
        require_choice("loss", loss, tuple(_LOSSES))
        self._module, self._tables = module, list(zip(inputs, labels, strict=True))
        self._clip, self._noise = clip, noise
        self._request: dict[str, Any] = {
            "plan": secrets.token_hex(16), "layers": described(module), "loss": loss,
            "clip": clip, "noise": noise,
        }  # fmt: skip
        self._rates = [min(1.0, batch_size / len(each)) for each in inputs]
        self._steps = [0] * len(inputs)

    def step(self) -> None:
        """Compute noisy gradients, and set each weight's `grad` for the caller's optimiser.

        Raises:
            ConsentError: the privacy budget that an owner granted is spent.
        """
        at = secrets.randbelow(len(self._tables))
        inputs, labels = self._tables[at]
        location, weights = inputs.location, list(self._module.parameters())
        request: dict[str, Any] = self._request | {
            "plan": f"{self._request['plan']} {at}", "rate": self._rates[at],
            "inputs": inputs, "labels": labels, "weights": weights,
        }  # fmt: skip
        if not location.remote:
            request |= {
                key: [_ref(each) for each in value] if key == "weights" else _ref(value)
                for key, value in request.items()
                if key in ("inputs", "labels", "weights")
            }
        found = location.private_step(request)
        self._steps[at] += 1
        for weight, grad in zip(weights, found, strict=True):
            if isinstance(weight, PointerTensor):
                weight.grad = PointerTensor(location, *location.store(grad))
            else:
                weight.grad = grad

    def statement(self, delta: float = 1e-5) -> PrivacyStatement:
        """Return the privacy guarantee of the steps taken so far, for each row of every worker."""
        kinds = [
            GaussianSteps(self._noise, steps, rate)
            for steps, rate in zip(self._steps, self._rates, strict=True)
        ]
        return replace(
            _OF_TRAINING, epsilon=max(epsilon_of(each, delta) for each in kinds), delta=delta
        )


def _ref(value: Any) -> Any:
    return Ref(value.number) if isinstance(value, PointerTensor) else value


# PATE.


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher: a network that votes for the class of public rows.

    Attributes:
        network: network that returns, for each row, a score for each class.
        aggregator: name of the only worker that may count the teacher's votes.
        budget: privacy budget of the teacher's training records for all its votes.
    """

    network: nn.Module
    aggregator: str
    budget: Budget

    def vote(self, rows: Tensor, sigma: float, where: str) -> Votes:
        """Return one-hot votes for rows.

        The votes may be counted only once, and only with noise.

        Raises:
            ConsentError: the privacy budget of the owner does not allow these votes.
        """
        with torch.no_grad():
            scores = self.network(rows)
        self.budget.take(sigma / math.sqrt(2), 1.0, where, len(rows))
        ones = nn.functional.one_hot(scores.argmax(1), scores.shape[1])
        return Votes(ones.to(torch.int64), float(sigma), secrets.token_bytes(16))


def tally(votes: Sequence[Votes], threshold: float, secret: Secret) -> Tensor:
    """Return the class with the largest noisy count of votes for each row.

    A row whose largest noisy count is below the threshold gets the label -1.

    Source: Papernot et al. 2018, section 3 (GNMax). The noise has the largest of the standard
    deviations that the teachers require. The threshold is compared with the same noisy counts, so
    the comparison costs no further privacy.

    Raises:
        UserError: the votes of a teacher for a row are not one-hot. Without this check, the
            rounding of huge votes could remove the other teachers' votes and the noise.
    """
    for each in votes:
        ones = each.ones
        if ones.dtype != torch.int64 or ones.dim() != 2:
            raise UserError("these are not votes", want="whole numbers of axes (rows, classes)")
        if not (((ones == 0) | (ones == 1)).all() and (ones.sum(1) == 1).all()):
            raise UserError(
                "a teacher must have exactly one vote for each row",
                want="a single 1 in each row, and 0 otherwise",
            )
    counts = torch.stack([each.ones for each in votes]).sum(0)
    sigma = max(each.sigma for each in votes)
    drawn = torch.from_numpy(secret.normal(tuple(counts.shape), "votes"))
    most, winner = (counts.double() + sigma * drawn).max(1)
    return torch.where(most >= threshold, winner, -1)


def pate(
    teachers: Mapping[Any, str] | Sequence[tuple[Any, str]],
    rows: Tensor,
    aggregator: Any,
    *,
    sigma: float,
    threshold: float = 0.0,
    delta: float = 1e-5,
) -> tuple[Tensor, PrivacyStatement]:
    """Label public rows by teachers' secret votes; return the labels and the privacy guarantee.

    A teacher network's owner decides which worker may count the teacher's votes, and which privacy
    budget the records have: ``worker.teach(tag, network, aggregator, epsilon=1.0)``. Each vote can
    be counted only once. The guarantee assumes that a record is in the training data of one teacher
    only. Changing a record moves one vote to another class, so the vector of counts changes by at
    most sqrt(2) (2-norm). Gaussian noise on all counts then bounds the privacy cost, whatever the
    votes are (proposition 8 of the source). If most teachers agree, the true privacy cost is
    smaller, but this smaller cost would depend on the votes and would have to stay secret.

    Args:
        teachers: pairs of a worker and the name of its voting network.
        rows: public rows, in the form that the networks accept.
        aggregator: another worker, which counts the votes and discloses no count.
        sigma: standard deviation of the noise on each count of votes.
        threshold: smallest noisy count with which a class becomes the label; if the largest noisy
            count is below it, the label of the row is -1.
        delta: delta of the privacy guarantee.

    Returns:
        Labels, axes (rows,), and the privacy guarantee.
    """
    require("sigma", sigma, "above 0", 0 < sigma < math.inf)
    pairs = list(teachers.items() if isinstance(teachers, Mapping) else teachers)
    require("teachers", len(pairs), "at least 2", len(pairs) >= 2)
    numbers, key = [], aggregator.public_key()
    moved = []
    for worker, tag in pairs:
        number, shape = worker.vote(tag, rows, sigma)
        kept = PointerTensor(worker, number, shape)
        parcel = worker.pack(kept.number, aggregator.name, key)
        moved.append(PointerTensor(aggregator, *aggregator.accept(parcel)))
        numbers.append(moved[-1].number)
    labels = aggregator.tally(numbers, threshold)
    statement = replace(
        _OF_TRAINING,
        against="an observer of the labels, and of any model that is trained on them",
        epsilon=epsilon_of(GaussianSteps(sigma / math.sqrt(2), len(rows)), delta),
        delta=delta,
        relation="replace",
        accountant="exact",
        assumes=("each record is in the training data of only one teacher", _SECRET_VOTES),
    )
    return labels, statement
