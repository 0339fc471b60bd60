"""Optimisers of a party's weights, by name, and schedules of their learning rate.

A party can use the optimisers of torch, and any other class derived from torch's base class. A spec
sets options of the constructor by their torch names; slashes separate the numbers of one option.
The learning rate, weight decay and (for `sgd`) momentum are settings in the section [train] of an
experiment.

>>> OPTIMIZERS.read("adamw:betas=0.8/0.99")[1]
{'betas': (0.8, 0.99)}

To add an optimiser, write a subclass of `torch.optim.Optimizer`, register it by an entry point in
the group ``vfl.optimizers`` (or by `register`), and run `vfl.testing.OptimizerContract`. For a
schedule, the base class is `torch.optim.lr_scheduler.LRScheduler`, the group is ``vfl.schedules``,
and the test is `ScheduleContract`.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from vfl.core.errors import BadOptionError, SpecError
from vfl.core.registry import MOST, Registry
from vfl.core.torch_internals import OptimizerFactory, before_steps, unhooked

Member = TypeVar("Member")

#: Name of the schedule that keeps the learning rate constant.
NO_SCHEDULE = "none"
#: For each beginning of an option's annotation, the type of the option's values.
_KINDS: Mapping[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "tuple[float": tuple[float, ...],
    "tuple[int": tuple[int, ...],
    "Iterable[int": tuple[int, ...],
    "Literal": str,
    "str": str,
}


class TorchRegistry(Registry[Member]):
    """A registry of torch classes, which are built from options and from weights or an optimiser.

    Args:
        elsewhere: constructor arguments that no spec may set: "name" stands for this argument of
            every class, "member.name" for that of one class.
        refused: reasons, by name of the class, why split training cannot use this class.
        kind, contract, members, group, aliases: see `Registry`.
    """

    def __init__(
        self,
        kind: str,
        contract: type[Member],
        members: Mapping[str, str],
        group: str,
        aliases: Mapping[str, str],
        elsewhere: Collection[str],
        refused: Mapping[str, str],
    ) -> None:
        super().__init__(kind, contract, members, group, aliases)
        self._elsewhere, self._refused = elsewhere, refused

    def member(self, name: str) -> type[Member]:
        """Return the class with this name.

        Raises:
            SpecError: the name is unknown, or split training cannot use the class.
        """
        if why := self._refused.get(name):
            raise SpecError(
                f"the {self.kind} '{name}' does not work in a split training: {why}",
                want=", ".join(self.names()),
            )
        return super().member(name)

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the options that a spec may set; options with function values are excluded."""
        found = inspect.signature(self.member(name)).parameters
        apart = {*self._elsewhere, *(one.removeprefix(f"{name}.") for one in self._elsewhere)}
        kinds = {key: _kind_of(one) for key, one in found.items() if key not in apart}
        return {key: found[key].replace(annotation=kind) for key, kind in kinds.items() if kind}

    def read(self, spec: str) -> tuple[str, dict[str, Any]]:
        """Return the name in a spec, and the values of its options.

        Raises:
            SpecError, BadOptionError: an option is unknown or has a wrong value, or a number is too
                large.
        """
        name, values = super().read(spec)
        for key, value in values.items():
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(one, int | float) and not abs(one) <= MOST for one in numbers):
                raise BadOptionError(
                    "out of range", where=f"{self.kind} '{name}', option '{key}'",
                    want=f"from -{MOST:g} to {MOST:g}",
                )  # fmt: skip
        return self.aliases.get(name, name), values


def _kind_of(option: inspect.Parameter) -> Any:
    """Return the type of an option; None if a spec cannot contain values of this type."""
    text = option.annotation
    if not isinstance(text, str):
        text = inspect.formatannotation(text)
    return next((kind for start, kind in _KINDS.items() if text.startswith(start)), None)


def _of_torch(
    module: Any, contract: type, short: Callable[[str], str], refused: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return a torch module's classes by name, aliases (class names) and refused classes."""
    found = (getattr(module, name) for name in module.__all__)
    known = {
        short(one.__name__): one.__name__ for one in found
        if isinstance(one, type) and issubclass(one, contract) and one is not contract
    }  # fmt: skip
    taken = {name: of for name, of in known.items() if name not in refused}
    return {
        "members": {name: f"{module.__name__}:{of}" for name, of in taken.items()},
        "aliases": {of: name for name, of in taken.items()},
        "refused": {**refused, **{known[name]: why for name, why in refused.items()
                                  if name in known}},
    }  # fmt: skip


def _short(name: str) -> str:
    """Shorten a schedule's class name: CosineAnnealingLR becomes `cosine_annealing`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.replace("LR", "")).lower()


_NOT_OPTIMIZERS = {
    "lbfgs": "a step computes the loss several times, and each would be an exchange",
    "sparseadam": "gradients of a split network are dense",
    "muon": "it updates matrices only, and layers have biases",
}
_NOT_SCHEDULES = {
    "reduce_on_plateau": "it follows a loss that only the label party knows",
    "lambda": "a spec cannot name a function",
    "multiplicative": "a spec cannot name a function",
    "sequential": "a spec cannot name other schedules",
    "chained_scheduler": "a spec cannot name other schedules",
}
_HOW = ("foreach", "fused", "capturable", "differentiable", "maximize")

OPTIMIZERS: TorchRegistry[optim.Optimizer] = TorchRegistry(
    kind="optimizer",
    contract=optim.Optimizer,
    group="vfl.optimizers",
    elsewhere=("params", "lr", "weight_decay", "sgd.momentum", *_HOW),
    **_of_torch(optim, optim.Optimizer, str.lower, _NOT_OPTIMIZERS),
)
SCHEDULES: TorchRegistry[lr_scheduler.LRScheduler] = TorchRegistry(
    kind="schedule",
    contract=lr_scheduler.LRScheduler,
    group="vfl.schedules",
    elsewhere=("optimizer", "last_epoch"),
    **_of_torch(lr_scheduler, lr_scheduler.LRScheduler, _short, _NOT_SCHEDULES),
)


class OptimizerSettings(Protocol):
    """Settings of an optimiser and a schedule; `vfl.config.TrainSettings` describes each one."""

    @property
    def optimizer(self) -> str: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def clip_norm(self) -> float: ...
    @property
    def epochs(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def momentum(self) -> float: ...


class Optimization:
    """The optimiser of a party's weights and its schedule, from the settings of a training.

    Every party computes the learning rate of an epoch from the settings alone. So all parties use
    the same learning rate in an epoch, also when a training resumes from a checkpoint.

    Args:
        settings: training settings that all parties have agreed on.

    Attributes:
        changes: whether the learning rate changes, so that each step must call `begin`.

    Raises:
        SpecError: the optimiser or schedule does not exist, or rejects its options.

    >>> from vfl.config import TrainSettings
    >>> how = Optimization(TrainSettings(learning_rate=0.4, schedule="step:step_size=2,gamma=0.5"))
    >>> [how.rate(epoch) for epoch in (1, 2, 3, 4, 5)]
    [0.4, 0.4, 0.2, 0.2, 0.1]
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        name, options = OPTIMIZERS.read(settings.optimizer)
        kind = OPTIMIZERS.member(name)
        takes = inspect.signature(kind).parameters
        options["lr"] = settings.learning_rate
        if "weight_decay" in takes:
            options["weight_decay"] = settings.weight_decay
        elif settings.weight_decay:
            raise SpecError(
                f"the optimizer '{name}' takes no weight decay",
                where="train.weight_decay",
                got=f"{settings.weight_decay:g}",
                want="0",
            )
        if name == "sgd":
            options["momentum"] = settings.momentum
        self._kind, self._options = unhooked(kind), options
        self._move = inspect.unwrap(kind.step)  # without hooks that other code registered
        self._made: list[Mapping[str, Any]] = []
        self._built: optim.Optimizer | None = None
        self._schedule: lr_scheduler.LRScheduler | None = None
        self._warmup, self._clip_norm = settings.warmup_steps, settings.clip_norm
        self.changes = settings.schedule != NO_SCHEDULE or self._warmup > 0
        if settings.schedule != NO_SCHEDULE:
            self._schedule = self._scheduled(settings.schedule)
            self._now(settings.epochs)

    def build(self, weights: Iterable[nn.Parameter]) -> optim.Optimizer:
        """Build the optimiser of a party's weights; later calls of `begin` change this optimiser.

        Raises:
            BadOptionError: the optimiser rejects its options.
        """
        try:
            self._built = self._kind(list(weights), **self._options)
        except (ValueError, TypeError) as problem:
            raise _no_options("train.optimizer", problem) from None
        return self._built

    def clipped(self, build: OptimizerFactory) -> OptimizerFactory:
        """Return a factory of optimisers that clip the norm of the gradient before each step.

        If several ranks (processes of one party) sum their gradients before a step, `build` must be
        the factory of the optimisers that sum. Then this method clips the norm of the sum.
        """
        return before_steps(build, self._clip) if self._clip_norm else build

    def _clip(self, weights: list[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(weights, self._clip_norm)

    def begin(self, epoch: int, trained: int = 0) -> None:
        """Set the optimiser's learning rate and other scheduled values for a step.

        Args:
            epoch: number of the epoch, counted from 1.
            trained: number of training steps before this one, in this and in all earlier epochs.
        """
        if not self.changes or self._built is None:
            return
        now = {"lr": self._options["lr"]} if self._schedule is None else dict(self._now(epoch))
        if trained < self._warmup:
            now["lr"] *= (trained + 1) / self._warmup
        for group in self._built.param_groups:
            group.update(now)

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch, without warm-up; epochs are counted from 1."""
        return float(self._of(epoch)["lr"])

    def momentum(self, epoch: int) -> float:
        """Return the momentum of an epoch, counted from 1; 0 for optimisers with betas instead."""
        return float(self._of(epoch).get("momentum", 0.0))

    def _of(self, epoch: int) -> Mapping[str, Any]:
        return self._options if self._schedule is None else self._now(epoch)

    @cached_property
    def copies(self) -> int:
        """Return how many values the optimiser keeps for each weight, besides the gradient.

        Raises:
            BadOptionError: the optimiser rejects its options, or cannot update a weight.
        """
        state = self._tried.state.values()
        weights: list[nn.Parameter] = self._tried.param_groups[0]["params"]
        kept = [
            one.numel() for own in state for one in own.values()
            if isinstance(one, torch.Tensor) and one.numel() > 1
        ]  # fmt: skip
        return math.ceil(sum(kept) / sum(one.numel() for one in weights))

    @cached_property
    def _tried(self) -> optim.Optimizer:
        """Return an optimiser that has updated a few test weights, so that its state exists."""
        weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
        try:
            optimizer = self._kind(weights, **self._options)
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            with torch.no_grad():
                self._move(optimizer)
        except (ValueError, TypeError, RuntimeError, ArithmeticError) as problem:
            raise _no_options("train.optimizer", problem) from None
        return optimizer

    def _scheduled(self, spec: str) -> lr_scheduler.LRScheduler:
        name, options = SCHEDULES.read(spec)
        kind = SCHEDULES.member(name)
        try:
            return kind(self._tried, **options)
        except (ValueError, TypeError, KeyError, ZeroDivisionError) as problem:
            raise _no_options("train.schedule", problem) from None

    def _now(self, epoch: int) -> Mapping[str, Any]:
        """Return an epoch's scheduled values, which depend on the settings only."""
        assert self._schedule is not None, "only with a schedule"
        if len(self._made) < epoch:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns about optimisers without steps
                    self._make(self._schedule, epoch)
            except (ValueError, ZeroDivisionError, OverflowError) as problem:
                raise _no_options("train.schedule", problem) from None
        return self._made[epoch - 1]

    def _make(self, schedule: lr_scheduler.LRScheduler, epochs: int) -> None:
        """Record the values that the schedule sets in each of the first epochs.

        Raises:
            ValueError: the schedule ends before the last epoch, or sets a value that no optimiser
                accepts.
        """
        (group,) = self._tried.param_groups
        while len(self._made) < epochs:
            if self._made:
                schedule.step()
            now = {key: group[key] for key in _CHANGED if key in group}
            fits = 0 <= now["lr"] <= MOST and 0 <= now.get("momentum", 0) < 1
            if not (fits and all(0 <= beta < 1 for beta in now.get("betas", ()))):
                raise ValueError(f"in epoch {len(self._made) + 1} it sets {now}")
            self._made.append(now)


#: Settings of an optimiser that a schedule of torch can change.
_CHANGED = ("lr", "momentum", "betas")


def _no_options(where: str, problem: Exception) -> BadOptionError:
    return BadOptionError("torch does not take these options", where=where, got=str(problem))


def descend(optimizer: optim.Optimizer, loss: torch.Tensor) -> None:
    """Take one optimiser step that reduces a loss."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
