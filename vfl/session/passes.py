"""A model's forward and backward passes in a session: random numbers, weights, repeated steps.

- `Draws` gives each forward pass its own private random numbers.
- `Stash` runs a forward pass on a copy of the weights (weight stashing: Harlap et al. 2018,
  PipeDream, section 3.3). With several exchanges in flight (sent before earlier gradients arrive),
  the optimiser changes the weights between the forward pass and the backward pass of a cut. The
  exact gradient belongs to the weights of the forward pass, and autograd refuses weights that were
  changed in place.
- `LocalSteps` defines optimiser steps that use the messages of one exchange again.
- `filled` pads the few rows of a query.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vfl.core.seeds import Secret, scoped
from vfl.session.ranks import group

#: Layer classes whose forward pass draws no random numbers. All other classes, such as a user's own
#: classes, may draw random numbers.
_PLAIN = (*group.ROWS_APART, *group.BATCH_NORMS)
#: Least number of rows with which the forward pass of a query is computed. With fewer rows,
#: libraries use different routines, whose results differ in the last bits; the answer for a row
#: would then disclose how many rows were queried together.
_FULL_ROWS = 32
#: For each smaller number of rows, the indices that pad a query: every row once, then the last row
#: repeatedly.
_REPEATED = [torch.arange(_FULL_ROWS).clamp(max=max(rows - 1, 0)) for rows in range(_FULL_ROWS)]


class Draws:
    """The private random numbers of a model's forward passes: one stream for each step.

    Args:
        secret: secret of the party that owns the model, from which the streams are derived.
        purpose: text that names the model within the party, so that each model of a party draws
            different random numbers.
        model: the model whose forward passes are run; if none of its layers can draw random
            numbers, no generator is set up.
        always: whether other code that may draw random numbers, such as a defense, runs together
            with the model's forward pass.
    """

    def __init__(
        self, secret: Secret, purpose: str, model: nn.Module, *, always: bool = False
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        # A subclass of one of these classes could draw random numbers, so only the exact classes
        # count.
        self._needed = always or any(type(part) not in _PLAIN for part in model.modules())

    def at(self, step: int, turn: int = 0) -> AbstractContextManager[None]:
        """Return a context in which the model's forward pass of a step draws random numbers.

        Each local step has a separate context; `turn` is the number of the local step, 0 for the
        exchange itself.
        """
        if not self._needed:
            return nullcontext()
        purpose = (self._purpose, step, turn) if turn else (self._purpose, step)
        return scoped(self._secret.number(*purpose))


class Stash:
    """Copy of a party's weights at one step.

    The gradients of the copied weights are stored in the copy.

    Args:
        model: the modules of the party, by name.
        state: weights and buffers of the party's modules at this step; see `gather`.

    Attributes:
        state: the copied state.
        weights: the copied weights, by name; the backward pass stores gradients in them.
    """

    def __init__(self, model: nn.ModuleDict, state: Mapping[str, Tensor]) -> None:
        self.state = {name: value.detach().clone() for name, value in state.items()}
        self._model = model
        self.weights = {
            name: self.state[name].detach().requires_grad_(weight.requires_grad)
            for name, weight in model.named_parameters()
        }

    def forward(self, part: str, inputs: Tensor) -> Tensor:
        """Run the module `part` on `inputs`, with the weights of this step.

        Buffers of the module, such as running statistics, are updated as in any other forward pass.
        """
        module, prefix = self._model[part], f"{part}."
        own = {
            name.removeprefix(prefix): weight
            for name, weight in self.weights.items()
            if name.startswith(prefix)
        }
        moved = {name: buffer.clone() for name, buffer in module.named_buffers()}
        outputs: Tensor = functional_call(module, own | moved, (inputs,))
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(moved[name])
        return outputs

    def hand_over(self) -> None:
        """Add the gradients of the copied weights to those of the party's present weights."""
        for name, weight in self._model.named_parameters():
            grad = self.weights[name].grad
            if grad is not None:
                weight.grad = grad if weight.grad is None else weight.grad + grad


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Additional optimiser steps after an exchange, which use the messages of this exchange again.

    Source: Liu et al. 2022 (FedBCD), algorithm 1, here with gradients of cuts; Fu et al. 2022
    (CELU-VFL), section 3, for the weights of rows.

    Attributes:
        steps: number of optimiser steps per exchange, including the step with the exchange itself.
        angle: largest angle in degrees between a row's present and earlier cut (or cut gradient);
            rows with a larger angle get weight 0; see `TrainSettings.local_angle`.

    >>> cuts = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    >>> LocalSteps(steps=2, angle=60).weights(cuts, torch.tensor([[1.0, 0.0]] * 3))
    tensor([1.0000, 0.7071, 0.0000])
    """

    steps: int = 1
    angle: float = 0.0

    @property
    def turns(self) -> range:
        """Numbers of the additional steps after an exchange, from 1 on."""
        return range(1, self.steps)

    def weights(self, now: Tensor, then: Tensor) -> Tensor | None:
        """Return each row's weight in an additional step, axes (rows,).

        The result is None if all weights are equal.

        Args:
            now: the rows' present cuts or cut gradients, axes (rows, width).
            then: the rows' cuts or cut gradients in the exchange, axes (rows, width).
        """
        if not self.angle:
            return None
        cosine = nn.functional.cosine_similarity(now.detach(), then, dim=1)
        return torch.where(cosine >= math.cos(math.radians(self.angle)), cosine, 0.0)


def filled(rows: Tensor) -> Tensor:
    """Pad the rows of a query to the least number for a forward pass by repeating the last row."""
    count = rows.shape[0]
    if not 0 < count < _FULL_ROWS:
        return rows
    return rows.index_select(0, _REPEATED[count].to(rows.device))


def set_training(model: nn.Module, training: bool) -> None:
    """Set a model to training mode or evaluation mode, unless it is already in this mode."""
    if model.training is not training:
        model.train(training)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Delete the gradients of the previous step.

    An optimiser's method `zero_grad` does the same within a profiler range, which takes longer than
    the deletion itself; in a split step, the optimiser of each party would add this time.
    """
    for parameter in parameters:
        parameter.grad = None
