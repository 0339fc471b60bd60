"""Randomised response: randomly replaces some training labels before any model uses them.

`LabelDP` randomises all labels once, before the training. `TwoStageLabelDP` randomises the labels
of some rows before the training, and those of the other rows later. By then the top has learned
from the first rows; its predictions are the prior probabilities with which the later labels are
randomised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vfl.compression import StepContext
from vfl.core.errors import BadOptionError, SpecError
from vfl.core.registry import require, require_range
from vfl.core.seeds import Secret
from vfl.defenses.base import (
    MOST_EPOCHS,
    MOST_EPSILON,
    Batch,
    Defense,
    LabelKind,
    refuse_hooks_on_labels,
    require_classes,
    require_equal_weights,
    require_uncalibrated,
)
from vfl.privacy import PrivacyStatement


class LabelDP(Defense):
    """Randomly replaces some training labels before the first step (Warner 1965).

    Without a prior, a label becomes another class with probability `flip`; all other classes are
    then equally likely. For K classes, epsilon = ln((1 - flip)(K - 1) / flip). With a public
    `prior`, the defense uses RRWithPrior (Ghazi et al. 2021, algorithm 2). RRWithPrior replaces
    labels only by one of the k most probable classes, where k maximises the expected share of
    labels that stay true.

    Validation and test labels stay exact. With two classes and no prior, the top learns from
    randomised labels: if it predicts q for class 1, the true probability of class 1 is (q - flip) /
    (1 - 2 flip).

    The guarantee holds for everything computed from the randomised labels: all epochs, messages and
    weights.

    Args:
        epsilon: epsilon of the guarantee for one row's label; it cannot be set together with
            `flip`.
        flip: probability of replacing a label by another class; it cannot be set together with
            `epsilon`.
        prior: publicly known share of each class, separated by dashes, in the sorted order of the
            classes; these shares must not come from the training labels.

    >>> defense = LabelDP(flip=0.1)
    >>> defense.prepare(LabelKind(classes=10))
    >>> round(defense.privacy()[0].epsilon, 4)  # ln(0.9 * 9 / 0.1)
    4.3944

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "label"
    once = True

    def __init__(
        self, epsilon: float | None = None, flip: float | None = None, prior: str | None = None
    ) -> None:
        if (epsilon is None) == (flip is None):
            raise BadOptionError(
                "randomised response needs one strength",
                want="'epsilon' or 'flip', not both",
                fix="label_dp:epsilon=2",
            )
        if epsilon is not None:
            require_range("epsilon", epsilon, 0, MOST_EPSILON)
        if flip is not None:
            require("flip", flip, "above 0 and below 1", 0 < flip < 1)
            require("prior", prior, "'epsilon' with it, not 'flip'", prior is None)
        self.epsilon = epsilon
        self.flip = flip
        self.prior = None if prior is None else _shares(prior)
        self._classes = 0
        self._flip = 0.0
        self._promised = epsilon

    def prepare(self, kind: LabelKind) -> None:
        classes = require_classes("label_dp", kind)
        require_uncalibrated("label_dp", kind)
        if self.prior is not None and self.prior.size != classes:
            raise SpecError(
                "the prior of 'label_dp' has another number of classes than the labels",
                got=f"{self.prior.size} shares",
                want=f"{classes}, joined by dashes",
            )
        if self.flip is not None and self.flip > 1 - 1 / classes:
            raise SpecError(
                f"'label_dp' flips labels more often than a random guess among {classes} classes",
                got=f"flip={self.flip:g}",
                want=f"at most {1 - 1 / classes:.4g}",
            )
        self._classes = classes
        if self.flip is not None:
            self._flip = self.flip
            self._promised = max(0.0, math.log((1 - self.flip) * (classes - 1) / self.flip))
        elif self.epsilon is not None:
            self._flip = flip_of(self.epsilon, classes)

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        assert self._classes, "prepare comes first"
        draws = secret.uniform((len(labels), 2), "label_dp")
        exact = labels.numpy()
        if self.prior is not None and self.epsilon is not None:
            answers = respond_with_prior(exact, self.prior, self.epsilon, draws)
        else:
            answers = respond(exact, self._classes, self._flip, draws)
        return torch.from_numpy(answers).to(labels.dtype)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = "all parties, in one training; a second training draws new noise"
        if self._promised is None:
            return (PrivacyStatement(protects="labels", against=against),)
        return (_promise(against, self._promised),)


def _promise(against: str, epsilon: float) -> PrivacyStatement:
    """Return the guarantee for a label, which also covers results computed from its noisy form."""
    return PrivacyStatement(
        "labels",
        against,
        epsilon,
        0.0,
        "label",
        relation="replace",
        accountant="randomised response",
    )


def flip_of(epsilon: float, classes: int) -> float:
    """Return the probability of replacing a label that gives randomised response this epsilon.

    >>> round(flip_of(math.log(9), classes=10), 4)  # 9 / (9 + 9)
    0.5
    """
    return (classes - 1) / (math.exp(min(epsilon, 700.0)) + classes - 1)


def respond(
    labels: np.ndarray, classes: int | np.ndarray, flip: float | np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """Replace some labels by other classes; all other classes are equally likely.

    Args:
        labels: class numbers, axes (rows,).
        classes: number of classes; an array has the number for each row, axes (rows,).
        flip: probability of replacing a label; an array has the probability for each row, axes
            (rows,).
        draws: uniform random numbers in [0, 1), axes (rows, 2).
    """
    shift = 1 + np.floor(draws[:, 1] * (classes - 1)).astype(labels.dtype)
    return np.where(draws[:, 0] < flip, (labels + shift) % classes, labels)


def respond_with_prior(
    labels: np.ndarray, priors: np.ndarray, epsilon: float, draws: np.ndarray
) -> np.ndarray:
    """Apply RRWithPrior: randomised response among the k most probable classes of each row.

    A label among these k classes stays with probability e^epsilon / (e^epsilon + k - 1); otherwise
    it becomes another of the k classes, each with equal probability. A label outside the k classes
    becomes any of the k classes with equal probability.

    Args:
        labels: class numbers, axes (rows,).
        priors: probabilities of the classes before the response, axes (rows, classes), or (1,
            classes) if all rows have the same probabilities.
        epsilon: epsilon of the guarantee for one row's label.
        draws: see `respond`.
    """
    order, counts = answers_of(priors, epsilon)
    of_row = np.arange(len(labels)) % len(order)
    index, count = np.argsort(order, axis=1)[of_row, labels], counts[of_row]
    flips = np.array([flip_of(epsilon, k) for k in range(1, priors.shape[1] + 1)])
    answers = respond(index, count, flips[count - 1], draws)
    anything = np.floor(draws[:, 1] * count).astype(answers.dtype)
    chosen: np.ndarray = order[of_row, np.where(index < count, answers, anything)]
    return chosen


def answers_of(priors: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's classes, most probable first, and the number k of classes to answer with.

    The returned k maximises the expected number of labels that stay true (Ghazi et al. 2021,
    algorithm 2). For priors of axes (rows, classes), the results have axes (rows, classes) and
    (rows,).
    """
    order = np.argsort(-priors, axis=1, kind="stable")
    reached = np.cumsum(np.take_along_axis(priors, order, axis=1), axis=1)
    kept = np.array([1 - flip_of(epsilon, k) for k in range(1, priors.shape[1] + 1)])
    return order, 1 + np.argmax(kept * reached, axis=1)


def _shares(text: str) -> np.ndarray:
    try:
        shares = [float(part) for part in text.split("-")]
    except ValueError:
        shares = []
    right = len(shares) > 1 and min(shares) >= 0 and abs(sum(shares) - 1) < 1e-3
    require("prior", text, "shares that add up to 1, such as 0.6-0.3-0.1", right)
    return np.array([shares])


class TwoStageLabelDP(Defense):
    """Randomises some labels before the first step, and the other labels later, with a prior.

    Late rows are the rows whose labels are randomised after the first stage. In the first stage,
    late rows have zero gradients, so no model learns from their labels. After the first stage, the
    label party randomises the labels of the late rows with RRWithPrior. The prior of a late row is
    the top's prediction for this row in the last epoch of the first stage. The second stage trains
    with all rows. The top does not learn from a late label before it is randomised, and every label
    is randomised exactly once. So epsilon holds for each label, as in `label_dp`: the priors and
    all messages are post-processing of labels that were randomised. The zero gradients show every
    feature party which rows are late.

    Source: Ghazi et al. 2021, "Deep learning with label differential privacy", LP-2ST, which is
    LP-MST with two stages. The paper computes the prior in a separate pass over the late rows. This
    class uses the top's outputs for the late rows in their training batches, so the label party
    sends no further message.

    Args:
        epsilon: epsilon of the guarantee for one row's label.
        epochs: number of epochs in the first stage; the training must have more epochs.
        share: share of the training rows whose labels are used in the first stage.

    >>> defense = TwoStageLabelDP(epsilon=2, epochs=1)
    >>> defense.prepare(LabelKind(classes=10))
    >>> answers = defense.labels(torch.arange(10), Secret.of_simulation(0, "lender"))
    >>> 0 < int(defense.counts(torch.arange(10), epoch=1).sum()) < 10
    True

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "label"
    rows_apart = True
    once = True

    def __init__(self, epsilon: float = 1.0, epochs: int = 5, share: float = 0.5) -> None:
        require_range("epsilon", epsilon, 0, MOST_EPSILON)
        require_range("epochs", epochs, 1, MOST_EPOCHS)
        require("share", share, "above 0 and below 1", 0 < share < 1)
        self.epsilon = epsilon
        self.epochs = epochs
        self.share = share
        self._classes = 0
        self._exact: np.ndarray | None = None
        self._answers = torch.empty(0, dtype=torch.int64)
        self._outputs = torch.empty(0)  # top's last output per row, in stage one
        self._indices: Tensor | None = None

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        what, cure = "'label_dp_two_stage' does not go", "label_dp, or it alone"
        refuse_hooks_on_labels(what, (*before, *after), cure, "labels")

    def prepare(self, kind: LabelKind) -> None:
        self._classes = require_classes("label_dp_two_stage", kind)
        require_equal_weights("label_dp_two_stage", kind)
        require_uncalibrated("label_dp_two_stage", kind)
        if kind.epochs is not None and kind.epochs <= self.epochs:
            raise SpecError(
                "the training ends before the second stage of 'label_dp_two_stage'",
                got=f"{kind.epochs} epochs",
                want=f"more than the {self.epochs} of the first stage",
                fix="fewer 'epochs' in the spec, or more in train.epochs",
            )

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        self._exact = labels.numpy()
        draws = secret.uniform((len(labels), 3), "label_dp_two_stage")
        self._draws = draws[:, 1:]
        self._late = draws[:, 0] >= self.share
        flip = flip_of(self.epsilon, self._classes)
        answers = respond(self._exact, self._classes, flip, self._draws)
        answers[self._late] = 0  # placeholders; no model learns from late rows
        self._answers = torch.from_numpy(answers).to(labels.dtype)
        self._outputs = torch.zeros(len(labels), self._classes)
        return self._answers.clone()

    def counts(self, indices: Tensor, epoch: int) -> Tensor | None:
        self._indices = indices
        if epoch > self.epochs and len(self._outputs):
            self._answer()
        return ~torch.from_numpy(self._late)[indices] if len(self._outputs) else None

    def batch(self, inputs: Tensor | None, labels: Tensor | None, context: StepContext) -> Batch:
        if labels is not None and self._indices is not None:
            labels = self._answers[self._indices]
        return inputs, labels

    def logits(self, logits: Tensor, context: StepContext) -> Tensor:
        if context.training and self._indices is not None and len(self._outputs):
            self._outputs[self._indices] = logits.detach().float().cpu()
        return logits

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = "all parties, in one training; a second training draws new noise"
        return (_promise(against, self.epsilon),)

    def state_dict(self) -> Mapping[str, Tensor]:
        return {"told": self._answers, "seen": self._outputs}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        answers = state["told"]
        if self._exact is not None and len(answers) != len(self._exact):
            raise SpecError(
                "'label_dp_two_stage' needs the same labels as in the first stage",
                got=f"{len(self._exact)} training rows",
                want=f"{len(answers)}, as in the first stage",
            )
        self._answers, self._outputs = answers.clone(), state["seen"].clone()

    def _answer(self) -> None:
        """Randomise the labels of the late rows; the top's predictions are the priors."""
        assert self._exact is not None, "labels comes first"
        late = self._late
        priors = torch.softmax(self._outputs.double(), dim=1).numpy()[late]
        answers = respond_with_prior(self._exact[late], priors, self.epsilon, self._draws[late])
        self._answers[torch.from_numpy(late)] = torch.from_numpy(answers).to(self._answers.dtype)
        self._outputs = self._outputs[:0]
