"""Learners of composed attacks: classifiers that are trained on a few leaked rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot

from vfl.attacks.base import fit, key_of, require_at_least, through
from vfl.attacks.labels.composed import Composed, Predict, Task
from vfl.attacks.labels.mixmatch import fit_mixmatch
from vfl.attacks.view import Grant
from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import scoped
from vfl.defenses.components import principal


def as_scores(found: np.ndarray, present: Sequence[int], classes: int) -> Tensor:
    """Return a classifier's decision values as scores of all classes, float32, (rows, classes).

    Args:
        found: decision values, axes (rows, present classes); for two classes also axes (rows,),
            where larger values favour the second class.
        present: classes of the leaked rows, ascending; all other classes get lower scores.
        classes: number of all classes.
    """
    numbers = torch.from_numpy(found).float()
    if numbers.dim() == 1:
        numbers = numbers[:, None] * torch.tensor([-0.5, 0.5])
    scores = numbers.min().repeat(len(numbers), classes) - 1
    scores[:, list(present)] = numbers
    return scores


Measure = Literal["cosine", "euclid"]


class NearestMean(Composed):
    """Assigns each target to the class whose mean of leaked rows is nearest.

    Source: Snell et al. 2017 (prototypes); vfl's attack uses the features without training them.

    Args:
        measure: measure of nearness: "cosine" compares directions; "euclid" compares Euclidean
            distances.
        options: options that all composed attacks have; see `Composed`.

    Raises:
        BadOptionError: the measure does not exist.
    """

    def __init__(self, measure: Measure = "cosine", **options: Any) -> None:
        require_choice("measure", measure, get_args(Measure))
        super().__init__(**self.defaults | options)
        self.measure: Measure = measure

    def learn(self, task: Task) -> Predict:
        counts, width = task.counts(), task.rows.shape[1]
        means = torch.zeros(task.classes, width)
        means.index_add_(0, task.labels, counts[:, None] * task.rows)
        total = torch.zeros(task.classes).index_add_(0, task.labels, counts)
        means /= torch.where(total > 0, total, 1.0)[:, None]
        if self.measure == "euclid":
            return lambda some: -torch.cdist(some, means)
        return lambda some: normalize(some, dim=1) @ normalize(means, dim=1).T


class KNN(Composed):
    """Gives each target the votes of its nearest leaked rows, weighted by inverse distance.

    Source: Dudani 1976 (votes weighted by distance).

    Args:
        neighbours: number of neighbours that vote; if there are fewer leaked rows, all of them
            vote.
        options: options that all composed attacks have; see `Composed`.

    Raises:
        BadOptionError: the number of neighbours is below 1.
    """

    def __init__(self, neighbours: int = 5, **options: Any) -> None:
        require_range("neighbours", neighbours, 1)
        super().__init__(**self.defaults | options)
        self.neighbours = neighbours

    def learn(self, task: Task) -> Predict:
        votes = one_hot(task.labels, task.classes) * task.counts()[:, None]
        neighbours = min(self.neighbours, len(task.rows))

        def predict(some: Tensor) -> Tensor:
            distance, near = torch.cdist(some, task.rows).topk(neighbours, dim=1, largest=False)
            say = 1 / distance.clamp_min(1e-12)
            return (say / say.sum(1, keepdim=True))[:, None, :].matmul(votes[near])[:, 0]

        return predict


class Penalised(Composed):
    """Base class of classifiers that minimise errors on leaked rows plus a squared penalty.

    Args:
        strength: weight of the errors relative to the penalty (C of scikit-learn).
        options: options that all composed attacks have; see `Composed`.

    Raises:
        BadOptionError: an option is out of range.
    """

    defaults: ClassVar[dict[str, Any]] = {"scaler": "standard"}

    def __init__(self, strength: float = 1.0, **options: Any) -> None:
        require_range("strength", strength, 1e-9)
        super().__init__(**self.defaults | options)
        self.strength = strength


class Logistic(Penalised):
    """Fits logistic regression to leaked rows; the scale of features follows from unlabelled rows.

    A defense that hides the classes in directions of low variance (distance correlation, potential
    energy) withstands fine-tuning but not this attack.

    Args:
        held_back: value of `strength` while the model learns from a teacher's guesses; it is small,
            because these guesses contain many errors.
        options: `strength`, and the options of all composed attacks; see `Composed`.

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, held_back: float = 0.01, **options: Any) -> None:
        require_range("held_back", held_back, 1e-9)
        super().__init__(**options)
        self.held_back = held_back

    def learn(self, task: Task) -> Predict:
        strength = self.held_back if task.taught else self.strength
        return fit_logistic(task.rows, task.labels, task.classes, strength, task.weights)


def fit_logistic(
    rows: Tensor, labels: Tensor, classes: int, strength: float, weights: Tensor | None = None
) -> Predict:
    """Fit a logistic regression; the softmax of its outputs gives class probabilities.

    Args:
        rows: features of the rows, axes (rows, features).
        labels: class numbers, int64, axes (rows,).
        classes: number of classes.
        strength: weight of the errors relative to the squared penalty (C of scikit-learn).
        weights: weight of each row, axes (rows,); None gives all rows the same weight.
    """
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=1000)
    counts = None if weights is None else weights.numpy()
    model.fit(rows.numpy(), labels.numpy(), sample_weight=counts)
    return lambda some: as_scores(model.decision_function(some.numpy()), model.classes_, classes)


class SVM(Penalised):
    """Fits a support-vector machine to the leaked rows, with kernel exp(-|x - x'|^2 / (d v)).

    In the kernel, d is the number of features and v their variance over the leaked rows, so the
    kernel has no parameter to tune. The machine can also separate classes that have no linear
    boundary.

    Source: Cortes and Vapnik 1995; with more than two classes, there is one machine for each pair
    of classes.

    Args:
        options: `strength`, and the options of all composed attacks; see `Composed`.
    """

    def learn(self, task: Task) -> Predict:
        from sklearn.svm import SVC

        # The fit is deterministic; scikit-learn still takes a seed from numpy's global generator if
        # none is given.
        model = SVC(C=self.strength, kernel="rbf", gamma="scale", random_state=0)
        weights = None if task.weights is None else task.weights.numpy()
        model.fit(task.rows.numpy(), task.labels.numpy(), weights)
        return lambda some: as_scores(
            model.decision_function(some.numpy()), model.classes_, task.classes
        )


class Ridge(Penalised):
    """Fits one-hot labels by kernel ridge regression, with the kernel of `SVM`.

    Source: Saunders et al. 1998. The solution is (K + W^-1 / strength)^-1 Y, for the kernel matrix
    K and the diagonal matrix W of the rows' weights. Y are the one-hot labels minus the shares of
    the classes.

    Args:
        options: `strength`, and the options of all composed attacks; see `Composed`.
    """

    def learn(self, task: Task) -> Predict:
        rows, labels, classes = task.rows, task.labels, task.classes
        gamma = 1 / (rows.shape[1] * rows.var(unbiased=False).clamp_min(1e-12))

        def kernel(some: Tensor) -> Tensor:
            return torch.exp(-gamma * torch.cdist(some, rows).square())

        penalty = torch.diag(1 / (self.strength * task.counts()))
        wanted = one_hot(labels, classes).float() - labels.bincount(minlength=classes) / len(labels)
        solved = torch.linalg.solve((kernel(rows) + penalty).double(), wanted.double()).float()
        return lambda some: kernel(some) @ solved


class Trees(Composed):
    """Fits boosted trees to the leaked rows; the trees use histograms of the features.

    Source: Friedman 2001; Ke et al. 2017.

    Args:
        steps: number of boosting rounds, each with one tree per class (with two classes, one tree).
        options: options that all composed attacks have; see `Composed`.

    Raises:
        BadOptionError: the number of boosting rounds is below 1.
    """

    def __init__(self, steps: int = 50, **options: Any) -> None:
        require_range("steps", steps, 1)
        super().__init__(**self.defaults | options)
        self.steps = steps

    def learn(self, task: Task) -> Predict:
        from sklearn.ensemble import HistGradientBoostingClassifier

        least = max(1, min(20, len(task.rows) // (4 * task.classes)))
        model = HistGradientBoostingClassifier(
            max_iter=self.steps, min_samples_leaf=least, early_stopping=False, random_state=0
        )
        weights = None if task.weights is None else task.weights.numpy()
        model.fit(task.rows.numpy(), task.labels.numpy(), weights)
        return lambda some: as_scores(
            np.log(model.predict_proba(some.numpy()).clip(1e-12)), model.classes_, task.classes
        )


class Discriminant(Composed):
    """A linear discriminant: one Gaussian per class, with a common covariance of all rows.

    Expectation-maximisation also uses the unlabelled rows: each step computes their class
    probabilities; leaked rows keep their labels. The covariance comes from all rows, so the attack
    finds classes that differ in directions of little variance. If noise makes the classes overlap,
    unlabelled rows need a smaller weight; with few leaked rows, the covariance must be shrunk.

    Source: Nigam et al. 2000 (labelled and unlabelled rows; 5.3.1: their weight), applied in vfl to
    linear discriminants; Friedman 1989 (shrunken covariance).

    Args:
        steps: number of expectation-maximisation steps.
        weight: weight of an unlabelled row; a leaked row has weight 1.
        shrink: share of the covariance matrix that is replaced by a multiple of the identity
            matrix.
        columns: largest number of features; rows with more features are reduced to this many
            principal components.
        options: options that all composed attacks have; see `Composed`.

    Raises:
        BadOptionError: an option is out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.UNLABELLED})

    def __init__(
        self,
        steps: int = 30,
        columns: int = 64,
        weight: float = 1.0,
        shrink: float = 0.0,
        **options: Any,
    ) -> None:
        require_at_least(1, steps=steps, columns=columns)
        require_range("weight", weight, 0, 1)
        require_range("shrink", shrink, 0, 1)
        super().__init__(**self.defaults | options)
        self.steps, self.columns, self.weight, self.shrink = steps, columns, weight, shrink

    def learn(self, task: Task) -> Predict:
        rows, classes = task.rows, task.classes
        further = task.further() if self.weight else rows[:0]
        every = torch.cat([rows, further]).double()
        turn = None
        if every.shape[1] > self.columns:
            turn = principal(every)[2][:, : self.columns]
            every = every @ turn
        known = one_hot(task.labels, classes).double() * task.counts()[:, None]
        present = known.sum(0) > 0
        shares = torch.cat([known, torch.zeros(len(further), classes, dtype=torch.float64)])
        apart = torch.eye(every.shape[1], dtype=torch.float64)
        apart *= 1e-3 * every.var(0).mean().clamp_min(1e-12)  # lower limit of the variance

        def fitted(spread: Tensor | None) -> Predict:
            total = shares.sum(0).clamp_min(1e-12)
            means = shares.T @ every / total[:, None]
            if spread is None:
                away = every - shares @ means / shares.sum(1, keepdim=True)
                spread = (away * shares.sum(1, keepdim=True)).T @ away / total.sum()
                even = spread.diagonal().mean() * torch.eye(len(spread), dtype=torch.float64)
                spread = spread.lerp(even, self.shrink)
            factor = torch.linalg.cholesky(spread + apart)
            centres = torch.linalg.solve_triangular(factor, means.T, upper=False).T
            prior = (total / total.sum()).log() - centres.square().sum(1) / 2

            def predict(some: Tensor) -> Tensor:
                placed = torch.linalg.solve_triangular(factor, some.T, upper=False).T
                scores: Tensor = placed @ centres.T + prior
                return scores.masked_fill(~present, float(scores.min()) - 1)

            return predict

        found = fitted(torch.cov(every.T).reshape(apart.shape))
        for _ in range(self.steps if len(further) else 1):
            if len(further):
                shares[len(rows) :] = self.weight * found(every[len(rows) :]).softmax(1)
            found = fitted(None)
        return lambda some: found(some.double() if turn is None else some.double() @ turn).float()


Loss = Literal["cross_entropy", "robust"]
_QUALITY = 0.7  # exponent q of the robust loss
_HIDDEN = 256


class MLP(Composed):
    """Trains a network with one hidden layer on the leaked rows.

    Args:
        steps: Adam steps.
        learning_rate: Adam's learning rate.
        batch: number of rows in a batch, drawn with replacement; 0 uses all rows.
        recipe: whether to train a network of the top's architecture instead; if this network is
            linear, it starts with the class means as weights.
        loss: "robust": (1 - p^q) / q, where p is the predicted probability of the label and q =
            0.7; wrong labels influence this loss less than the cross-entropy (Zhang and Sabuncu
            2018).
        options: options that all composed attacks have; see `Composed`.

    Raises:
        BadOptionError: an option is out of range.
    """

    defaults: ClassVar[dict[str, Any]] = {"scaler": "standard"}
    mixes: ClassVar[bool] = True

    def __init__(
        self,
        steps: int = 300,
        learning_rate: float = 1e-3,
        batch: int = 256,
        recipe: bool = False,
        loss: Loss = "cross_entropy",
        **options: Any,
    ) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate, batch=batch)
        require_choice("loss", loss, get_args(Loss))
        super().__init__(**self.defaults | options)
        self.steps, self.learning_rate, self.batch = steps, learning_rate, batch
        self.recipe, self.loss = recipe, loss
        if recipe:
            self.needs |= {Grant.TOP_RECIPE}

    def learn(self, task: Task) -> Predict:
        assert task.draw is not None
        with scoped(key_of(task.draw)):
            network = self._network(task)
        rows, labels = task.rows, task.labels
        if isinstance(network, nn.Linear) and not task.taught and task.weights is None:
            start_at_means(network, rows, labels)
        if task.weights is not None:
            twice = task.weights > 1
            rows, labels = torch.cat([rows, rows[twice]]), torch.cat([labels, labels[twice]])
        if self.unlabelled == "mixmatch":
            fit_mixmatch(network, rows, labels, task.further(), task.classes, self.steps,
                         self.learning_rate, task.draw)  # fmt: skip
        else:
            loss = robust_loss if self.loss == "robust" else None
            fit(network, rows, labels, self.steps, self.learning_rate, task.draw,
                batch=self.batch, loss=loss)  # fmt: skip
        return lambda some: through(network, some)

    def _network(self, task: Task) -> nn.Module:
        width, last = task.rows.shape[1], task.classes
        if self.recipe:
            assert task.view is not None
            return task.view.new_top(width)
        return nn.Sequential(nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, last))


def robust_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of (1 - p^q) / q, where p is the probability of each row's label."""
    own = logits.log_softmax(1).gather(1, labels[:, None])
    return ((1 - (_QUALITY * own).exp()) / _QUALITY).mean()


def start_at_means(top: nn.Linear, known: Tensor, labels: Tensor) -> None:
    """Set a linear top's weights to each class's mean features, and its biases to zero."""
    with torch.no_grad():
        for code in range(top.out_features):
            top.weight[code] = known[labels == code].mean(0)
        top.bias.zero_()


class FineTuning(MLP):
    """Freezes the bottom and trains a top on the leaked rows.

    A linear top starts with the class means of the leaked features as weights; other tops start
    with random weights.

    Source: thesis section 4.4.1; Fu et al. 2022 (model completion).

    Args:
        steps: number of Adam steps; by default, each is on all leaked rows.
        learning_rate: Adam's learning rate.
        batch, recipe: see `MLP`.
        options: options of `MLP` and of all composed attacks; see `Composed`.

    Raises:
        BadOptionError: an option is out of range.
    """

    defaults: ClassVar[dict[str, Any]] = {"scaler": "none"}

    def __init__(
        self, steps: int = 200, learning_rate: float = 0.01, batch: int = 0, recipe: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(steps, learning_rate, batch, recipe, **options)


class SelfTraining(Logistic):
    """Fits logistic regression to leaked rows; then again, with confident guesses added.

    Under a defense, a few labels may be too few to find the classes, although the classes are still
    separate in the features. Unlabelled rows show where the classes are separate. A leaked row has
    twice the weight of a row with a guessed label.

    Args:
        options: options of `Logistic`; `scaler=whiten` also finds classes that differ in directions
            of low variance.
    """

    defaults: ClassVar[dict[str, Any]] = Logistic.defaults | {"unlabelled": "self_training"}


Student = Literal["linear", "top"]


class TeacherStudent(Logistic):
    """Trains a student on the bottom's features; its labels are a teacher's guesses.

    The teacher is a classifier that guesses from the inputs.

    The teacher's errors do not depend on the bottom's features. If the victim's top can distinguish
    the classes by these features, the student therefore learns the classes and not the errors.

    Args:
        student: "linear": a logistic regression with a strong penalty at first, which is then
            self-trained. "top": a network of the top's architecture, for classes that no linear
            boundary separates.
        options: options of `Logistic`.

    Raises:
        BadOptionError: an option is out of range.
    """

    defaults: ClassVar[dict[str, Any]] = SelfTraining.defaults | {"teacher": "propagation"}

    def __init__(self, student: Student = "linear", **options: Any) -> None:
        require_choice("student", student, get_args(Student))
        super().__init__(**options)
        self._network = MLP(recipe=True) if student == "top" else None
        if self._network is not None:
            self.needs |= self._network.needs - {Grant.CUTS}

    def learn(self, task: Task) -> Predict:
        return super().learn(task) if self._network is None else self._network.learn(task)
