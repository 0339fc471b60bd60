"""All parties' data in one process: a bundled set, one table, or one table a party."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from vfl.datasets.align import align
from vfl.datasets.bundled import Bundled, read_bundled
from vfl.datasets.files import read_table
from vfl.datasets.labels import encode_labels
from vfl.datasets.partition import blocks, partition_columns, partition_image
from vfl.datasets.party import PartyData
from vfl.datasets.rows import AlignedRows, Inputs, fit_inputs, own_columns, read_sorted
from vfl.datasets.split import split_fixed, split_rows
from vfl.datasets.table import (
    Source,
    TableFormat,
    check_column,
    check_owners,
)
from vfl.errors import DataError, MissingDataError


def load_bundled(
    source: str,
    parties: Sequence[str],
    seed: int,
    label_party: str,
    validation: float = 0.1,
    test: float = 0.2,
    flatten: bool = False,
    download: bool = False,
    root: Path | None = None,
    limit: int | None = None,
) -> dict[str, PartyData]:
    """A data set by name, cut into strips of the picture or blocks of columns.

    Args:
        source: one of `vfl.datasets.SOURCES`.
        parties: who gets columns, from left to right; the label party only if it is listed.
        seed: the run's public seed.
        label_party: who gets the labels.
        validation: share of the rows, or of the training rows where test rows are fixed.
        test: share of the rows; picture sets from files keep their own test rows instead.
        flatten: pictures as (rows, pixels); then there may be more parties than columns of pixels.
        download: fetch picture files that are not there.
        root: folder of the picture files; VFL_DATA without it.
        limit: at most so many rows; see `read_bundled`.

    Returns:
        Data by party, in the order given, the label party last unless it is listed.

    Raises:
        UnknownNameError: no such data set.
        MissingDataError: picture files that are not there.
        TooFewRowsError: an empty part.
        DataError: more parties than columns.
    """
    data = read_bundled(source, root, download, limit)
    if data.train_rows is None:
        split = split_rows(data.rows, seed, validation, test)
    else:
        split = split_fixed(data.train_rows, data.rows, seed, validation)
    rows = AlignedRows.of(data.rows, split)
    inputs: dict[str, Inputs]
    if isinstance(data.cells, pd.DataFrame):
        owned = partition_columns(list(data.cells.columns), parties)
        inputs = {party: fit_inputs(data.cells, own, split) for party, own in owned.items()}
    else:
        strips = _strips(data, data.cells, parties, flatten)
        inputs = {party: Inputs(strip) for party, strip in strips.items()}
    return rows.parties(inputs, label_party, data.labels, data.classes)


def _strips(
    data: Bundled, pictures: np.ndarray, parties: Sequence[str], flatten: bool
) -> dict[str, np.ndarray]:
    """Each party's standardised part of the pictures, float32, axes (rows, ...)."""
    rows = len(pictures)
    if flatten and len(parties) > pictures.shape[-1]:
        whole = _scaled(pictures, data)
        pixels = whole.transpose(0, 3, 1, 2).reshape(rows, -1)  # pixel columns stay neighbours
        owned = zip(parties, blocks(pixels.shape[1], parties), strict=True)
        return {party: np.ascontiguousarray(pixels[:, block]) for party, block in owned}
    strips = {
        party: _scaled(strip, data) for party, strip in partition_image(pictures, parties).items()
    }
    if flatten:
        return {party: strip.reshape(rows, -1) for party, strip in strips.items()}
    return strips


def _scaled(strip: np.ndarray, data: Bundled) -> np.ndarray:
    inputs = np.array(strip, dtype=np.float32, order="C")
    inputs -= np.array(data.mean, dtype=np.float32)[:, None, None]
    inputs /= np.array(data.scale, dtype=np.float32)[:, None, None]
    return inputs


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

    Raises:
        MissingDataError, MissingColumnError, SharedColumnError, LabelLeakError, MisalignedError,
        TooFewRowsError, DataError: see `vfl.errors`; messages hold names and counts only.
    """
    frame, ids = read_sorted(source, id_column, "the table", form)
    check_column(frame.columns, label, "the label", "label.column")
    columns = {
        party: own_columns(frame, patterns, party, label, id_column, f"parties.{party}.columns")
        for party, patterns in party_columns.items()
    }
    check_owners(columns)
    _check_feature_parties(columns, label_party)
    split = split_rows(len(frame), seed, validation, test)
    inputs = {party: fit_inputs(frame, own, split) for party, own in columns.items()}
    labels, classes = encode_labels(frame[label], task)
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

    Raises:
        MissingDataError, MissingColumnError, LabelLeakError, MisalignedError, TooFewRowsError,
        DataError: see `vfl.errors`; messages hold names and counts only.
    """
    form = form or TableFormat()
    without = [party for party in (*party_columns, label_party) if party not in sources]
    if without:
        raise MissingDataError(
            f"party '{without[0]}' has no table",
            where=f"parties.{without[0]}.source",
            want="a file for every party, once one party has a file of its own",
        )
    frames = {
        party: read_table(own, form, [id_column], f"parties.{party}.source")
        for party, own in sources.items()
    }
    aligned = align(frames, id_column, form.id_type)
    check_column(
        aligned.frames[label_party].columns, label, f"the label of '{label_party}'", "label.column"
    )
    columns = {
        party: own_columns(
            frame, party_columns.get(party, ()), party, label, id_column, f"parties.{party}.columns"
        )
        for party, frame in aligned.frames.items()
    }
    _check_feature_parties(columns, label_party)
    split = split_rows(len(aligned.ids), seed, validation, test)
    inputs = {
        party: fit_inputs(aligned.frames[party], own, split) for party, own in columns.items()
    }
    labels, classes = encode_labels(aligned.frames[label_party][label], task)
    rows = AlignedRows.of(len(aligned.ids), split, aligned.ids)
    return rows.parties(inputs, label_party, labels, classes)


def _check_feature_parties(columns: Mapping[str, Sequence[str]], label_party: str) -> None:
    idle = [party for party, own in columns.items() if not own and party != label_party]
    if idle or not any(columns.values()):
        raise DataError(
            f"party '{idle[0]}' has no columns" if idle else "no party has any columns",
            want="at least one column for every party but the label party",
        )
