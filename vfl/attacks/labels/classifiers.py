"""Classifiers of a few leaked rows, on features that rows without labels may scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from vfl.attacks.base import EmbeddingAttack, Layer, Scale, Scaler, scale_by
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_choice, require_range

#: From rows of axes (rows, features) to scores of axes (rows, classes).
Predict = Callable[[Tensor], Tensor]


class Classifier(EmbeddingAttack):
    """Learns from the leaked rows and classifies the targets.

    Args:
        scaler: see `scale_by`; all but "none" are fitted on the unlabelled rows.
        at: the layer it reads.

    Raises:
        BadOptionError: no such scaler or layer.
    """

    uses: ClassVar[frozenset[Grant]] = frozenset({Grant.LEAKED})

    def __init__(self, scaler: Scaler, at: Layer) -> None:
        super().__init__(at)
        require_choice("scaler", scaler, get_args(Scaler))
        self.scaler: Scaler = scaler
        if scaler != "none":
            self.needs |= {Grant.UNLABELLED}

    @abstractmethod
    def learn(self, rows: Tensor, labels: Tensor, classes: int) -> Predict:
        """Fit the leaked rows, of axes (rows, features), scaled already."""

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        scale = self.scale(view)
        leaked = view.leaked
        predict = self.learn(scale(self.rows(view, leaked)), leaked.labels, view.classes)
        return predict(scale(self.rows(view, view.targets)))

    def scale(self, view: View) -> Scale:
        """The scaling, fitted on the unlabelled rows if it has anything to fit."""
        if self.scaler == "none":
            return lambda rows: rows
        return scale_by(self.scaler, self.rows(view, view.unlabelled))


def as_scores(found: np.ndarray, present: Sequence[int], classes: int) -> Tensor:
    """A decision function's numbers as scores, float32, axes (rows, classes).

    Args:
        found: axes (rows, present), or (rows,) for two classes: the evidence for the second.
        present: the classes among the leaked rows, ascending; others score below them.
        classes: how many there are.
    """
    numbers = torch.from_numpy(found).float()
    if numbers.dim() == 1:
        numbers = numbers[:, None] * torch.tensor([-0.5, 0.5])
    scores = numbers.min().repeat(len(numbers), classes) - 1
    scores[:, list(present)] = numbers
    return scores


Measure = Literal["cosine", "euclid"]


class NearestMean(Classifier):
    """Gives each target the class whose mean over the leaked rows is nearest.

    Source: Snell et al. 2017 (prototypes), without training.

    Args:
        measure: "cosine" compares directions, "euclid" places.
        scaler: see `scale_by`.
        at: the layer it reads.

    Raises:
        BadOptionError: no such measure.
    """

    def __init__(
        self, measure: Measure = "cosine", scaler: Scaler = "none", at: Layer = "cut"
    ) -> None:
        require_choice("measure", measure, get_args(Measure))
        super().__init__(scaler, at)
        self.measure: Measure = measure

    def learn(self, rows: Tensor, labels: Tensor, classes: int) -> Predict:
        means = torch.zeros(classes, rows.shape[1]).index_add_(0, labels, rows)
        means /= labels.bincount(minlength=classes).clamp_min(1)[:, None]
        if self.measure == "euclid":
            return lambda some: -torch.cdist(some, means)
        return lambda some: normalize(some, dim=1) @ normalize(means, dim=1).T


class KNN(Classifier):
    """Lets the nearest leaked rows vote, each with the inverse of its distance.

    Source: Dudani 1976 (votes weighted by distance).

    Args:
        neighbours: how many vote, at most; with fewer leaked rows all of them do.
        scaler: see `scale_by`; "cosine" compares directions.
        at: the layer it reads.

    Raises:
        BadOptionError: no neighbour at all.
    """

    def __init__(self, neighbours: int = 5, scaler: Scaler = "none", at: Layer = "cut") -> None:
        require_range("neighbours", neighbours, 1)
        super().__init__(scaler, at)
        self.neighbours = neighbours

    def learn(self, rows: Tensor, labels: Tensor, classes: int) -> Predict:
        votes = one_hot(labels, classes).float()

        def predict(some: Tensor) -> Tensor:
            distance, near = torch.cdist(some, rows).topk(
                min(self.neighbours, len(rows)), dim=1, largest=False
            )
            say = 1 / distance.clamp_min(1e-12)
            return (say / say.sum(1, keepdim=True))[:, None, :].matmul(votes[near])[:, 0]

        return predict


class Penalised(Classifier):
    """A classifier that weighs its errors against a squared penalty.

    Args:
        scaler: see `scale_by`.
        strength: weight of the errors (C of scikit-learn).
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    def __init__(
        self, scaler: Scaler = "standard", strength: float = 1.0, at: Layer = "cut"
    ) -> None:
        require_range("strength", strength, 1e-9)
        super().__init__(scaler, at)
        self.strength = strength


class Logistic(Penalised):
    """Fits the leaked rows by a logistic regression, after scaling by the unlabelled rows.

    What hides classes in directions of low variance (distance correlation, potential energy)
    stands against fine-tuning and falls here.

    Args:
        scaler: see `scale_by`.
        strength: inverse weight of the squared penalty (C of scikit-learn).
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    def learn(self, rows: Tensor, labels: Tensor, classes: int) -> Predict:
        return fit_logistic(rows, labels, classes, self.strength)


def fit_logistic(
    rows: Tensor, labels: Tensor, classes: int, strength: float, weights: Tensor | None = None
) -> Predict:
    """A logistic regression; softmax of what it gives is what it believes.

    Args:
        rows: axes (rows, features).
        labels: int64, axes (rows,).
        classes: how many there are.
        strength: inverse weight of the squared penalty.
        weights: how much each row counts, axes (rows,); None counts all alike.
    """
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=1000)
    counts = None if weights is None else weights.numpy()
    model.fit(rows.numpy(), labels.numpy(), sample_weight=counts)
    return lambda some: as_scores(model.decision_function(some.numpy()), model.classes_, classes)


class SVM(Penalised):
    """Fits the leaked rows by a support-vector machine with kernel exp(-|x - x'|^2 / (d v)).

    d is the number of features and v their variance over the leaked rows, so that nothing is left
    to tune. It reads classes that no linear boundary separates.

    Source: Cortes and Vapnik 1995; several classes one against one.

    Args:
        scaler: see `scale_by`.
        strength: weight of the errors (C of scikit-learn).
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    def learn(self, rows: Tensor, labels: Tensor, classes: int) -> Predict:
        from sklearn.svm import SVC

        # Nothing in it is random, but without a seed it asks numpy's global generator for one.
        model = SVC(C=self.strength, kernel="rbf", gamma="scale", random_state=0)
        model.fit(rows.numpy(), labels.numpy())
        return lambda some: as_scores(
            model.decision_function(some.numpy()), model.classes_, classes
        )
