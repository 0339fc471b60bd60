"""Tests that every loss must pass; an author of a plug-in subclasses `LossContract`.

    class TestMine(LossContract):
        specs = ["mine:margin=0.5"]

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.core.seeds import generator
from vfl.models.losses import LOSSES, Loss
from vfl.testing.base import Contract, global_states, require_still

_ROWS, _CLASSES = 8, 3


class LossContract(Contract):
    """Properties of every loss."""

    family = "loss"

    def batch(self, spec: str) -> tuple[Loss, Tensor, Tensor]:
        """Return the loss function of a spec, with a batch of outputs and targets."""
        loss, drawn = LOSSES.make(spec), generator(0, "loss")
        if loss.task == "regression":
            return loss, torch.randn(_ROWS, generator=drawn), torch.randn(_ROWS, generator=drawn)
        outputs = torch.randn(_ROWS, _CLASSES, generator=drawn)
        return loss, outputs, torch.arange(_ROWS) % _CLASSES

    def test_loss_is_finite_for_each_row(self, spec: str) -> None:
        loss, outputs, targets = self.batch(spec)
        rows = loss.rows(outputs, targets)
        assert rows.shape == (_ROWS,)
        assert bool(rows.isfinite().all()), "a loss is not finite"
        for one in range(_ROWS):
            alone = loss.rows(outputs[one : one + 1], targets[one : one + 1])
            assert torch.allclose(alone, rows[one], atol=1e-6), "another batch, another loss"

    def test_batch_loss_is_the_mean_over_rows(self, spec: str) -> None:
        loss, outputs, targets = self.batch(spec)
        rows, weights = loss.rows(outputs, targets), torch.arange(_ROWS) + 1.0
        assert torch.allclose(loss(outputs, targets), rows.mean())
        weighted = (rows * weights).sum() / weights.sum()
        assert torch.allclose(loss(outputs, targets, weights), weighted)

    def test_gradient_steps_lower_the_loss(self, spec: str) -> None:
        loss, outputs, targets = self.batch(spec)
        outputs = outputs.clone().requires_grad_()
        before = loss(outputs, targets)
        before.backward()  # type: ignore[no-untyped-call]
        assert outputs.grad is not None
        assert bool(outputs.grad.isfinite().all()), "a gradient is not finite"
        after = loss(outputs.detach() - 1e-2 * outputs.grad, targets)
        assert float(after) < float(before.detach()), (
            "a step along the negative gradient does not reduce the loss"
        )

    def test_loss_is_deterministic_without_side_effects(self, spec: str) -> None:
        loss, outputs, targets = self.batch(spec)
        states = global_states()
        first, second = loss(outputs, targets), loss(outputs, targets)
        require_still(states)
        assert torch.equal(first, second), "two equal calls differ"
        assert torch.equal(outputs, self.batch(spec)[1]), "outputs were changed"
