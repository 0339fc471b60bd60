"""Loss and quality over the batches of one phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vfl.server.task import Task


@dataclass
class Meter:
    """Adds up batches; what it reports is about all their rows at once.

    Training stays cheap: the loss, with accuracy or the loss's root. Any other phase keeps what the
    task needs of outputs and labels until its end and reports the task's whole quality.

    Args:
        task: what the outputs mean.
        phase: prefix of the figures' names.
    """

    task: Task
    phase: str
    rows: int = 0
    _loss: float = 0.0
    _weight: float = 0.0
    _correct: int = 0
    _evidence: list[Tensor] = field(default_factory=list, repr=False)
    _labels: list[Tensor] = field(default_factory=list, repr=False)

    def add(
        self, outputs: Tensor, labels: Tensor, loss: float, weights: Tensor | None = None
    ) -> None:
        """Count one batch.

        Args:
            outputs: of the top, axes (rows, outputs).
            labels: axes (rows,).
            loss: the mean over the batch, as the task gives it.
            weights: of the rows in that mean, axes (rows,); None weighs all alike.
        """
        weight = len(labels) if weights is None else float(weights.sum())
        self.rows += len(labels)
        self._weight += weight
        self._loss += loss * weight
        if self.phase != "train":
            self._evidence.append(self.task.evidence(outputs, labels).cpu())
            self._labels.append(labels.cpu())
        elif self.task.name == "classification":
            self._correct += int((outputs.argmax(dim=1) == labels).sum())

    def state(self) -> dict[str, Any]:
        """What was added up so far, for a checkpoint."""
        return {
            "rows": self.rows,
            "loss": self._loss,
            "weight": self._weight,
            "correct": self._correct,
            "evidence": list(self._evidence),
            "labels": list(self._labels),
        }

    @classmethod
    def restored(cls, task: Task, phase: str, state: Mapping[str, Any]) -> Meter:
        """A meter that goes on from `state`."""
        return cls(
            task,
            phase,
            state["rows"],
            state["loss"],
            state["weight"],
            state["correct"],
            list(state["evidence"]),
            list(state["labels"]),
        )

    def figures(self) -> dict[str, float]:
        """What was measured, by name, in the labels' own units; empty when no row was seen."""
        if not self.rows:
            return {}
        loss = self.task.own_units(self._loss / self._weight) if self._weight else 0.0
        if self.phase != "train":
            quality = self.task.quality(torch.cat(self._evidence), torch.cat(self._labels))
            found = {"loss": loss} | quality
        elif self.task.name == "classification":
            found = {"loss": loss, "accuracy": self._correct / self.rows}
        else:
            found = {"loss": loss, "rmse": loss**0.5}
        return {f"{self.phase}_{name}": value for name, value in found.items()}
