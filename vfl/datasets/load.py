"""Loaders: turn tables, files, or a data set by name into `PartyData` with aligned and split rows.

A process that runs all parties loads a data set by name, one common table, or one table for each
party. A party of a federation reads only its own file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vfl.core.errors import (
    BadOptionError,
    DataError,
    MisalignedError,
    MissingDataError,
)
from vfl.core.seeds import permutation
from vfl.datasets.alignment.gaps import MissingRows
from vfl.datasets.alignment.join import Ids, align, sort_by_id
from vfl.datasets.alignment.positions import Alignment
from vfl.datasets.encode import (
    Encoder,
    PictureEncoder,
    TableEncoder,
    Unfamiliar,
    encode_labels,
    encoder_of,
    token_encoder,
)
from vfl.datasets.files import column_names, read_table
from vfl.datasets.on_disk import OnDisk
from vfl.datasets.party import NO_INPUTS, AlignedRows, Inputs, PartyData
from vfl.datasets.sources import Bundled, SetFormat, read_bundled
from vfl.datasets.split import (
    Fold,
    Split,
    split_apart,
    split_fixed,
    split_fold,
    split_parts,
    split_rows,
)
from vfl.datasets.streamed import (
    RowOrder,
    StreamedTable,
    no_training_rows,
    order_by_id,
    order_of_alignment,
)
from vfl.datasets.table import (
    Classes,
    IdType,
    OwnTable,
    Part,
    Source,
    Table,
    TableFormat,
    check_column,
    check_encoded,
    check_features,
    check_owners,
    id_columns,
    pick_columns,
)

#: Masks of the rows that each feature party has, if every party has all rows.
NO_GAPS: Mapping[str, np.ndarray] = {}
#: No earlier encoders: each party fits its encoder to the training rows.
NO_ENCODERS: Mapping[str, Encoder] = {}


@dataclass(frozen=True)
class Label:
    """A column of labels that a label party trains on.

    Attributes:
        party: the party that has the labels.
        column: label column in that party's table; no party uses it as a feature.
        task: "classification" or "regression".
    """

    party: str
    column: str
    task: str = "classification"


@dataclass(frozen=True)
class Dealing:
    """Assignment of rows to training, validation and test.

    Attributes:
        seed: the run's public seed.
        validation, test: shares of all rows in these parts.
        fold: fold whose rows are the test rows; `validation` is then a share of the other rows.
        stratified: whether every part has the same share of each class; see `split_rows`.
        block_rows: see `split_rows`.
        limit: largest number of rows; the seed draws which rows are used; None takes all rows.
    """

    seed: int
    validation: float = 0.1
    test: float = 0.2
    fold: Fold | None = None
    stratified: bool = False
    block_rows: int = 0
    limit: int | None = None

    @property
    def reads_all(self) -> bool:
        """Return whether the split needs the labels of all rows, or all rows, at once."""
        return self.fold is not None or self.stratified or self.limit is not None

    def split(self, labels: np.ndarray, task: str) -> Split:
        """Split rows with known labels."""
        if self.fold is not None:
            strata = task == "classification"
            return split_fold(labels, self.seed, self.fold, self.validation, strata=strata)
        return self.split_of(len(labels), labels if self.stratified else None)

    def split_of(
        self, rows: int, strata: np.ndarray | None = None, place: OnDisk | None = None
    ) -> Split:
        """Split a given number of rows; `place` stores the rows' positions on disk."""
        shares = self.validation, self.test
        return split_rows(rows, self.seed, *shares, strata, self.block_rows, place)

    def drawn(self, rows: int) -> np.ndarray | None:
        """Return the positions of the drawn rows, ascending; None if all rows are taken.

        >>> len(Dealing(0, limit=4).drawn(10)), Dealing(0, limit=10).drawn(10)
        (4, None)
        """
        if self.limit is None or self.limit >= rows:
            return None
        return np.sort(permutation(self.seed, rows, "rows")[: self.limit])


def load_bundled(
    source: str,
    parties: Sequence[str],
    label_party: str,
    dealing: Dealing,
    form: SetFormat | None = None,
    *,
    flatten: bool = False,
    as_cells: bool = False,
    download: bool = False,
    root: Path | None = None,
) -> dict[str, PartyData]:
    """Load a data set by name, and assign strips of pictures, or blocks of columns, to parties.

    Args:
        source: spec of a data set in `SOURCES`, or of several picture sets joined by plus signs.
        parties: parties with columns, from left to right; the label party has columns only if it is
            among them.
        label_party: the party with the labels.
        dealing: how to split the rows. A set that has its own test or validation rows keeps them;
            then `validation` is a share of the training rows. `limit` selects the first rows; see
            `read_bundled`.
        form: requested form of the rows, such as the size of pictures.
        flatten: whether pictures become (rows, pixels), so that there may be more parties than
            columns of pixels.
        as_cells: whether cells of a table become inputs without scaling.
        download: whether to download missing files of pictures.
        root: folder of the files; None takes it from VFL_DATA.

    Returns:
        Data by party in the given order; the label party comes last unless it is in `parties`.

    Raises:
        SpecError: the data set or an option does not exist.
        BadOptionError: the set does not support the requested form, or it does not support folds,
            because it has its own test rows.
        MissingDataError: files are missing.
        TooFewRowsError: a part of the split would be empty.
        DataError: there are more parties than columns.
    """
    data = read_bundled(source, root, download, dealing.limit, form, dealing.seed)
    split = _split_of(data, source, dealing)
    rows = AlignedRows.of(data.rows, split)
    inputs: dict[str, Inputs]
    if isinstance(data.cells, pd.DataFrame):
        owned = partition_columns(list(data.cells.columns), parties)
        table = TableFormat(cells=as_cells)
        inputs = {
            party: fit_inputs(data.cells, own, split, form=table) for party, own in owned.items()
        }
    else:
        cells = data.cells
        cells = cells if isinstance(cells, np.ndarray) else cells.rows(split.train)
        cut = _columns(cells, parties) if cells.ndim == 2 else _strips(data, parties, flatten)
        inputs = {party: Inputs(own) for party, own in cut.items()}
    return rows.parties(inputs, label_party, data.labels, data.classes)


def _split_of(data: Bundled, source: str, dealing: Dealing) -> Split:
    """Split a bundled data set by rows; some data sets have fixed parts."""
    if data.train_rows is None:
        return dealing.split(data.labels, "classification")
    if (fold := dealing.fold) is not None:
        raise BadOptionError(
            f"data set '{source}' has test rows of its own",
            where="data.folds",
            got=f"fold {fold.number} of {fold.of}",
            fix="leave data.folds out",
        )
    if data.validation_rows:
        return split_parts(data.train_rows, data.validation_rows, data.rows)
    strata = data.labels if dealing.stratified else None
    return split_fixed(data.train_rows, data.rows, dealing.seed, dealing.validation, strata)


def _columns(cells: np.ndarray, parties: Sequence[str]) -> dict[str, np.ndarray]:
    """Return each party's adjacent columns, (rows, columns): steps of a sequence, or pixels."""
    owned = blocks(cells.shape[1], parties)
    return {party: np.ascontiguousarray(cells[:, own]) for party, own in owned.items()}


def _strips(data: Bundled, parties: Sequence[str], flatten: bool) -> dict[str, np.ndarray]:
    """Return each party's standardised strip of the pictures, float32, axes (rows, ...)."""
    pictures = data.cells
    assert isinstance(pictures, np.ndarray), "only pictures have more than two axes"
    if flatten and len(parties) > pictures.shape[-1]:
        whole = _scaled(pictures, data)  # columns of pixels stay adjacent
        return _columns(whole.transpose(0, 3, 1, 2).reshape(data.rows, -1), parties)
    strips = {
        party: _scaled(pictures[..., own[0] : own[-1] + 1], data)
        for party, own in blocks(pictures.shape[-1], parties).items()
    }
    if flatten:
        return {party: strip.reshape(data.rows, -1) for party, strip in strips.items()}
    return strips


def _scaled(strip: np.ndarray, data: Bundled) -> np.ndarray:
    inputs = np.array(strip, dtype=np.float32, order="C")
    inputs -= np.array(data.mean, dtype=np.float32)[:, None, None]
    inputs /= np.array(data.scale, dtype=np.float32)[:, None, None]
    return inputs


def load_table(
    table: OwnTable,
    party_columns: Mapping[str, Sequence[str]],
    labels: Sequence[Label],
    dealing: Dealing,
    encoders: Mapping[str, Encoder] = NO_ENCODERS,
    place: OnDisk | None = None,
) -> dict[str, PartyData]:
    """Load one table whose columns belong to several parties.

    Args:
        table: the table.
        party_columns: column names and globs of each party; empty for a label party without
            columns.
        labels: label columns; the first one belongs to the leading label party.
        dealing: how to split the rows.
        encoders: encoders of an earlier training, by party, which are used instead of new encoders.
        place: folder for inputs and labels; None keeps them in memory, which is necessary if
            `dealing.reads_all` is true.

    Raises:
        MissingDataError, MissingColumnError, SharedColumnError, LabelLeakError, MisalignedError,
        TooFewRowsError, DataError: see `vfl.core.errors`; messages hold names and counts only.
    """
    label, *further = labels
    whole, order = read_rows(table, "the table", place)
    check_column(whole.columns, label.column, "the label", "label.column")
    columns = {
        party: own_columns(
            whole.columns, asked, party, labels, table.id_column, f"parties.{party}.columns"
        )
        for party, asked in party_columns.items()
    }
    for one in further:
        check_column(whole.columns, one.column, "the label", "tasks.column")
    _check_busy(columns, label.party)
    check_owners(columns)
    if place is not None:
        assert not dealing.reads_all, "a table on disk is split as a whole, and without its labels"
    elif (drawn := dealing.drawn(order.rows)) is not None:
        whole = Part.of(whole, drawn)
        order = RowOrder(len(drawn), ids=None if order.ids is None else order.ids[drawn])
    given = _given(whole, "the table", order, place)
    learned = {one.party: given.labels(one.column, one.task) for one in labels}
    if place is None:
        split = dealing.split(learned[label.party][0], label.task)
    else:
        split = dealing.split_of(order.rows, place=place)
    inputs = {
        party: _inputs(
            given, f"party '{party}'", replace(table, columns=own), split, encoders.get(party)
        )
        for party, own in columns.items()
    }
    rows = AlignedRows.of(order.rows, split, order.ids, order.digest)
    return _of_parties(rows, inputs, labels, learned)


def _of_parties(
    rows: AlignedRows,
    inputs: Mapping[str, Inputs],
    labels: Sequence[Label],
    learned: Mapping[str, tuple[Any, Classes | None]],
) -> dict[str, PartyData]:
    """Return the data of all parties; further label parties come last.

    `learned` maps a label party to its labels and classes.
    """
    leading, *further = (one.party for one in labels)
    found = rows.parties(inputs, leading, *learned[leading])
    return found | {name: rows.party(name, NO_INPUTS, *learned[name]) for name in further}


def load_parties(
    tables: Mapping[str, OwnTable],
    party_columns: Mapping[str, Sequence[str] | None],
    labels: Sequence[Label],
    dealing: Dealing,
    alignments: Path | None = None,
    missing_rows: MissingRows = "intersection",
    unaligned: bool = False,
    encoders: Mapping[str, Encoder] = NO_ENCODERS,
) -> dict[str, PartyData]:
    """Load the tables of several owners, and join them by ids, in a process that runs all parties.

    No party uses a column with the label's name as a feature.

    Args:
        tables: tables by party, including label parties; their id columns may have different names.
        party_columns: column patterns of the experiment file, by party, for parties with feature
            columns; None uses the patterns in each party's own party.toml.
        labels: label columns, each in its party's table; the first one belongs to the leading label
            party.
        dealing: how to split the common rows.
        alignments: folder of a private alignment, which gives the rows and their order, with a
            subfolder for each party; None joins by ids.
        missing_rows: "intersection" leaves out rows that some party lacks; "token" keeps each row
            of the label party that at least one feature party has. The rows that all parties have
            are then split as in an intersection.
        unaligned: whether a feature party's rows outside the alignment become inputs too.
        encoders: encoders of an earlier training, by party, which are used instead of new encoders.

    Raises:
        UserError: see `load_table`.
    """
    label, label_party = labels[0], labels[0].party
    order = [*party_columns, *({label_party} - set(party_columns))]
    if without := [party for party in order if party not in tables]:
        raise MissingDataError(
            f"party '{without[0]}' has no table",
            where=f"parties.{without[0]}.source",
            want="a file for every party, if one party has a separate file",
        )
    named, columns = _read_tables(tables, party_columns, labels, alignments is not None)
    further = {one.party for one in labels[1:]}
    _check_busy({name: own for name, own in columns.items() if name not in further}, label_party)
    if alignments is None:
        joined = _joined(tables, named, label_party, missing_rows)
    else:
        joined = _privately_aligned(tables, named, label_party, alignments, missing_rows)
    joined = joined.drawn(dealing)
    learned = {
        one.party: encode_labels(joined.frames[one.party][one.column], one.task) for one in labels
    }
    codes = learned[label_party][0]
    split = joined.split(dealing, codes, label.task)
    inputs = {}
    for name in order:
        more = joined.others[name] if unaligned and name != label_party else None
        own = replace(tables[name], columns=columns[name])
        whose = f"party '{name}'"
        given = HeldRows(joined.frames[name], whose, joined.held.get(name), more)
        inputs[name] = _inputs(given, whose, own, split, encoders.get(name))
    rows = AlignedRows.of(len(codes), split, joined.ids, joined.digest)
    rows = replace(rows, held=joined.held, id_rules=joined.rules)
    return _of_parties(rows, inputs, labels, learned)


def _read_tables(
    tables: Mapping[str, OwnTable],
    party_columns: Mapping[str, Sequence[str] | None],
    labels: Sequence[Label],
    aligned: bool,
) -> tuple[dict[str, Table], dict[str, list[str]]]:
    """Read each party's ids, inputs and label; return the tables and input columns."""
    named, columns = dict[str, Table](), dict[str, list[str]]()
    by_party = {one.party: one for one in labels}
    for name, own in tables.items():
        known = column_names(own.source, own.form, f"parties.{name}.source")
        ids = id_columns(own.id_column, known) if aligned else [own.id_column]
        for each in ids:
            check_column(known, each, f"the id column of party '{name}'", "data.id")
        asked = party_columns[name] or own.columns or ("*",) if name in party_columns else ()
        # Columns of a party file: the error names the line of that file's name
        of_file = own.columns and not party_columns.get(name)
        whose = f"parties.{name}.{'source' if of_file else 'columns'}"
        columns[name] = own_columns(known, asked, name, labels, own.id_column, whose)
        kept = [*ids, *columns[name]]
        if name in by_party:
            column, setting = by_party[name].column, "label" if name == labels[0].party else "tasks"
            check_column(known, column, f"the label of '{name}'", f"{setting}.column")
            kept.append(column)
        texts = ids if own.form.text_ids or aligned else []
        named[name] = read_table(own.source, own.form, texts, f"parties.{name}.source", kept)
    return named, columns


@dataclass(frozen=True, eq=False)
class _Joined:
    """Rows of all parties' tables, joined by id and sorted in the same order at all parties.

    Attributes:
        frames: rows of each party's table, in the joined order.
        others: rows of each party's table outside the joined rows.
        ids: ids of the rows.
        digest: digest of the private alignment; None if there is none.
        held: mask of the rows that each feature party has, bool, if rows are missing; otherwise
            empty.
        rules: rules by which the ids were compared.
    """

    frames: Mapping[str, Part]
    others: Mapping[str, Part]
    ids: Ids
    digest: bytes | None
    held: Mapping[str, np.ndarray]
    rules: str

    def drawn(self, dealing: Dealing) -> _Joined:
        """Draw as many rows as `dealing.limit` allows, if there are more.

        Raises:
            BadOptionError: a limit is set together with `missing_rows = "token"`.
        """
        if (drawn := dealing.drawn(len(self.ids))) is None:
            return self
        if self.held:
            raise BadOptionError(
                "rows that some party lacks stay, so a limit cannot draw from the rows",
                where="data.rows",
                fix="leave data.rows out, or missing_rows = 'intersection'",
            )
        frames = {name: Part.of(frame, drawn) for name, frame in self.frames.items()}
        digest = self.digest
        if digest is not None:
            digest = hashlib.sha256(digest + drawn.tobytes()).digest()
        return replace(self, frames=frames, ids=self.ids[drawn], digest=digest)

    def split(self, dealing: Dealing, codes: np.ndarray, task: str) -> Split:
        """Split the rows; rows that all parties have are split as in an intersection."""
        if not self.held:
            return dealing.split(codes, task)
        complete = np.logical_and.reduce(list(self.held.values()))
        return split_apart(complete, lambda rows: dealing.split(codes[rows], task))


def _joined(
    tables: Mapping[str, OwnTable],
    named: Mapping[str, Table],
    label_party: str,
    missing_rows: MissingRows,
) -> _Joined:
    """Join the tables by their ids."""
    whole = label_party if missing_rows == "token" else None
    names = {name: own.id_column for name, own in tables.items()}
    found = align(named, names, _common_id_type(tables), whole)
    held = {name: rows for name, rows in found.held.items() if name != label_party}
    rules = _rules(tables[label_party], None)
    return _Joined(found.frames, found.others, found.ids, None, held, rules)


def _without(table: Table, part: Part) -> Part:
    """Return a table's rows that are not in a given part of that table, in the table's order."""
    return Part.of(table, np.setdiff1d(np.arange(len(table)), part.rows))


class HeldRows:
    """Makes inputs and labels from a table whose rows are in memory.

    Args:
        table: the party's rows, in the session's order.
        whose: owner of the table, for error texts.
        held: mask of the session's rows that the party has, bool, if rows are missing; inputs of
            missing rows are NaN.
        others: further rows of the party that are in no session and also become inputs.
    """

    def __init__(
        self,
        table: Table,
        whose: str,
        held: np.ndarray | None = None,
        others: Table | None = None,
    ) -> None:
        self._table, self._whose, self._held, self._others = table, whose, held, others

    def inputs(self, own: OwnTable, split: Split, encoder: Encoder | None = None) -> Inputs:
        """Encode the columns in `own`; see `fit_inputs`.

        Raises:
            TooFewRowsError: the party has none of the training rows.
            DataError: see `fit_inputs`.
        """
        columns, about = own.columns or (), (own.shape, own.form, self._others, encoder)
        if self._held is None:
            return fit_inputs(self._table, columns, split, *about)
        at, parts = np.cumsum(self._held) - 1, (split.train, split.validation, split.test)
        split = Split(*(at[rows[self._held[rows]]] for rows in parts))
        if encoder is None and not len(split.train):
            raise no_training_rows(self._whose, len(self._table), len(self._held))
        found = fit_inputs(self._table, columns, split, *about)
        return found._replace(array=_with_gaps(found.array, self._held))

    def labels(self, column: str, task: str) -> tuple[np.ndarray, Classes | None]:
        """Return the result of `encode_labels` for a label column."""
        return encode_labels(self._table[column], task)


def _with_gaps(array: np.ndarray | None, held: np.ndarray) -> np.ndarray | None:
    """Return inputs of axes (all rows, ...): the given ones where `held` is true, otherwise NaN."""
    if array is None:
        return None
    whole = np.full((len(held), *array.shape[1:]), np.nan, dtype=np.float32)
    whole[held] = array
    return whole


def _common_id_type(tables: Mapping[str, OwnTable]) -> IdType:
    kinds: set[IdType] = {own.form.id_type for own in tables.values()}
    if len(kinds) > 1:
        raise DataError(
            "the parties compare ids as different types",
            where="data.id_type",
            got=" and ".join(sorted(kinds)),
            want="the same id_type in every party's file",
            fix='set id_type = "number" everywhere if all ids are whole numbers, otherwise "text"',
        )
    return kinds.pop()


def _privately_aligned(
    tables: Mapping[str, OwnTable],
    named: Mapping[str, Table],
    label_party: str,
    folder: Path,
    missing_rows: MissingRows,
) -> _Joined:
    """Return the rows of a private alignment, in its order, with the label party's ids."""
    found = {party: Alignment.newest(folder / party, party) for party in named}
    if len({one.digest for one in found.values()}) > 1:
        raise MisalignedError(
            "the parties' positions belong to different alignments",
            where=str(folder),
            got=", ".join(f"'{party}': version {one.version}" for party, one in found.items()),
            fix="vfl align, for all parties together",
        )
    found[label_party].require(missing_rows)
    applied = {
        party: one.applied(named[party], tables[party].id_column, f"party '{party}'")
        for party, one in found.items()
    }
    frames = {party: frame for party, (frame, _) in applied.items()}
    own, others = found[label_party], {name: _without(named[name], frames[name]) for name in named}
    ids = applied[label_party][1]
    return _Joined(frames, others, ids, own.digest, own.held, own.agreed.rules)


def _check_busy(columns: Mapping[str, Sequence[str]], label_party: str) -> None:
    idle = [party for party, own in columns.items() if not own and party != label_party]
    if idle or not any(columns.values()):
        raise DataError(
            f"party '{idle[0]}' has no columns" if idle else "no party has any columns",
            want="at least one column for every party but the label party",
        )


def _columns_of(id_column: str, source: Source, form: TableFormat | None) -> list[str]:
    """Return the columns of a table that form an id; they are read as texts."""
    names = column_names(source, form)
    return [name for name in id_columns(id_column, names) if name in names]


def load_own(
    name: str,
    table: OwnTable,
    label: Label | None,
    dealing: Dealing,
    *,
    alignment: Alignment | None = None,
    unaligned: bool = False,
    place: OnDisk | None = None,
    encoder: Encoder | None = None,
) -> PartyData:
    """Load a party's data for a training, with rows in the order of their ids or of an alignment.

    Only the party's own columns stay in memory.

    All parties must have the same rows, but this function cannot see the rows of other parties. So
    compare `rows` and `row_digest` before a training.

    Args:
        name: name of the party.
        table: the party's table; without columns if it is a label party without features.
        label: the party's label column; None for a feature party.
        dealing: how to split the rows; the same at every party.
        alignment: alignment that gives the rows and their order; None sorts the rows by id.
        unaligned: whether rows outside the alignment become inputs too.
        place: folder for inputs and labels; None keeps them in memory.
        encoder: encoder of an earlier training, which is used instead of a new encoder.

    Raises:
        MissingDataError, MissingColumnError, LabelLeakError, MisalignedError, TooFewRowsError,
        DataError: the data do not fit; the errors contain only names and counts.
    """
    names = column_names(table.source, table.form, "data.source")
    patterns = ("*",) if table.columns is None else table.columns
    learned = [] if label is None else [label]
    own = own_columns(names, patterns, name, learned, table.id_column, "data.columns")
    _check_id(names, table.id_column, name, alignment)
    if label is not None:
        check_column(names, label.column, f"the label of '{name}'", "data.label")
    elif not own:
        raise DataError(f"party '{name}' has neither columns nor a label")
    if place is not None and unaligned:
        raise DataError(
            "a table on disk has only the rows of the session",
            where="data.memory",
            fix="leave data.memory out if a defense reads rows outside the session",
        )
    kept = [*own, *(one.column for one in learned)]
    split_of = partial(dealing.split_of, place=place)
    held = alignment.held if alignment else NO_GAPS
    whose = f"party '{name}'"
    whole, order = read_rows(table, whose, place, kept, alignment)
    split = split_of(order.rows) if alignment is None else alignment.split(split_of)
    given = _given(whole, whose, order, place, held.get(name), unaligned)
    labels = (None, None) if label is None else given.labels(label.column, label.task)
    inputs = _inputs(given, whose, replace(table, columns=own), split, encoder)
    rows = AlignedRows.of(order.rows, split, None if name in held else order.ids, order.digest)
    return replace(rows.party(name, inputs, *labels), held=held, id_rules=_rules(table, alignment))


def _given(
    table: Table,
    whose: str,
    order: RowOrder,
    place: OnDisk | None,
    held: np.ndarray | None = None,
    unaligned: bool = False,
) -> HeldRows | StreamedTable:
    """Return the session's rows, and if `unaligned` is set also the rows outside the alignment."""
    if place is not None:
        return StreamedTable(table, whose, order, place)
    others = _without(table.table, table) if unaligned and isinstance(table, Part) else None
    return HeldRows(table, whose, held, others)


def _check_id(
    names: Sequence[str], id_column: str, party: str, alignment: Alignment | None
) -> None:
    """Refuse an id column that the table lacks, and a composite id without an alignment."""
    columns = [id_column] if id_column else []
    if alignment is not None and id_column:
        columns = id_columns(id_column, names)
    for each in columns:
        check_column(names, each, f"the id column of party '{party}'", "data.id")


def load_for_prediction(
    name: str,
    source: Source,
    id_column: str | None,
    encoder: Encoder | None,
    form: TableFormat | None = None,
    alignment: Alignment | None = None,
    place: OnDisk | None = None,
) -> PartyData:
    """Load a party's data for predictions of new rows: all rows are test rows without labels.

    The function reads only the party's own columns.

    Args:
        name: name of the party.
        source: the party's table; see `read_table`.
        id_column: column by which the rows are sorted; None keeps the order of the table.
        encoder: encoder from the party's training (`PartyData.encoder`, `read_encoder`); None for a
            party without inputs.
        form: format of the file.
        alignment: alignment that gives the rows and their order; None sorts the rows by id.
        place: folder for the inputs; None keeps them in memory.

    Raises:
        MissingDataError, MissingColumnError, MisalignedError, DataError: see `vfl.core.errors`.
    """
    names, kept = column_names(source, form, "data.predict"), list(encoder.names) if encoder else []
    table = OwnTable(source, id_column or "", kept, form or TableFormat())
    _check_id(names, table.id_column, name, alignment)
    check_encoded(names, kept, "data.predict")
    # A table without ids and inputs gives only the number of its rows.
    columns = kept if kept or id_column else None
    held = alignment.held if alignment else NO_GAPS
    whose = f"party '{name}'"
    whole, order = read_rows(table, whose, place, columns, alignment, "data.predict")
    nothing = np.empty(0, dtype=np.int64)
    split = Split(nothing, nothing, np.arange(order.rows, dtype=np.int64))
    given = _given(whole, whose, order, place, held.get(name))
    inputs = _inputs(given, whose, table, split, encoder)
    known = None if order.absent is not None else order.ids
    rows = AlignedRows.of(order.rows, split, known, order.digest)
    return replace(rows.party(name, inputs), held=held, id_rules=_rules(table, alignment))


def _rules(table: OwnTable, alignment: Alignment | None) -> str:
    """Return the normalisation of the ids as rules of an alignment."""
    if alignment is not None:
        return alignment.agreed.rules
    return "decimal+zeros" if table.form.id_type == "number" else "plain"


def read_rows(
    table: OwnTable,
    where: str,
    place: OnDisk | None,
    columns: Sequence[str] | None = None,
    by: Alignment | None = None,
    setting: str = "data.source",
) -> tuple[Table, RowOrder]:
    """Read a party's rows and their order.

    If the rows stay in memory, the result is the session's rows in the session's order. A table on
    disk keeps its order; then `RowOrder` states the position of each row.

    Args:
        table: the party's own table.
        where: owner of the table, for error texts.
        place: folder for the ids of a table on disk; None sorts the rows in memory.
        columns: columns to read besides the ids; None reads all columns.
        by: alignment that gives the rows and their order; None sorts the rows by id.
        setting: setting that names the file, for error texts.

    Raises:
        MissingDataError, DataError: the table cannot be read.
        MissingColumnError, MisalignedError: the table lacks the id column, or its ids do not fit.
    """
    source, form, id_column = table.source, table.form, table.id_column
    if not id_column:
        found = read_table(source, form, setting=setting, columns=columns)
        return found, RowOrder(len(found))
    names = [id_column] if by is None else _columns_of(id_column, source, form)
    kept = None if columns is None else list(dict.fromkeys([*names, *columns]))
    texts = names if form.text_ids or by is not None else []
    found = read_table(source, form, texts, setting, kept)
    if by is None:
        if place is not None:
            return found, order_by_id(found, id_column, where, form.id_type, place)
        part, ids = sort_by_id(found, id_column, where, form.id_type)
        return part, RowOrder(len(part), ids=ids)
    if place is not None:
        return found, order_of_alignment(found, id_column, where, by)
    part, own = by.applied(found, id_column, where)
    return part, RowOrder(len(by.positions), ids=own, digest=by.digest, absent=by.absent)


def own_columns(
    names: Iterable[str],
    patterns: Sequence[str],
    party: str,
    labels: Sequence[Label],
    ids: str,
    setting: str,
) -> list[str]:
    """Resolve a party's column patterns to names; refuse the label and the id among them.

    Raises:
        MissingColumnError, LabelLeakError, DataError: see `pick_columns` and `check_features`.
    """
    names, learned = list(names), [label.column for label in labels]
    leave_out = [*learned, *(id_columns(ids, names) if ids else [])]
    columns = pick_columns(names, patterns, f"party '{party}'", leave_out, setting)
    for column in learned or (None,):
        check_features(party, columns, column, ids or None, setting)
    return columns


def _inputs(
    given: HeldRows | StreamedTable,
    whose: str,
    own: OwnTable,
    split: Split,
    encoder: Encoder | None,
) -> Inputs:
    """Encode a party's columns; an error without a place names the party."""
    try:
        return given.inputs(own, split, encoder)
    except DataError as error:
        error.where = error.where or whose
        raise


def fit_inputs(
    frame: Table,
    columns: Sequence[str],
    split: Split,
    shape: Sequence[int] | None = None,
    form: TableFormat | None = None,
    others: Table | None = None,
    encoder: Encoder | None = None,
) -> Inputs:
    """Encode all rows as inputs, with an encoder that is fitted to the training rows only.

    Args:
        frame: the party's aligned table.
        columns: names of the party's columns.
        split: split, which contains the training rows.
        shape: (channels, height, width) if the columns are pixels.
        form: format of the table, with the forms of dates in text columns and the encoding of
            numbers.
        others: rows of the party outside the alignment, which become inputs too.
        encoder: encoder of an earlier training, which is used instead of a new encoder.

    Raises:
        MissingColumnError: the table lacks a column that the encoder reads.
        DataError: see `TableEncoder.fit` and `PictureEncoder.fit`.
    """
    if not columns:
        return NO_INPUTS
    if encoder is None:
        training, own = Part.of(frame, split.train, columns), form or TableFormat()

        def fit_table(names: Sequence[str]) -> TableEncoder:
            part = Part.of(frame, split.train, names)
            return encoder_of(own).fit(part, dates=own.dates, bins=own.bins)

        encoder = (
            PictureEncoder.fit(training, tuple(shape))
            if shape
            else token_encoder([training], columns, own, fit_table) or fit_table(columns)
        )
    check_encoded(frame.columns, encoder.names, "data.source")
    tested = np.zeros(len(frame), dtype=bool)
    tested[split.test] = True
    counter = Unfamiliar(tested)
    array = encoder.transform(frame, counter)
    more = None if others is None or not len(others) else encoder.transform(others)
    return Inputs(array, encoder, counter.counts, more)


def partition_columns(columns: Sequence[str], parties: Sequence[str]) -> dict[str, list[str]]:
    """Divide columns into one block of adjacent columns per party; the first blocks may be larger.

    >>> partition_columns(["a", "b", "c"], ["bank", "shop"])
    {'bank': ['a', 'b'], 'shop': ['c']}

    Raises:
        DataError: there are more parties than columns, there is no party, or two parties have the
            same name.
    """
    owned = blocks(len(columns), parties)
    return {party: [columns[position] for position in own] for party, own in owned.items()}


def blocks(columns: int, parties: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the positions of each party's columns, int64, from left to right.

    Raises:
        DataError: there are more parties than columns, there is no party, or two parties have the
            same name.
    """
    if not 1 <= len(parties) <= columns or len(set(parties)) != len(parties):
        raise DataError(
            "these columns cannot be divided among these parties",
            got=f"{len(parties)} parties ({len(set(parties))} different), {columns} columns",
            want="at least one party, each named once, and a column for each of them",
        )
    return dict(zip(parties, np.array_split(np.arange(columns), len(parties)), strict=True))
