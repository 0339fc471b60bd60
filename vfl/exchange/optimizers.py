"""Optimisers from settings, the same way at every party."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn, optim

from vfl.config import TrainSettings

OptimizerFactory = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


def optimizer_factory(settings: TrainSettings) -> OptimizerFactory:
    """A function that builds the optimiser the settings name for a party's own parameters."""

    def build(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        if settings.optimizer == "adam":
            return optim.Adam(
                parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
            )
        return optim.SGD(
            parameters,
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )

    return build


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Forget the last step's gradients.

    An optimiser's own `zero_grad` does the same inside a profiler range that costs more than it,
    and a split step has one optimiser a party.
    """
    for parameter in parameters:
        parameter.grad = None
