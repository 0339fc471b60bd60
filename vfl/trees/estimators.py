"""scikit-learn estimators: boosted trees over tables whose columns belong to several parties."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pandas as pd
import torch

from vfl.config import Experiment
from vfl.core.errors import ConfigError
from vfl.datasets import split_rows
from vfl.datasets.table import TableFormat
from vfl.estimators.base import Columns, InProcessEstimator, frame_of, weights_of
from vfl.estimators.predictors import Classifier, Regressor, at_least_two, labels_of, numbers_of
from vfl.session.label import EpochRecord
from vfl.training.specs import checked
from vfl.training.whole_network import WholeNetworkSession
from vfl.trees.boosting import Forest
from vfl.trees.cells import within
from vfl.trees.explanation import gain_shares
from vfl.trees.mode import Trees

#: Characters that have a special meaning in a spec.
_OF_SPECS = frozenset(",/=:+")


@dataclass(eq=False, repr=False)
class VFLBoosting(InProcessEstimator):
    """Gradient boosting with all parties in this process; see `VFLBoostingClassifier`."""

    _form: ClassVar[TableFormat] = TableFormat(cells=True)
    _kind: ClassVar[Callable[..., Any]] = WholeNetworkSession
    objective: ClassVar[str] = "auto"

    parties: Mapping[str, Columns] | int = 2
    _: KW_ONLY
    label_party: str = "label"
    protect: Literal["order", "shared"] = "order"
    nodes: Literal["known", "hidden"] = "known"
    helper: str = "helper"
    epsilon: float | None = None
    n_estimators: int = 100
    learning_rate: float = 0.3
    max_depth: int = 6
    max_leaves: int = 0
    grow_policy: Literal["depthwise", "lossguide"] = "depthwise"
    max_bin: int = 255
    reg_lambda: float = 1.0
    reg_alpha: float = 0.0
    gamma: float = 0.0
    min_child_weight: float = 1.0
    max_delta_step: float | None = None
    subsample: float = 1.0
    colsample_bytree: float = 1.0
    own_rounds: int = 0
    monotone_constraints: Mapping[str, int] | None = None
    early_stopping_rounds: int = 0
    validation: float = 0.0
    random_state: int | None = None

    def _train(self, frame: pd.DataFrame, labels: np.ndarray, weights: np.ndarray | None) -> None:
        """Train a forest; `PartyData` describes the form of labels; weights have axes (rows,)."""
        self._start(frame)
        split = split_rows(len(frame), self._experiment.seed, self.validation, 0.0)
        data = self._data(split, self._fit_inputs(frame, split), labels, weights)
        session = self._session(data, "train").run()
        self._kept: dict[str, dict[str, torch.Tensor]] = session.weights()
        self.history_: list[EpochRecord] = session.label.history
        self.ledger_ = session.ledger
        self.feature_importances_ = self._gain_shares(list(frame.columns))

    def _gain_shares(self, names: list[Any]) -> np.ndarray:
        """Return each column's share of the total gain of all splits, axes (columns,)."""
        owners = {self.label_party: self.parties_.get(self.label_party, [])} | dict(self.parties_)
        order = [name for own in owners.values() for name in own]
        forest = Forest.of_state(within("share.", self._kept[self.label_party]))
        columns = np.array([split.column for split in forest.splits], np.int64)
        shares, found = gain_shares(forest, columns, len(order)), np.zeros(len(names))
        np.add.at(found, [names.index(name) for name in order], shares)
        return found

    def _weights(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return self._kept

    def _settings(self, seed: int) -> Experiment:
        patience = self.early_stopping_rounds
        content = {
            "name": "estimator",
            "seed": seed,
            "model": self._spec(),
            "parties": {name: {} for name in self.parties_},
            "label": {"party": self.label_party, "task": self._task, **self._of_label()},
            "train": {
                "epochs": self.n_estimators,
                "patience": patience,
                "keep": "best" if patience else "last",
            },
            "data": {"validation": self.validation, "test": 0.0},
        }
        return checked(content, "the estimator's arguments")

    def _of_label(self) -> dict[str, str]:
        """Return the label settings for this kind of task (classes or numbers)."""
        return {}

    def _spec(self) -> str:
        """Return the model's options as a spec string."""
        signs = self.monotone_constraints or {}
        if strange := [name for name in signs if _OF_SPECS & set(name)]:
            raise ConfigError(
                "a constraint cannot be set for a column with this name",
                where="monotone_constraints",
                got=f"{len(strange)} names that contain one of {' '.join(sorted(_OF_SPECS))}",
                fix="rename the column",
            )
        given = {name: getattr(self, name, None) for name in inspect.signature(Trees).parameters}
        for option, sign in (("rising", 1), ("falling", -1)):
            given[option] = "/".join(name for name, own in signs.items() if own == sign) or None
        options = [f"{name}={value}" for name, value in given.items() if value is not None]
        return f"trees:{','.join(options)}"


class VFLBoostingClassifier(Classifier, VFLBoosting):
    """Gradient boosting over columns of several parties, all in this process.

    With protect="order", the label party receives the bin number of each cell, grows all trees, and
    sends each feature party the splits on that party's columns (`vfl.trees.ends`). Names of the
    parameters are those of XGBoost.

    Args:
        parties: columns of each party (names, globs or positions), or a number of parties that
            share the columns evenly in order.
        label_party: name of the party that holds the labels; it also has columns if `parties`
            contains it.
        protect, nodes, helper, epsilon: see `vfl.trees.mode.Trees`.
        n_estimators, learning_rate, max_depth, max_leaves, grow_policy: parameters of XGBoost.
        max_bin: parameter of XGBoost. With the default of 255 and one bin for missing cells, a bin
            number fits in one byte.
        reg_lambda, reg_alpha, gamma, min_child_weight, max_delta_step: parameters of XGBoost.
        subsample, colsample_bytree: parameters of XGBoost.
        own_rounds: number of boosting rounds, from the first one, whose trees split only on the
            label party's columns.
        monotone_constraints: column -> -1 or 1: the prediction may only fall, or only rise, with
            the column.
        early_stopping_rounds: number of rounds without a lower validation loss after which boosting
            stops and keeps the trees up to the best round; 0 never stops.
        validation: share of the training rows that is held out to measure the validation loss after
            each round.
        calibration: "isotonic" or "platt" calibrates probabilities on the validation rows at the
            end of `fit`.
        random_state: an int makes the random sampling of rows and columns repeatable.

    Attributes:
        classes_: the labels, sorted.
        feature_importances_: each column's share of the total gain of all splits, axes (columns,);
            XGBoost's `total_gain`, normalised.
        history_: one record of metrics per round.
        ledger_: record of the messages that parties exchanged in training.
        parties_: column names of each party, as used in training.

    Examples:
        >>> from sklearn.datasets import load_breast_cancer
        >>> X, y = load_breast_cancer(return_X_y=True)
        >>> model = VFLBoostingClassifier(2, n_estimators=10, random_state=0).fit(X[:400], y[:400])
        >>> model.score(X[400:], y[400:]) > 0.9
        True
    """

    calibration: str = "none"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on a table.

        Args:
            X: a DataFrame, or an array of axes (rows, columns); NaN and None are missing cells.
            y: one label per row.
            sample_weight: weight of each row, not negative, axes (rows,).
        """
        frame = frame_of(self, X, y, reset=True)
        labels = labels_of(y)
        self.classes_ = at_least_two(np.unique(labels))
        codes = np.searchsorted(self.classes_, labels)
        self._train(frame, codes, weights_of(sample_weight, frame))
        return self

    def _of_label(self) -> dict[str, str]:
        return {"calibration": self.calibration}


@dataclass(eq=False, repr=False, kw_only=True)
class VFLBoostingRegressor(Regressor, VFLBoosting):
    """Gradient boosting for numeric labels or counts; for arguments, see `VFLBoostingClassifier`.

    Args:
        objective: "auto" for squared error, or "poisson" for counts.
    """

    objective: Literal["auto", "poisson"] = "auto"  # type: ignore[misc]

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on a table.

        Args:
            X: a DataFrame, or an array of axes (rows, columns); NaN and None are missing cells.
            y: one number per row; not negative for "poisson".
            sample_weight: weight of each row, not negative, axes (rows,).
        """
        frame = frame_of(self, X, y, reset=True)
        self._train(frame, numbers_of(y), weights_of(sample_weight, frame))
        return self
