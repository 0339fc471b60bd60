"""Turn a party's table into inputs and labels on disk, with only a few rows in memory at a time.

The table is read in blocks of rows: its ids once, to sort the rows; its training rows once, to fit
the encoder; all rows once, to encode them and to write each one to its position; and labels twice.
For each row, memory also holds one byte that states whether the row is for training, validation or
test. With a private alignment, memory holds the row's id and position too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from vfl.core.errors import DataError, TooFewRowsError
from vfl.datasets.alignment.ids import id_blocks
from vfl.datasets.alignment.join import Ids, bad_ids, typed_ids
from vfl.datasets.alignment.positions import Alignment
from vfl.datasets.encode import (
    Encoder,
    LabelFit,
    PictureEncoder,
    TableEncoder,
    Unfamiliar,
    encoder_of,
    token_encoder,
)
from vfl.datasets.on_disk import DiskArray, DiskTexts, OnDisk, Scatter, SortedIds
from vfl.datasets.party import NO_INPUTS, IdsDigest, Inputs
from vfl.datasets.split import Split
from vfl.datasets.table import (
    BLOCK_ROWS,
    ID_UNIT,
    Classes,
    IdType,
    OwnTable,
    Table,
    check_column,
    column_blocks,
    row_blocks,
    spaced,
)

_MOST_ROWS = 1 << 17  # largest number of rows in a block
_CELL_BYTES = 64  # assumed memory of one cell during encoding
_TRAIN, _VALIDATION, _TEST = range(3)


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Order in which the rows of a table are used.

    Attributes:
        rows: number of rows in this order.
        at: the new position of each row of the table, int64, axes (rows of the table,), or -1 for a
            row that is left out; None if all rows keep their order.
        ids: ids in the new order; None if rows have no id.
        digest: digest of the order of the rows; None if it is `digest_of` the ids, or rows have no
            id.
        absent: positions for which the table has no row, ascending; None if it has a row for every
            position.
    """

    rows: int
    at: np.ndarray | None = None
    ids: Ids | None = None
    digest: bytes | None = None
    absent: np.ndarray | None = None

    def of_block(self, start: int, count: int) -> np.ndarray:
        """Return the new positions of `count` rows of the table from row `start` on."""
        if self.at is None:
            return np.arange(start, start + count)
        found: np.ndarray = self.at[start : start + count]
        return found


def order_by_id(
    table: Table, id_column: str, where: str, id_type: IdType, place: OnDisk
) -> RowOrder:
    """Return the order that `sorted_ids` defines, with its ids; ids and positions are on disk.

    Raises:
        MissingColumnError, MisalignedError: see `sorted_ids`.
    """
    check_column(table.columns, id_column, f"the id column of {where}", "data.id")
    rows, missing = len(table), 0

    def blocks() -> Iterator[pa.Array]:
        nonlocal missing
        for block in column_blocks(table, id_column):
            present = block.dropna() if block.hasnans else block  # dropna of pandas 2 always copies
            missing += len(block) - len(present)
            yield typed_ids(present, where, id_column, id_type)

    ids = SortedIds(place, blocks())
    if missing:
        raise bad_ids(where, id_column, f"{spaced(missing)} rows without an id")
    kept: DiskArray | DiskTexts = (
        DiskArray(place, (rows,), np.int64) if id_type == "number" else DiskTexts(place)
    )
    at = None if ids.in_order else Scatter(place, (rows,), np.int64)
    digest, start = IdsDigest(), 0
    for found, of_table in ids.ranges():
        for first in range(0, len(found), BLOCK_ROWS):
            digest.add(found[first : first + BLOCK_ROWS].to_pylist())
        if isinstance(kept, DiskArray):
            kept.write(start, found.to_numpy())
        else:
            kept.write(found)
        if at is not None:
            at.add(of_table, np.arange(start, start + len(found)))
        start += len(found)
    if ids.repeated:
        raise bad_ids(where, id_column, f"{spaced(ids.repeated)} rows repeat another row's id")
    positions = None if at is None else at.finish().read(place.share(16))
    if isinstance(kept, DiskArray):
        return RowOrder(rows, positions, kept.read(place.share(16)), digest.finish())
    return RowOrder(rows, positions, pd.arrays.ArrowStringArray(kept.read()), digest.finish())


def order_of_alignment(table: Table, id_column: str, where: str, by: Alignment) -> RowOrder:
    """Return the row order of a private alignment, with the party's ids of these rows.

    Positions take 16 bytes of memory for each row; each id takes 8 bytes plus its letters.

    Raises:
        MisalignedError: the table's ids have changed since the alignment.
    """
    digest, texts = IdsDigest(), list[pa.Array]()
    for block in id_blocks(table, id_column, where):
        digest.add(block.tolist())
        texts.append(pc.replace_substring(pa.array(block, pa.large_string()), ID_UNIT, " "))
    by.check(len(table), digest.finish().hex(), where)
    has = by.positions >= 0
    rows, at = by.positions[has], np.full(len(table), -1, dtype=np.int64)
    at[rows] = np.flatnonzero(has)
    ids = pc.take(pa.chunked_array(texts, pa.large_string()), pa.array(rows))
    own = pd.arrays.ArrowStringArray(ids)
    return RowOrder(len(by.positions), at, own, by.digest, by.absent)


class StreamedTable:
    """Makes inputs and labels of a table that is larger than memory.

    Args:
        table: the party's table.
        whose: owner of the table, for messages.
        order: order of the table's rows.
        place: folder for the inputs and labels.
    """

    def __init__(self, table: Table, whose: str, order: RowOrder, place: OnDisk) -> None:
        self._table, self._whose, self._order, self._place = table, whose, order, place

    def inputs(self, own: OwnTable, split: Split, encoder: Encoder | None = None) -> Inputs:
        """Encode the columns of `own`; medians and edges may come from a sample. See `fit_inputs`.

        Raises:
            TooFewRowsError: the party has none of the training rows.
            DataError: see `TableEncoder.fit_blocks` and `PictureEncoder.fit_blocks`.
        """
        if not own.columns:
            return NO_INPUTS
        part = np.full(self._order.rows, _TRAIN, dtype=np.uint8)
        for name, rows in ((_VALIDATION, split.validation), (_TEST, split.test)):
            for start in range(0, len(rows), _MOST_ROWS):
                part[rows[start : start + _MOST_ROWS]] = name
        return self._encoded(encoder or self._fitted(own, len(split.train), part), part)

    def _fitted(self, own: OwnTable, training_rows: int, part: np.ndarray) -> Encoder:
        training, columns = self._training(own.columns or (), part), own.columns or ()
        if own.shape:
            return PictureEncoder.fit_blocks(training, columns, tuple(own.shape))
        form = own.form

        def fit_table(names: Sequence[str]) -> TableEncoder:
            blocks = self._training(names, part)
            return encoder_of(form).fit_blocks(
                blocks, names, training_rows, dates=form.dates, bins=form.bins
            )

        return token_encoder(training, columns, form, fit_table) or fit_table(columns)

    def _encoded(self, encoder: Encoder, part: np.ndarray) -> Inputs:
        counter, found = Unfamiliar(), None
        for at, block in self._blocks(encoder.names):
            counted = Unfamiliar(part[at] == _TEST)
            inputs = encoder.transform(block, counted)
            counter.join(counted)
            shape = (self._order.rows, *inputs.shape[1:])
            found = found or Scatter(self._place, shape, np.float32)
            found.add(at, inputs)
        if found is None:
            raise DataError(
                "this table has none of the rows of the session",
                where="data.source",
                got=f"{spaced(len(self._table))} rows here",
            )
        absent = self._order.absent if self._order.absent is not None else np.empty(0, np.int64)
        for start in range(0, len(absent), 1024):
            at = absent[start : start + 1024]
            found.add(at, np.full((len(at), *found.found.shape[1:]), np.nan, dtype=np.float32))
        return Inputs(found.finish().read(self._place.share(8)), encoder, counter.counts)

    def labels(self, column: str, task: str) -> tuple[np.ndarray, Classes | None]:
        """Return what `encode_labels` returns for a label column, with the labels on disk.

        Raises:
            DataError: see `encode_labels`.
        """
        fit = LabelFit(column, task)
        for _, block in self._blocks([column]):
            fit.add(block[column])
        classes = fit.classes()
        kind = np.float32 if classes is None else np.int64
        found = Scatter(self._place, (self._order.rows,), kind)
        for at, block in self._blocks([column]):
            found.add(at, fit.encode(block[column], classes))
        return found.finish().read(self._place.share(16)), classes

    def _blocks(self, names: Sequence[str]) -> Iterator[tuple[np.ndarray, pd.DataFrame]]:
        """Yield blocks of the session's rows, in the table's order, with their new positions."""
        rows = self._place.share(12) // (_CELL_BYTES * len(names))
        start = 0
        for block in row_blocks(self._table, names, max(1024, min(rows, _MOST_ROWS))):
            at = self._order.of_block(start, len(block))
            start += len(block)
            if (left_out := at < 0).any():
                at, block = at[~left_out], block[~left_out]
            if len(at):
                yield at, block

    def _training(self, names: Sequence[str], part: np.ndarray) -> Iterator[pd.DataFrame]:
        found = False
        for at, block in self._blocks(names):
            training = part[at] == _TRAIN
            if training.any():
                found = True
                yield block[training]
        if not found:
            raise no_training_rows(self._whose, len(self._table), self._order.rows)


def no_training_rows(whose: str, here: int, rows: int) -> TooFewRowsError:
    """Make the error for a party whose table has none of the training rows."""
    return TooFewRowsError(
        f"{whose} has none of the training rows",
        got=f"{spaced(here)} of {spaced(rows)} rows",
        fix="another seed, or an experiment without that party",
    )
