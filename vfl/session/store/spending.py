"""Privacy spending of a party on disk: the common base of the ledgers of sessions and products.

The ledger adds the spending of messages to the file of a run name before the messages are sent. A
folder itself cannot show that it was restored from an earlier copy; the counters of the folder's
`Witness` let other parties notice a restore.
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
    """Interface of an entry that a ledger stores for one run name."""

    @property
    def run(self) -> str:
        """Run name to which the entry belongs."""

    @property
    def spent_epsilon(self) -> float | None:
        """Epsilon that the entry's sessions have spent on one row.

        The value is None if the sessions state no epsilon.
        """


Kept = TypeVar("Kept", bound=Counted)


class Spending(Generic[Kept]):
    """Base of a ledger for one kind of spending: a sealed file per run name.

    A subclass defines the form of the entries.

    Args:
        folder: folder of the files; it is outside the folders of runs, so the entry of a run name
            remains after the run is deleted.
        party: party that owns the files.
        store: folder that contains the lock and the witness, if this is not `folder`; all ledgers
            whose spending counts for one limit use the same `store`.

    Attributes:
        kind: name of this kind of file, which the files' seals contain.
        form: class of the entries; a subclass of `Settings` whose objects are frozen.
        suffix: last part of the names of the files.
        restored_by: command line with which a party declares that the newest state of its store is
            lost.
        witness: counters with which other parties notice that the store was restored from an
            earlier copy, and the last known counters of these parties.
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
        """Hold the store's lock, so that only this process spends budgets in the `with` block.

        Args:
            patience_s: seconds to wait while another process holds the lock.

        Raises:
            RunFolderError: another process is already spending from this store.
        """
        with locked(self._store, patience_s):
            private_folder(self.folder)
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """In the `with` block, prevent other processes from changing the store's spending."""
        with locked(self._store, math.inf):
            private_folder(self.folder)
            yield

    def entries(self) -> list[Kept]:
        """Return the entries of all run names, ordered by run name.

        Raises:
            RunFolderError: an entry is damaged.
        """
        return [self._found(name) for name in sorted(path.stem for path in self._files())]

    def spent_epsilon(self) -> float:
        """Return the sum of the epsilon that all run names have spent on one row."""
        return sum(one.spent_epsilon or 0.0 for one in self.entries())

    def give_up(self) -> None:
        """After a restore of the store, end every entry that may have spent more than it records.

        The ledger then refuses to spend more under the name of such an entry. The caller has the
        lock.
        """

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
        """Return the content of an entry from the record in its file."""
        return record["entry"]

    def _record(self, entry: Any) -> dict[str, Any]:
        """Return the record of an entry, as its file stores it."""
        return {"entry": entry.model_dump(mode="json")}

    def _seal(self, run: str) -> Seal:
        return Seal(self.kind, self.party, run)

    def _path(self, run: str) -> Path:
        return self.folder / f"{run}{self.suffix}"
