"""A classifier and a regressor with scikit-learn's contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from vfl.core.errors import ConfigError, DataError
from vfl.estimators.base import VFLEstimator, frame_of, weights_of


@dataclass(eq=False, repr=False, kw_only=True)
class VFLClassifier(ClassifierMixin, VFLEstimator):  # type: ignore[misc]
    """Classifier that several parties train together in this process.

    Every cut and gradient travels as a real frame, so accuracy and bytes are those of a federation
    with the same settings.

    Args:
        parties: columns by party (names, globs or positions), or a number of parties with equal
            shares of the columns in order.
        label_party: party with the labels; if it is one of `parties`, it has columns too.
        codec, defense: specs, such as "randtopk:k=4,alpha=0.1" and "layer_norm".
        merge: spec of a merger of the cuts, such as "sum".
        secure: "sum" or "beaver" as in a federation; the label party then only learns the sum.
        width: width of each party's cut.
        bottom, top: model specs.
        epochs, batch_size: number of epochs, and rows of a batch.
        optimizer, schedule, learning_rate, momentum, weight_decay: settings of every party's
            optimiser.
        class_weight: "balanced", or weights by class, with 1 for missing classes; they multiply the
            weights of rows.
        calibration: "isotonic" or "platt" corrects probabilities by the validation rows at the end
            of `fit`.
        patience: epochs without a lower validation loss after which `fit` stops; 0 never does.
        keep: "best" ends `fit` with the weights of the lowest validation loss, "last" with the last
            ones.
        validation: share of held-out rows, for metrics and model selection in each epoch.
        random_state: an integer makes the fit repeatable.

    Attributes:
        classes_: sorted labels.
        history_: one record for each epoch.
        ledger_: traffic of the training.
        wire_ratio_: training bytes over dense float32 in both directions.
        parties_: columns by party, as used.
    """

    _task: ClassVar[str] = "classification"

    class_weight: Mapping[Any, float] | str | None = None
    calibration: str = "none"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> VFLClassifier:
        """Train on a table from new weights.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: labels, one for each row.
            sample_weight: weight of each row in the training loss, not negative, axes (rows,); None
                weighs all alike. A batch's loss is sum(w * loss) / sum(w).
        """
        frame = frame_of(self, X, y, reset=True)
        labels = labels_of(y)
        self.classes_ = at_least_two(np.unique(labels))
        weights = weights_of(sample_weight, frame)
        codes = self._codes(labels)
        self._train(frame, codes, self._weighted(codes, weights))
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> VFLClassifier:
        """Train one epoch on these rows, continuing from the current weights and optimiser.

        The first call, unless `fit` came before, initialises weights and fixes columns, their
        scales and every setting. `epochs` calls with the same rows give the result of `fit`.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: labels, one for each row.
            classes: all labels of all calls; required in the first call.
            sample_weight: see `fit`.

        Raises:
            DataError: the classes are missing, or differ from earlier ones.
            ConfigError: balanced class weights need all rows at once.
        """
        if self.class_weight == "balanced":
            raise ConfigError(
                "classes cannot be balanced before all rows are known",
                got='class_weight = "balanced"',
                want="weights by class",
            )
        begun = self._has_begun()
        frame = frame_of(self, X, y, reset=not begun, training=True)
        if not begun:
            self.classes_ = _known_classes(classes)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise DataError("these classes differ from those of the first call")
        weights = weights_of(sample_weight, frame)
        codes = self._codes(labels_of(y))
        self._train_epoch(frame, codes, self._weighted(codes, weights))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The most likely label of each row; axes (rows,)."""
        likeliest = self._outputs(X).argmax(dim=1).numpy()
        answer: np.ndarray = self.classes_[likeliest]
        return answer

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class; axes (rows, classes)."""
        answer: np.ndarray = torch.softmax(self._outputs(X).double(), dim=1).numpy()
        return answer

    def _output_count(self) -> int:
        return len(self.classes_)

    def _class_weight(self) -> str:
        by_class = self.class_weight is None or isinstance(self.class_weight, Mapping)
        return "none" if by_class else str(self.class_weight)

    def _codes(self, labels: np.ndarray) -> np.ndarray:
        codes = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        strange = int((self.classes_[codes] != labels).sum())
        if strange:
            raise DataError(
                "some labels are not among the classes", got=f"{strange} of {len(labels)} rows"
            )
        return codes.astype(np.int64)

    def _weighted(self, codes: np.ndarray, weights: np.ndarray | None) -> np.ndarray | None:
        """Weights of rows, multiplied by those of their classes."""
        if not isinstance(self.class_weight, Mapping):
            return weights
        strange = len(set(self.class_weight) - set(self.classes_.tolist()))
        if strange:
            raise DataError("class_weight names labels that are no classes", got=f"{strange} names")
        by_class = [float(self.class_weight.get(name, 1.0)) for name in self.classes_.tolist()]
        own: np.ndarray = np.array(by_class)[codes]
        return own if weights is None else own * weights


class VFLRegressor(RegressorMixin, VFLEstimator):  # type: ignore[misc]
    """Regressor that several parties train together in this process.

    The label party trains on standardised numbers, so that any unit is possible; predictions and
    metrics are in the unit of `y`.

    Args:
        parties: columns by party (names, globs or positions), or a number of parties with equal
            shares of the columns in order.
        label_party: party with the numbers; if it is one of `parties`, it has columns too.
        codec, defense: specs, such as "randtopk:k=4,alpha=0.1" and "layer_norm".
        merge: spec of a merger of the cuts, such as "sum".
        secure: "sum" or "beaver" as in a federation; the label party then only learns the sum.
        width: width of each party's cut.
        bottom, top: model specs.
        epochs, batch_size: number of epochs, and rows of a batch.
        optimizer, schedule, learning_rate, momentum, weight_decay: settings of every party's
            optimiser.
        patience: epochs without a lower validation loss after which `fit` stops; 0 never does.
        keep: "best" ends `fit` with the weights of the lowest validation loss, "last" with the last
            ones.
        validation: share of held-out rows, for metrics and model selection in each epoch.
        random_state: an integer makes the fit repeatable.

    Attributes:
        history_: one record for each epoch.
        ledger_: traffic of the training.
        wire_ratio_: training bytes over dense float32 in both directions.
        parties_: columns by party, as used.
    """

    _task: ClassVar[str] = "regression"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> VFLRegressor:
        """Train on a table from new weights.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: numbers, one for each row.
            sample_weight: weight of each row in the training loss, not negative, axes (rows,); None
                weighs all alike. A batch's loss is sum(w * loss) / sum(w).
        """
        frame = frame_of(self, X, y, reset=True)
        self._train(frame, numbers_of(y), weights_of(sample_weight, frame))
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> VFLRegressor:
        """Train one epoch on these rows, continuing from the current weights and optimiser.

        The first call, unless `fit` came before, initialises weights and fixes columns, the scales
        of columns and numbers, and every setting. `epochs` calls with the same rows give the result
        of `fit`.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: numbers, one for each row.
            sample_weight: see `fit`.
        """
        frame = frame_of(self, X, y, reset=not self._has_begun(), training=True)
        self._train_epoch(frame, numbers_of(y), weights_of(sample_weight, frame))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predicted number of each row, in the unit of `y`; axes (rows,)."""
        answer: np.ndarray = self._outputs(X)[:, 0].numpy()
        return answer

    def _output_count(self) -> int:
        return 1


def labels_of(y: Any) -> np.ndarray:
    """Labels of a classification, axes (rows,).

    Raises:
        DataError: some labels are missing.
    """
    labels: np.ndarray = column_or_1d(y)
    if missing := int(pd.isna(labels).sum()):
        raise DataError(
            "Input y contains NaN",
            got=f"{missing} of {len(labels)} labels are missing",
            want="a label for every row",
            fix="leave these rows out of X and y",
        )
    check_classification_targets(labels)
    return labels


def _known_classes(classes: Any) -> np.ndarray:
    if classes is None:
        raise DataError(
            "the first partial_fit needs the classes",
            fix="pass all of them as 'classes', also those of later calls",
        )
    return at_least_two(np.unique(classes))


def at_least_two(classes: np.ndarray) -> np.ndarray:
    """The classes.

    Raises:
        DataError: there are fewer than two classes.
    """
    if len(classes) < 2:
        raise DataError("the labels have only one class", got="1 class", want="at least 2 classes")
    return classes


def numbers_of(y: Any) -> np.ndarray:
    """Numbers of a regression, float32, axes (rows,).

    Raises:
        DataError: some values are not numbers, or are not finite.
    """
    labels = column_or_1d(y, warn=True)
    try:
        with np.errstate(over="ignore"):
            numbers: np.ndarray = labels.astype(np.float32)
    except (TypeError, ValueError):
        raise DataError("y contains a value that is no number", got=f"{labels.dtype}") from None
    if not np.isfinite(numbers).all():
        raise DataError("Input y contains NaN or infinity", want="numbers in the range of float32")
    return numbers
