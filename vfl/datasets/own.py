"""One party of a federation: it reads its own file and nobody else's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from vfl.datasets.encode import Encoder, TableEncoder
from vfl.datasets.files import column_names
from vfl.datasets.labels import encode_labels
from vfl.datasets.party import Classes, PartyData, Split
from vfl.datasets.pictures import PictureEncoder
from vfl.datasets.rows import NO_INPUTS, AlignedRows, Inputs, fit_inputs, own_columns, read_sorted
from vfl.datasets.split import split_rows
from vfl.datasets.table import Source, TableFormat, check_column
from vfl.errors import DataError


def load_own(
    name: str,
    source: Source,
    id_column: str | None,
    columns: Sequence[str] | None,
    label: str | None,
    task: str,
    seed: int,
    validation: float = 0.1,
    test: float = 0.2,
    shape: Sequence[int] | None = None,
    form: TableFormat | None = None,
    left_out: str | None = None,
    setting: str = "data.columns",
) -> PartyData:
    """A party's data for training, rows sorted by id; of the file its own columns alone are kept.

    The other parties' rows must be the same and are never seen here: compare `rows` and
    `row_digest` before training.

    Args:
        name: the party.
        source: its CSV or Parquet file, or a frame.
        id_column: rows are sorted by it; None keeps the order of the table.
        columns: names and globs of its features; none for a label party without columns.
        label: its label column; None at a feature party.
        task: "classification" or "regression"; unused without a label.
        seed: the run's public seed.
        validation: share of the rows, the same at every party.
        test: share of the rows, the same at every party.
        shape: (channels, height, width) when the columns are pixels in reading order.
        form: how the file is written.
        left_out: somebody else's label in this file, which is no feature either.
        setting: what names the columns, for messages.

    Raises:
        MissingDataError, MissingColumnError, LabelLeakError, MisalignedError, TooFewRowsError,
        DataError: see `vfl.errors`; messages hold names and counts only.
    """
    names = column_names(source, form, "data.source")
    own = own_columns(names, columns or (), name, label or left_out, id_column, setting)
    _check_names(names, name, own, id_column, label)
    kept = own if label is None else [*own, label]
    frame, ids = read_sorted(source, id_column, f"party '{name}'", form, columns=kept)
    split = split_rows(len(frame), seed, validation, test)
    labels: np.ndarray | None = None
    classes: Classes | None = None
    if label is not None:
        labels, classes = encode_labels(frame[label], task)
    rows = AlignedRows.of(len(frame), split, ids)
    return rows.party(name, fit_inputs(frame, own, split, shape), labels, classes)


def _check_names(
    names: Sequence[str], party: str, own: Sequence[str], id_column: str | None, label: str | None
) -> None:
    if id_column is not None:
        check_column(names, id_column, f"the id column of party '{party}'", "data.id")
    if label is not None:
        check_column(names, label, f"the label of '{party}'", "data.label")
    elif not own:
        raise DataError(f"party '{party}' has neither columns nor a label")


def load_for_prediction(
    name: str,
    source: Source,
    id_column: str | None,
    encoder: Encoder | None,
    form: TableFormat | None = None,
) -> PartyData:
    """A party's data for prediction on new rows: all of them test rows, none with a label.

    Of the file its own columns alone are kept.

    Args:
        name: the party.
        source: its CSV or Parquet file, or a frame.
        id_column: rows are sorted by it; None keeps the order of the table.
        encoder: the one its training left behind (`PartyData.encoder`, `read_encoder`); None for a
            party without inputs.
        form: how the file is written.

    Raises:
        MissingDataError, MissingColumnError, MisalignedError, DataError: see `vfl.errors`.
    """
    names, kept = column_names(source, form, "data.predict"), list(encoder.names) if encoder else []
    if id_column is not None:
        check_column(names, id_column, f"the id column of party '{name}'", "data.id")
    for each in kept:
        check_column(names, each, f"the encoder's '{each}'", "data.predict")
    # Of a table without ids that gives no inputs, its rows are all there is to know.
    columns = kept if kept or id_column else None
    frame, ids = read_sorted(source, id_column, f"party '{name}'", form, "data.predict", columns)
    nothing = np.empty(0, dtype=np.int64)
    split = Split(train=nothing, validation=nothing, test=np.arange(len(frame), dtype=np.int64))
    inputs = Inputs(encoder.transform(frame), encoder) if encoder else NO_INPUTS
    return AlignedRows.of(len(frame), split, ids).party(name, inputs)


def read_encoder(text: str) -> Encoder:
    """The encoder whose `to_json` wrote this text.

    Raises:
        DataError: the text is something else.
    """
    readers: dict[str, Callable[[str], Encoder]] = {
        "table": TableEncoder.from_json,
        "pictures": PictureEncoder.from_json,
    }
    try:
        read = readers[json.loads(text)["encoder"]]
    except (ValueError, KeyError, TypeError):
        raise DataError("this is not a stored encoder", want="what to_json wrote") from None
    return read(text)
