"""What a party spent and consented to, on its disk: the one ledger of sessions and of products.

A name is counted, and is on the disk, before what it stands for is sent. Nothing in a folder can
show that it was put back from an earlier copy; its `Witness` lets those notice who have met it.
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
    """What a ledger keeps under a name."""

    @property
    def run(self) -> str:
        """The name."""

    @property
    def spent_epsilon(self) -> float | None:
        """What it spent of one row's privacy; None where no epsilon is stated."""


Kept = TypeVar("Kept", bound=Counted)


class Spending(Generic[Kept]):
    """One kind of what a party spent, a sealed file a name; many processes may use it at once.

    A subclass says what its entries are.

    Args:
        folder: where they lie; not in the runs' own folders, so that a name stays bound when a run
            is deleted.
        party: whose they are.
        store: the folder with the lock and the witness, if another; all that one limit bounds has
            the same.

    Attributes:
        kind: of its files.
        form: of an entry; frozen settings.
        suffix: of its files.
        restored_by: the command by which a party says that its newest store is lost.
        witness: the count by which peers notice that the store went back, and theirs.
    """

    kind: ClassVar[str]
    form: ClassVar[type[Settings]]
    suffix: ClassVar[str] = ".json"
    restored_by: ClassVar[str] = RESTORED_BY

    def __init__(self, folder: Path, party: str, store: Path | None = None) -> None:
        self.folder, self.party, self._store = folder, party, store or folder
        self.witness = Witness(self._store, party, self.restored_by)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only process that spends from the store, until this ends.

        Raises:
            RunFolderError: another process does.
        """
        with locked(self._store):
            private_folder(self.folder)
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only one who changes what the store has spent."""
        with locked(self._store, math.inf):
            private_folder(self.folder)
            yield

    def entries(self) -> list[Kept]:
        """Every entry, in the order of the names.

        Raises:
            RunFolderError: one is damaged.
        """
        return [self._found(name) for name in sorted(path.stem for path in self._files())]

    def spent_epsilon(self) -> float:
        """What all names together spent of one row's privacy, by basic composition."""
        return sum(one.spent_epsilon or 0.0 for one in self.entries())

    def give_up(self) -> None:
        """End what was under way: the store was put back from a copy. Its lock is held."""

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
        """What a file says of an entry."""
        return record["entry"]

    def _record(self, entry: Any) -> dict[str, Any]:
        """An entry as its file has it."""
        return {"entry": entry.model_dump(mode="json")}

    def _seal(self, run: str) -> Seal:
        return Seal(self.kind, self.party, run)

    def _path(self, run: str) -> Path:
        return self.folder / f"{run}{self.suffix}"
