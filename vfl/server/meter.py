"""Loss and quality over the batches of one phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


def task_loss(task: str) -> nn.Module:
    """The loss of a task: cross-entropy, or the mean squared error of a single output."""
    return nn.CrossEntropyLoss() if task == "classification" else _SquaredError()


class _SquaredError(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs[:, 0], targets)


@dataclass
class Meter:
    """Adds up batches; what it reports is the mean over all their rows.

    For classification: loss and accuracy. For regression: loss (mean squared error), its root and
    R2 = 1 - residual sum of squares / total sum of squares.
    """

    task: str
    rows: int = 0
    _loss: float = 0.0
    _correct: int = 0
    _targets: list[Tensor] = field(default_factory=list, repr=False)

    def add(self, outputs: Tensor, targets: Tensor, loss: float) -> None:
        """Count one batch; outputs of axes (rows, outputs), targets of axes (rows,)."""
        self.rows += len(targets)
        self._loss += loss * len(targets)
        if self.task == "classification":
            self._correct += int((outputs.argmax(dim=1) == targets).sum())
        else:
            self._targets.append(targets)

    def state(self) -> dict[str, Any]:
        """What was added up so far, for a checkpoint."""
        return {
            "rows": self.rows,
            "loss": self._loss,
            "correct": self._correct,
            "targets": list(self._targets),
        }

    @classmethod
    def restored(cls, task: str, state: Mapping[str, Any]) -> Meter:
        """A meter that goes on from `state`."""
        return cls(task, state["rows"], state["loss"], state["correct"], list(state["targets"]))

    def figures(self, phase: str) -> dict[str, float]:
        """What was measured, by name; empty when no row was seen."""
        if not self.rows:
            return {}
        loss = self._loss / self.rows
        if self.task == "classification":
            return {f"{phase}_loss": loss, f"{phase}_accuracy": self._correct / self.rows}
        targets = torch.cat(self._targets)
        spread = float(((targets - targets.mean()) ** 2).mean())
        fitted = 1 - loss / spread if spread else float("nan")
        return {f"{phase}_loss": loss, f"{phase}_rmse": loss**0.5, f"{phase}_r2": fitted}
