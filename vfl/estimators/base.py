"""Common code of classifier and regressor: settings, tables, sessions in this process, outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from vfl.config import DataSettings, Experiment, LabelSettings, PartySettings, TrainSettings
from vfl.config.toml import Settings
from vfl.core.errors import ConfigError, DataError, MissingColumnError
from vfl.datasets import PartyData, Split, split_rows
from vfl.datasets.encode import TextColumn
from vfl.datasets.load import fit_inputs, partition_columns
from vfl.datasets.party import NO_INPUTS, AlignedRows, Inputs
from vfl.datasets.table import (
    TableFormat,
    check_names,
    check_owners,
    misread,
    name_of,
    pick_columns,
)
from vfl.session.label import EpochRecord
from vfl.session.schedule import one_epoch
from vfl.training.local import LocalSession
from vfl.training.specs import checked

Columns = Sequence[str] | Sequence[int]


class InProcessEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of estimators that run all parties in the calling process."""

    _task: ClassVar[str]
    _form: ClassVar[TableFormat] = TableFormat()
    _kind: ClassVar[Callable[..., Any]] = LocalSession

    parties: Mapping[str, Columns] | int
    random_state: int | None

    def _output_count(self) -> int:
        """Return the number of outputs of the top model."""
        raise NotImplementedError

    def _settings(self, seed: int) -> Experiment:
        """Return the experiment with the settings that the estimator's arguments describe."""
        raise NotImplementedError

    def _weights(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Return the trained weights by party, and then by name of the weight."""
        raise NotImplementedError

    def _start(self, frame: pd.DataFrame) -> None:
        """Set the columns of each party and the experiment, which all epochs of a training use."""
        self.parties_ = owners_of(self.parties, list(frame.columns))
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        self._experiment = self._settings(int(seed))

    def _outputs(self, X: Any) -> torch.Tensor:
        """Return the top model's outputs for each row; axes (rows, outputs)."""
        check_is_fitted(self)
        frame = frame_of(self, X, reset=False)
        none = np.empty(0, dtype=np.int64)
        data = self._data(Split(none, none, np.arange(len(frame))), self._inputs(frame))
        session = self._session(data, "predict", weights=self._weights())
        outputs: torch.Tensor = session.run().outputs()
        return outputs

    def _fit_inputs(self, frame: pd.DataFrame, split: Split) -> dict[str, Inputs]:
        inputs = {
            name: fit_inputs(frame, own, split, form=self._form)
            for name, own in self.parties_.items()
        }
        for name, own in inputs.items():
            for column in getattr(own.encoder, "columns", ()):
                texts = column.categories if isinstance(column, TextColumn) else ()
                if why := misread(column.name, texts):
                    told = f"column '{column.name}' of '{name}' is read as categories, but {why}"
                    warnings.warn(told, UserWarning, stacklevel=4)
        self._encoders = {name: own.encoder for name, own in inputs.items()}
        return inputs

    def _inputs(self, frame: pd.DataFrame) -> dict[str, Inputs]:
        inputs = {}
        for name, encoder in self._encoders.items():
            assert encoder is not None, "every party with columns has an encoder"
            inputs[name] = Inputs(encoder.transform(frame), encoder)
        return inputs

    def _data(
        self,
        split: Split,
        inputs: Mapping[str, Inputs],
        labels: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> dict[str, PartyData]:
        rows = AlignedRows.of(sum(map(len, (split.train, split.validation, split.test))), split)
        label = self._experiment.label.party
        data = {name: rows.party(name, own) for name, own in inputs.items()}
        data[label] = rows.party(label, inputs.get(label, NO_INPUTS), labels)
        if weights is not None:
            data[label] = replace(data[label], row_weights=torch.from_numpy(weights))
        return data

    def _session(self, data: Mapping[str, PartyData], mode: Any, **options: Any) -> Any:
        outputs = self._output_count()
        return self._kind(self._experiment, data, mode=mode, outputs=outputs, **options)


@dataclass(eq=False, repr=False)
class VFLEstimator(InProcessEstimator):
    """Base class that runs all parties in one process; `VFLClassifier` documents its arguments."""

    parties: Mapping[str, Columns] | int = 2
    _: KW_ONLY
    label_party: str = "label"
    codec: str = "none"
    defense: str = "none"
    merge: str = "concat"
    secure: str = "none"
    width: int = 32
    bottom: str = "mlp:hidden=64"
    top: str = "mlp:hidden=64"
    epochs: int = 20
    batch_size: int = 64
    optimizer: str = "adam"
    schedule: str = "none"
    learning_rate: float = 2e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    patience: int = 0
    keep: str = "last"
    validation: float = 0.0
    random_state: int | None = None

    def _class_weight(self) -> str:
        """Return the setting `label.class_weight` of the label party."""
        return "none"

    def _train(self, frame: pd.DataFrame, labels: np.ndarray, weights: np.ndarray | None) -> None:
        """Train all epochs from new weights; labels are as in `PartyData`, axes (rows,)."""
        self._start(frame)
        split = split_rows(len(frame), self._experiment.seed, self.validation, 0.0)
        data = self._data(split, self._fit_inputs(frame, split), labels, weights)
        self._keep(self._session(data, "train").run())

    def _train_epoch(
        self, frame: pd.DataFrame, labels: np.ndarray, weights: np.ndarray | None
    ) -> None:
        """Train one epoch on these rows, from the weights of earlier epochs if there are any.

        Raises:
            ConfigError: the settings need validation rows, but `partial_fit` uses all rows for
                training.
        """
        calibration = getattr(self, "calibration", "none")
        if self.patience or self.keep == "best" or calibration != "none":
            raise ConfigError(
                "partial_fit holds no rows out for validation, which these settings need",
                got=f"patience = {self.patience}, keep = '{self.keep}', "
                f"calibration = '{calibration}'",
                want="fit, or patience = 0, keep = 'last' and calibration = 'none'",
            )
        none = np.empty(0, dtype=np.int64)
        split = Split(np.arange(len(frame)), none, none)
        if self._has_begun():
            inputs, states = self._inputs(frame), self._states
            epoch, step = self.history_[-1]["epoch"] + 1, self._step
        else:
            self._start(frame)
            inputs, states = self._fit_inputs(frame, split), None
            epoch, step = 1, 0
        session = self._session(self._data(split, inputs, labels, weights), "train")
        rows = self._experiment.train.batch_size
        schedule = one_epoch(self._experiment.seed, epoch, rows, split.train, step)
        self._keep(session.go_on(states, schedule))

    def _has_begun(self) -> bool:
        return hasattr(self, "_states")

    def _keep(self, session: LocalSession) -> None:
        """Store the results of a training, and its state for predictions and later epochs."""
        self._states = session.training_states()
        self._step = session.next_step
        self.history_: list[EpochRecord] = session.label.history
        self.ledger_ = session.ledger
        sent = self.ledger_.payload_bytes("train")
        dense = 8 * session.label.progress.train_rows * self._width() * len(session.clients)
        self.wire_ratio_ = sent / dense

    def _weights(self) -> dict[str, Any]:
        return {party: kept["state"] for party, kept in self._states.items()}

    def _width(self) -> int:
        return next(iter(self._experiment.parties.values())).width

    def _settings(self, seed: int) -> Experiment:
        given = self.get_params(deep=False)

        def of(table: type[Settings]) -> dict[str, Any]:
            return {name: given[name] for name in table.model_fields if name in given}

        own = {"party": self.label_party, "task": self._task, "class_weight": self._class_weight()}
        content = of(Experiment) | {
            "name": "estimator",
            "seed": seed,
            "parties": dict.fromkeys(self.parties_, of(PartySettings)),
            "label": of(LabelSettings) | own,
            "train": of(TrainSettings),
            "data": of(DataSettings),
        }
        return checked(content, "the estimator's arguments")


def frame_of(
    estimator: BaseEstimator, X: Any, y: Any = None, *, reset: bool, training: bool | None = None
) -> pd.DataFrame:
    """Convert X to a frame; scikit-learn checks arrays, and vfl's data encoders check frames.

    Args:
        estimator: estimator that stores the names and the number of X's columns, or whose stored
            names and number X must match.
        X: a frame, or an array of axes (rows, columns).
        y: labels, which are checked together with X in a training.
        reset: whether the estimator stores the names and the number of columns again.
        training: whether y is required; by default, y is required if `reset` is true.

    Raises:
        DataError: a frame has no rows or no columns, or its columns have no usable names.
        ValueError: scikit-learn refuses the array or the number of labels.
    """
    training = reset if training is None else training
    if isinstance(X, pd.DataFrame):
        X = X.set_axis([name_of(name) for name in X.columns], axis=1)
        check_names(X.columns.to_series(), "X")
        if not len(X) or not len(X.columns):
            raise DataError(
                "this frame has no rows or no columns",
                where="X",
                got=f"{len(X)} sample(s), {len(X.columns)} feature(s)",
                want="at least one row and one column",
            )
        validate_data(estimator, X, skip_check_array=True, reset=reset)
        if training:
            check_consistent_length(X, y)
        frame: pd.DataFrame = X.reset_index(drop=True)
        return frame
    names = None if reset else getattr(estimator, "feature_names_in_", None)
    # an array that has as many columns as the frame with which the estimator was fitted
    if names is not None and np.shape(X)[1:] == (len(names),):
        warnings.warn(
            f"X does not have valid feature names, but {type(estimator).__name__} was fitted with "
            "feature names: its columns are taken in that order",
            UserWarning,
            stacklevel=3,
        )
        return pd.DataFrame(np.asarray(X), columns=list(names)).infer_objects()
    if training:
        checked, _ = validate_data(estimator, X, y, dtype=np.float64, reset=reset)
    else:
        checked = validate_data(estimator, X, dtype=np.float64, reset=reset)
    return pd.DataFrame(checked, columns=[f"x{i}" for i in range(checked.shape[1])])


def owners_of(parties: Mapping[str, Columns] | int, columns: list[str]) -> dict[str, list[str]]:
    """Return the names of the columns of each party, by party.

    Args:
        parties: names, patterns or positions of columns by party; or a number of parties, which get
            adjacent blocks of columns, as equal as possible.
        columns: names of all columns, in the table's order.

    Raises:
        MissingColumnError, SharedColumnError, DataError: see `vfl.datasets.table`.
        ConfigError: `parties` is neither a mapping nor a number.
    """
    if isinstance(parties, int | np.integer):
        if parties > len(columns):
            raise DataError(
                f"{len(columns)} feature(s) are too few for {parties} parties",
                where="parties",
                want="a column for every party",
                fix=f"parties={len(columns)}, or more columns",
            )
        return partition_columns(columns, [f"party{number}" for number in range(1, parties + 1)])
    if not isinstance(parties, Mapping):
        raise ConfigError(
            "these parties are invalid",
            where="parties",
            got=f"a {type(parties).__name__}",
            want="columns by party, or a number of parties that share all columns",
            fix='parties={"bank": ["income", "debt"], "shop": ["basket*"]}, or parties=2',
        )
    owners = {}
    for name, own in parties.items():
        places = [one for one in own if isinstance(one, int | np.integer)]
        if any(not -len(columns) <= one < len(columns) for one in places):
            raise MissingColumnError(
                f"party '{name}' names a column that the table lacks",
                where=f"parties['{name}']",
                got=f"column number {', '.join(map(str, places))}",
                want=f"numbers from 0 to {len(columns) - 1}, or names of columns",
            )
        names = [columns[c] if isinstance(c, int | np.integer) else c for c in own]
        owners[name] = pick_columns(pd.Index(columns), names, f"party '{name}'")
    check_owners(owners)
    owned = {name for own in owners.values() for name in own}
    if idle := [name for name in columns if name not in owned]:
        shown = ", ".join(f"'{name}'" for name in idle)
        warnings.warn(f"no party is given {shown}: not used", UserWarning, stacklevel=4)
    return owners


def weights_of(sample_weight: Any, frame: pd.DataFrame) -> np.ndarray | None:
    """Return row weights as float64, axes (rows,); None stays None."""
    if sample_weight is None:
        return None
    weights = column_or_1d(sample_weight, dtype=np.float64)
    check_consistent_length(frame, weights)
    return np.array(weights)
