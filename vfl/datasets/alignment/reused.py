"""Keys and tags of earlier alignments, which later ones of the same two parties reuse.

With `ecdh:reuse=true` both parties keep their scalars, so the points of ids that were sent before
stay valid: the set is precomputed, and only ids that are new are sent and multiplied. 1,000 ids
against 10 million then cost about 1,000 multiplications at each party once the large set was sent.

A file belongs to one peer and to one set of terms. Both parties compare a random name of their keys
and the sizes of the kept sets first, and draw fresh keys if anything differs. The file contains
tags of the party's ids under a key of its own, and no id.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vfl.core.storage import Seal, checked_span, damaged, write_sealed
from vfl.datasets.alignment import ristretto
from vfl.datasets.alignment.tags import (
    BLOCK_TAGS,
    KEY_BYTES,
    TAG_BYTES,
    as_tags,
    common_rows,
    tag_blocks,
    tags_of,
)
from vfl.datasets.on_disk import DiskBytes, OnDisk

NAME_BYTES = 16
#: The judge's first message: name of the keys, number of the other party's kept points, of its own.
STATE = struct.Struct(f"<{NAME_BYTES}sQQ")
_NO_NAME = bytes(NAME_BYTES)
_PIECE_BYTES = BLOCK_TAGS * TAG_BYTES
_KIND = "reused keys"


@dataclass(frozen=True, eq=False)
class Known:
    """Ids of a table, compared with those that were sent before.

    Attributes:
        present: mask of the sent ids that are still in the table; bool, axes (sent,).
        rows: rows of those, in the order in which they were sent; int64.
        new: mask of the table's rows whose id was not sent; bool, axes (rows,). None if no id was
            sent.
    """

    present: np.ndarray
    rows: np.ndarray
    new: np.ndarray | None

    @property
    def bits(self) -> bytes:
        """One bit for each sent id: whether it is still in the table."""
        return np.packbits(self.present).tobytes()

    def rows_of(self, at: np.ndarray) -> np.ndarray:
        """Rows of new ids, by their position among the new ones."""
        return at if self.new is None else np.flatnonzero(self.new)[at]


@dataclass(eq=False)
class Keys:
    """A party's scalar in an alignment, with what was sent and received under it before.

    Args:
        place: where tags are stored.
        terms: digest of the terms under which the keys may be reused.

    Attributes:
        scalar: the secret scalar.
        name: random name of the last alignment with these keys, the same at both parties.
        ids: tags of the party's ids under `key`, in the order in which they were sent.
        tags: at the comparing party, tags of these ids under both scalars.
        theirs: at the comparing party, tags of the other party's ids under both scalars.
        count: number of the other party's ids that were multiplied.
    """

    place: OnDisk
    terms: str = ""
    count: int = 0
    name: bytes = _NO_NAME
    scalar: bytes = field(default_factory=ristretto.fresh_scalar, repr=False)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)

    def __post_init__(self) -> None:
        self.ids, self.tags, self.theirs = (DiskBytes(self.place) for _ in range(3))

    def state(self) -> bytes:
        """The comparing party's first message."""
        return STATE.pack(self.name, self.count, len(self.ids) // TAG_BYTES)

    def fits(self, state: bytes) -> bool:
        """Return whether the comparing party has the same keys, and what this party sent."""
        same = STATE.pack(self.name, len(self.ids) // TAG_BYTES, self.count)
        return self.name != _NO_NAME and state == same

    def begin(self, name: bytes, *, same: bool) -> None:
        """Give the keys the name of this alignment; unless both parties have the same, renew them.

        If two alignments run at once, the parties may keep the result of different ones, which then
        have different names.
        """
        if not same:
            vars(self).update(vars(Keys(self.place, self.terms)))
        self.name = name

    def known(self, ids: Iterable[Sequence[bytes]], count: int) -> Known:
        """Compare `count` ids of a table, in blocks, with those that were sent before."""
        sent = len(self.ids) // TAG_BYTES
        if not sent:
            return Known(np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64), None)
        own = (tags_of(each, self.key) for each in ids)
        sets = common_rows([own, tag_blocks(self.ids)], [count, sent], self.place)
        row_of, new = np.full(sent, -1, dtype=np.int32), np.ones(count, dtype=bool)
        for start in range(0, len(sets[0]), BLOCK_TAGS):
            rows, at = (column[start : start + BLOCK_TAGS] for column in sets)
            row_of[at], new[rows] = rows, False
        present = row_of >= 0
        return Known(present, row_of[present].astype(np.int64), new)

    def keep(self, column: DiskBytes, tags: bytes | DiskBytes) -> None:
        """Append tags to a column of this object: its `tags`, or `theirs`."""
        for start in range(0, len(tags), _PIECE_BYTES):
            column.write(tags[start : start + _PIECE_BYTES])

    def stage(self, path: Path, party: str) -> None:
        """Write the file under a temporary name.

        Raises:
            StorageError: the disk is full, or cannot be written.
        """
        columns = (self.ids, self.tags, self.theirs)
        secret = {"name": self.name.hex(), "scalar": self.scalar.hex(), "key": self.key.hex()}
        sizes = {"count": self.count, "sizes": [len(each) for each in columns]}
        head = json.dumps(secret | sizes | {"terms": self.terms}).encode()
        pieces = (
            each[start : start + _PIECE_BYTES]
            for each in columns
            for start in range(0, len(each), _PIECE_BYTES)
        )
        start = len(head).to_bytes(4, "little") + head
        write_sealed(_staged(path), chain([start], pieces), Seal(_KIND, party, ""))

    @staticmethod
    def commit(path: Path) -> None:
        """Make the staged file the kept one."""
        _staged(path).replace(path)

    @staticmethod
    def discard(path: Path) -> None:
        """Remove a staged file that will not be kept."""
        _staged(path).unlink(missing_ok=True)

    @classmethod
    def kept(cls, path: Path, terms: str, place: OnDisk) -> Keys:
        """The keys in a file; fresh ones if there is no file, or one of other terms.

        Raises:
            RunFolderError: the file is damaged.
        """
        if not path.exists():
            return cls(place, terms)
        span = checked_span(path, Seal(_KIND, None, None))
        with path.open("rb") as file:
            file.seek(span.start)
            try:
                head: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(4), "little")))
                if head["terms"] != terms:
                    return cls(place, terms)
                secret = {name: bytes.fromhex(head[name]) for name in ("name", "scalar", "key")}
                found = cls(place, terms, head["count"], **secret)
                columns = (found.ids, found.tags, found.theirs)
                for column, size in zip(columns, head["sizes"], strict=True):
                    for start in range(0, size, _PIECE_BYTES):
                        column.write(file.read(min(_PIECE_BYTES, size - start)))
            except (ValueError, KeyError, TypeError):
                raise damaged(path) from None
        return found


def chosen(tags: DiskBytes, present: np.ndarray) -> Iterator[np.ndarray]:
    """Yield some of the first tags, in blocks; `present` is bool, axes (tags,)."""
    for start in range(0, len(present), BLOCK_TAGS):
        stop = min(start + BLOCK_TAGS, len(present))
        yield as_tags(tags[start * TAG_BYTES : stop * TAG_BYTES])[present[start:stop]]


def _staged(path: Path) -> Path:
    return path.with_name(f"{path.name}.staged")
