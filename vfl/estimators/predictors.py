"""A classifier and a regressor with the interface of scikit-learn."""

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
from vfl.estimators.base import InProcessEstimator, VFLEstimator, frame_of, weights_of


class Classifier(ClassifierMixin, InProcessEstimator):  # type: ignore[misc]
    """Base class of classifiers.

    Attributes:
        classes_: sorted labels.
    """

    _task: ClassVar[str] = "classification"

    classes_: np.ndarray

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each row; axes (rows,)."""
        likeliest = self._outputs(X).argmax(dim=1).numpy()
        answer: np.ndarray = self.classes_[likeliest]
        return answer

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class; axes (rows, classes)."""
        answer: np.ndarray = torch.softmax(self._outputs(X).double(), dim=1).numpy()
        return answer

    def _output_count(self) -> int:
        return len(self.classes_)


class Regressor(RegressorMixin, InProcessEstimator):  # type: ignore[misc]
    """Base class of regressors."""

    _task: ClassVar[str] = "regression"

    def predict(self, X: Any) -> np.ndarray:
        """Return the predicted number of each row, in the unit of `y`; axes (rows,)."""
        answer: np.ndarray = self._outputs(X)[:, 0].numpy()
        return answer

    def _output_count(self) -> int:
        return 1


@dataclass(eq=False, repr=False, kw_only=True)
class VFLClassifier(Classifier, VFLEstimator):
    """Classifier that several parties train together in this process.

    Every cut and gradient is sent as a real frame, so accuracy and number of bytes are those of a
    federation with the same settings.

    Args:
        parties: names, patterns or positions of columns by party; or a number of parties that get
            blocks of columns in the table's order, as equal as possible.
        label_party: party that has the labels; if it is one of `parties`, it also has columns.
        codec, defense: specs of the codec and of the defense, such as "randtopk:k=4,alpha=0.1" and
            "layer_norm".
        merge: spec of the merger, which makes the top model's input from the cuts, such as "sum".
        secure: "sum" or "beaver", secure modes as in a federation; the label party then learns only
            the sum of the cuts.
        width: number of values per row in each party's cut.
        bottom, top: model specs.
        epochs, batch_size: number of epochs, and number of rows in a batch.
        optimizer, schedule, learning_rate, momentum, weight_decay: settings of every party's
            optimiser.
        class_weight: "balanced", or weights by class (1 for classes that are not listed), which are
            multiplied with the weights of rows.
        calibration: "isotonic" or "platt" corrects the probabilities with the validation rows at
            the end of `fit`.
        patience: number of epochs without a lower validation loss after which `fit` stops; 0 means
            that it never stops early.
        keep: "best" keeps the weights of the epoch with the lowest validation loss; "last" keeps
            the weights of the last epoch.
        validation: fraction of the rows that is held out from training, for metrics and model
            selection in each epoch.
        random_state: seed of all random draws; an integer makes the fit repeatable.

    Attributes:
        classes_: sorted labels.
        history_: one record of metrics for each epoch.
        ledger_: ledger with the traffic of the training.
        wire_ratio_: payload bytes of the training, divided by the bytes of dense float32 values in
            both directions.
        parties_: names of the columns that each party had in the training, by party.
    """

    class_weight: Mapping[Any, float] | str | None = None
    calibration: str = "none"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> VFLClassifier:
        """Train on a table, starting from new weights.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: labels, one for each row.
            sample_weight: weight of each row in the training loss, not negative, axes (rows,); with
                None, all rows have the same weight. The loss of a batch is sum(w * loss) / sum(w).
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
        """Train for one epoch on these rows, starting from the current weights and optimiser state.

        If `fit` was not called before, the first call initialises the weights, and fixes the
        columns, the columns' scales and all settings. Calling `partial_fit` `epochs` times with the
        same rows gives the same result as `fit`.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: labels, one for each row.
            classes: all labels that occur in any call of `partial_fit`; required in the first call.
            sample_weight: see `fit`.

        Raises:
            DataError: the first call has no classes, the classes differ from those of the first
                call, or a label is not among the classes.
            ConfigError: classes cannot be balanced, because this needs the frequencies of all rows;
                or the settings need validation rows.
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
        """Return the weights of rows, multiplied by the weights of the rows' classes."""
        if not isinstance(self.class_weight, Mapping):
            return weights
        strange = len(set(self.class_weight) - set(self.classes_.tolist()))
        if strange:
            raise DataError(
                "class_weight has labels that are not among the classes", got=f"{strange} names"
            )
        by_class = [float(self.class_weight.get(name, 1.0)) for name in self.classes_.tolist()]
        own: np.ndarray = np.array(by_class)[codes]
        return own if weights is None else own * weights


class VFLRegressor(Regressor, VFLEstimator):
    """Regressor that several parties train together in this process.

    The label party trains on standardised numbers, so `y` may have any unit; predictions and
    metrics are in the unit of `y`.

    Args:
        parties: names, patterns or positions of columns by party; or a number of parties that get
            blocks of columns in the table's order, as equal as possible.
        label_party: party with the numbers to predict; if it is one of `parties`, it also has
            columns.
        codec, defense: specs of the codec and of the defense, such as "randtopk:k=4,alpha=0.1" and
            "layer_norm".
        merge: spec of the merger, which makes the top model's input from the cuts, such as "sum".
        secure: "sum" or "beaver", secure modes as in a federation; the label party then learns only
            the sum of the cuts.
        width: number of values per row in each party's cut.
        bottom, top: model specs.
        epochs, batch_size: number of epochs, and number of rows in a batch.
        optimizer, schedule, learning_rate, momentum, weight_decay: settings of every party's
            optimiser.
        patience: number of epochs without a lower validation loss after which `fit` stops; 0 means
            that it never stops early.
        keep: "best" keeps the weights of the epoch with the lowest validation loss; "last" keeps
            the weights of the last epoch.
        validation: fraction of the rows that is held out from training, for metrics and model
            selection in each epoch.
        random_state: seed of all random draws; an integer makes the fit repeatable.

    Attributes:
        history_: one record of metrics for each epoch.
        ledger_: ledger with the traffic of the training.
        wire_ratio_: payload bytes of the training, divided by the bytes of dense float32 values in
            both directions.
        parties_: names of the columns that each party had in the training, by party.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> VFLRegressor:
        """Train on a table, starting from new weights.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: numbers to predict, one for each row.
            sample_weight: weight of each row in the training loss, not negative, axes (rows,); with
                None, all rows have the same weight. The loss of a batch is sum(w * loss) / sum(w).
        """
        frame = frame_of(self, X, y, reset=True)
        self._train(frame, numbers_of(y), weights_of(sample_weight, frame))
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> VFLRegressor:
        """Train for one epoch on these rows, starting from the current weights and optimiser state.

        If `fit` was not called before, the first call initialises the weights, and fixes the
        columns, the scales of columns and of `y`, and all settings. Calling `partial_fit` `epochs`
        times with the same rows gives the same result as `fit`.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: numbers to predict, one for each row.
            sample_weight: see `fit`.

        Raises:
            ConfigError: the settings need validation rows.
        """
        frame = frame_of(self, X, y, reset=not self._has_begun(), training=True)
        self._train_epoch(frame, numbers_of(y), weights_of(sample_weight, frame))
        return self


def labels_of(y: Any) -> np.ndarray:
    """Return the labels of a classification, axes (rows,).

    Raises:
        DataError: `y` lacks a label for at least one row.
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
    """Return the classes unchanged, after a check of their number.

    Raises:
        DataError: the labels have fewer than two classes.
    """
    if len(classes) < 2:
        what, got = ("only one class", "1 class") if len(classes) else ("no class", "0 classes")
        raise DataError(f"the labels have {what}", got=got, want="at least 2 classes")
    return classes


def numbers_of(y: Any) -> np.ndarray:
    """Return the numbers to predict in a regression, float32, axes (rows,).

    Raises:
        DataError: a value of `y` is not a number, or is not finite.
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
