"""A party's record of how a run used its rows: for training, validation or test.

After a training, the party may change its table, or align it again. The record still identifies the
rows of the training, because it contains a keyed digest of each row's id. The key is stored with
the record in the party's own part of the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vfl.core.storage import Seal, damaged, read_sealed, write_sealed
from vfl.datasets import PartyData, Split
from vfl.datasets.alignment.join import Ids
from vfl.datasets.table import BLOCK_ROWS

_PARTS = ("train", "validation", "test")
_POSITION, DIGEST = np.dtype("<i8"), np.dtype("<u8")
#: Use of a row in a run, as a number: an index into `_PARTS`, or NEW for a row that the run did not
#: use.
TRAINED, VALIDATED, TESTED, NEW = range(4)


def _pieces(rows: np.ndarray, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Yield the bytes of an array, which may be mapped, in pieces."""
    for start in range(0, len(rows), BLOCK_ROWS):
        yield rows[start : start + BLOCK_ROWS].astype(dtype).tobytes()


@dataclass(frozen=True, eq=False)
class RunRows:
    """Record of one party's rows in one training.

    Attributes:
        split: positions of the training, validation and test rows in the row order of the training.
        alignment: name of the private alignment that determined the row order; None if there was
            none.
        order: keyed digest of the row order; if there was a private alignment, the digest
            identifies the alignment's version.
        ids: keyed digest of each row's id, uint64, axes (rows,); None if the party's rows have no
            ids.
    """

    split: Split
    alignment: str | None
    order: str
    ids: np.ndarray | None

    @classmethod
    def of(cls, data: PartyData, alignment: str | None, key: bytes) -> RunRows:
        """Make the record of a training that used these rows."""
        order = keyed_order(data.ids_digest, key)
        return cls(data.split, alignment, order, keyed_ids(data.ids, key))

    def parts(self, ids: np.ndarray) -> np.ndarray:
        """Return how the run used the rows with these keyed digests of ids; int8, axes (rows,)."""
        assert self.ids is not None, "rows without ids cannot be recognised"
        part = np.full(len(self.ids), NEW, dtype=np.int8)
        for code, name in enumerate(_PARTS):
            part[getattr(self.split, name)] = code
        order = np.argsort(self.ids)
        at = order[np.searchsorted(self.ids, ids, sorter=order).clip(max=len(order) - 1)]
        return np.where(self.ids[at] == ids, part[at], np.int8(NEW))

    def save(self, path: Path, seal: Seal) -> None:
        """Write the record to a file that only its owner can read."""
        parts = [getattr(self.split, name) for name in _PARTS]
        head = {
            "alignment": self.alignment,
            "order": self.order,
            "parts": [len(part) for part in parts],
            "ids": None if self.ids is None else len(self.ids),
        }
        start = json.dumps(head).encode()

        pieces = [_pieces(part, _POSITION) for part in parts]
        if self.ids is not None:
            pieces.append(_pieces(self.ids, DIGEST))
        write_sealed(path, chain([len(start).to_bytes(4, "little"), start], *pieces), seal)

    @classmethod
    def load(cls, path: Path, seal: Seal) -> RunRows:
        """Read a record from its file.

        Raises:
            RunFolderError: the record is damaged, or belongs to another training.
        """
        payload = read_sealed(path, seal)
        try:
            at = 4 + int.from_bytes(payload[:4], "little")
            head = json.loads(payload[4:at])
            parts = []
            for count in head["parts"]:
                parts.append(np.frombuffer(payload, _POSITION, count, at).astype(np.int64))
                at += count * _POSITION.itemsize
            ids = None
            if head["ids"] is not None:
                ids = np.frombuffer(payload, DIGEST, head["ids"], at)
            return cls(Split(*parts), head["alignment"], head["order"], ids)
        except (ValueError, KeyError, TypeError):
            raise damaged(path) from None


def keyed_order(digest: bytes, key: bytes) -> str:
    """Return a keyed BLAKE2b digest of the order of all rows, 32 bytes as hexadecimal digits."""
    return hashlib.blake2b(digest, key=key, digest_size=32).hexdigest()


def keyed_ids(ids: Ids | None, key: bytes) -> np.ndarray | None:
    """Return a keyed BLAKE2b digest of each row's id, 8 bytes as a uint64, axes (rows,)."""
    if ids is None:
        return None
    found = np.empty(len(ids), dtype=DIGEST)
    keyed = hashlib.blake2b(key=key, digest_size=DIGEST.itemsize)
    for start in range(0, len(ids), BLOCK_ROWS):
        for row, text in enumerate(ids[start : start + BLOCK_ROWS].tolist(), start):
            digest = keyed.copy()
            digest.update(str(text).encode())
            found[row] = int.from_bytes(digest.digest(), "little")
    return found
