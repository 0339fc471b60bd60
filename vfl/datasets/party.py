"""What one party holds once rows are aligned: its own columns, its own labels, nothing else."""

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
    """One party's aligned rows, ready for its model.

    Attributes:
        name: the party.
        inputs: float32, axes (rows, columns) or (rows, channels, height, width); None for a label
            party without columns.
        labels: axes (rows,): int64 codes 0..C-1, or float32 for a regression; None at a feature
            party.
        classes: what the codes stand for; None at a feature party and for a regression.
        split: the same at every party of a run.
        ids_digest: 32 bytes that stand for the order of the rows; see `digest_of`.
        ids: the rows' ids, axes (rows,), for the party's own files; None where rows have no id.
        id_rules: those of the alignment that gave the rows: how ids are written alike.
        encoder: what turned the party's table into `inputs`; kept beside its bottom model.
        row_weights: float32, axes (rows,), not negative: how much each row counts in the training
            loss, at the label party; None counts all alike. Evaluation counts all rows alike.
        unfamiliar: cells of the test rows that the training rows had nothing like, by column and
            kind; they stay with the party.
        held: which rows a feature party has, bool, axes (rows,), where some lack some: a party's
            own, and everybody's at the label party. Empty where all have all. Inputs of a row that
            a party lacks are not numbers, so that nothing learns from them unnoticed.
        unaligned: inputs of the party's own rows that no session has, axes (other rows, ...).
        trained: whether the run has trained on a row that a prediction asks for, axes (rows,):
            "yes"; "validation" where it only chose its weights or calibration by it; "no", whose
            answer is an honest one; or "unknown". None where the table is another and has no row
            of the first two kinds.
        unseen: which rows of an evaluation the run has never had, bool, axes (rows,); None where
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
        """Which rows every feature party has, at the label party; None where all have all."""
        return np.logical_and.reduce(list(self.held.values())) if self.held else None

    @property
    def asked(self) -> np.ndarray:
        """The test rows that this party has, int64."""
        test, held = self.split.test, self.held.get(self.name)
        return test if held is None else test[held[test]]

    @property
    def rows(self) -> int:
        """How many rows are aligned."""
        return len(self.split.train) + len(self.split.validation) + len(self.split.test)

    @property
    def columns(self) -> tuple[str, ...]:
        """What the inputs are made of, by name; empty where columns have no names."""
        return () if self.encoder is None else tuple(self.encoder.names)

    @property
    def categories(self) -> tuple[int, ...]:
        """How many categories each column has, where inputs are cells; else empty."""
        return getattr(self.encoder, "categories", ())

    @property
    def outputs(self) -> int:
        """Columns of what a top over these labels gives: classes, or 1 for a regression."""
        return 1 if self.classes is None else len(self.classes)

    def row_digest(self, session: str) -> str:
        """What two parties compare to know that their rows stand in the same order.

        HMAC-SHA256 keyed by the session's id, so that a digest means nothing in another session.
        It hides ids from a passer-by, not from a party that can guess the whole list.
        """
        return hmac.new(session.encode(), self.ids_digest, hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        inputs = None if self.inputs is None else tuple(self.inputs.shape)
        classes = None if self.classes is None else len(self.classes)
        return (
            f"PartyData(name={self.name!r}, rows={self.rows}, inputs={inputs}, "
            f"labels={self.labels is not None}, classes={classes}, split={self.split})"
        )


def digest_of(ids: Ids) -> bytes:
    """SHA-256 of the ids in their order, 32 bytes; JSON keeps apart what mere joining would not.

    >>> digest_of(np.array(["a", "b"])) == hashlib.sha256(b'["a", "b"]').digest()
    True
    """
    digest = IdsDigest()
    for start in range(0, len(ids), BLOCK_ROWS):
        digest.add(ids[start : start + BLOCK_ROWS].tolist())
    return digest.finish()


class IdsDigest:
    """`digest_of` of ids that come some at a time."""

    def __init__(self) -> None:
        self._digest, self._begun = hashlib.sha256(b"["), False

    def add(self, ids: list[Any]) -> None:
        """The next ids, numbers or texts."""
        if ids:
            self._digest.update(f"{', ' if self._begun else ''}{json.dumps(ids)[1:-1]}".encode())
            self._begun = True

    def finish(self) -> bytes:
        """The digest of all that came, 32 bytes."""
        self._digest.update(b"]")
        return self._digest.digest()


class Inputs(NamedTuple):
    """One party's model inputs, axes (rows, ...), and what made them; None where there is none.

    Attributes:
        unfamiliar: cells of the test rows that the training rows had nothing like; `Unfamiliar`.
        unaligned: the same of the party's other rows, axes (other rows, ...).
    """

    array: np.ndarray | None = None
    encoder: Encoder | None = None
    unfamiliar: Counts = NO_COUNTS
    unaligned: np.ndarray | None = None


NO_INPUTS = Inputs()


@dataclass(frozen=True, eq=False, repr=False)
class AlignedRows:
    """The order of the rows and their split, the same at every party.

    Attributes:
        split: which rows serve what.
        ids: axes (rows,); None where rows have no id and stand as they came.
        digest: stands for the order, or for the mere number of rows without ids.
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
        """Rows in their final order; `digest` is that of a private alignment, if there was one."""
        return cls(split, ids, digest or digest_of(np.arange(rows) if ids is None else ids))

    def party(
        self,
        name: str,
        inputs: Inputs = NO_INPUTS,
        labels: np.ndarray | None = None,
        classes: Classes | None = None,
    ) -> PartyData:
        """One party's data over these rows; the arrays are taken over, not copied."""
        held = self.held
        if labels is None:  # what others have is not told
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
        """Every party's data; the label party comes last unless it has inputs."""
        parts = {party: self.party(party, own) for party, own in inputs.items()}
        own = inputs.get(label_party, NO_INPUTS)
        return parts | {label_party: self.party(label_party, own, labels, classes)}


def _tensor(array: np.ndarray | None) -> Tensor | None:
    import torch

    if isinstance(array, MappedArray):
        from vfl.datasets.mapped_tensor import MappedTensor

        return MappedTensor.over(array)
    return None if array is None else torch.from_numpy(array)
