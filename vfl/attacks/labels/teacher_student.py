"""Teacher and student: a model without the bottom labels rows, and the bottom cleans the labels."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from vfl.attacks.base import Layer, Scaler, fit, key_of, through
from vfl.attacks.labels.classifiers import Logistic, Predict, fit_logistic
from vfl.attacks.labels.propagation import propagate
from vfl.attacks.labels.scratch import Scratch
from vfl.attacks.labels.self_training import leaked_of_each, most_confident, taught_rows
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import scoped

Teacher = Literal["propagation", "scratch"]
Student = Literal["linear", "top"]
_STEPS, _RATE, _BATCH = 300, 1e-3, 256  # of a student that is a network


class TeacherStudent(Logistic):
    """Teaches a student on the bottom's features what a teacher guesses from the inputs alone.

    The teacher errs, but not in the way the bottom arranges its rows: where the victim's own top
    can tell classes apart, the student learns the classes and not the errors.

    Args:
        teacher: "propagation": labels spread over the graph of inputs; "scratch": an untrained
            network of the same architecture, trained on the leaked rows.
        student: "linear": a logistic regression, held back at first and then self-trained; "top":
            a network of the top's architecture, for cuts that no line divides into classes.
        share: of the rows guessed to be of a class, those the student is taught.
        scaler: see `scale_by`.
        strength: inverse weight of a linear student's squared penalty while it learns from the
            teacher; small, for the teacher's errors are many.
        rounds: of self-training after that, as `SelfTraining` does it.
        at: the layer the student reads.

    Raises:
        BadOptionError: an option out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.UNLABELLED, Grant.INPUTS})

    def __init__(
        self,
        teacher: Teacher = "propagation",
        student: Student = "linear",
        share: float = 0.5,
        scaler: Scaler = "standard",
        strength: float = 0.01,
        rounds: int = 4,
        at: Layer = "cut",
    ) -> None:
        require_choice("teacher", teacher, get_args(Teacher))
        require_choice("student", student, get_args(Student))
        require_range("share", share, 0, 1)
        require_range("rounds", rounds, 0)
        super().__init__(scaler, strength, at)
        self.teacher: Teacher = teacher
        self.student: Student = student
        self.share = share
        self.rounds = rounds
        self._scratch = Scratch()
        if teacher == "scratch":
            self.needs |= self._scratch.needs
        if student == "top":
            self.needs |= {Grant.TOP_RECIPE}

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        scale, labels = self.scale(view), view.leaked.labels
        known, further = (scale(self.rows(view, one)) for one in (view.leaked, view.unlabelled))
        scores = self._taught(view, draw)
        sure = most_confident(scores, self.share, leaked_of_each(labels, view.classes))
        rows = torch.cat([known, further[sure]])
        taught, weights = torch.cat([labels, scores[sure].argmax(1)]), torch.ones(len(rows))
        predict = self._student(view, draw, rows, taught, weights, self.strength)
        for _ in range(self.rounds):
            rows, taught, weights = taught_rows(known, labels, further, predict, 0.5, every=4)
            predict = self._student(view, draw, rows, taught, weights, 1.0)
        return predict(scale(self.rows(view, view.targets)))

    def _student(
        self, view: View, draw: torch.Generator,
        rows: Tensor, labels: Tensor, weights: Tensor, strength: float,
    ) -> Predict:  # fmt: skip
        if self.student == "linear":
            return fit_logistic(rows, labels, view.classes, strength, weights)
        with scoped(key_of(draw)):
            network = view.new_top(rows.shape[1])
        twice = weights > 1
        rows, labels = torch.cat([rows, rows[twice]]), torch.cat([labels, labels[twice]])
        network = fit(network, rows, labels, _STEPS, _RATE, draw, batch=_BATCH)
        return lambda asked: through(network, asked)

    def _taught(self, view: View, draw: torch.Generator) -> Tensor:
        """The teacher's logits of the unlabelled rows, axes (rows, classes)."""
        leaked, further = view.leaked, view.unlabelled.inputs
        if self.teacher == "scratch":
            return through(self._scratch.trained(view, draw), further)
        rows = torch.cat([leaked.inputs, further]).flatten(1)
        spread = propagate(rows, leaked.labels, view.classes, neighbours=10, spread=0.99)
        return spread[len(leaked.labels) :].clamp_min(1e-12).log()
