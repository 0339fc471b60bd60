"""Keys and tags of earlier alignments, which later alignments of the same two parties reuse.

With `ecdh:reuse=true` both parties store their scalars, so the points of ids that were already sent
stay valid. The parties then send and multiply only the points of new ids. For example, after one
party has sent a set of 10 million ids, aligning 1,000 ids with this set costs each party about
1,000 multiplications.

Each file belongs to one other party and to one set of terms (the settings that both parties agreed
on). First the two parties compare a random name of their keys and the sizes of the stored sets. If
anything differs, the parties draw fresh keys. The file contains no ids, but tags of the party's
ids, and their key: a reader of the file can test whether it has a given id.
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
#: Content of the comparing party's first message: name of the keys, number of stored points of the
#: other party, and number of its own stored points.
STATE = struct.Struct(f"<{NAME_BYTES}sQQ")
_NO_NAME = bytes(NAME_BYTES)
_PIECE_BYTES = BLOCK_TAGS * TAG_BYTES
_KIND = "reused keys"


@dataclass(frozen=True, eq=False)
class Known:
    """The ids of a table, compared with the ids that were sent in earlier alignments.

    Attributes:
        present: mask of the sent ids that are still in the table, bool, axes (sent ids,).
        rows: rows of these ids, in the order in which the ids were sent, int64.
        new: mask of the table's rows whose ids were not sent yet, bool, axes (rows,). None if no id
            was sent yet.
    """

    present: np.ndarray
    rows: np.ndarray
    new: np.ndarray | None

    @property
    def bits(self) -> bytes:
        """Return one bit for each id sent earlier: whether the id is still in the table."""
        return np.packbits(self.present).tobytes()

    def rows_of(self, at: np.ndarray) -> np.ndarray:
        """Return the rows of new ids, given by their positions among the new ids."""
        return at if self.new is None else np.flatnonzero(self.new)[at]


@dataclass(eq=False)
class Keys:
    """A party's scalar, and the tags that it sent and received with this scalar.

    Args:
        place: where the tags are stored.
        terms: digest of the terms under which the keys may be used again.

    Attributes:
        scalar: the secret scalar.
        name: random name of the last alignment with these keys, equal at both parties.
        ids: tags of the party's own ids with the key `key`, in the order in which the ids were
            sent.
        tags: at the comparing party: tags of the points of these ids, multiplied by both scalars.
        theirs: at the comparing party: tags of the points of the other party's ids, multiplied by
            both scalars.
        count: number of the other party's ids that this party has multiplied.
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
        """Return the comparing party's first message."""
        return STATE.pack(self.name, self.count, len(self.ids) // TAG_BYTES)

    def fits(self, state: bytes) -> bool:
        """Return whether the comparing party's message fits the keys and counts stored here."""
        same = STATE.pack(self.name, len(self.ids) // TAG_BYTES, self.count)
        return self.name != _NO_NAME and state == same

    def begin(self, name: bytes, *, same: bool) -> None:
        """Name the keys after this alignment; draw new keys if the two parties' keys differ.

        If two alignments run at once, the two parties may store the results of different
        alignments; in the next alignment, the different names show this.
        """
        if not same:
            vars(self).update(vars(Keys(self.place, self.terms)))
        self.name = name

    def known(self, ids: Iterable[Sequence[bytes]], count: int) -> Known:
        """Compare `count` ids of a table, given in blocks, with the ids that were sent earlier."""
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
        """Append tags to one of this object's columns, `tags` or `theirs`."""
        for start in range(0, len(tags), _PIECE_BYTES):
            column.write(tags[start : start + _PIECE_BYTES])

    def stage(self, path: Path, party: str) -> None:
        """Write the file under a temporary name.

        Raises:
            StorageError: the disk is full, or the file cannot be written.
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
        """Rename a staged file, so that it becomes the stored file."""
        _staged(path).replace(path)

    @staticmethod
    def discard(path: Path) -> None:
        """Remove a staged file that shall not be stored."""
        _staged(path).unlink(missing_ok=True)

    @classmethod
    def kept(cls, path: Path, terms: str, place: OnDisk) -> Keys:
        """Return the keys in a file; return fresh keys if there is no file or its terms differ.

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
    """Yield the tags that `present` marks, in blocks; `present` is bool, axes (first tags,)."""
    for start in range(0, len(present), BLOCK_TAGS):
        stop = min(start + BLOCK_TAGS, len(present))
        yield as_tags(tags[start * TAG_BYTES : stop * TAG_BYTES])[present[start:stop]]


def _staged(path: Path) -> Path:
    return path.with_name(f"{path.name}.staged")
