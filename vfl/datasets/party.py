"""Data of one party with aligned rows, which contain only the party's own columns and labels."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vfl.datasets.on_disk import MappedArray
from vfl.datasets.split import Split
from vfl.datasets.table import BLOCK_ROWS, Classes

if TYPE_CHECKING:
    from torch import Tensor

    from vfl.datasets.alignment.join import Ids
    from vfl.datasets.encode import Encoder


Counts = Mapping[str, Mapping[str, int]]
NO_COUNTS: Counts = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class PartyData:
    """One party's aligned rows, ready for the party's models.

    Attributes:
        name: name of the party.
        inputs: inputs of the rows, float32, axes (rows, columns) or (rows, channels, height,
            width); None for a label party without columns.
        labels: labels, axes (rows,): int64 codes 0..C-1, or float32 for a regression; None at a
            feature party.
        classes: names of the classes by code; None at a feature party and for a regression.
        split: split of the rows, the same at every party of a run.
        ids_digest: 32 bytes that identify the rows and their order; see `digest_of`.
        ids: ids of the rows, axes (rows,), which the party writes to its own files; None if rows
            have no ids.
        id_rules: normalisation rules of the ids in the alignment that gave the rows.
        encoder: encoder that made `inputs` from the party's table; stored with the party's bottom.
        row_weights: weight of each row in the training loss, float32, axes (rows,), at least 0, at
            the label party; None gives all rows the same weight. Evaluation gives all rows the same
            weight.
        unfamiliar: numbers of cells in test rows whose values do not occur in the training rows, by
            column and kind; the party does not send these numbers.
        held: mask of the rows that a feature party has, bool, axes (rows,), if rows are missing. A
            feature party has only its own mask; the label party has all masks. Empty if every party
            has all rows. Inputs of missing rows are NaN, so that no model learns from them by
            mistake.
        unaligned: inputs of the party's rows outside the session, axes (other rows, ...).
        trained: for rows of a prediction, their use in the run's training, axes (rows,). "yes":
            trained on; "validation": used to select weights or to calibrate; "no": not used, so
            that the prediction is an honest test; or "unknown". None if the table has changed and
            none of its rows is known to be "yes" or "validation".
        unseen: mask of an evaluation's rows that are new to the run, bool, axes (rows,); None if
            the rows are those of the training.
    """

    name: str
    inputs: Tensor | None
    labels: Tensor | None
    classes: Classes | None
    split: Split
    ids_digest: bytes
    ids: Ids | None = None
    encoder: Encoder | None = None
    row_weights: Tensor | None = None
    unfamiliar: Counts = field(default_factory=dict)
    held: Mapping[str, np.ndarray] = field(default_factory=dict)
    unaligned: Tensor | None = None
    trained: np.ndarray | None = None
    unseen: np.ndarray | None = None
    id_rules: str = "plain"

    @property
    def complete(self) -> np.ndarray | None:
        """Return a mask of the rows that all feature parties have; None if these are all rows."""
        return np.logical_and.reduce(list(self.held.values())) if self.held else None

    @property
    def asked(self) -> np.ndarray:
        """Return the test rows that this party has, int64."""
        test, held = self.split.test, self.held.get(self.name)
        return test if held is None else test[held[test]]

    @property
    def rows(self) -> int:
        """Return the number of aligned rows."""
        return len(self.split.train) + len(self.split.validation) + len(self.split.test)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the input columns; empty if they have no names."""
        return () if self.encoder is None else tuple(self.encoder.names)

    @property
    def tokens(self) -> int | None:
        """Return the number of leading inputs of a row that are tokens; None without an encoder."""
        return None if self.encoder is None else self.encoder.tokens

    @property
    def categories(self) -> tuple[int, ...]:
        """Return the number of categories of each column, if inputs are cells; otherwise empty."""
        return getattr(self.encoder, "categories", ())

    @property
    def outputs(self) -> int:
        """Return a top's number of outputs for these labels: the classes, or 1 for a regression."""
        return 1 if self.classes is None else len(self.classes)

    def row_digest(self, session: str) -> str:
        """Return a digest with which two parties compare the order of their rows.

        The digest is HMAC-SHA256 with the session's id as key, so it means nothing in another
        session. The digest hides the ids from third parties, but not from a party that can guess
        the whole list of ids.
        """
        return hmac.new(session.encode(), self.ids_digest, hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        inputs = None if self.inputs is None else tuple(self.inputs.shape)
        classes = None if self.classes is None else len(self.classes)
        return (
            f"PartyData(name={self.name!r}, rows={self.rows}, inputs={inputs}, "
            f"labels={self.labels is not None}, classes={classes}, split={self.split})"
        )


def digest_of(ids: Ids | range) -> bytes:
    """Return the SHA-256 of ordered ids, 32 bytes; JSON keeps neighbouring ids distinct.

    >>> digest_of(np.array(["a", "b"])) == hashlib.sha256(b'["a", "b"]').digest()
    True
    """
    digest = IdsDigest()
    for start in range(0, len(ids), BLOCK_ROWS):
        block = ids[start : start + BLOCK_ROWS]
        digest.add(list(block) if isinstance(block, range) else block.tolist())
    return digest.finish()


class IdsDigest:
    """Computes `digest_of` for ids that arrive in blocks."""

    def __init__(self) -> None:
        self._digest, self._begun = hashlib.sha256(b"["), False

    def add(self, ids: list[Any]) -> None:
        """Add the next ids, which are numbers or texts."""
        if ids:
            self._digest.update(f"{', ' if self._begun else ''}{json.dumps(ids)[1:-1]}".encode())
            self._begun = True

    def finish(self) -> bytes:
        """Return the digest of all added ids, 32 bytes."""
        self._digest.update(b"]")
        return self._digest.digest()


class Inputs(NamedTuple):
    """One party's model inputs, axes (rows, ...), and their encoder; a missing part is None.

    Attributes:
        unfamiliar: numbers of cells in test rows whose values do not occur in the training rows;
            see `Unfamiliar`.
        unaligned: inputs of the party's rows outside the session, axes (other rows, ...).
    """

    array: np.ndarray | None = None
    encoder: Encoder | None = None
    unfamiliar: Counts = NO_COUNTS
    unaligned: np.ndarray | None = None


NO_INPUTS = Inputs()


@dataclass(frozen=True, eq=False, repr=False)
class AlignedRows:
    """The order of the rows and their split, equal at every party.

    Attributes:
        split: split of the rows.
        ids: ids of the rows, axes (rows,); None if rows have no ids and keep their original order.
        digest: digest of the order of the rows; if rows have no ids, digest of their number alone.
        held, id_rules: see `PartyData`.
    """

    split: Split
    ids: Ids | None
    digest: bytes
    held: Mapping[str, np.ndarray] = field(default_factory=dict)
    id_rules: str = "plain"

    @classmethod
    def of(
        cls, rows: int, split: Split, ids: Ids | None = None, digest: bytes | None = None
    ) -> AlignedRows:
        """Return rows in their final order; `digest` is that of a private alignment, if any."""
        if digest is None:
            # a range, because an array of all numbers would take 8 bytes of memory per row
            digest = digest_of(range(rows) if ids is None else ids)
        return cls(split, ids, digest)

    def party(
        self,
        name: str,
        inputs: Inputs = NO_INPUTS,
        labels: np.ndarray | None = None,
        classes: Classes | None = None,
    ) -> PartyData:
        """Make one party's data from these rows; the arrays are not copied."""
        held = self.held
        if labels is None:  # each feature party knows only its own rows
            held = {party: rows for party, rows in held.items() if party == name}
        return PartyData(
            name=name,
            inputs=_tensor(inputs.array),
            labels=_tensor(labels),
            classes=classes,
            split=self.split,
            ids_digest=self.digest,
            ids=self.ids,
            encoder=inputs.encoder,
            unfamiliar=inputs.unfamiliar,
            held=held,
            unaligned=_tensor(inputs.unaligned),
            id_rules=self.id_rules,
        )

    def parties(
        self,
        inputs: Mapping[str, Inputs],
        label_party: str,
        labels: np.ndarray,
        classes: Classes | None,
    ) -> dict[str, PartyData]:
        """Return the data of every party; a label party without inputs comes last."""
        parts = {party: self.party(party, own) for party, own in inputs.items()}
        own = inputs.get(label_party, NO_INPUTS)
        return parts | {label_party: self.party(label_party, own, labels, classes)}


def _tensor(array: np.ndarray | None) -> Tensor | None:
    import torch

    if isinstance(array, MappedArray):
        from vfl.datasets.mapped_tensor import MappedTensor

        return MappedTensor.over(array)
    return None if array is None else torch.from_numpy(array)
