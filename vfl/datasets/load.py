"""All parties' data in one process: one table, or one table a party."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vfl.datasets.align import Aligned, align
from vfl.datasets.files import read_table
from vfl.datasets.labels import encode_labels
from vfl.datasets.party import PartyData, Split
from vfl.datasets.rows import AlignedRows, fit_inputs, own_columns, read_sorted
from vfl.datasets.split import Fold, split_fold, split_rows
from vfl.datasets.table import (
    Source,
    TableFormat,
    check_column,
    check_owners,
)
from vfl.errors import DataError, MissingDataError


def load_table(
    source: Source,
    id_column: str | None,
    label: str,
    party_columns: Mapping[str, Sequence[str]],
    label_party: str,
    task: str,
    seed: int,
    validation: float = 0.1,
    test: float = 0.2,
    form: TableFormat | None = None,
    fold: Fold | None = None,
) -> dict[str, PartyData]:
    """One table whose columns are dealt to parties.

    Args:
        source: a CSV or Parquet file, or a frame.
        id_column: rows are sorted by it; None keeps the order of the table.
        label: the label column.
        party_columns: names and globs by party; none for a label party without columns.
        label_party: who gets the labels.
        task: "classification" or "regression".
        seed: the run's public seed.
        validation: share of the rows.
        test: share of the rows.
        form: how the file is written.
        fold: its rows are the test rows, and `validation` is a share of the others.

    Raises:
        MissingDataError, MissingColumnError, SharedColumnError, LabelLeakError, MisalignedError,
        TooFewRowsError, DataError: see `vfl.errors`; messages hold names and counts only.
    """
    frame, ids = read_sorted(source, id_column, "the table", form)
    check_column(frame.columns, label, "the label", "label.column")
    columns = {
        party: own_columns(
            frame.columns, patterns, party, label, id_column, f"parties.{party}.columns"
        )
        for party, patterns in party_columns.items()
    }
    check_owners(columns)
    _check_feature_parties(columns, label_party)
    labels, classes = encode_labels(frame[label], task)
    split = _split(labels, task, seed, validation, test, fold)
    inputs = {party: fit_inputs(frame, own, split) for party, own in columns.items()}
    rows = AlignedRows.of(len(frame), split, ids)
    return rows.parties(inputs, label_party, labels, classes)


def load_tables(
    sources: Mapping[str, Source],
    id_column: str,
    label: str,
    party_columns: Mapping[str, Sequence[str]],
    label_party: str,
    task: str,
    seed: int,
    validation: float = 0.1,
    test: float = 0.2,
    form: TableFormat | None = None,
    fold: Fold | None = None,
) -> dict[str, PartyData]:
    """One table a party, joined by their ids in this process; see `load_table`.

    Args:
        sources: a table by party, the label party's among them.
        id_column: of the same name in every table; rows that some party lacks are left out.
        label: a column of the label party's table.
        party_columns: names and globs by party; none for a label party without columns.
        label_party: who holds the labels.
        task: "classification" or "regression".
        seed: the run's public seed.
        validation: share of the aligned rows.
        test: share of the aligned rows.
        form: how the files are written.
        fold: its rows are the test rows, and `validation` is a share of the others.

    Raises:
        MissingDataError, MissingColumnError, LabelLeakError, MisalignedError, TooFewRowsError,
        DataError: see `vfl.errors`; messages hold names and counts only.
    """
    _check_sources(sources, (*party_columns, label_party))
    aligned = _read_aligned(sources, id_column, form or TableFormat())
    check_column(
        aligned.frames[label_party].columns, label, f"the label of '{label_party}'", "label.column"
    )
    columns = {
        party: own_columns(
            frame.columns,
            party_columns.get(party, ()),
            party,
            label,
            id_column,
            f"parties.{party}.columns",
        )
        for party, frame in aligned.frames.items()
    }
    _check_feature_parties(columns, label_party)
    labels, classes = encode_labels(aligned.frames[label_party][label], task)
    split = _split(labels, task, seed, validation, test, fold)
    inputs = {
        party: fit_inputs(aligned.frames[party], own, split) for party, own in columns.items()
    }
    rows = AlignedRows.of(len(aligned.ids), split, aligned.ids)
    return rows.parties(inputs, label_party, labels, classes)


def _split(
    labels: np.ndarray, task: str, seed: int, validation: float, test: float, fold: Fold | None
) -> Split:
    if fold is None:
        return split_rows(len(labels), seed, validation, test)
    return split_fold(labels, seed, fold, validation, strata=task == "classification")


def _check_sources(sources: Mapping[str, Source], parties: Sequence[str]) -> None:
    without = [party for party in parties if party not in sources]
    if without:
        raise MissingDataError(
            f"party '{without[0]}' has no table",
            where=f"parties.{without[0]}.source",
            want="a file for every party, once one party has a file of its own",
        )


def _read_aligned(sources: Mapping[str, Source], id_column: str, form: TableFormat) -> Aligned:
    """Every party's table, with the rows that all of them have."""
    frames = {
        party: read_table(own, form, [id_column], f"parties.{party}.source")
        for party, own in sources.items()
    }
    return align(frames, id_column, form.id_type)


def _check_feature_parties(columns: Mapping[str, Sequence[str]], label_party: str) -> None:
    idle = [party for party, own in columns.items() if not own and party != label_party]
    if idle or not any(columns.values()):
        raise DataError(
            f"party '{idle[0]}' has no columns" if idle else "no party has any columns",
            want="at least one column for every party but the label party",
        )
