"""Tests that every schedule must pass; an author of a plug-in subclasses `ScheduleContract`.

    class TestMine(ScheduleContract):
        specs = ["mine:every=3"]

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from vfl.config import TrainSettings
from vfl.models.optimizers import Optimization
from vfl.testing.base import Contract, global_states, require_still


class ScheduleContract(Contract):
    """Properties of every schedule of the learning rate.

    Attributes:
        epochs: number of epochs of the training under test.
    """

    family = "schedule"
    epochs: int = 8

    def steps(self, spec: str) -> Optimization:
        """Return the optimisation settings of a training with this schedule."""
        return Optimization(TrainSettings(schedule=spec, epochs=self.epochs, optimizer="sgd"))

    def test_every_epoch_has_a_learning_rate(self, spec: str) -> None:
        states = global_states()
        rates = [self.steps(spec).rate(epoch) for epoch in self._epochs()]
        require_still(states)
        assert all(math.isfinite(rate) and rate >= 0 for rate in rates), (
            "a learning rate is negative or not finite"
        )
        assert len(set(rates)) > 1, "every epoch has the same learning rate"

    def test_resume_continues_with_the_learning_rate(self, spec: str) -> None:
        """Test that a training that resumes at an epoch has the learning rate of that epoch."""
        weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        through = self.steps(spec)
        optimizer = through.build(weights[:1])
        for epoch in self._epochs():
            through.begin(epoch)
            anew = self.steps(spec)
            resumed = anew.build(weights[1:])
            anew.begin(epoch)
            one, other = (dict(each.param_groups[0], params=0) for each in (optimizer, resumed))
            assert one == other, f"another learning rate after a resume at epoch {epoch}"

    def _epochs(self) -> range:
        return range(1, self.epochs + 1)
