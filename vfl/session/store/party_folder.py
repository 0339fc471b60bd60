"""Private data of one party: its part of a run, its rows, session ledger and secret."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl import defenses
from vfl.config import DataSettings, Experiment, OwnData, PartyFile, memory_bytes
from vfl.core.errors import DataError, DisagreementError, RunFolderError, TrainedRowsError
from vfl.core.products import products
from vfl.core.registry import named
from vfl.core.seeds import Secret
from vfl.core.storage import (
    Seal,
    load_weights,
    read_json,
    read_sealed_json,
    save_weights,
    weights_digest,
    write_json,
    write_sealed_json,
    write_text,
)
from vfl.core.text import csv_text
from vfl.datasets import (
    Dealing,
    Encoder,
    Label,
    OwnTable,
    PartyData,
    Split,
    TableFormat,
    load_for_prediction,
    load_own,
    read_encoder,
)
from vfl.datasets.alignment.positions import Alignment
from vfl.datasets.augment import Augment, augmentation_of
from vfl.datasets.describe import left_out
from vfl.datasets.encode import NumberColumn
from vfl.datasets.on_disk import OnDisk
from vfl.datasets.repeats import Repeats
from vfl.privacy import PrivacyStatement
from vfl.session import secure_mode
from vfl.session.dp_plan import PrivacyPlan
from vfl.session.drift import Drift
from vfl.session.exchange import Own, refuse_augment
from vfl.session.store.checkpoint import CHECKPOINTS, Checkpoints
from vfl.session.store.identity import Identity
from vfl.session.store.journal import Journal
from vfl.session.store.run_rows import (
    NEW,
    TESTED,
    TRAINED,
    VALIDATED,
    RunRows,
    keyed_ids,
    keyed_order,
)
from vfl.session.store.session_ledger import Entry, SessionLedger
from vfl.session.store.session_log import Consented, SessionLog
from vfl.session.terms import Mode, Terms, differing

_WEIGHTS, _ENCODER, _RECORD = "weights.safetensors", "encoder.json", "party.json"
_ROWS, _FORGOTTEN = "rows.sealed", "forgotten.json"
_PREDICTED, _BINS, _SERVED = "predicted.json", "bins.json", "served-rows.json"
_EXPLAINED, EXPLANATIONS = "explained.json", "explanations.csv"
CARD = "card.json"
#: Settings that must have equal values in two runs if one run starts from the weights of the other
#: run.
_OF_NETWORK = frozenset(
    {"parties", "label_party", "merge", "codec", "defense", "secure", "middle", "tasks"}
)
_KEY_BYTES = 32
_DIGEST_ROWS = 1 << 14  # number of rows of a table on disk that are in memory at a time


class PartyFolder:
    """Reads and writes one party's files of one run; these files never leave the party.

    The record (`party.json`) names the run and contains the digest of the weights. All files that a
    later session needs are sealed with party and run (see `vfl.core.storage`): a `PartyFolder`
    refuses a folder of another party, and a folder with files of two runs. The user may move the
    folder to another machine. `card.json` describes the party's part of the model for human
    readers, and contains no row, no category and no weight of a network; for other models it may
    contain parameters, such as coefficients of a regression (see `WholeNetwork.figures`).

    Args:
        path: the party's folder in the run's folder; its name is the party's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(
        self,
        data: PartyData,
        terms: Terms,
        weights: Mapping[str, Tensor],
        figures: Mapping[str, Any] | None = None,
        answers: Tensor | None = None,
        privacy: Sequence[PrivacyStatement] | None = None,
        model: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the files for evaluation and prediction and a card, then `party.json` as last file.

        Args:
            data: rows of the party in the training.
            terms: the agreed terms.
            weights: the party's weights at the end of the training.
            figures: metrics on the test rows, which only the label party computes.
            answers: the model's outputs for the test rows, axes (rows, outputs); only the label
                party has them.
            privacy: privacy statements about the training, if they cannot be derived from these
                rows and terms alone.
            model: description of the party's part of the model, for its card.
        """
        key = secrets.token_bytes(_KEY_BYTES)
        card = _card(self.path.name, data, terms, weights, figures or {}, key, privacy)
        card["model"] |= model or {}
        write_sealed_json(self.path / CARD, card, self._seal("card", terms.run))
        save_weights(self.path / _WEIGHTS, weights, self._seal("weights", terms.run))
        encoder = None if data.encoder is None else json.loads(data.encoder.to_json())
        if encoder is not None:
            seal = self._seal("encoder", terms.run)
            write_sealed_json(self.path / _ENCODER, {"encoder": encoder}, seal)
        bins = Drift.of(data, answers).record()
        write_sealed_json(self.path / _BINS, bins, self._seal("bins", terms.run))
        rows = RunRows.of(data, terms.alignment, key)
        rows.save(self.path / _ROWS, self._seal("rows", terms.run))
        classes = None if data.classes is None else list(data.classes)
        record = {
            "classes": classes,
            "encodes": encoder is not None,
            "weights": weights_digest(weights),
            "shape": None if data.inputs is None else list(data.inputs.shape[1:]),
            "data_key": key.hex(),
            "terms": terms.model_dump(mode="json"),
        }
        write_sealed_json(self.path / _RECORD, record, self._seal("party's part", terms.run))

    def weights(self) -> dict[str, Tensor]:
        """Load this party's trained weights.

        Raises:
            RunFolderError: the weights are missing or damaged, or belong to another training.
        """
        record = self._record()
        path = self.path / _WEIGHTS
        weights = load_weights(path, self._seal("weights", record["run"]))
        if weights_digest(weights) != record["weights"]:
            raise RunFolderError(
                "these weights are not the final weights of the training",
                where=str(path),
                got=f"weights {weights_digest(weights)[:8]}...",
                want=f"weights {record['weights'][:8]}...",
                fix="restore both files of that training from a copy, or train again",
            )
        return weights

    def save_predicted(self, data: PartyData) -> None:
        """Save how many rows were predicted, were trained on, and have new values, by column."""
        rows = data.split.test
        trained = 0 if data.trained is None else int((data.trained[rows] == "yes").sum())
        record = {"rows": len(rows), "trained": trained, "unfamiliar": dict(data.unfamiliar)}
        write_json(self.path / _PREDICTED, record)

    def predicted(self) -> dict[str, Any] | None:
        """Return what `save_predicted` saved at the last prediction.

        The result is None if there was no prediction.
        """
        path = self.path / _PREDICTED
        return read_json(path) if path.exists() else None

    def save_explained(self, data: PartyData, terms: Terms, values: np.ndarray | None) -> None:
        """Save the Shapley values of the party's columns, if the session computed any.

        Args:
            data: rows of the session.
            terms: terms of the session.
            values: for a prediction, the Shapley values of each row, axes (rows, columns, outputs);
                for an evaluation, their mean absolute values over the rows, axes (columns,).
        """
        if values is None:
            return
        count = len(values) if terms.mode == "evaluate" else values.shape[1]
        columns = data.columns or tuple(str(1 + number) for number in range(count))
        if terms.mode == "evaluate":
            shapley = dict(zip(columns, values.tolist(), strict=True))
            write_json(self.path / _EXPLAINED, {"shapley": shapley})
            return
        outputs = [""] if values.shape[2] == 1 else [f"_{1 + at}" for at in range(values.shape[2])]
        head = ["id", *(f"shapley_{name}{output}" for name in columns for output in outputs)]
        rows = data.split.test
        ids = rows if data.ids is None else data.ids[rows]
        digits = np.char.mod("%.7g", values.reshape(len(rows), -1)).tolist()
        cells = zip(ids.tolist(), digits, strict=True)
        table = (dict(zip(head, [name, *own], strict=True)) for name, own in cells)
        write_text(self.path / EXPLANATIONS, csv_text(head, table))

    def explained(self) -> dict[str, float]:
        """Return each column's mean absolute Shapley value in the last evaluation.

        The result is empty if the evaluation computed no Shapley values.
        """
        path = self.path / _EXPLAINED
        found: dict[str, float] = read_json(path)["shapley"] if path.exists() else {}
        return found

    def drift(self) -> Drift:
        """Make drift counters with the bins (value ranges) of the training rows.

        The counters have no bins if an earlier version of vfl trained the run.

        Raises:
            RunFolderError: the bins are damaged, or belong to another training.
        """
        path = self.path / _BINS
        if not path.exists():
            return Drift(None, None)
        return Drift.restored(read_sealed_json(path, self._seal("bins", self._record()["run"])))

    def save_served(self, drift: Drift) -> None:
        """Save how many queried rows fell into each bin of the training rows' values."""
        write_json(self.path / _SERVED, drift.summary())

    def encoder(self) -> Encoder | None:
        """Load the encoder that turns the party's table into inputs.

        The result is None for a party without columns.

        Raises:
            RunFolderError: the encoder is missing or damaged, or belongs to another training.
        """
        record = self._record()
        if not record["encodes"]:
            return None
        seal = self._seal("encoder", record["run"])
        return read_encoder(json.dumps(read_sealed_json(self.path / _ENCODER, seal)["encoder"]))

    def classes(self) -> tuple[str | int, ...] | None:
        """Return the class names of the labels, at the label party of a classification.

        The result is None for other parties, and for a regression.
        """
        classes = self._record()["classes"]
        return None if classes is None else tuple(classes)

    def terms(self) -> Terms:
        """Return the agreed terms of the training."""
        before = {
            "beside": (),
            "dp": None,
            "explained": (),
            "missing_rows": "intersection",
            "purpose": "",
        }  # defaults for runs of earlier versions
        found = before | self._record()["terms"]
        tasks = found["tasks"].items()  # runs of earlier versions stored only the tasks' weights
        found["tasks"] = {n: {"weight": t} if isinstance(t, float) else t for n, t in tasks}
        return Terms.model_validate(found)

    def shape(self) -> tuple[int, ...] | None:
        """Return the axes of one row of the inputs; None for a label party without columns.

        Raises:
            RunFolderError: an earlier version of vfl wrote the folder, and did not store the axes.
        """
        record = self._record()
        if "shape" not in record:
            raise RunFolderError(
                "this party's part of the run does not state the shape of an input row",
                where=str(self.path / _RECORD),
                fix="train again with this version",
            )
        return None if record["shape"] is None else tuple(record["shape"])

    def card(self) -> dict[str, Any]:
        """Return the contents of the model card.

        Raises:
            RunFolderError: the card is missing, or describes other weights than the stored ones.
        """
        record = self._record()
        card = read_sealed_json(self.path / CARD, self._seal("card", record["run"]))
        if card["model"]["weights_sha256"] != record["weights"]:
            raise RunFolderError(
                "this model card belongs to other weights than the stored ones",
                where=str(self.path / CARD),
            )
        return card

    def is_of(self, data: PartyData) -> bool:
        """Return whether the training used exactly the rows, columns and labels of `data`."""
        key = self._key()
        digest: str = self.card()["data"]["hmac_sha256"]
        return hmac.compare_digest(digest.encode(), _data_digest(data, key).encode())

    def rows(self) -> RunRows | None:
        """Return the record of how the training used each row.

        The result is None for a run of an earlier version.

        Raises:
            RunFolderError: the record is damaged, or belongs to another training.
        """
        path = self.path / _ROWS
        run = self._record()["run"]
        return RunRows.load(path, self._seal("rows", run)) if path.exists() else None

    def digests_of(self, ids: Sequence[str]) -> np.ndarray:
        """Return this run's keyed digests of these ids, uint64, axes (ids,)."""
        found = keyed_ids(np.array(ids, dtype=object), self._key())
        assert found is not None, "there are ids"
        return found

    def places_of(
        self, known: RunRows, alignments: Iterable[Alignment], rows: np.ndarray
    ) -> np.ndarray | None:
        """Return the training's positions of some table rows, for a run whose record has no ids.

        Args:
            known: record of how the training used each row.
            alignments: the party's stored alignments; the result is None if the training used an
                alignment that is not in this list.
            rows: positions of the rows in the table.
        """
        for one in alignments:
            if hmac.compare_digest(known.order, keyed_order(one.digest, self._key())):
                return np.flatnonzero(np.isin(one.positions, rows))
        return None

    def count(self, known: RunRows, places: np.ndarray) -> dict[str, int]:
        """Count how many rows at these positions the run trained, validated and tested on."""
        parts = ("train", "validation", "test")
        return {name: int(np.isin(getattr(known.split, name), places).sum()) for name in parts}

    def keep_rows(self, rows: RunRows) -> None:
        """Replace the record of how the training used each row."""
        rows.save(self.path / _ROWS, self._seal("rows", self._record()["run"]))

    def mark_forgotten(self, counts: Mapping[str, int], at: str) -> None:
        """Record that some rows of the training have been erased from the party's table.

        If rows are erased several times, the counts are added up.
        """
        before = self.forgotten()
        rows = {name: count + before.get(name, 0) for name, count in counts.items()}
        record = {"rows": rows, "at": at}
        seal = self._seal("forgotten rows", self._record()["run"])
        write_sealed_json(self.path / _FORGOTTEN, record, seal)

    def forgotten(self) -> dict[str, int]:
        """Return how many training, validation and test rows have been erased since the training.

        The result is empty if no row was erased.

        Raises:
            RunFolderError: the record is damaged, or belongs to another training.
        """
        path = self.path / _FORGOTTEN
        if not path.exists():
            return {}
        seal = self._seal("forgotten rows", self._record()["run"])
        found: dict[str, int] = read_sealed_json(path, seal)["rows"]
        return found

    def rows_left(self, data: PartyData) -> PartyData:
        """Return the rows with which this run can be tested, even if the table has changed since.

        If the table is unchanged, its rows keep their split from the training. In a changed table,
        two kinds of rows are test rows: the rows that were test rows in the training, and rows that
        were not in the training's table. Rows on which the run was trained or validated are left
        out.

        Args:
            data: the rows of the present table, encoded by the encoder of the training.

        Raises:
            TrainedRowsError: no test row is left; or the rows have changed, and vfl cannot
                recognise the rows of the training.
            DataError: some labels have classes that did not occur in the training.
        """
        data, known = self.in_own_classes(data), self.rows()
        ids = keyed_ids(data.ids, self._key())
        whose = f"party '{self.path.name}'"
        if known is None or known.ids is None or ids is None:
            if self.is_of(data):
                return data if known is None else replace(data, split=known.split)
            why = (
                "an earlier version of vfl stored no record of the training's rows"
                if known is None
                else "rows have no ids"
            )
            raise TrainedRowsError(
                f"the rows of {whose} that this run trained on are unknown",
                where=str(self.path),
                got=f"a table that differs from the training's table, and {why}",
                want="the table of the training; or rows with ids, and a run that recorded the ids",
                fix="restore that table, or train again",
            )
        if np.array_equal(ids, known.ids):
            return replace(data, split=known.split)
        if secure_mode.make(self.terms().secure).divides_rows:
            raise TrainedRowsError(
                f"the rows of {whose} differ from the rows of the training",
                where=str(self.path),
                want="the same rows as in the training: each party has separate rows, and no "
                "party recognises all of them",
                fix="restore that table, or train again",
            )
        parts = known.parts(ids)
        left = np.flatnonzero(parts >= TESTED)
        if not len(left):
            raise TrainedRowsError(
                f"this run has trained or validated on every row that {whose} has now",
                where=str(self.path),
                got=f"{len(parts)} rows",
                want="rows that were test rows in the training, or new rows",
                fix="restore the table of the training, or add rows to the present table",
            )
        return _tested(data, left, parts == NEW)

    def may_test(self, data: PartyData) -> np.ndarray:
        """Return the mask of rows that the run used neither to train nor to validate, axes (rows,).

        Args:
            data: rows with ids, or else exactly the rows of the training.

        Raises:
            TrainedRowsError: the run's record does not show how these rows were used.
        """
        parts = self._parts(data)
        if parts is not None:
            return parts >= TESTED
        found = np.zeros(data.rows, dtype=bool)
        found[self.rows_left(data).split.test] = True
        return found

    def trained_rows(self, data: PartyData) -> np.ndarray:
        """Return how the run used each row, axes (rows,); see `PartyData.trained`."""
        parts = self._parts(data)
        if parts is None:
            return np.full(data.rows, "unknown")
        return np.select([parts == TRAINED, parts == VALIDATED], ["yes", "validation"], "no")

    def _parts(self, data: PartyData) -> np.ndarray | None:
        """Return how the run used each row, as numbers.

        The result is None if the rows or the run's record lack ids.
        """
        known, ids = self.rows(), keyed_ids(data.ids, self._key())
        if known is None or known.ids is None or ids is None:
            return None
        return known.parts(ids)

    def require_network(self, terms: Terms) -> None:
        """Refuse a training whose network or parties differ from those of this run.

        Args:
            terms: terms of the new training, which may have other rows and other training settings
                than the run.

        Raises:
            RunFolderError: this party has no part of the earlier run, from which the training would
                start.
            DisagreementError: the earlier run had a different network or different parties.
        """
        if not (self.path / _RECORD).exists():
            raise RunFolderError(
                f"party '{self.path.name}' has no part of the run that this training starts from",
                where=str(self.path),
                fix="train without train.warm_start, or start from a finished run of these parties",
            )
        settings = (self.terms().settings(), terms.settings())
        then, now = ({k: v for k, v in one.items() if k in _OF_NETWORK} for one in settings)
        if then != now:
            got, want = differing(now, then)
            raise DisagreementError(
                "a training starts from a run that has a different network",
                where=f"train.warm_start = '{terms.train.warm_start}'",
                got=got,
                want=want,
                fix="set these to the values of the earlier run, or train without train.warm_start",
            )

    def in_own_classes(self, data: PartyData) -> PartyData:
        """Return the same rows, with each label as its class code in the training.

        Raises:
            DataError: some labels have classes that did not occur in the training.
        """
        learned = self.classes()
        if data.labels is None or data.classes is None or data.classes == learned:
            return data
        code = {name: at for at, name in enumerate(learned or ())}
        if strange := sum(name not in code for name in data.classes):
            raise DataError(
                "the table has labels of classes that did not occur in the training of this run",
                where=str(self.path),
                got=f"{strange} classes that did not occur in the training",
                want=f"the {len(code)} classes of the training",
                fix="remove these rows, or train again",
            )
        codes = torch.tensor([code[name] for name in data.classes])
        return replace(data, labels=codes[data.labels], classes=learned)

    def _key(self) -> bytes:
        return bytes.fromhex(self._record()["data_key"])

    def require(self) -> None:
        """Refuse a run whose folder does not contain this party's part.

        Raises:
            RunFolderError: the part is missing: each party of a federation stores its own weights
                only.
        """
        if not self.path.exists():
            raise RunFolderError(
                f"the weights of party '{self.path.name}' are not in this run",
                where=str(self.path),
                got="no file of this party: in a federation, each party keeps its files",
                want="a run that one process trained for all parties, if all parties' weights are "
                "needed, as in an attack",
                fix="run vfl train with an experiment file that has a source for each of "
                "[parties], and use that run",
            )

    def _record(self) -> dict[str, Any]:
        self.require()
        return read_sealed_json(self.path / _RECORD, self._seal("party's part", None))

    def _seal(self, kind: str, run: str | None) -> Seal:
        return Seal(kind, self.path.name, run)


def table_format(own: DataSettings | OwnData) -> TableFormat:
    """Return how to read a table: separator, encoding, missing words, dates, id type and so on."""
    return TableFormat(
        separator=own.separator,
        missing=own.missing,
        id_type=own.id_type,
        encoding=own.encoding,
        decimal=own.decimal,
        dates=own.dates or {},
        query=own.query if isinstance(own, OwnData) else None,
        bins=own.bins,
        skip_lines=own.skip_lines,
        numbers=own.numbers or {},
        tokenizer=own.tokenizer,
        length=own.length,
        repeats=Repeats(own.id, own.repeats) if own.repeats and own.id else None,
    )


def own_table(party: PartyFile) -> OwnTable:
    """Return a party's table, as the party's own file describes it."""
    own = party.table
    return OwnTable(party.source_path, own.id, own.columns, table_format(own), own.shape)


def _card(
    name: str,
    data: PartyData,
    terms: Terms,
    weights: Mapping[str, Tensor],
    figures: Mapping[str, Any],
    key: bytes,
    privacy: Sequence[PrivacyStatement] | None,
) -> dict[str, Any]:
    """Return the model card of a party's part of a model: counts, digests, metrics and terms."""
    is_label = name in (terms.label_party, *terms.tasks)
    role, half = _role_and_half(name, terms, is_label)
    cells = secure_mode.make(terms.secure).reads_cells
    asked = None if cells else terms.parties.get(name)
    states = [one.as_dict() for one in privacy or defenses.make(terms.defense).privacy()]
    split = data.split
    if privacy is None and (plan := PrivacyPlan.of(terms, len(split.train))) is not None:
        states.append(plan.statement(plan.steps).as_dict())
    rows = {part: len(getattr(split, part)) for part in ("train", "validation", "test")}
    return {
        "role": role,
        "model": {
            "half": half,
            "bottom": None if asked is None else asked.bottom,
            "width": None if asked is None else asked.width,
            "numbers": sum(one.numel() for one in weights.values()),
            "weights_sha256": weights_digest(weights),
        },
        "data": {
            "rows": rows,
            "row_shape": None if data.inputs is None else list(data.inputs.shape[1:]),
            "classes": None if data.classes is None else len(data.classes),
            "hmac_sha256": _data_digest(data, key),
            "key": "in party.json, which stays with the owner, so that other parties cannot "
            "guess rows by it",
        },
        "privacy": {
            "cuts": secure_mode.promise(terms),
            "secure": terms.secure,
            "defense": terms.defense,
            "codec": terms.codec,
            "states": states or "no statement covers what cuts or weights disclose",
            "attacks": "not measured by this card; see vfl attack",
        },
        "test_figures": dict(figures)
        or ("known to the label party" if not is_label else "not measured"),
        "terms": terms.public(),
    }


def _role_and_half(name: str, terms: Terms, is_label: bool) -> tuple[str, str]:
    """Return a party's role, and the name of the part of the model that it stores."""
    if is_label:
        whole = "the top, and the bottom of the label party's own columns"
        role, half = "label party", whole if terms.middle is None else "the head"
    elif name in terms.parties:
        role, half = "feature party", "a bottom"
    else:
        role, half = (
            "party in the middle",
            "the middle of the model, between the bottoms and the head",
        )
    mode = secure_mode.make(terms.secure)
    if mode.reveals_model:
        return role, "the whole model, which every holder has"
    return role, half if mode.keeps is None else mode.keeps[is_label]


def _data_digest(data: PartyData, key: bytes) -> str:
    """Return a keyed digest (HMAC-SHA256) of a party's inputs, labels and row order."""
    digest = hmac.new(key, data.ids_digest, hashlib.sha256)
    for one in (data.inputs, data.labels):
        if one is not None:
            digest.update(f"{one.dtype}|{tuple(one.shape)}|".encode())
            for start in range(0, len(one), _DIGEST_ROWS):
                digest.update(one[start : start + _DIGEST_ROWS].reshape(-1).numpy().data)
    return digest.hexdigest()


def own_data(party: PartyFile, terms: Terms, task: str = "") -> PartyData:
    """Return the rows that this party uses in a session, in the session's order.

    Args:
        party: the party's own file.
        terms: the session's terms; a prediction reads new rows with the encoder of the training.
        task: learning task of the labels (for example classification), at the label party.

    Raises:
        DataError: see `vfl.datasets.load_own`.
        TrainedRowsError: the session is an evaluation, and no row may be tested.
        RunFolderError: the session needs a trained run, and this party has no part of it.
        DisagreementError: see `earlier_folder`.
    """
    own, table, test = party.table, own_table(party), terms.test
    mode = secure_mode.make(terms.secure)
    if mode.reads_cells:
        table = replace(table, form=table.form.of_cells())
    if apart := mode.divides_rows:
        task = task or "classification"
        test = test if party.party == terms.label_party else 0.0  # all other rows are for training
        if own.label is None:
            raise DataError(
                "a party with separate rows must also have the labels of these rows",
                where="data.label",
                fix="name the label column in [data] of the party's own file",
            )
    if own.columns is None and party.party not in terms.parties:
        table = replace(table, columns=())
    place = None if own.memory is None else OnDisk(party.store_path, memory_bytes(own.memory))
    earlier = earlier_folder(party, terms)
    with party.locations.located(PartyFile):
        if terms.mode in ("predict", "serve"):
            return _asked_rows(party, terms, table.form, place)
        evaluated = own_folder(party, terms) if terms.mode == "evaluate" else None
        known = evaluated or earlier
        shares = terms.validation, test
        data = load_own(
            party.party,
            table,
            None if own.label is None else Label(party.party, own.label, task),
            Dealing(terms.seed, *shares, block_rows=terms.train.split_rows),
            alignment=own_alignment(party, terms),
            unaligned=terms.mode == "train" and defenses.make(terms.defense).unaligned,
            place=place,
            encoder=None if known is None else known.encoder(),
        )
    if earlier is not None:
        return earlier.in_own_classes(data)
    if apart:
        require_numbers(data)
    if evaluated is None:
        return data
    return _evaluated_rows(party, terms, evaluated, data)


def _asked_rows(
    party: PartyFile, terms: Terms, form: TableFormat, place: OnDisk | None
) -> PartyData:
    """Return the rows that a prediction or a service reads, encoded as in the training."""
    own, folder = party.table, own_folder(party, terms)
    form, given = replace(form, query=own.predict_query or own.query), own_alignment(party, terms)
    source, encoder = party.predict_path, folder.encoder()
    data = load_for_prediction(party.party, source, own.id, encoder, form, given, place)
    if terms.mode == "predict":
        trained = folder.trained_rows(data)
        if not party.predicts_others or np.isin(trained, ("yes", "validation")).any():
            data = replace(data, trained=trained)
    return data


def _evaluated_rows(
    party: PartyFile, terms: Terms, trained: PartyFolder, data: PartyData
) -> PartyData:
    """Keep only rows on which this run, and all runs compared with it, may be tested.

    Raises:
        TrainedRowsError: no row may be tested; or the table has changed since the training, or runs
            are compared, and the session has a middle party, which cannot compute which rows
            remain.
    """
    may_test = [
        PartyFolder(party.run_path(other) / "parties" / party.party).may_test(data)
        for other in terms.beside
    ]
    data = trained.rows_left(data)
    if may_test:
        data = _common_rows(data, np.logical_and.reduce(may_test), terms)
    if (data.unseen is not None or terms.beside) and terms.middle is not None:
        raise TrainedRowsError(
            "a session with a party without rows can evaluate only the table of the training",
            where=f"middle.party = '{terms.middle.party}'",
            got="other rows than the rows of the training",
            fix="restore the table of the training, or train again",
        )
    return data


def unread_columns(party: PartyFile, data: PartyData) -> list[str]:
    """Return lines that name a table's unused columns; only this party's screen shows them."""
    own = party.table
    read = {*data.columns, *([] if own.label is None else [own.label])}
    return left_out(own_table(party), read, f"{party.party} leaves out")


def _common_rows(data: PartyData, may_test: np.ndarray, terms: Terms) -> PartyData:
    """Return the rows of an evaluation on which all compared runs may be tested.

    Raises:
        TrainedRowsError: there is no row on which all these runs may be tested.
    """
    left = data.split.test[may_test[data.split.test]]
    if not len(left):
        raise TrainedRowsError(
            "each row was used by at least one of these runs to train or to validate",
            where=", ".join((terms.run, *terms.beside)),
            fix="compare runs with the same seed and split, or use rows that are new to all runs",
        )
    return _tested(data, left)


def _tested(data: PartyData, rows: np.ndarray, unseen: np.ndarray | None = None) -> PartyData:
    """Return the same data, of which only these rows are used, as test rows."""
    order = hashlib.sha256(data.ids_digest + rows.tobytes()).digest()
    return replace(data, split=Split(test=rows), ids_digest=order, unseen=unseen)


def earlier_folder(party: PartyFile, terms: Terms) -> PartyFolder | None:
    """Return this party's part of the run from which a training starts; None for new weights.

    Raises:
        RunFolderError: this party has no part of the earlier run.
        DisagreementError: the earlier run had a different network or different parties.
    """
    run = terms.train.warm_start
    if terms.mode != "train" or run is None:
        return None
    folder = PartyFolder(party.run_path(run) / "parties" / party.party)
    folder.require_network(terms)
    return folder


def require_same_top(earlier: Experiment, experiment: Experiment) -> None:
    """Refuse to start from a run whose label party had a different label or learning task.

    Raises:
        DisagreementError: the label settings of the two runs differ; the error states both.
    """
    then, now = earlier.label.model_dump(), experiment.label.model_dump()
    others = [name for name in now if now[name] != then[name]]
    if others:
        raise DisagreementError(
            "a training starts from a run with a different label or top model",
            where=f"train.warm_start = '{experiment.train.warm_start}'",
            got=", ".join(f"label.{name} = {now[name]}" for name in others),
            want=", ".join(f"label.{name} = {then[name]}" for name in others),
            fix="set these to the values of the earlier run, or train without train.warm_start",
        )


def require_numbers(data: PartyData) -> None:
    """Refuse text columns: parties with separate rows would encode the same text differently.

    Raises:
        DataError: there are text columns; each party would number the categories of a text column
            in its own way.
    """
    columns = getattr(data.encoder, "columns", ())
    texts = sum(not isinstance(one, NumberColumn) for one in columns)
    if texts:
        raise DataError(
            "if each party has separate rows, all columns must contain numbers",
            where="data.columns",
            got=f"{texts} columns that do not contain numbers",
            fix="leave these columns out, or write them as numbers, equally at every party",
        )


def own_alignment(party: PartyFile, terms: Terms) -> Alignment | None:
    """Return the newest version of the agreed alignment; None if parties join rows by ids.

    Only versions that all parties of this session made together count, so a run keeps its version
    when other parties join or leave the project.
    """
    if terms.alignment is None:
        return None
    everybody = {*terms.parties, *terms.tasks, terms.label_party}
    found = Alignment.of_parties(alignment_folder(party, terms), party.party, everybody)
    found.require(terms.missing_rows)
    return found


def alignment_folder(party: PartyFile, terms: Terms) -> Path:
    """Return the folder with the versions of the alignment that orders a session's rows."""
    assert terms.alignment is not None, "there is one"
    of_predicted = terms.mode in ("predict", "serve")
    return party.alignment_path(terms.alignment, of_predicted=of_predicted)


#: The file name is a warning: a person who knows how the secret was made can compute every random
#: draw.
INJECTED_SECRET = "secret-for-trials"


def own_folder(party: PartyFile, terms: Terms) -> PartyFolder:
    """Return this party's part of a run."""
    return PartyFolder(party.run_path(terms.run) / "parties" / party.party)


def part_of(run: Path, party: PartyFile) -> PartyFolder:
    """Return this party's part of a stored run, even if the party was renamed after the run."""
    own, parts = run / "parties" / party.party, [*(run / "parties").glob("*")]
    return PartyFolder(parts[0] if not own.exists() and len(parts) == 1 else own)


def own_checkpoints(party: PartyFile, terms: Terms) -> Checkpoints | None:
    """Return this party's checkpoints of a training; None for other sessions."""
    if terms.mode != "train":
        return None
    folder = own_folder(party, terms).path / CHECKPOINTS
    return Checkpoints(folder, party.party, terms.run, terms.digest())


def own_ledger(party: PartyFile) -> SessionLedger:
    """Return this party's ledger of sessions."""
    paths = [path for product in products().values() for path in product.ledgers]
    others = [named(path)(party) for path in paths]
    folder, consent = party.store_path / "sessions", party.consent
    return SessionLedger(
        folder,
        party.party,
        consent.max_epsilon,
        others,
        _own_log(party, folder),
        consent.max_statistics,
        consent.min_changed_rows,
        consent.max_alignments,
    )


def _own_log(party: PartyFile, folder: Path) -> SessionLog:
    """Return the session log of a party; it is signed if the party has an identity key."""
    key = party.beside(party.identity.key)
    identity = Identity.kept_at(key) if key.exists() else None
    given = party.consent.model_dump(mode="json", exclude_defaults=True)
    return SessionLog(folder, party.party, identity, Consented(party.sha256, given))


def trained_digests(party: PartyFile, data: PartyData) -> np.ndarray:
    """Return keyed digests of the training rows, for comparison between sessions, uint64.

    If rows have no ids, a digest is computed from the row's position and the digest of the order.
    """
    rows, order = data.split.train, data.ids_digest.hex()
    places = rows if data.ids is None else data.ids[rows]
    whose = f"{order} " if data.ids is None else ""
    return digests_of_ids(party, [f"{whose}{one}" for one in places])


def digests_of_ids(party: PartyFile, ids: Sequence[str]) -> np.ndarray:
    """Return the keyed digests under which the ledger stores these ids, uint64, axes (ids,)."""
    key = _lasting_secret(party).key("rows of exact statistics")
    found = keyed_ids(np.asarray(ids, dtype=object), key)
    assert found is not None, "there are ids"
    return found


def own_terms(experiment: Experiment, mode: Mode, run: str, party: PartyFile) -> Terms:
    """Return the terms that the label party offers.

    With [dp], the terms contain a key for row sampling.
    """
    terms = Terms.of(experiment, mode, run)
    return terms if terms.dp is None else terms.keyed(_lasting_secret(party))


def _lasting_secret(party: PartyFile) -> Secret:
    injected = party.store_path / INJECTED_SECRET
    if injected.exists():
        return Secret.kept_at(injected)
    return Secret.kept_at(party.store_path / "secret")


def own_augment(party: PartyFile, data: PartyData | None) -> Augment | None:
    """Build the augmentation of training rows that a party's own file sets.

    The result is None without augmentation.

    Raises:
        SpecError: see `augmentation_of`.
    """
    if data is None or data.inputs is None:
        return None
    return augmentation_of(party.augment, data.inputs.shape[1:], own=True)


def own_secret(party: PartyFile, entry: Entry) -> Secret:
    """Return this party's secret for a run name; two run names never draw the same numbers.

    The secret is derived from the store's secret, which the operating system generated at first
    use, and from the ledger's entry for the run name: the label party can choose the name, but not
    the random nonce in the entry. For reproducible experiments, the owner can place a secret file
    in the store; all runs then use this secret unchanged, and draw the same numbers.
    """
    lasting = _lasting_secret(party)
    injected = (party.store_path / INJECTED_SECRET).exists()
    return lasting if injected else entry.secret_from(lasting)


def own_state(
    party: PartyFile,
    terms: Terms,
    entry: Entry,
    data: PartyData | None,
    checkpoints: Checkpoints | None,
    sent: Journal | None,
) -> Own:
    """Return this party's private settings and state in a session; for the arguments, see `Own`.

    Raises:
        ConfigError: the inputs cannot be augmented in this session.
        SpecError: see `augmentation_of`.
    """
    own = Own(
        own_secret(party, entry),
        device=party.device,
        checkpoints=checkpoints,
        sent=sent,
        augment=own_augment(party, data),
    )
    refuse_augment(terms, own)
    return own
