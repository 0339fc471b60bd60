"""All parties' data in one process, of a data set that is known by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from vfl.datasets.bundled import Bundled, read_bundled
from vfl.datasets.form import SetFormat
from vfl.datasets.partition import blocks, partition_columns, partition_image
from vfl.datasets.party import PartyData, Split
from vfl.datasets.rows import AlignedRows, Inputs, fit_inputs
from vfl.datasets.split import Fold, split_fixed, split_fold, split_parts, split_rows
from vfl.datasets.texts import Texts
from vfl.errors import BadOptionError


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
    form: SetFormat | None = None,
    fold: Fold | None = None,
) -> dict[str, PartyData]:
    """A data set by name, cut into strips of the picture or blocks of columns, words or items.

    Args:
        source: one of `vfl.datasets.SOURCES`, or picture sets joined with a plus.
        parties: who gets columns, from left to right; the label party only if it is listed.
        seed: the run's public seed.
        label_party: who gets the labels.
        validation: share of the rows, or of the training rows where test rows are fixed; a set with
            validation rows of its own keeps them.
        test: share of the rows; a set with test rows of its own keeps them instead.
        flatten: pictures as (rows, pixels); then there may be more parties than columns of pixels.
        download: fetch picture files that are not there.
        root: folder of the files; VFL_DATA without it.
        limit: at most so many rows; see `read_bundled`.
        form: what is made of the set.
        fold: its rows are the test rows, and `validation` is a share of the others.

    Returns:
        Data by party, in the order given, the label party last unless it is listed.

    Raises:
        UnknownNameError: no such data set.
        BadOptionError: a form the set cannot have, or a fold of a set with test rows of its own.
        MissingDataError: files that are not there.
        TooFewRowsError: an empty part.
        DataError: more parties than columns.
    """
    data = read_bundled(source, root, download, limit, form, seed)
    split = _split(data, source, seed, validation, test, fold)
    rows = AlignedRows.of(data.rows, split)
    inputs: dict[str, Inputs]
    if isinstance(data.cells, pd.DataFrame):
        owned = partition_columns(list(data.cells.columns), parties)
        inputs = {party: fit_inputs(data.cells, own, split) for party, own in owned.items()}
    else:
        cells = data.cells.rows(split.train) if isinstance(data.cells, Texts) else data.cells
        cut = _steps(cells, parties) if cells.ndim == 2 else _strips(data, cells, parties, flatten)
        inputs = {party: Inputs(own) for party, own in cut.items()}
    return rows.parties(inputs, label_party, data.labels, data.classes)


def _split(
    data: Bundled, source: str, seed: int, validation: float, test: float, fold: Fold | None
) -> Split:
    if fold is not None:
        if data.train_rows is not None:
            raise BadOptionError(
                f"data set '{source}' has test rows of its own",
                where="data.folds",
                got=f"fold {fold.number} of {fold.of}",
                fix="leave data.folds out",
            )
        return split_fold(data.labels, seed, fold, validation)
    if data.train_rows is None:
        return split_rows(data.rows, seed, validation, test)
    if data.validation_rows:
        return split_parts(data.train_rows, data.validation_rows, data.rows)
    return split_fixed(data.train_rows, data.rows, seed, validation)


def _steps(rows: np.ndarray, parties: Sequence[str]) -> dict[str, np.ndarray]:
    """Each party's neighbouring steps of rows of whole numbers, axes (rows, steps)."""
    owned = zip(parties, blocks(rows.shape[1], parties), strict=True)
    return {party: np.ascontiguousarray(rows[:, block]) for party, block in owned}


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
