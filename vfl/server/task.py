"""A task at the label party: what is minimised, what the outputs mean, and what is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from vfl.core.errors import DataError
from vfl.core.ledger import Ledger
from vfl.server.quality import (
    classification_quality,
    reduced,
    reduced_quality,
    regression_quality,
)

#: Most classes of which a phase's outputs are kept whole, and an AUC is computed.
FEW_CLASSES = 50


class Task(nn.Module):
    """One task; calling it gives the loss of a batch.

    A module, so that what it learned from the labels is kept with the label party's weights.
    """

    name: ClassVar[str]

    def fit(self, labels: Tensor, weights: Tensor | None = None) -> None:
        """Look at the training labels once, before the first step; all of axes (rows,)."""

    def answers(self, outputs: Tensor) -> Tensor:
        """What outputs of axes (rows, outputs) say, in the labels' own units."""
        return outputs

    def own_units(self, loss: float) -> float:
        """A loss in the labels' own units."""
        return loss

    def evidence(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """What `quality` needs of a batch, axes (rows, ...)."""
        return self.answers(outputs)

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        """The figures of a whole phase by name; see `vfl.server.quality`."""
        raise NotImplementedError


class Classification(Task):
    """Cross-entropy over classes.

    Args:
        hits: rows whose class is among so many largest outputs are counted; 0 counts none.
    """

    name = "classification"

    def __init__(self, hits: int = 0) -> None:
        super().__init__()
        self.hits = hits

    def forward(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss of logits of axes (rows, classes) for codes of axes (rows,)."""
        if weights is None:
            return cross_entropy(outputs, labels)
        return weighted_mean(cross_entropy(outputs, labels, reduction="none"), weights)

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        return classification_quality(evidence, labels, self.hits)


class ManyClasses(Classification):
    """The same over so many classes that a phase's outputs are not kept."""

    def evidence(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return reduced(outputs, labels)

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        return reduced_quality(evidence, labels, self.hits)


class Regression(Task):
    """Mean squared error of labels made standard: minus their mean, over their deviation.

    The top learns numbers around 0 and 1 whatever the labels' units; whatever is told outside,
    losses too, is in the labels' own.
    """

    name = "regression"
    center: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def fit(self, labels: Tensor, weights: Tensor | None = None) -> None:
        exact = labels.double()
        weights = torch.ones_like(exact) if weights is None else weights.double()
        center = weighted_mean(exact, weights)
        counted = exact[weights > 0]
        varies = bool((counted != counted[0]).any())
        scale = weighted_mean((exact - center) ** 2, weights).sqrt() if varies else torch.ones(())
        self.center.copy_(center)
        self.scale.copy_(scale)

    def forward(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss of outputs of axes (rows, 1) for labels of axes (rows,)."""
        targets = (labels - self.center) / self.scale
        if weights is None:
            return mse_loss(outputs[:, 0], targets)
        return weighted_mean((outputs[:, 0] - targets) ** 2, weights)

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.double() * self.scale + self.center

    def own_units(self, loss: float) -> float:
        return loss * float(self.scale) ** 2

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        return regression_quality(evidence, labels)


def make_task(name: str, outputs: int, hits: int = 0) -> Task:
    """The task of a name.

    Args:
        name: "classification" or "regression".
        outputs: number of classes, or 1.
        hits: see `Classification`.
    """
    if name == "regression":
        return Regression()
    return Classification(hits) if outputs <= FEW_CLASSES else ManyClasses(hits)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """sum(w * v) / sum(w), both of axes (rows,); 0 where no row weighs anything.

    >>> float(weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0])))
    2.0
    """
    total = weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    return (weights * values).sum() / total


def training_weights(
    labels: Tensor, train: Tensor, row_weights: Tensor | None, class_weight: str
) -> Tensor | None:
    """The weight of every row in the training loss, sum(w * loss) / sum(w) over a batch.

    "balanced" gives each row (training rows) / (classes * training rows of its class), as
    scikit-learn does, times its own weight.

    Args:
        labels: of all rows, axes (rows,).
        train: positions of the training rows.
        row_weights: of all rows, axes (rows,), not negative; None weighs all alike.
        class_weight: "none" or "balanced".

    Returns:
        float32 of axes (rows,); None where all training rows weigh the same, which is a training
        without weights.

    >>> labels = torch.tensor([0, 0, 0, 1])
    >>> training_weights(labels, torch.arange(4), None, "balanced")
    tensor([0.6667, 0.6667, 0.6667, 2.0000])

    Raises:
        DataError: weights of another number of rows, negative, not finite, or 0 for all.
    """
    weights = torch.ones(len(labels), dtype=torch.float64)
    if row_weights is not None:
        _check_weights(row_weights, len(labels), train)
        weights *= row_weights
    if class_weight == "balanced":
        codes = labels[train]
        counts = torch.bincount(codes)
        weights[train] *= len(train) / (int((counts > 0).sum()) * counts[codes].double())
    counted = weights[train]
    return None if bool((counted == counted[0]).all()) else weights.float()


def batch_weights(
    weights: Tensor | None, rows: np.ndarray, counts: Tensor | None, device: torch.device
) -> Tensor | None:
    """What a batch's rows weigh, axes (rows,); None where all weigh the same.

    Args:
        weights: of all rows, as `training_weights` gives them.
        rows: positions of the batch's rows.
        counts: which of them are learned from, axes (rows,); None for all.
        device: where the weights go.
    """
    if weights is None:
        return None if counts is None else counts.float().to(device)
    own = weights[rows]
    return (own if counts is None else own * counts).to(device)


def _check_weights(row_weights: Tensor, rows: int, train: Tensor) -> None:
    if row_weights.shape != (rows,):
        got = f"axes {tuple(row_weights.shape)}"
        raise DataError("every row needs one weight", got=got, want=f"axes ({rows},)")
    if not bool((torch.isfinite(row_weights) & (row_weights >= 0)).all()):
        raise DataError("a row's weight is negative or not finite", want="finite numbers from 0")
    if not bool(row_weights[train].any()):
        raise DataError("the weights of all training rows are zero", want="at least one above 0")


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


EpochRecord = dict[str, Any]


class Progress:
    """Counts of the label party; they go into checkpoints, so a resumed run reports the whole.

    Args:
        task: what the outputs mean.
        ledger: where traffic is counted.
        on_epoch: told one record an epoch.

    Attributes:
        train_steps, train_rows, train_seconds: exchanges, rows and time of training.
        asked_steps, asked_rows: exchanges and rows of evaluations, those of a training included.
        history: one record an epoch.
    """

    def __init__(self, task: Task, ledger: Ledger, on_epoch: Callable[[EpochRecord], None]) -> None:
        self.train_steps = 0
        self.train_rows = 0
        self.train_seconds = 0.0
        self.asked_steps = 0
        self.asked_rows = 0
        self.history: list[EpochRecord] = []
        self._task = task
        self._ledger = ledger
        self._on_epoch = on_epoch
        self._meters: dict[str, Meter] = {}

    def trained(self, rows: int) -> None:
        """Count one training exchange."""
        self.train_steps += 1
        self.train_rows += rows

    def asked(self, rows: int) -> None:
        """Count one exchange of an evaluation."""
        self.asked_steps += 1
        self.asked_rows += rows

    def meter(self, phase: str) -> Meter:
        """What is measured of a phase in this epoch."""
        return self._meters.setdefault(phase, Meter(self._task, phase))

    def end_epoch(self, epoch: int, seconds: float, more: Mapping[str, Any]) -> None:
        """Make the record of an epoch from its measurements and `more`, and start anew."""
        record: EpochRecord = {"epoch": epoch, "steps": self.train_steps}
        for meter in self._meters.values():
            record |= meter.figures()
        record |= more
        record["seconds"] = round(seconds, 4)
        record["bytes_up"] = self._ledger.total_bytes("up")
        record["bytes_down"] = self._ledger.total_bytes("down")
        self._meters = {}
        self.history.append(record)
        self._on_epoch(record)

    def state(self) -> dict[str, Any]:
        """Everything counted so far, for a checkpoint."""
        return {
            "trained": [self.train_steps, self.train_rows, self.train_seconds],
            "asked": [self.asked_steps, self.asked_rows],
            "history": list(self.history),
            "meters": {phase: meter.state() for phase, meter in self._meters.items()},
            "traffic": self._ledger.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.train_steps, self.train_rows, self.train_seconds = state["trained"]
        self.asked_steps, self.asked_rows = state["asked"]
        self.history = list(state["history"])
        self._meters = {
            phase: Meter.restored(self._task, phase, kept)
            for phase, kept in state["meters"].items()
        }
        self._ledger.restore(state["traffic"])
