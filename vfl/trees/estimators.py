"""scikit-learn: boosted trees over tables whose columns belong to several parties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from vfl.core.errors import ConfigError, DataError
from vfl.core.traffic import Ledger
from vfl.datasets import split_rows
from vfl.estimators.base import Columns, frame_of, owners_of, weights_of
from vfl.estimators.predictors import at_least_two, labels_of, numbers_of
from vfl.transport.link import Observed, local_pair
from vfl.trees.bins import MAX_BINS, fit_bins
from vfl.trees.boosting import Boosting
from vfl.trees.grow import Growth, Layout
from vfl.trees.objectives import Binary, Classes, Objective, Poisson, Squared
from vfl.trees.parties import Booster, Owner


@dataclass(eq=False, repr=False)
class VFLBoosting(BaseEstimator):  # type: ignore[misc]
    """Boosts trees with parties that are all in this process; see `VFLBoostingClassifier`."""

    parties: Mapping[str, Columns] | int = 2
    _: KW_ONLY
    label_party: str = "label"
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
    monotone_constraints: Mapping[str, int] | None = None
    early_stopping_rounds: int = 0
    validation: float = 0.0
    random_state: int | None = None

    def _fit(
        self, frame: pd.DataFrame, labels: np.ndarray, weights: np.ndarray | None, loss: Objective
    ) -> None:
        """Grow a forest; labels as the objective has them, axes (rows,)."""
        self._check()
        weights = np.ones(len(frame)) if weights is None else weights
        if not (weights >= 0).all() or not weights.any():
            raise DataError(
                "weights of rows are negative, or all zero",
                where="sample_weight",
                got="a negative weight" if weights.any() else "zeros alone",
                want="no weight below 0, and one above",
            )
        self.parties_ = owners_of(self.parties, list(frame.columns))
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        split = split_rows(len(frame), int(seed), self.validation, 0.0)
        train = np.sort(split.train)
        self._binnings = {
            name: fit_bins(frame.iloc[train], own, self.max_bin)
            for name, own in self.parties_.items()
        }
        # A cell of a validation row is sent as well: it decides when boosting stops.
        self.ledger_ = Ledger()
        self.ledger_.phase = "train"
        self._booster, self._owners = self._connected(frame)
        for name, owner in self._owners.items():
            owner.send_bins(self._binnings[name].transform(frame))
        self._booster.train(
            self._settings(int(seed)), loss, labels,
            weights,
            train, np.sort(split.validation),
        )  # fmt: skip
        for owner in self._owners.values():
            owner.receive_splits()
        forest = self._booster.forest
        assert forest is not None
        self.history_ = forest.history
        self._objective = loss

    def _connected(self, frame: pd.DataFrame) -> tuple[Booster, dict[str, Owner]]:
        """The label party and the feature parties, connected with links that are counted."""
        links, owners = {}, {}
        own: tuple[np.ndarray, Layout] | None = None
        for name, binning in self._binnings.items():
            if name == self.label_party:
                own = binning.transform(frame), binning.layout
                continue
            at_label, at_owner = local_pair()
            links[name] = Observed(at_label, name, "label", [self.ledger_])
            owners[name] = Owner(binning, at_owner, self.epsilon)
        return Booster(links, own), owners

    def _settings(self, seed: int) -> Boosting:
        columns = [name for own in self._columns_in_order() for name in own]
        signs = self.monotone_constraints or {}
        growth = Growth(
            max_depth=self.max_depth,
            max_leaves=self.max_leaves,
            grow_policy=self.grow_policy,
            learning_rate=self.learning_rate,
            reg_lambda=self.reg_lambda,
            reg_alpha=self.reg_alpha,
            gamma=self.gamma,
            min_child_weight=self.min_child_weight,
            max_delta_step=self._delta_step(),
            monotone=tuple(signs.get(name, 0) for name in columns) if signs else (),
        )
        return Boosting(
            growth,
            self.n_estimators,
            self.subsample,
            self.colsample_bytree,
            self.early_stopping_rounds,
            seed,
        )

    def _delta_step(self) -> float:
        return self.max_delta_step or 0.0

    def _columns_in_order(self) -> list[list[str]]:
        """Names of columns as histograms have them: the label party's first."""
        own = self.parties_.get(self.label_party, [])
        return [own, *(names for name, names in self.parties_.items() if name != self.label_party)]

    def _margins(self, X: Any) -> np.ndarray:
        """What the forest adds up to for each row, axes (rows, outputs)."""
        check_is_fitted(self)
        frame = frame_of(self, X, reset=False)
        self.ledger_.phase = "predict"
        for name, owner in self._owners.items():
            owner.answer(self._binnings[name].transform(frame))
        own = self._binnings.get(self.label_party)
        return self._booster.margins(len(frame), own.transform(frame) if own else None)

    def _check(self) -> None:
        """Refuse what no training can be made of.

        Raises:
            ConfigError: an argument out of its range.
        """
        wrong = [
            f"{name} = {got!r}, want {want}"
            for name, got, fits, want in (
                ("n_estimators", self.n_estimators, self.n_estimators >= 1, "1 or more"),
                ("learning_rate", self.learning_rate, self.learning_rate > 0, "more than 0"),
                ("max_depth", self.max_depth, self.max_depth >= 0, "0 or more"),
                ("max_leaves", self.max_leaves, self.max_leaves >= 0, "0 or more"),
                (
                    "max_leaves",
                    self.max_leaves,
                    self.max_depth > 0 or self.max_leaves > 0,
                    "a bound on leaves or on depth",
                ),
                ("max_bin", self.max_bin, 2 <= self.max_bin <= MAX_BINS, f"2 to {MAX_BINS}"),
                ("subsample", self.subsample, 0 < self.subsample <= 1, "above 0, up to 1"),
                (
                    "colsample_bytree",
                    self.colsample_bytree,
                    0 < self.colsample_bytree <= 1,
                    "above 0, up to 1",
                ),
                ("epsilon", self.epsilon, self.epsilon is None or self.epsilon > 0, "above 0"),
                (
                    "early_stopping_rounds",
                    self.early_stopping_rounds,
                    not self.early_stopping_rounds or self.validation > 0,
                    "0, or a validation share to judge by",
                ),
            )
            if not fits
        ]
        if wrong:
            raise ConfigError("arguments of the estimator", got="; ".join(wrong))


class VFLBoostingClassifier(ClassifierMixin, VFLBoosting):  # type: ignore[misc]
    """Gradient boosting over columns of several parties, all of them in this process.

    The label party gets the number of each cell's bin, grows all trees and tells each party which
    of its bins were split (`vfl.trees.parties`). Names of parameters are XGBoost's.

    Args:
        parties: columns by party (names, globs or positions), or a number of parties that share
            the columns evenly in order.
        label_party: who holds the labels; if it is one of `parties`, it has columns too.
        epsilon: of the randomised response on each cell that a feature party sends: local
            differential privacy, and a row spends it for each of that party's columns. None sends
            bins as they are.
        n_estimators, learning_rate, max_depth, max_leaves, grow_policy, max_bin, reg_lambda,
            reg_alpha, gamma, min_child_weight, max_delta_step, subsample, colsample_bytree,
            early_stopping_rounds: as in XGBoost. 255 bins and the missing cells fit a byte.
        monotone_constraints: column -> -1 or 1, the sign with which the outcome may change.
        validation: share of the rows held out to judge each round by.
        random_state: an int makes the draws of rows and columns repeatable; those of `epsilon`
            never are.

    Attributes:
        classes_: the labels, sorted.
        history_: one `Round` each.
        ledger_: what crossed.
        parties_: columns by party, as used.

    Examples:
        >>> from sklearn.datasets import load_breast_cancer
        >>> X, y = load_breast_cancer(return_X_y=True)
        >>> model = VFLBoostingClassifier(2, n_estimators=10, random_state=0).fit(X[:400], y[:400])
        >>> model.score(X[400:], y[400:]) > 0.9
        True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on a table.

        Args:
            X: a frame, or an array of axes (rows, columns); NaN and None are missing cells.
            y: one label a row.
            sample_weight: how much each row counts, not negative, axes (rows,).
        """
        frame = frame_of(self, X, y, reset=True)
        labels = labels_of(y)
        self.classes_ = at_least_two(np.unique(labels))
        codes, count = np.searchsorted(self.classes_, labels), len(self.classes_)
        loss = Binary() if count == 2 else Classes(count)
        self._fit(frame, codes, weights_of(sample_weight, frame), loss)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class; axes (rows, classes)."""
        margins = self._margins(X)
        return self._objective.outcome(margins)

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest label of each row; axes (rows,)."""
        likeliest = self.predict_proba(X).argmax(axis=1)
        found: np.ndarray = self.classes_[likeliest]
        return found


@dataclass(eq=False, repr=False, kw_only=True)
class VFLBoostingRegressor(RegressorMixin, VFLBoosting):  # type: ignore[misc]
    """Gradient boosting of numbers or counts; see `VFLBoostingClassifier` for its arguments.

    Args:
        objective: "squared_error", or "poisson" for counts.
    """

    objective: Literal["squared_error", "poisson"] = "squared_error"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on a table.

        Args:
            X: a frame, or an array of axes (rows, columns); NaN and None are missing cells.
            y: one number a row; for "poisson" not negative.
            sample_weight: how much each row counts, not negative, axes (rows,).
        """
        frame = frame_of(self, X, y, reset=True)
        squared = self.objective == "squared_error"
        loss = Squared() if squared else Poisson(max_delta_step=self._delta_step())
        self._fit(frame, numbers_of(y).astype(float), weights_of(sample_weight, frame), loss)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The expected number of each row; axes (rows,)."""
        margins = self._margins(X)
        return self._objective.outcome(margins)

    def _delta_step(self) -> float:
        usual = 0.7 if self.objective == "poisson" else 0.0
        return usual if self.max_delta_step is None else self.max_delta_step
