"""A regressor with scikit-learn's contract."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import column_or_1d

from vfl.errors import DataError
from vfl.estimators.base import VFLEstimator
from vfl.estimators.tables import frame_of, weights_of


class VFLRegressor(RegressorMixin, VFLEstimator):  # type: ignore[misc]
    """A regressor that several parties train together, all of them in this process.

    The label party learns its numbers minus their mean and over their deviation, so that any unit
    will do; predictions and figures are in the unit of `y`.

    Args:
        parties: columns by party (names, globs or positions), or a number of parties that share
            the columns evenly in order.
        label_party: who holds the numbers; if it is one of `parties`, it has columns too.
        codec, defense: specs, such as "randtopk:k=4,alpha=0.1" and "layer_norm".
        merge: "concat" or "sum" of the cuts.
        secure: "sum" or "beaver" as in a federation; the label party then learns the sum alone.
        width: width of each party's cut.
        bottom, top: model specs.
        epochs, batch_rows: how long and how much at once.
        optimizer, learning_rate, momentum, weight_decay: the same at every party.
        patience: epochs without a lower validation loss after which `fit` stops; 0 never does.
        keep: "best" ends `fit` with the weights of the lowest validation loss, "last" as they are.
        validation: share of the rows held out to report on, and to judge by, each epoch.
        random_state: an int makes the fit repeatable.

    Attributes:
        history_: one record an epoch.
        ledger_: what crossed in training.
        wire_ratio_: training bytes over dense float32 both ways.
        parties_: columns by party, as used.
    """

    _task = "regression"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> VFLRegressor:
        """Train on a table from new weights.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: one number a row.
            sample_weight: how much each row counts in the training loss, not negative, axes
                (rows,); None counts all alike. A batch's loss is sum(w * loss) / sum(w).
        """
        frame = frame_of(self, X, y, reset=True)
        self._train(frame, _numbers(y), weights_of(sample_weight, frame))
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> VFLRegressor:
        """Train one epoch over these rows, going on from the current weights and optimiser.

        The first call, unless `fit` came before, makes new weights and fixes columns, the scales of
        columns and numbers, and every setting. As many calls with the same rows as `epochs` end
        where `fit` ends.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: one number a row.
            sample_weight: as in `fit`.
        """
        frame = frame_of(self, X, y, reset=not self._has_begun(), training=True)
        self._train_epoch(frame, _numbers(y), weights_of(sample_weight, frame))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The number of each row, in the unit of `y`; axes (rows,)."""
        answer: np.ndarray = self._outputs(X)[:, 0].numpy()
        return answer

    def _output_count(self) -> int:
        return 1


def _numbers(y: Any) -> np.ndarray:
    labels = column_or_1d(y, warn=True)
    try:
        with np.errstate(over="ignore"):
            numbers: np.ndarray = labels.astype(np.float32)
    except (TypeError, ValueError):
        raise DataError("y holds something that is no number", got=f"{labels.dtype}") from None
    if not np.isfinite(numbers).all():
        raise DataError("Input y contains NaN or infinity", want="numbers that float32 holds")
    return numbers
