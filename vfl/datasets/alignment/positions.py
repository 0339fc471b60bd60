"""What an alignment leaves at a party: the positions of its own rows in the common order.

One sealed file a version, in the party's own folder. The positions hold while the ids of the table
are those that were aligned; a table with other ids, or in another order, is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vfl.core.errors import MisalignedError, MissingDataError
from vfl.core.storage import Seal, damaged, locked, private_folder, read_sealed, write_sealed
from vfl.datasets.alignment.ids import read_ids
from vfl.datasets.party import digest_of
from vfl.datasets.table import Part, Table, spaced

_INDEX = np.dtype("<u4")
_VERSION = re.compile(r"([0-9]{4})\.positions")
_STAGED = "staged"


@dataclass(frozen=True)
class Agreed:
    """What all parties of an alignment know of it.

    Attributes:
        name: of the alignment, the same at every party.
        parties: with ids, in an order all agree on.
        rules: how ids are written alike.
        protocol: how common ones were found.
    """

    name: str
    parties: tuple[str, ...]
    rules: str
    protocol: str


@dataclass(frozen=True, eq=False)
class Alignment:
    """One version of an alignment, at one party.

    Attributes:
        party: whose it is.
        agreed: what all parties know of it.
        version: counts from 1, at this party.
        key: 32 bytes as hex that stand for the common rows and their order, equal at all parties.
        table: digest of the party's own ids in their order; it leaves the party nowhere.
        ids: how many those are.
        positions: int64, axes (common rows,).
    """

    party: str
    agreed: Agreed
    version: int
    key: str
    table: str = field(repr=False)
    ids: int
    positions: np.ndarray = field(repr=False)

    @property
    def digest(self) -> bytes:
        """Stands for the order of the rows; see `PartyData.ids_digest`."""
        return bytes.fromhex(self.key)

    def applied(self, table: Table, id_column: str, where: str) -> tuple[Part, np.ndarray]:
        """The common rows of the table in the common order, and the party's own ids of them.

        Raises:
            MisalignedError: the table has other ids than those that were aligned.
        """
        ids = read_ids(table, id_column, where)
        if not self.holds(ids):
            raise MisalignedError(
                f"the ids of {where} have changed since they were aligned",
                where=f"alignment '{self.agreed.name}', version {self.version}",
                got=f"{spaced(len(ids))} rows",
                want=f"the same ids in the same order, {spaced(self.ids)} rows",
                fix="vfl align, then train again",
            )
        own = np.array([text.replace("\x1f", " ") for text in ids[self.positions]], dtype=object)
        return Part.of(table, self.positions), own

    def holds(self, ids: np.ndarray) -> bool:
        """Whether these are the ids that were aligned, in their order."""
        return len(ids) == self.ids and ids_digest(ids) == self.table

    def keep(self, folder: Path) -> None:
        """Write this version; those before it stay."""
        self.stage(folder)
        self.commit(folder)

    def stage(self, folder: Path) -> None:
        """Write it, so that only its name is missing; what was staged before is removed.

        Raises:
            StorageError: the disk is full, or cannot be written; nothing of it is left.
        """
        about = asdict(self.agreed) | {"key": self.key, "table": self.table, "ids": self.ids}
        head = json.dumps(about).encode()
        private_folder(folder)
        with locked(folder):
            self.discard(folder)
            payload = len(head).to_bytes(4, "little") + head
            payload += self.positions.astype(_INDEX).tobytes()
            write_sealed(folder / _STAGED, payload, self._seal())

    def commit(self, folder: Path) -> None:
        """Let what was staged be the last version, which takes no room on the disk."""
        (folder / _STAGED).replace(folder / f"{self.version:04d}.positions")

    @staticmethod
    def discard(folder: Path) -> None:
        """Remove what was staged and will be no version."""
        (folder / _STAGED).unlink(missing_ok=True)

    def _seal(self) -> Seal:
        return Seal("alignment", self.party, self.agreed.name, self.version)

    @classmethod
    def newest(cls, folder: Path, party: str) -> Alignment:
        """The last version in a folder.

        Raises:
            MissingDataError: there is none.
            RunFolderError: it is damaged, or another party's.
        """
        version = last_version(folder)
        if not version:
            raise MissingDataError(
                f"party '{party}' has no alignment of that name",
                where=str(folder),
                fix="vfl align makes one",
            )
        path = folder / f"{version:04d}.positions"
        payload = read_sealed(path, Seal("alignment", party, None, version))
        try:
            start = 4 + int.from_bytes(payload[:4], "little")
            about: dict[str, Any] = json.loads(payload[4:start])
            rest = {name: about.pop(name) for name in ("key", "table", "ids")}
            agreed = Agreed(**about | {"parties": tuple(about["parties"])})
            positions = np.frombuffer(payload, _INDEX, offset=start).astype(np.int64)
        except (ValueError, KeyError, TypeError):
            raise damaged(path) from None
        return cls(party=party, agreed=agreed, version=version, positions=positions, **rest)


def last_version(folder: Path) -> int:
    """The number of the last version in a folder; 0 where there is none."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(found[1]) for found in map(_VERSION.fullmatch, names) if found), default=0)


def ids_digest(ids: np.ndarray) -> str:
    """SHA-256 of ids in their order, as hex."""
    return digest_of(ids).hex()


def key_of(session: str, agreed: Agreed, common: int) -> str:
    """What stands for the result of one session: a digest of what all parties know of it.

    Args:
        session: a name that is used once.
        agreed: what was agreed.
        common: how many rows are common.
    """
    facts = [session, *map(str, asdict(agreed).values()), common]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
