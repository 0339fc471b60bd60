"""scikit-learn's door: fit and predict on tables whose columns belong to several parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from vfl.config import Experiment
from vfl.config.toml import check
from vfl.datasets import PartyData, Split, split_rows
from vfl.datasets.partition import partition_columns
from vfl.datasets.rows import AlignedRows, Inputs, fit_inputs
from vfl.datasets.table import check_owners, pick_columns
from vfl.errors import DataError
from vfl.local import LocalSession
from vfl.server import EpochRecord

Columns = Sequence[str] | Sequence[int]


class VFLClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that several parties train together, all of them in this process.

    Every cut and gradient crosses as a real frame, so accuracy and bytes are those of a
    federation with the same settings.

    Args:
        parties: columns by party (names, globs or positions), or a number of parties that share
            the columns evenly in order.
        label_party: who holds the labels; if it is one of `parties`, it has columns too.
        codec, defense: specs, such as "randtopk:k=4,alpha=0.1" and "layer_norm".
        merge: "concat" or "sum" of the cuts.
        width: width of each party's cut.
        bottom, top: model specs.
        epochs, batch_rows: how long and how much at once.
        optimizer, learning_rate, momentum, weight_decay: the same at every party.
        validation: share of the rows held out to report on each epoch.
        random_state: an int makes the fit repeatable.

    Attributes:
        classes_: the labels, sorted.
        history_: one record an epoch.
        ledger_: what crossed in training.
        wire_ratio_: training bytes over dense float32 both ways.
        parties_: columns by party, as used.
    """

    def __init__(
        self,
        parties: Mapping[str, Columns] | int = 2,
        *,
        label_party: str = "label",
        codec: str = "none",
        defense: str = "none",
        merge: str = "concat",
        width: int = 32,
        bottom: str = "mlp:hidden=64",
        top: str = "mlp:hidden=64",
        epochs: int = 20,
        batch_rows: int = 64,
        optimizer: str = "adam",
        learning_rate: float = 2e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        validation: float = 0.0,
        random_state: int | None = None,
    ) -> None:
        self.parties = parties
        self.label_party = label_party
        self.codec = codec
        self.defense = defense
        self.merge = merge
        self.width = width
        self.bottom = bottom
        self.top = top
        self.epochs = epochs
        self.batch_rows = batch_rows
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.validation = validation
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> VFLClassifier:
        """Train on a table.

        Args:
            X: a frame, or an array of axes (rows, columns).
            y: one label a row.
        """
        frame = self._frame(X, y, reset=True)
        labels = column_or_1d(y)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                "the labels have nothing to tell apart", got="1 class", want="at least 2 classes"
            )
        self.parties_ = self._owners(frame)
        random = check_random_state(self.random_state)
        fixed = isinstance(self.random_state, int | np.integer)
        seed = int(self.random_state) if fixed else int(random.randint(2**31 - 1))  # type: ignore[arg-type]
        self._experiment = self._settings(seed)
        split = split_rows(len(frame), seed, self.validation, 0.0)
        rows = AlignedRows.of(len(frame), split)
        inputs = {name: fit_inputs(frame, own, split) for name, own in self.parties_.items()}
        self._encoders = {name: own.encoder for name, own in inputs.items()}
        data = rows.parties(inputs, self.label_party, codes.astype(np.int64), None)
        session = self._session(data, "train").run()
        self._weights = session.weights()
        self.history_: list[EpochRecord] = session.label.history
        self.ledger_ = session.ledger
        sent = self.ledger_.payload_bytes("train")
        dense = 8 * session.label.progress.train_rows * self.width * len(session.clients)
        self.wire_ratio_ = sent / dense
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest label of each row; axes (rows,)."""
        likeliest = self._outputs(X).argmax(dim=1).numpy()
        answer: np.ndarray = self.classes_[likeliest]
        return answer

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class; axes (rows, classes)."""
        answer: np.ndarray = torch.softmax(self._outputs(X).double(), dim=1).numpy()
        return answer

    def _outputs(self, X: Any) -> torch.Tensor:
        check_is_fitted(self)
        frame = self._frame(X, reset=False)
        none = np.empty(0, dtype=np.int64)
        rows = AlignedRows.of(len(frame), Split(none, none, np.arange(len(frame))))
        data = {self.label_party: rows.party(self.label_party)}
        for name, encoder in self._encoders.items():
            assert encoder is not None, "every party with columns has an encoder"
            data[name] = rows.party(name, Inputs(encoder.transform(frame), encoder))
        return self._session(data, "predict", weights=self._weights).run().outputs()

    def _session(self, data: Mapping[str, PartyData], mode: Any, **options: Any) -> LocalSession:
        outputs = len(self.classes_)
        return LocalSession(self._experiment, data, mode=mode, outputs=outputs, **options)

    def _settings(self, seed: int) -> Experiment:
        party = {"width": self.width, "bottom": self.bottom}
        content = {
            "name": "estimator",
            "seed": seed,
            "codec": self.codec,
            "defense": self.defense,
            "merge": self.merge,
            "parties": dict.fromkeys(self.parties_, party),
            "label": {"party": self.label_party, "top": self.top},
            "train": {
                "epochs": self.epochs,
                "batch_rows": self.batch_rows,
                "optimizer": self.optimizer,
                "learning_rate": self.learning_rate,
                "momentum": self.momentum,
                "weight_decay": self.weight_decay,
            },
        }
        return check(content, Experiment, where="the estimator's arguments")

    def _frame(self, X: Any, y: Any = None, *, reset: bool) -> pd.DataFrame:
        """X as a frame; scikit-learn checks arrays, our encoders check frames."""
        if isinstance(X, pd.DataFrame):
            validate_data(self, X, skip_check_array=True, reset=reset)
            return X.reset_index(drop=True).set_axis([str(name) for name in X.columns], axis=1)
        if reset:
            checked, _ = validate_data(self, X, y, dtype=np.float64)
        else:
            checked = validate_data(self, X, dtype=np.float64, reset=False)
        return pd.DataFrame(checked, columns=[f"x{i}" for i in range(checked.shape[1])])

    def _owners(self, frame: pd.DataFrame) -> dict[str, list[str]]:
        columns = list(frame.columns)
        if isinstance(self.parties, int):
            names = [f"party{number}" for number in range(1, self.parties + 1)]
            return partition_columns(columns, names)
        owners = {}
        for name, own in self.parties.items():
            names = [columns[c] if isinstance(c, int | np.integer) else c for c in own]
            owners[name] = pick_columns(frame.columns, names, f"party '{name}'")
        check_owners(owners)
        return owners
