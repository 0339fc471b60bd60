"""From an aligned table to `PartyData`: what all parties of a run share, and one party's part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vfl.datasets.align import sort_by_id
from vfl.datasets.columns import Part, Table
from vfl.datasets.encode import Encoder, TableEncoder
from vfl.datasets.files import read_table
from vfl.datasets.ids import Ids
from vfl.datasets.party import Classes, PartyData, Split, digest_of
from vfl.datasets.pictures import PictureEncoder
from vfl.datasets.table import Source, TableFormat, check_features, pick_columns

if TYPE_CHECKING:
    from torch import Tensor


class Inputs(NamedTuple):
    """One party's model inputs, axes (rows, ...), and what made them; None where there is none."""

    array: np.ndarray | None = None
    encoder: Encoder | None = None


NO_INPUTS = Inputs()


@dataclass(frozen=True, eq=False, repr=False)
class AlignedRows:
    """The order of the rows and their split, the same at every party.

    Attributes:
        split: which rows serve what.
        ids: axes (rows,); None where rows have no id and stand as they came.
        digest: stands for the order, or for the mere number of rows without ids.
    """

    split: Split
    ids: Ids | None
    digest: bytes

    @classmethod
    def of(cls, rows: int, split: Split, ids: Ids | None = None) -> AlignedRows:
        """Rows in their final order."""
        return cls(split, ids, digest_of(np.arange(rows) if ids is None else ids))

    def party(
        self,
        name: str,
        inputs: Inputs = NO_INPUTS,
        labels: np.ndarray | None = None,
        classes: Classes | None = None,
    ) -> PartyData:
        """One party's data over these rows; the arrays are taken over, not copied."""
        return PartyData(
            name=name,
            inputs=_tensor(inputs.array),
            labels=_tensor(labels),
            classes=classes,
            split=self.split,
            ids_digest=self.digest,
            ids=self.ids,
            encoder=inputs.encoder,
        )

    def parties(
        self,
        inputs: Mapping[str, Inputs],
        label_party: str,
        labels: np.ndarray,
        classes: Classes | None,
    ) -> dict[str, PartyData]:
        """Every party's data; the label party comes last unless it has inputs."""
        parts = {party: self.party(party, own) for party, own in inputs.items()}
        own = inputs.get(label_party, NO_INPUTS)
        return parts | {label_party: self.party(label_party, own, labels, classes)}


def read_sorted(
    source: Source,
    id_column: str | None,
    where: str,
    form: TableFormat | None,
    setting: str = "data.source",
    columns: Sequence[str] | None = None,
) -> tuple[Table, Ids | None]:
    """A table in ascending order of its ids, and the ids; as it stands, and None, without ids.

    Of `columns`, if they are given, and the ids alone.

    Raises:
        MissingDataError, DataError: no readable table.
        MissingColumnError, MisalignedError: no usable ids.
    """
    form = form or TableFormat()
    if id_column is None:
        return read_table(source, form, setting=setting, columns=columns), None
    kept = None if columns is None else [id_column, *columns]
    frame = read_table(source, form, [id_column], setting, kept)
    return sort_by_id(frame, id_column, where, form.id_type)


def own_columns(
    names: Iterable[str],
    patterns: Sequence[str],
    party: str,
    label: str | None,
    ids: str | None,
    setting: str,
) -> list[str]:
    """A party's resolved columns, checked: neither the label nor the id is among them.

    Raises:
        MissingColumnError, LabelLeakError, DataError: see `pick_columns` and `check_features`.
    """
    leave_out = [name for name in (label, ids) if name is not None]
    columns = pick_columns(names, patterns, f"party '{party}'", leave_out, setting)
    check_features(party, columns, label, ids, setting)
    return columns


def fit_inputs(
    frame: Table, columns: Sequence[str], split: Split, shape: Sequence[int] | None = None
) -> Inputs:
    """Inputs of all rows by an encoder that saw the training rows only.

    Args:
        frame: the party's aligned table.
        columns: its resolved columns.
        split: which rows are training rows.
        shape: (channels, height, width) when the columns are pixels.

    Raises:
        DataError: see `TableEncoder.fit` and `PictureEncoder.fit`.
    """
    if not columns:
        return NO_INPUTS
    training = Part.of(frame, split.train, columns)
    encoder: Encoder = (
        PictureEncoder.fit(training, tuple(shape)) if shape else TableEncoder.fit(training)
    )
    return Inputs(encoder.transform(frame), encoder)


def _tensor(array: np.ndarray | None) -> Tensor | None:
    import torch

    return None if array is None else torch.from_numpy(array)
