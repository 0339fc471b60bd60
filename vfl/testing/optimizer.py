"""Tests that every optimiser must pass; an author of a plug-in subclasses `OptimizerContract`.

    class TestMine(OptimizerContract):
        specs = ["mine:beta=0.9"]

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn, optim

from vfl.config import TrainSettings
from vfl.models.optimizers import Optimization
from vfl.testing.base import Contract, global_states, require_still

#: Numbers of rows and columns of a linear regression, and number of steps within which every
#: optimiser must improve its fit.
_ROWS, _COLUMNS, _STEPS = 32, 4, 60


class OptimizerContract(Contract):
    """Properties of every optimiser.

    Attributes:
        learning_rate: learning rate for the linear regression under test.
    """

    family = "optimizer"
    learning_rate: float = 0.02

    def steps(self, spec: str) -> Optimization:
        """Return the optimisation settings of a training with this optimiser."""
        train = TrainSettings(optimizer=spec, learning_rate=self.learning_rate)
        return Optimization(train)

    def test_steps_lower_the_loss(self, spec: str) -> None:
        model, optimizer = self._begun(spec)
        first = float(_loss(model).detach())
        _go_on(model, optimizer, _STEPS)
        assert float(_loss(model).detach()) < first, "the loss has not become lower"

    def test_resumed_optimizer_gives_the_same_weights(self, spec: str) -> None:
        whole, optimizer = self._begun(spec)
        _go_on(whole, optimizer, 3)
        state, half = optimizer.state_dict(), copy.deepcopy(whole)
        resumed = self.steps(spec).build(half.parameters())
        resumed.load_state_dict(copy.deepcopy(state))
        _go_on(whole, optimizer, 3)
        _go_on(half, resumed, 3)
        assert all(map(torch.equal, whole.parameters(), half.parameters())), "a resume differs"

    def test_steps_use_no_global_generator(self, spec: str) -> None:
        model, optimizer = self._begun(spec)
        states = global_states()
        _go_on(model, optimizer, 2)
        require_still(states)

    def test_state_size_is_at_most_the_declared_copies(self, spec: str) -> None:
        model, optimizer = self._begun(spec)
        _go_on(model, optimizer, 1)
        weights = sum(one.numel() for one in model.parameters())
        kept = sum(
            one.numel() for state in optimizer.state.values() for one in state.values()
            if isinstance(one, Tensor) and one.numel() > 1
        )  # fmt: skip
        assert kept <= self.steps(spec).copies * weights, (
            "the optimiser keeps more than `copies` values for each weight"
        )

    def _begun(self, spec: str) -> tuple[nn.Module, optim.Optimizer]:
        model = nn.Linear(_COLUMNS, 2)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.linspace(-1, 1, weight.numel()).reshape(weight.shape))
        return model, self.steps(spec).build(model.parameters())


def _loss(model: nn.Module) -> Tensor:
    rows = torch.linspace(-1, 1, _ROWS * _COLUMNS).reshape(_ROWS, _COLUMNS) ** 3
    wanted = torch.stack([rows.sum(1), rows[:, 0]], 1)
    loss: Tensor = ((model(rows) - wanted) ** 2).mean()
    return loss


def _go_on(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
