"""Losses of a training, by name; the label party minimises one of them.

A custom loss is a subclass of `Loss` with one method, `rows`, which returns the loss of each row. A
custom loss gets its name from an entry point in the group ``vfl.losses``, from `--plugin` or from
`LOSSES.register`; only the label party needs the loss. The tests of `vfl.testing.LossContract`
check a custom loss.

>>> make_loss("focal:gamma=2", "classification")(torch.zeros(1, 2), torch.tensor([0]))
tensor(0.1733)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from vfl.core.errors import SpecError
from vfl.core.registry import Registry, require, require_range


class Loss(ABC):
    """Base class of losses; the loss of a batch is the weighted mean of its rows' losses.

    Attributes:
        task: kind of labels: "classification" or "regression".
        power: exponent p of the loss: if labels and outputs are c times as large, the loss is c^p
            times as large.
    """

    task: ClassVar[str] = "classification"
    power: ClassVar[int] = 0

    def __call__(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the loss of a batch, a scalar.

        Args:
            outputs: outputs of the top: axes (rows, classes), or axes (rows,) for a regression.
            targets: class numbers, axes (rows,), or class probabilities that a defense returns,
                axes (rows, classes); for a regression, numbers, axes (rows,).
            weights: weights of the rows, axes (rows,); None gives all rows the same weight.
        """
        rows = self.rows(outputs, targets)
        return rows.mean() if weights is None else weighted_mean(rows, weights)

    @abstractmethod
    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each row, axes (rows,), which must not depend on other rows."""


class CrossEntropy(Loss):
    """Cross-entropy, with label smoothing (Szegedy et al. 2016, section 7).

    Args:
        smoothing: share of each label's probability that is spread equally over all classes, from 0
            to below 1.

    >>> CrossEntropy(smoothing=0.5)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
    tensor(0.6269)

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        require("smoothing", smoothing, "from 0 to below 1", 0 <= smoothing < 1)
        self.smoothing = smoothing

    def __call__(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        if weights is None:  # torch's own mean: other means differ in their last bits
            return functional.cross_entropy(outputs, targets, label_smoothing=self.smoothing)
        return super().__call__(outputs, targets, weights)

    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        how = {"reduction": "none", "label_smoothing": self.smoothing}
        return functional.cross_entropy(outputs, targets, **how)  # type: ignore[arg-type]


class Focal(Loss):
    """Cross-entropy times (1 - p)^gamma, p being the label's probability (Lin et al. 2017, eq 4).

    Rows with a high p get small weights, which helps if most rows are of a class that is easy to
    predict.

    Args:
        gamma: focusing parameter, at least 0; 0 gives the cross-entropy.

    >>> Focal(gamma=1)(torch.zeros(1, 2), torch.tensor([0]))  # log(2) / 2
    tensor(0.3466)

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, gamma: float = 2.0) -> None:
        require_range("gamma", gamma, 0, 100)
        self.gamma = gamma

    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        surprise = functional.cross_entropy(outputs, targets, reduction="none")
        missed = (1 - torch.exp(-surprise)).clamp(min=1e-12)  # keeps the derivative finite
        return missed**self.gamma * surprise


class SquaredError(Loss):
    """Squared error.

    >>> SquaredError()(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))
    tensor(5.)
    """

    task = "regression"
    power = 2

    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) ** 2


class AbsoluteError(Loss):
    """Absolute error; of all constant predictions, the median of the labels minimises it.

    >>> AbsoluteError()(torch.tensor([1.0, -3.0]), torch.tensor([0.0, 0.0]))
    tensor(2.)
    """

    task = "regression"
    power = 1

    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs()


class Huber(Loss):
    """Half the squared error near 0, and a linear function of the error elsewhere (Huber 1964).

    Args:
        delta: absolute error above which the loss is linear, in standard deviations of the labels.

    >>> Huber()(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))
    tensor(1.5000)

    Raises:
        BadOptionError: an option is out of range.
    """

    task = "regression"
    power = 2  # if labels, outputs and delta are scaled together

    def __init__(self, delta: float = 1.0) -> None:
        require_range("delta", delta, 1e-6, 1e6)
        self.delta = delta

    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.huber_loss(outputs, targets, reduction="none", delta=self.delta)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return sum(w * v) / sum(w) for weights w and values v, axes (rows,); 0 if all weights are 0.

    >>> float(weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0])))
    2.0
    """
    total = weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    return (weights * values).sum() / total


LOSSES: Registry[Loss] = Registry(
    kind="loss",
    contract=Loss,  # type: ignore[type-abstract]
    members={
        "cross_entropy": "vfl.models.losses:CrossEntropy",
        "focal": "vfl.models.losses:Focal",
        "squared_error": "vfl.models.losses:SquaredError",
        "absolute_error": "vfl.models.losses:AbsoluteError",
        "huber": "vfl.models.losses:Huber",
    },
    group="vfl.losses",
    aliases={"mse": "squared_error", "mae": "absolute_error"},
)


def make_loss(spec: str, task: str) -> Loss:
    """Return the loss that a spec names.

    Args:
        spec: spec of a loss, such as ``cross_entropy:smoothing=0.1``.
        task: "classification" or "regression".

    Raises:
        SpecError: the loss or option does not exist, or the loss is for the other task.
    """
    loss = LOSSES.make(spec)
    if loss.task != task:
        fitting = [name for name in LOSSES.names() if LOSSES.member(name).task == task]
        raise SpecError(f"this loss is for a {loss.task}", got=spec, want=", ".join(fitting))
    return loss
