"""Learning tasks of a label party: loss and weights of rows, metrics, and the session's counters.

A `Task` defines the loss and the meaning of the outputs, a `Meter` accumulates the results of one
phase (training, validation, test), and `Progress` the results of the session. An `Objective` names
task, loss and top model, as the experiment sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vfl.config import LabelSettings
from vfl.core.errors import DataError, SpecError
from vfl.core.traffic import Ledger
from vfl.models.losses import CrossEntropy, Loss, SquaredError, make_loss, weighted_mean
from vfl.session.label.calibration import Calibration
from vfl.session.label.quality import (
    brier_score,
    classification_quality,
    reduced,
    reduced_quality,
    regression_quality,
)
from vfl.session.label.scored import Guessed, Residuals, Scored

#: Up to this number of classes, the outputs of all rows of a phase are stored, and AUC is computed.
FEW_CLASSES = 50


class Task(nn.Module):
    """A learning task; calling the object returns the loss of a batch.

    A task is a torch module, so that state which is fitted to the labels is saved with the label
    party's weights.

    Attributes:
        calibration: calibration of the class probabilities; None does not calibrate.
    """

    name: ClassVar[str]
    fits: ClassVar[bool] = False  #: whether `fit` needs the labels and weights

    def __init__(self, calibration: Calibration | None = None) -> None:
        super().__init__()
        self.calibration = calibration

    def fit(self, labels: Tensor, weights: Tensor | None = None) -> None:
        """Fit the task's state to all training labels, once before the first step.

        Both arguments have the axes (rows,).
        """

    def answers(self, outputs: Tensor) -> Tensor:
        """Convert outputs with axes (rows, outputs) to the unit of the labels."""
        return outputs

    def calibrated(self, answers: Tensor) -> Tensor:
        """Calibrate answers; without calibration, return them unchanged."""
        return answers if self.calibration is None else self.calibration(answers)

    def own_units(self, loss: float) -> float:
        """Convert a loss to the unit of the labels; the unit of a squared error is its square."""
        return loss

    def evidence(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the values of a batch from which `quality` computes metrics, axes (rows, ...)."""
        return self.answers(outputs)

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the metrics of all rows of a phase, by name; see `vfl.session.label.quality`."""
        raise NotImplementedError


class Classification(Task):
    """Classification: a loss function over classes.

    Args:
        hits: k of the hit rate at k; 0 omits the hit rate.
        calibration: calibration of the class probabilities; None does not calibrate.
        loss: loss function to minimise; None is cross-entropy.
    """

    name = "classification"

    def __init__(
        self, hits: int = 0, calibration: Calibration | None = None, loss: Loss | None = None
    ) -> None:
        super().__init__(calibration)
        self.hits, self.loss = hits, loss or CrossEntropy()

    def forward(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the loss of logits, axes (rows, classes), for class codes, axes (rows,)."""
        return self.loss(outputs, labels, weights)

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        return classification_quality(evidence, labels, self.hits)


class ManyClasses(Classification):
    """Classification with so many classes that the outputs of a phase cannot be stored."""

    def evidence(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return reduced(outputs, labels)

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        return reduced_quality(evidence, labels, self.hits)


class Regression(Task):
    """Regression: a loss function of standardised labels, (label - mean) / standard deviation.

    The top model therefore learns numbers with mean 0 and standard deviation 1, whatever the unit
    of the labels. Reported predictions and metrics are in the unit of the labels; see `own_units`
    for losses.

    Args:
        loss: loss function to minimise; None is the mean squared error.
    """

    name = "regression"
    fits = True
    center: Tensor
    scale: Tensor

    def __init__(self, loss: Loss | None = None) -> None:
        super().__init__()
        self.loss = loss or SquaredError()
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
        """Return the loss of outputs, axes (rows, 1), for labels, axes (rows,)."""
        return self.loss(outputs[:, 0], (labels - self.center) / self.scale, weights)

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.double() * self.scale + self.center

    def own_units(self, loss: float) -> float:
        return loss * float(self.scale) ** self.loss.power

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        return regression_quality(evidence, labels)


def make_task(
    name: str, outputs: int, hits: int = 0, calibration: str = "none", loss: str | None = None
) -> Task:
    """Build the task of a given name.

    Args:
        name: "classification" or "regression".
        outputs: number of classes; 1 for a regression.
        hits: see `Classification`.
        calibration: "none", "isotonic" or "platt".
        loss: spec of the loss function; None is the usual loss of the task.

    Raises:
        SpecError: probabilities of this many classes cannot be calibrated, or the loss function is
            for the other task.
    """
    asked = None if loss is None else make_loss(loss, name)
    if name == "regression":
        return Regression(asked)
    if calibration == "none":
        kind = Classification if outputs <= FEW_CLASSES else ManyClasses
        return kind(hits, loss=asked)
    if outputs > FEW_CLASSES:
        raise SpecError(
            "probabilities of so many classes cannot be calibrated",
            where=f"label.calibration = '{calibration}'",
            got=f"{outputs} classes",
            want=f"at most {FEW_CLASSES}",
        )
    return Classification(hits, Calibration(calibration, outputs), asked)


def training_weights(
    labels: Tensor, train: Tensor, row_weights: Tensor | None, class_weight: str
) -> Tensor | None:
    """Compute each row's weight w in the loss.

    The loss of a batch is sum(w * loss of a row) / sum(w). With "balanced", the weight of a row is
    its own weight times (training rows) / (classes * training rows of its class), as in
    scikit-learn.

    Args:
        labels: labels of all rows, axes (rows,).
        train: positions of the training rows.
        row_weights: each row's own weight, axes (rows,), not negative; None gives all rows the same
            weight.
        class_weight: "none" or "balanced".

    Returns:
        The weights, float32, axes (rows,); None if all training rows have the same weight.

    >>> labels = torch.tensor([0, 0, 0, 1])
    >>> training_weights(labels, torch.arange(4), None, "balanced")
    tensor([0.6667, 0.6667, 0.6667, 2.0000])

    Raises:
        DataError: the number of weights differs from the number of rows, a weight is negative or
            not finite, or the weights of all training rows are 0.
    """
    if row_weights is None and class_weight == "none":
        return None
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
    """Return the weights of a batch's rows in the loss, axes (rows,); None if all are equal.

    Args:
        weights: weights of all rows, from `training_weights`.
        rows: positions of the batch's rows.
        counts: mask of the batch's rows that the loss includes, axes (rows,); None includes all
            rows.
        device: device of the result.
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
        raise DataError(
            "the weights of all training rows are zero", want="at least one weight above 0"
        )


@dataclass
class Meter:
    """Accumulates the batches of one phase, and reports metrics over all rows of these batches.

    In training, a meter computes only the loss and a cheap metric: the accuracy, or for the squared
    error the root of the loss. In any other phase, it stores the outputs and labels that the task
    needs until the phase ends, and then computes all metrics of the task.

    Args:
        task: task that interprets the outputs.
        phase: name of the phase, which is the prefix of the metrics' names.
    """

    task: Task
    phase: str
    rows: int = 0
    loss: float = 0.0
    weight: float = 0.0
    correct: int = 0
    evidence: list[Tensor] = field(default_factory=list, repr=False)
    labels: list[Tensor] = field(default_factory=list, repr=False)

    def add(
        self, outputs: Tensor, labels: Tensor, loss: float, weights: Tensor | None = None
    ) -> None:
        """Add the results of one batch.

        Args:
            outputs: outputs of the top model, axes (rows, outputs).
            labels: labels of the rows, axes (rows,).
            loss: mean loss of the batch as the task computed it.
            weights: weights of the rows in `loss`, axes (rows,); None means equal weights.
        """
        weight = len(labels) if weights is None else float(weights.sum())
        self.rows += len(labels)
        self.weight += weight
        self.loss += loss * weight
        if self.phase != "train":
            self.evidence.append(self.task.evidence(outputs, labels).cpu())
            self.labels.append(labels.cpu())
        elif self.task.name == "classification":
            self.correct += int((outputs.argmax(dim=1) == labels).sum())

    def state(self) -> dict[str, Any]:
        """Return the accumulated values, for a checkpoint."""
        return {one.name: copy(getattr(self, one.name)) for one in fields(self)[2:]}

    @classmethod
    def restored(cls, task: Task, phase: str, state: Mapping[str, Any]) -> Meter:
        """Make a meter that continues from the values that `state` returned."""
        return cls(task, phase, **{name: copy(value) for name, value in state.items()})

    def figures(self) -> dict[str, float]:
        """Return the metrics by name; empty if no row was added."""
        if not self.rows:
            return {}
        loss = self.task.own_units(self.loss / self.weight) if self.weight else 0.0
        if self.phase != "train":
            found = {"loss": loss} | self._quality()
        elif self.task.name == "classification":
            found = {"loss": loss, "accuracy": self.correct / self.rows}
        else:
            squared = isinstance(self.task, Regression) and self.task.loss.power == 2
            found = {"loss": loss} | ({"rmse": loss**0.5} if squared else {})
        return {f"{self.phase}_{name}": value for name, value in found.items()}

    def _quality(self) -> dict[str, float]:
        """Return the metrics of the answers after calibration.

        The answers for validation rows are not calibrated, because the calibration curves are
        fitted to these rows.
        """
        before, labels = torch.cat(self.evidence), torch.cat(self.labels)
        if self.task.calibration is None or self.phase == "validation":
            return self.task.quality(before, labels)
        after = self.calibrated()
        found = self.task.quality(after, labels)
        if "log_loss" in found:
            found["brier"] = brier_score(after, labels)
            found["uncalibrated_log_loss"] = self.task.quality(before, labels)["log_loss"]
            found["uncalibrated_brier"] = brier_score(before, labels)
        return found

    def calibrated(self) -> Tensor:
        """Return the stored answers after calibration, which is applied batch by batch."""
        return torch.cat([self.task.calibrated(one) for one in self.evidence])

    def scored(self, *, calibrated: bool = True) -> Scored | Guessed | Residuals | None:
        """Return counts of the rows by score; for a regression, the residuals.

        The result is None in training, with more than `FEW_CLASSES` classes, and if an output is
        not finite.
        """
        if not self.evidence or isinstance(self.task, ManyClasses):
            return None
        evidence = self.calibrated() if calibrated else torch.cat(self.evidence)
        labels = torch.cat(self.labels)
        if self.task.name == "regression":
            return Residuals.of(evidence, labels)
        return (Scored if evidence.shape[1] == 2 else Guessed).of(evidence, labels)


EpochRecord = dict[str, Any]


class Progress:
    """Counters of the label party.

    Checkpoints contain the counters, so a resumed run continues them.

    Args:
        task: the learning task, which computes metrics from outputs.
        ledger: ledger of the bytes and times on the links.
        on_epoch: function that is called with one record after each epoch.

    Attributes:
        train_steps, train_rows, train_seconds: number of training exchanges, number of rows in
            these exchanges, and their duration in seconds.
        asked_steps, asked_rows: number of exchanges that evaluate or predict, including those
            during a training, and number of rows in these exchanges.
        history: one record of metrics for each epoch.
        ended: meters of the test rows, and of the validation rows for the weights that are the
            final weights so far; a checkpoint contains the latter only if the task calibrates.
    """

    def __init__(self, task: Task, ledger: Ledger, on_epoch: Callable[[EpochRecord], None]) -> None:
        self.train_steps = 0
        self.train_rows = 0
        self.train_seconds = 0.0
        self.asked_steps = 0
        self.asked_rows = 0
        self.history: list[EpochRecord] = []
        self.ended: dict[str, Meter] = {}
        self._task = task
        self._ledger = ledger
        self._on_epoch = on_epoch
        self._meters: dict[str, Meter] = {}

    def trained(self, rows: int) -> None:
        """Count one training exchange."""
        self.train_steps += 1
        self.train_rows += rows

    def asked(self, rows: int) -> None:
        """Count one exchange that evaluates or predicts."""
        self.asked_steps += 1
        self.asked_rows += rows

    def meter(self, phase: str) -> Meter:
        """Return the meter of this phase in the current epoch."""
        return self._meters.setdefault(phase, Meter(self._task, phase))

    def judged(self, *, stays: bool) -> Meter | None:
        """Return the meter of the validation rows for the final weights.

        The result is None if there are no such rows.

        Args:
            stays: whether the weights at the end of this epoch are the final weights.
        """
        return (
            self._meters.get("validation", self.ended.get("validation"))
            if stays
            else self.ended.get("validation")
        )

    def end_epoch(
        self, epoch: int, seconds: float, more: Mapping[str, Any], *, stays: bool = True
    ) -> None:
        """Make the record of an epoch from its metrics and from `more`; then begin new meters.

        Args:
            epoch: number of the epoch, from 1.
            seconds: duration of the epoch in seconds.
            more: further entries of the epoch's record.
            stays: whether the weights at the end of this epoch are the final weights so far.
        """
        record: EpochRecord = {"epoch": epoch, "steps": self.train_steps}
        for phase, meter in self._meters.items():
            record |= meter.figures()
            if phase == "test" or (phase == "validation" and stays):
                self.ended[phase] = meter
        record |= more
        record["seconds"] = round(seconds, 4)
        record["bytes_up"] = self._ledger.total_bytes("up")
        record["bytes_down"] = self._ledger.total_bytes("down")
        self._meters = {}
        self.history.append(record)
        self._on_epoch(record)

    def kept_scores(self) -> dict[str, Any]:
        """Return counts of validation and test rows by score, with the final weights."""
        found = {phase: meter.scored() for phase, meter in self.ended.items()}
        if self._task.calibration is not None and "test" in self.ended:
            found["uncalibrated"] = self.ended["test"].scored(calibrated=False)
        return {phase: scored.record() for phase, scored in found.items() if scored is not None}

    def state(self) -> dict[str, Any]:
        """Return all counters, for a checkpoint."""
        return {
            "trained": [self.train_steps, self.train_rows, self.train_seconds],
            "asked": [self.asked_steps, self.asked_rows],
            "history": list(self.history),
            "meters": {phase: meter.state() for phase, meter in self._meters.items()},
            "traffic": self._ledger.state(),
        } | self._kept_validation()

    def _kept_validation(self) -> dict[str, Any]:
        """Return the validation meter's state, which a later calibration needs."""
        kept = self.ended.get("validation") if self._task.calibration is not None else None
        return {} if kept is None else {"validation": kept.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        if (kept := state.get("validation")) is not None:
            self.ended["validation"] = Meter.restored(self._task, "validation", kept)
        self.train_steps, self.train_rows, self.train_seconds = state["trained"]
        self.asked_steps, self.asked_rows = state["asked"]
        self.history = list(state["history"])
        self._meters = {
            phase: Meter.restored(self._task, phase, kept)
            for phase, kept in state["meters"].items()
        }
        self._ledger.restore(state["traffic"])


@dataclass(frozen=True, slots=True)
class Objective:
    """Learning objective of a session: top model, task and loss from [label] of the experiment.

    Attributes:
        top: spec of the top model, or a module that maps the merged cuts to `outputs` numbers per
            row.
        task: "classification" or "regression".
        outputs: number of classes; 1 for a regression.
        class_weight: "none" or "balanced".
        hits: k of the hit rate at k; 0 omits the hit rate.
        bottom: module for the label party's own columns; it replaces the bottom model in the terms.
        calibration: "none", "isotonic" or "platt".
        loss: spec of the loss function; None is the usual loss of the task.
    """

    top: str | nn.Module
    task: str
    outputs: int
    class_weight: str = "none"
    hits: int = 0
    bottom: nn.Module | None = None
    calibration: str = "none"
    loss: str | None = None

    @classmethod
    def of(
        cls,
        label: LabelSettings,
        outputs: int,
        top: nn.Module | None = None,
        bottom: nn.Module | None = None,
    ) -> Objective:
        """Make the objective from the settings.

        Given modules replace the models of the settings.
        """
        weighing = label.class_weight, label.hits
        how = label.calibration, label.loss
        return cls(top or label.top, label.task, outputs, *weighing, bottom, *how)

    def make_task(self) -> Task:
        """Build the learning task of the objective; see `make_task`."""
        return make_task(self.task, self.outputs, self.hits, self.calibration, self.loss)
