"""Which models may draw random numbers while they run, so that the others need no generator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from vfl.seeds import Secret, scoped

#: Layers whose forward pass draws nothing. Any other class, a user's above all, may draw.
_PLAIN = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Linear,
    nn.Conv1d, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d,
    nn.GroupNorm, nn.ReLU, nn.LeakyReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.MaxPool2d,
    nn.AvgPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip


class Draws:
    """The private draws of one model, a stream of its own for every step.

    Args:
        secret: of the party that owns the model.
        purpose: keeps models of one party apart.
        model: what will run; without a layer that may draw, no generator is set up.
        always: something else that may draw runs beside it, a defense for example.
    """

    def __init__(
        self, secret: Secret, purpose: str, model: nn.Module, *, always: bool = False
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        # The exact class: a subclass of a plain layer may do anything.
        self._needed = always or any(type(part) not in _PLAIN for part in model.modules())

    def at(self, step: int) -> AbstractContextManager[None]:
        """What the model's forward pass of a step runs under."""
        if not self._needed:
            return nullcontext()
        return scoped(self._secret.number(self._purpose, step))
