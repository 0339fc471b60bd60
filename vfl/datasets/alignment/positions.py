"""A party's result of an alignment: the positions of its own rows in the common order.

Each version of the result is a sealed file in the party's own folder. The positions are valid as
long as the ids of the table do not change; a table with other ids, or with the ids in another
order, is refused. If a party erases rows, these rows lose their positions at every party; all other
rows stay.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vfl.core.errors import MisalignedError, MissingDataError
from vfl.core.storage import Seal, damaged, locked, private_folder, read_sealed, write_sealed
from vfl.datasets.alignment.gaps import Found, MissingRows
from vfl.datasets.alignment.ids import OwnIds, read_ids
from vfl.datasets.party import digest_of
from vfl.datasets.split import Split, split_apart
from vfl.datasets.table import ID_UNIT, Part, Table, spaced

_INDEX = np.dtype("<u4")
_GAP = np.iinfo(_INDEX).max  # stored in files for -1 (a row that the party lacks)
_VERSION = re.compile(r"([0-9]{4})\.positions")
_STAGED = "staged"
_BLOCK = 1 << 16  # number of positions in one write


@dataclass(frozen=True)
class Agreed:
    """Facts about an alignment that all of its parties know.

    Attributes:
        name: name of the alignment, equal at every party.
        parties: all parties with ids, in an order that they agree on.
        rules: normalisation rules of the ids, as a spec.
        protocol: protocol that found the common ids, as a spec.
        rows: "intersection": the session has the rows that all parties have; "token": it also has
            rows that some party lacks.
    """

    name: str
    parties: tuple[str, ...]
    rules: str
    protocol: str
    rows: MissingRows = "intersection"


@dataclass(frozen=True, eq=False)
class Alignment:
    """One version of an alignment, as one party stores it.

    Attributes:
        party: the party that stores it.
        agreed: facts that all parties know.
        version: number of the version at this party, counted from 1.
        key: 32 bytes, as hex, that identify the common rows and their order; equal at all parties.
        table: digest of the party's own ids in their order; the party never sends it.
        ids: number of the party's own ids.
        positions: for each row of the session, its position in the party's table, int64, axes
            (rows,); -1 if the party lacks the row.
        complete, held: see `Found`.
        withdrawn: positions, in the original order of the session, of rows that were removed;
            ascending.
    """

    party: str
    agreed: Agreed
    version: int
    key: str
    table: str = field(repr=False)
    ids: int
    positions: np.ndarray = field(repr=False)
    complete: int | None = None
    held: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    withdrawn: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, party: str, agreed: Agreed, version: int, session: str, ids: OwnIds, found: Found
    ) -> Alignment:
        """Make an alignment from a party's result of the protocol.

        Args:
            party: name of the party.
            agreed: facts that all parties know.
            version: number of the version at this party.
            session: an identifier that is used only once, equal at all parties.
            ids: ids of the party's table.
            found: the party's result of the protocol.
        """
        key = key_of(session, agreed, len(found.positions))
        more = (found.positions, found.complete, found.held)
        return cls(party, agreed, version, key, ids.digest, len(ids), *more)

    def require(self, rows: MissingRows) -> None:
        """Refuse an alignment that was made with another treatment of missing rows.

        Raises:
            MisalignedError: the alignment was made with another `data.missing_rows`.
        """
        if self.agreed.rows != rows:
            raise MisalignedError(
                "this alignment was made for another treatment of rows that some party lacks",
                where=f"alignment '{self.agreed.name}', version {self.version}",
                got=f"missing_rows = '{self.agreed.rows}'",
                want=f"missing_rows = '{rows}'",
                fix="vfl align, with the same data.missing_rows",
            )

    @property
    def absent(self) -> np.ndarray | None:
        """Return positions of the session's rows that the party lacks, ascending, or None."""
        lacking = np.flatnonzero(self.positions < 0)
        return lacking if len(lacking) else None

    def split(self, split: Callable[[int], Split]) -> Split:
        """Return the session rows' split; `split` splits a number of rows. See `split_apart`."""
        if self.complete is None:
            return split(len(self.positions))
        everybody = np.arange(len(self.positions)) < self.complete
        return split_apart(everybody, lambda rows: split(len(rows)))

    @property
    def digest(self) -> bytes:
        """Return a digest of the order of the rows; see `PartyData.ids_digest`."""
        order = bytes.fromhex(self.key)
        if not self.withdrawn:
            return order
        return hashlib.sha256(order + np.array(self.withdrawn, _INDEX).tobytes()).digest()

    def without(self, places: Collection[int]) -> Alignment:
        """Remove rows, given by positions in the session's original order; earlier removals remain.

        Raises:
            MisalignedError: a position is not in the original order.
        """
        whole = len(self.positions) + len(self.withdrawn)
        if places and (min(places) < 0 or max(places) >= whole):
            raise MisalignedError(
                "this alignment does not have the rows to withdraw",
                where=f"alignment '{self.agreed.name}', version {self.version}",
                want=f"positions below {spaced(whole)}",
                fix="vfl align",
            )
        left = np.delete(np.arange(whole), self.withdrawn)
        stays = ~np.isin(left, list(places))
        complete = self.complete
        return replace(
            self,
            positions=self.positions[stays],
            complete=None if complete is None else int(stays[:complete].sum()),
            held={party: has[stays] for party, has in self.held.items()},
            withdrawn=tuple(sorted({*self.withdrawn, *left[~stays].tolist()})),
        )

    def places_of(self, rows: np.ndarray) -> list[int]:
        """Return the positions, in the session's original order, of rows of the party's table."""
        left = np.delete(np.arange(len(self.positions) + len(self.withdrawn)), self.withdrawn)
        found: list[int] = left[np.isin(self.positions, rows)].tolist()
        return found

    def of_shorter_table(self, gone: np.ndarray, table: str) -> Alignment:
        """Adapt to the party's table after rows outside the session were removed from that table.

        Args:
            gone: positions of the removed rows in the table, ascending.
            table: digest of the remaining ids in their order.
        """
        shift = np.searchsorted(gone, self.positions)
        positions = np.where(self.positions < 0, self.positions, self.positions - shift)
        return replace(self, positions=positions, table=table, ids=self.ids - len(gone))

    def applied(self, table: Table, id_column: str, where: str) -> tuple[Part, np.ndarray]:
        """Return the table's rows in the session's order, and the party's ids of these rows.

        Raises:
            MisalignedError: the ids of the table have changed since the alignment.
        """
        ids = read_ids(table, id_column, where)
        self.check(len(ids), ids_digest(ids), where)
        has = self.positions[self.positions >= 0]
        own = np.array([text.replace(ID_UNIT, " ") for text in ids[has]], dtype=object)
        return Part.of(table, has), own

    def holds(self, ids: OwnIds) -> bool:
        """Return whether a table's ids are those of the alignment, in the same order."""
        return (len(ids), ids.digest) == (self.ids, self.table)

    def check(self, count: int, digest: str, where: str) -> None:
        """Refuse ids that differ from those of the alignment, by their number and `ids_digest`.

        Raises:
            MisalignedError: the ids have changed since the alignment.
        """
        if (count, digest) != (self.ids, self.table):
            raise MisalignedError(
                f"the ids of {where} have changed since they were aligned",
                where=f"alignment '{self.agreed.name}', version {self.version}",
                got=f"{spaced(count)} rows",
                want=f"the same ids in the same order, {spaced(self.ids)} rows",
                fix="vfl align, then train again",
            )

    @property
    def common(self) -> int:
        """Return the number of rows that all parties have."""
        return len(self.positions) if self.complete is None else self.complete

    def counts(self) -> str:
        """Return a text with the numbers of common rows, session rows and table rows."""
        if self.complete is None:
            return f"{self.common} of {self.ids} rows are common"
        own = int((self.positions >= 0).sum())
        return (
            f"the session has {len(self.positions)} rows; this table has {own} of them "
            f"(and {self.ids} rows in all), and all parties have {self.common} of them"
        )

    def keep(self, folder: Path) -> None:
        """Write this version to a folder; earlier versions stay."""
        self.stage(folder)
        self.commit(folder)

    def stage(self, folder: Path) -> None:
        """Write this version under a temporary name, in place of an earlier staged file.

        Raises:
            StorageError: the disk is full, or the folder cannot be written; no part of the file
                remains.
        """
        about = asdict(self.agreed) | {"key": self.key, "table": self.table, "ids": self.ids}
        if self.complete is not None:
            sizes = {"count": len(self.positions), "complete": self.complete}
            about |= sizes | {"held": list(self.held)}
        if self.withdrawn:
            about |= {"count": len(self.positions), "withdrawn": self.withdrawn}
        head = json.dumps(about).encode()
        private_folder(folder)
        with locked(folder):
            self.discard(folder)
            start = len(head).to_bytes(4, "little") + head
            write_sealed(folder / _STAGED, chain([start], self._rows()), self._seal())

    def _rows(self) -> Iterator[bytes]:
        for start in range(0, len(self.positions), _BLOCK):
            yield self.positions[start : start + _BLOCK].astype(_INDEX).tobytes()
        for one in self.held.values():
            yield np.packbits(one).tobytes()

    def commit(self, folder: Path) -> None:
        """Rename the staged file, so that it is the last version, without further disk space."""
        (folder / _STAGED).replace(folder / f"{self.version:04d}.positions")

    @staticmethod
    def discard(folder: Path) -> None:
        """Remove a staged file that shall not become a version."""
        (folder / _STAGED).unlink(missing_ok=True)

    def _seal(self) -> Seal:
        return Seal("alignment", self.party, self.agreed.name, self.version)

    def lacking(self, party: str) -> Alignment:
        """Return this alignment, but as if another party had none of the session's rows."""
        return replace(self, held={**self.held, party: np.zeros_like(self.held[party])})

    @classmethod
    def newest(cls, folder: Path, party: str) -> Alignment:
        """Return the last version in a folder.

        Raises:
            MissingDataError: the folder has no version.
            RunFolderError: the version is damaged, or belongs to another party.
        """
        version = last_version(folder)
        if not version:
            raise MissingDataError(
                f"party '{party}' has no alignment of that name",
                where=str(folder),
                fix="vfl align makes one",
            )
        return cls.read(folder, party, version)

    @classmethod
    def of_parties(cls, folder: Path, party: str, parties: Collection[str]) -> Alignment:
        """Return the last version in a folder that exactly these parties made.

        If parties enter or leave later, the new set of parties has its own versions, so a run keeps
        the order of its parties.

        Raises:
            MissingDataError: the folder has no version of exactly these parties.
            RunFolderError: a version is damaged, or belongs to another party.
        """
        made_by: Collection[str] = ()
        for version in reversed(versions(folder)):
            found = cls.read(folder, party, version)
            if {*found.agreed.parties} == {*parties}:
                return found
            made_by = made_by or found.agreed.parties
        raise MissingDataError(
            f"party '{party}' has no alignment of that name"
            + (" among these parties" if made_by else ""),
            where=str(folder),
            got=", ".join(sorted(made_by)) or None,
            want=", ".join(sorted(parties)),
            fix="vfl align makes one",
        )

    @classmethod
    def read(cls, folder: Path, party: str, version: int) -> Alignment:
        """Return one version in a folder.

        Raises:
            RunFolderError: the version is missing or damaged, or belongs to another party.
        """
        path = folder / f"{version:04d}.positions"
        payload = read_sealed(path, Seal("alignment", party, None, version))
        try:
            start = 4 + int.from_bytes(payload[:4], "little")
            about: dict[str, Any] = json.loads(payload[4:start])
            rest: dict[str, Any] = {name: about.pop(name) for name in ("key", "table", "ids")}
            count, rest["complete"] = about.pop("count", -1), about.pop("complete", None)
            named, withdrawn = about.pop("held", []), tuple(about.pop("withdrawn", ()))
            agreed = Agreed(**about | {"parties": tuple(about["parties"])})
            positions = np.frombuffer(payload, _INDEX, count, start).astype(np.int64)
            positions[positions == _GAP] = -1
            held, at = {}, start + positions.size * _INDEX.itemsize
            for name in named:
                packed = np.frombuffer(payload, np.uint8, -(-count // 8), at)
                held[name] = np.unpackbits(packed, count=count).astype(bool)
                at += packed.size
        except (ValueError, KeyError, TypeError):
            raise damaged(path) from None
        rest |= {"positions": positions, "held": held, "withdrawn": withdrawn}
        return cls(party=party, agreed=agreed, version=version, **rest)


def versions(folder: Path) -> list[int]:
    """Return the numbers of the versions in a folder, ascending."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for found in map(_VERSION.fullmatch, names) if found)


def last_versions(folder: Path, party: str) -> list[Alignment]:
    """Return, for each set of parties, the last version in a folder; sessions use these versions.

    The newest version comes last.

    Raises:
        RunFolderError: a version is damaged, or belongs to another party.
    """
    found = [Alignment.read(folder, party, version) for version in versions(folder)]
    last = {frozenset(one.agreed.parties): one for one in found}
    return sorted(last.values(), key=lambda one: one.version)


def last_version(folder: Path) -> int:
    """Return the number of the last version in a folder; 0 if there is none."""
    return max(versions(folder), default=0)


def ids_digest(ids: np.ndarray) -> str:
    """Return the SHA-256 digest of ids in their order, as hex."""
    return digest_of(ids).hex()


def key_of(session: str, agreed: Agreed, common: int) -> str:
    """Return an alignment's identifier: a digest of the facts that all parties know.

    Args:
        session: an identifier that is used only once.
        agreed: facts that all parties have agreed on.
        common: number of rows of the session.
    """
    facts = [session, *map(str, asdict(agreed).values()), common]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
