"""Spending and consent of a party on disk: common base of the ledgers of sessions and products.

The spending under a run name is counted on disk before the messages are sent. A folder itself
cannot show that it was restored from an earlier copy; the folder's `Witness` lets peers notice a
restore.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import ValidationError

from vfl.config.toml import Settings
from vfl.core.errors import RunFolderError
from vfl.core.storage import (
    Seal,
    damaged,
    locked,
    private_folder,
    read_sealed_json,
    write_sealed_json,
)
from vfl.session.store.witness import RESTORED_BY, Witness


class Counted(Protocol):
    """Interface of an entry that a ledger stores under a run name."""

    @property
    def run(self) -> str:
        """Run name of the entry."""

    @property
    def spent_epsilon(self) -> float | None:
        """Epsilon that the entry has spent on one row; None if no epsilon is stated."""


Kept = TypeVar("Kept", bound=Counted)


class Spending(Generic[Kept]):
    """Base of a ledger for one kind of spending: a sealed file per run name, for many processes.

    A subclass defines its entries.

    Args:
        folder: folder of the files; it is outside the folders of runs, so a name stays bound after
            its run is deleted.
        party: party that owns the files.
        store: folder that has the lock and the witness, if this is not `folder`; all kinds of
            spending under one limit use the same `store`.

    Attributes:
        kind: kind of the files, as their seals name it.
        form: class of an entry; a subclass of `Settings` whose objects are frozen.
        suffix: suffix of the files' names.
        restored_by: command with which a party declares that its newest store is lost.
        witness: counters with which peers notice that the store was restored from an earlier copy,
            and the known counters of peers.
    """

    kind: ClassVar[str]
    form: ClassVar[type[Settings]]
    suffix: ClassVar[str] = ".json"
    restored_by: ClassVar[str] = RESTORED_BY

    def __init__(self, folder: Path, party: str, store: Path | None = None) -> None:
        self.folder, self.party, self._store = folder, party, store or folder
        self.witness = Witness(self._store, party, self.restored_by)

    @contextmanager
    def alone(self, patience_s: float = 0.0) -> Iterator[None]:
        """Hold the lock that every spending from this store needs, until the block ends.

        Args:
            patience_s: seconds to wait while another process holds the lock.

        Raises:
            RunFolderError: another process already spends from this store.
        """
        with locked(self._store, patience_s):
            private_folder(self.folder)
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing the spending of the store, until the block ends."""
        with locked(self._store, math.inf):
            private_folder(self.folder)
            yield

    def entries(self) -> list[Kept]:
        """Return every entry, ordered by run name.

        Raises:
            RunFolderError: an entry is damaged.
        """
        return [self._found(name) for name in sorted(path.stem for path in self._files())]

    def spent_epsilon(self) -> float:
        """Return the epsilon that all run names together spent on one row, by basic composition."""
        return sum(one.spent_epsilon or 0.0 for one in self.entries())

    def give_up(self) -> None:
        """End all running entries after a restore of the store; the caller holds the lock."""

    def _files(self) -> Iterator[Path]:
        return self.folder.glob(f"*{self.suffix}")

    def _found(self, run: str) -> Kept:
        entry = self._read(run)
        if entry is None:
            raise RunFolderError("an entry of the ledger is missing", where=str(self._path(run)))
        return entry

    def _read(self, run: str) -> Kept | None:
        path = self._path(run)
        if not path.exists():
            return None
        record = read_sealed_json(path, self._seal(run))
        try:
            return self.form.model_validate(self._content(record))  # type: ignore[return-value]
        except (KeyError, ValidationError):
            raise damaged(path) from None

    def _write(self, entry: Kept) -> None:
        write_sealed_json(self._path(entry.run), self._record(entry), self._seal(entry.run))

    def _content(self, record: Mapping[str, Any]) -> Any:
        """Return the content of an entry, given the record in its file."""
        return record["entry"]

    def _record(self, entry: Any) -> dict[str, Any]:
        """Return the record of an entry for its file."""
        return {"entry": entry.model_dump(mode="json")}

    def _seal(self, run: str) -> Seal:
        return Seal(self.kind, self.party, run)

    def _path(self, run: str) -> Path:
        return self.folder / f"{run}{self.suffix}"
