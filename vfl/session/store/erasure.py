"""Erases rows at the party that owns them; lists all kinds of files that contain data of rows.

`KEPT` lists every kind of file in a party's folder, and which data of rows these files contain.
`forget` removes rows from all files with data of single rows: the table if the caller requests it,
positions, digests of ids, predictions and traces. Results that were learned from many rows, such as
weights, stay unchanged; the runs that used erased rows are marked. When the next session begins,
the other parties receive the positions of the erased rows in the alignment
(`vfl.session.handshake.Withdrawn`), so all other rows can be used without a new alignment.
"""

from __future__ import annotations

import csv
import io
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from vfl.config import PartyFile
from vfl.core.errors import (
    ConsentError,
    DataError,
    MissingDataError,
    RunFolderError,
    UserError,
)
from vfl.core.sources import is_database
from vfl.core.storage import (
    locked,
    read_bytes,
    worker_of,
    write_bytes,
)
from vfl.core.text import as_written
from vfl.datasets.alignment.ids import normalise, read_own_ids
from vfl.datasets.alignment.positions import (
    Alignment,
    ids_digest,
    last_version,
    last_versions,
    versions,
)
from vfl.datasets.table import ID_UNIT
from vfl.models.features import features_folder
from vfl.session.store.party_folder import (
    EXPLANATIONS,
    PartyFolder,
    alignment_folder,
    digests_of_ids,
    own_alignment,
    own_ledger,
    part_of,
    table_format,
)
from vfl.session.terms import Terms

PREDICTIONS = "predictions.csv"
_MOST_BYTES = 1 << 26  # largest size in bytes of a file that lists the ids to forget


@dataclass(frozen=True, slots=True)
class Kept:
    """A kind of file that vfl writes in a party's folder.

    Attributes:
        files: a glob pattern of these files, relative to the folder of party.toml; `**` matches any
            folders.
        holds: data of rows that the files contain; empty if they contain no such data.
        forget: text that describes how `vfl forget` changes the files; empty if it does not change
            them.
    """

    files: str
    holds: str = ""
    forget: str = ""


_LEARNED = "results learned from many rows"
_RUN, _PART = "store/runs/*/", "store/runs/*/parties/*/"
#: Every kind of file in the folder of a party.toml; if several globs match a file, the first one
#: applies.
KEPT = (
    Kept(
        "store/alignments/*/*/*.positions",
        "positions",
        "the positions of these rows are removed; older versions of the positions are deleted",
    ),
    Kept(
        "store/alignments/*/*/*.reused",
        "keyed tags of ids",
        "the file, which also contains the keys, is removed",
    ),
    Kept("store/alignments/_asked.json"),
    Kept(f"{_PART}rows.sealed", "keyed digests of ids", "the rows' digests are overwritten"),
    Kept(f"{_RUN}{PREDICTIONS}", "ids and predictions", "the line of each row is removed"),
    Kept(f"{_PART}{PREDICTIONS}", "ids and predictions", "the line of each row is removed"),
    Kept(
        f"{_PART}{EXPLANATIONS}",
        "ids, and contributions of columns",
        "the line of each row is removed",
    ),
    Kept(f"{_PART}explained.json", "figures of many rows"),
    Kept(
        f"{_PART}trace/**",
        "cuts and gradients by row",
        "the traces of runs that used the rows are removed",
    ),
    Kept(
        f"{_PART}checkpoints/**",
        _LEARNED,
        "the checkpoints of ended runs that used the rows are removed",
    ),
    Kept(f"{_PART}weights.safetensors", _LEARNED),
    Kept(f"{_PART}encoder.json", "means, edges and categories of columns"),
    Kept(f"{_PART}bins.json", "edges and counts of columns"),
    Kept(f"{_PART}served-rows.json", "counts"),
    Kept(f"{_PART}predicted.json", "counts"),
    Kept(f"{_PART}forgotten.json", "counts"),
    Kept(f"{_PART}card.json", "counts, and an HMAC of all rows together"),
    Kept(f"{_PART}**", _LEARNED),
    Kept(f"{_RUN}report.html", "digests (SHA-256) of messages about many rows"),
    Kept(f"{_RUN}**", "figures of many rows"),
    Kept("store/sessions/*.sent", "digests (SHA-256) of sent values of many rows"),
    Kept("store/sessions/*.shown", "keyed digests of ids", "the rows' digests are overwritten"),
    Kept("store/sessions/**", "counts"),
    Kept("store/clients/**", "counts"),
    Kept("store/row-rate", "counts"),
    Kept("store/secret*"),
    Kept("store/flower/**", "terms, and positions of rows that left an alignment"),
    Kept("flower/**", "terms, and positions of rows that left an alignment"),
    Kept("app/**"),
    Kept("certificates/**"),
    Kept("keys/**"),
    Kept("peers/**"),
    Kept("party.toml", "names and categories of columns"),
    Kept("README.md"),
    Kept("*.key"),
    Kept("*.pub"),
    Kept("*.pem"),
)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Counts of the changes that one call of `forget` made.

    Attributes:
        asked: number of different ids that the caller asked to forget.
        found: number of rows in the party's table that have one of these ids.
        in_table: number of rows with one of these ids that are still in the party's table and in
            its table to predict, because the caller requested no change of the tables.
        alignments: number of rows removed from each alignment; keys contain the alignment's name
            and the kind of table.
        runs: for each run, the numbers of erased rows with which the run was trained, validated and
            tested.
        unknown: runs whose files do not show whether the runs used the rows.
        predictions: number of lines that were removed from tables of predictions.
        traces: runs whose traces were deleted.
        at_work: runs that a process was using, so that `forget` did not change their files.
    """

    asked: int
    found: int
    in_table: int
    alignments: Mapping[str, int]
    runs: Mapping[str, Mapping[str, int]]
    unknown: Sequence[str]
    predictions: int
    traces: Sequence[str]
    at_work: Sequence[str]

    def remains(self) -> list[str]:
        """Return sentences: which data of the rows remain, and what the user should do."""
        said = []
        if self.in_table:
            said.append(
                f"your own table still contains {self.in_table} of these rows; delete them there: "
                "until then, vfl refuses sessions with alignments of this table (V206)"
            )
        trained = [run for run, parts in self.runs.items() if parts["train"]]
        if trained:
            said.append(
                f"the weights of {len(trained)} runs were trained with these rows; the runs are "
                f"marked: {', '.join(trained)}; train again to get weights without these rows"
            )
        if any(self.alignments.values()):
            said.append(
                "the other parties remove the positions of these rows when the next session "
                "begins; their own tables, predictions and copies stay until those parties erase "
                "the rows, too"
            )
        if self.unknown:
            said.append(
                f"these runs stored no ids, and may have used the rows: {', '.join(self.unknown)}"
            )
        if self.at_work:
            said.append(
                "these runs are in use; end the processes that use them, and run vfl forget "
                f"again: {', '.join(self.at_work)}"
            )
        said.append("a running service keeps the data in memory until it restarts")
        if (features := features_folder()).is_dir():
            said.append(f"features cached with keep=disk are not changed; delete {features}")
        said.append("copies and backups of this folder are not changed")
        return said


def read_list(path: Path) -> list[str]:
    """Read the ids to forget, one per line.

    If an id is made of several columns, tabs separate the values of the columns.

    Raises:
        MissingDataError: the file does not exist.
        DataError: the file is too large, is not a text, or is empty.
    """
    if not path.exists():
        raise MissingDataError("the file with the list of ids is missing", where=str(path))
    if path.stat().st_size > _MOST_BYTES:
        raise DataError("the list of ids is too long", where=str(path), want="at most 64 MiB")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError("the list of ids is not UTF-8 text", where=str(path)) from None
    found = dict.fromkeys(line.strip().replace("\t", ID_UNIT) for line in lines if line.strip())
    if not found:
        raise DataError("the list of ids is empty", where=str(path), want="one id on each line")
    return list(found)


def forget(party: PartyFile, ids: Sequence[str], *, rewrite: bool = False) -> Forgotten:
    """Erase rows from all files of this party that contain data of single rows.

    Args:
        party: the party's own file.
        ids: ids of the rows, as the party's table spells them, or in another spelling that the
            alignment normalises to the same id.
        rewrite: whether to remove the rows from the party's own CSV or Parquet file, too.

    Raises:
        UserError: with `rewrite`, a table is no CSV or Parquet file, or has several rows of one id.
        DataError: a table cannot be read, or vfl cannot write it without changing other rows.
    """
    wanted = _Wanted.of(party, ids)
    tables = {"source": _Table.of(party, predicted=False, wanted=wanted)}
    if party.predicts_others:
        tables["predict"] = _Table.of(party, predicted=True, wanted=wanted)
    if rewrite:
        for table in tables.values():
            table.require_file()
    wanted.spell(table.spelled for table in tables.values())
    before = [one for _, folder in _alignments(party) for one in last_versions(folder, party.party)]
    in_runs = _forget_runs(party, wanted, before, tables["source"].gone)
    alignments = {
        f"{name}, {which}": _forget_places(folder, party.party, tables[which])
        for (name, which), folder in _alignments(party)
        if which in tables
    }
    for kept in (party.store_path / "alignments").glob("*/*/*.reused"):
        kept.unlink()
    files = {(str(table.source), table.after): table for table in tables.values()}.values()
    if rewrite:
        for table in files:
            table.rewrite()
    left = sum(len(table.gone) for table in files if not rewrite)
    rows = len(tables["source"].gone)
    ledger = own_ledger(party)
    ledger.forget_shown(digests_of_ids(party, sorted(wanted.plain)))
    ledger.note("forgotten", rows=rows)
    return Forgotten(len(ids), rows, left, alignments, *in_runs)


def _forget_runs(
    party: PartyFile, wanted: _Wanted, before: Sequence[Alignment], gone: np.ndarray
) -> tuple[dict[str, Mapping[str, int]], list[str], int, list[str], list[str]]:
    """Erase rows from the party's runs.

    Return the last five fields of `Forgotten`, in their order.
    """
    runs, unknown, traces, at_work, cut_out = dict[str, Mapping[str, int]](), [], [], [], 0
    for run in sorted((party.store_path / "runs").glob("*")):
        part = part_of(run, party)
        if worker_of(run) is not None or worker_of(part.path) is not None:
            at_work.append(run.name)
            continue
        with locked(run):
            written = (run / PREDICTIONS, part.path / PREDICTIONS, part.path / EXPLANATIONS)
            cut_out += sum(_cut_lines(path, wanted) for path in written if path.exists())
            found = _forget_run(part, wanted, before, gone)
            if found is None:
                unknown.append(run.name)
            elif any(found.values()):
                runs[run.name] = found
            if found is None or any(found.values()):
                traces += [run.name] if _remove_traces(part.path) else []
    return runs, unknown, cut_out, traces, at_work


@dataclass(slots=True)
class _Wanted:
    """The ids to forget, in every spelling in which vfl's files may contain these ids."""

    plain: set[str]
    rules: tuple[str, ...]
    by_rules: dict[str, set[bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, party: PartyFile, ids: Sequence[str]) -> _Wanted:
        rules = {
            one.agreed.rules
            for _, folder in _alignments(party)
            for one in last_versions(folder, party.party)
        }
        texts = np.array(ids, dtype=object)
        alike = {spec: set(normalise(texts, spec)) for spec in rules | {"plain"}}
        return cls({one.replace(ID_UNIT, " ") for one in ids}, tuple(sorted(rules)), alike)

    def among(self, ids: np.ndarray) -> np.ndarray:
        """Return a mask: which of these ids of a table are in the list of ids to forget."""
        found = np.zeros(len(ids), dtype=bool)
        for spec, keys in self.by_rules.items():
            found |= np.fromiter((key in keys for key in normalise(ids, spec)), bool, len(ids))
        return found

    def spell(self, tables: Iterator[Sequence[str]]) -> None:
        """Add the spellings of these ids in tables, and the stored forms of numeric ids.

        Args:
            tables: for each table, the spellings of those of its ids that are to be forgotten.
        """
        for spelled in tables:
            self.plain |= {one.replace(ID_UNIT, " ") for one in spelled}
        self.plain |= {str(int(one)) for one in self.plain if one.isascii() and one.isdigit()}

    def has(self, text: str) -> bool:
        """Return whether a text in one of vfl's files is an id to forget."""
        return as_written(text) in self.plain or text in self.plain


@dataclass(slots=True)
class _Table:
    """One table of a party: the ids of its rows, and which rows to remove.

    Attributes:
        gone: positions in the table of the rows to remove, ascending.
        spelled: ids of the rows to remove, as the table spells them.
        before, after: digests of all ids in the table's order, before and after the removal.
    """

    party: PartyFile
    source: Path | str
    gone: np.ndarray
    spelled: Sequence[str]
    before: str
    after: str

    @classmethod
    def of(cls, party: PartyFile, *, predicted: bool, wanted: _Wanted) -> _Table:
        source = party.predict_path if predicted else party.source_path
        ids = _ids_of(party, predicted=predicted)
        has = wanted.among(ids)
        digests = ids_digest(ids), ids_digest(ids[~has])
        return cls(party, source, np.flatnonzero(has), ids[has].tolist(), *digests)

    def require_file(self) -> None:
        """Refuse a table that is not in a file of a kind which vfl can write."""
        path = Path(self.source)
        if self.party.table.repeats is not None:
            raise UserError(
                "vfl does not change a table that has several rows with one id",
                where=f"party '{self.party.party}'",
                got=f'repeats = "{self.party.table.repeats}"',
                fix="delete all rows with these ids in the table yourself, and run vfl forget "
                "without --table",
            )
        if is_database(self.source) or path.suffix not in (".csv", ".parquet"):
            raise UserError(
                "vfl cannot change this kind of table",
                where=f"party '{self.party.party}'",
                want="a .csv or .parquet file",
                fix="delete the rows in the table yourself, and run vfl forget without --table",
            )

    def rewrite(self) -> None:
        """Write the table's file without the rows.

        Check the new file before it replaces the old one.
        """
        if not len(self.gone):
            return
        path, gone = Path(self.source), set(self.gone.tolist())
        mode = path.stat().st_mode & 0o777
        aside = path.with_name(f".without.{path.name}")
        try:
            if path.suffix == ".csv":
                encoding = self.party.table.encoding
                text = read_bytes(path).decode(encoding)
                kept = _without_lines(text, self.party.table.separator, gone)
                write_bytes(aside, kept.encode(encoding), mode)
            else:
                _parquet_without(path, aside, self.gone)
                aside.chmod(mode)
            form, own = table_format(self.party.table), self.party.table
            ids = read_own_ids(aside, own.id, form, f"party '{self.party.party}'")
            if ids_digest(ids) != self.after:
                raise DataError(
                    "vfl cannot remove these rows without changing other parts of the table",
                    where=f"party '{self.party.party}'",
                    fix="delete the rows in the table yourself, and run vfl forget without --table",
                )
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def _ids_of(party: PartyFile, *, predicted: bool) -> np.ndarray:
    """Return the ids of a party's table (or prediction table), as the table spells them."""
    own, form = party.table, table_format(party.table)
    if predicted:
        form = replace(form, query=own.predict_query or own.query)
    source = party.predict_path if predicted else party.source_path
    return read_own_ids(source, own.id, form, f"party '{party.party}'")


def _alignments(party: PartyFile) -> list[tuple[tuple[str, str], Path]]:
    """Return the folders with alignment versions.

    Keys are the alignment's name and the kind of table.
    """
    folders = sorted((party.store_path / "alignments").glob("*/*"))
    return [((one.parent.name, one.name), one) for one in folders if last_version(one)]


def _forget_places(folder: Path, party: str, table: _Table) -> int:
    """Remove rows from the newest versions of an alignment; delete older versions.

    Returns:
        The number of rows that were removed from the newest version.
    """
    used = last_versions(folder, party)
    for version in {*versions(folder)} - {one.version for one in used}:
        (folder / f"{version:04d}.positions").unlink()
    left = 0
    for one in used:
        left = 0
        if len(table.gone) and one.table == table.before:
            shorter = one.without(one.places_of(table.gone))
            shorter.of_shorter_table(table.gone, table.after).keep(folder)
            left = len(shorter.withdrawn) - len(one.withdrawn)
    return left


def _forget_run(
    part: PartyFolder, wanted: _Wanted, alignments: Sequence[Alignment], gone: np.ndarray
) -> Mapping[str, int] | None:
    """Overwrite the digests of these rows in a run's record.

    Return how the run had used the rows; None if the run's files do not show it.
    """
    try:
        known = part.rows()
    except RunFolderError:  # this party trained nothing in the run, or the run is damaged
        return {} if not part.path.exists() or not (part.path / "party.json").exists() else None
    if known is None:
        return None
    if known.ids is None:
        places = part.places_of(known, alignments, gone)
        if places is None:
            return None
    else:
        digests = part.digests_of(sorted(wanted.plain))
        places = np.flatnonzero(np.isin(known.ids, digests))
    counts = part.count(known, places)
    if known.ids is not None and len(places):
        ids = known.ids.copy()
        ids[places] = np.frombuffer(secrets.token_bytes(8 * len(places)), ids.dtype)
        part.keep_rows(replace(known, ids=ids))
    if any(counts.values()):
        part.mark_forgotten(counts, _now())
    return counts


def withdraw(party: PartyFile, terms: Terms, places: Collection[int]) -> None:
    """Remove from this party's alignment the rows that another party has erased; mark runs.

    Args:
        party: the own file of this party.
        terms: terms of the session in which the other party reported the rows.
        places: positions of the rows in the alignment's original order.

    Raises:
        ConsentError: fewer rows would remain in the alignment than the party's file requires.
        MisalignedError: the alignment has no rows at these positions.
    """
    alignment = own_alignment(party, terms)
    assert alignment is not None, "parties report erased rows only in sessions with an alignment"
    shorter, least = alignment.without(places), party.consent.min_common
    if shorter.common < least:
        raise ConsentError(
            f"party '{party.party}' requires more common rows than would remain",
            got="fewer, after the erased rows are removed",
            want=f"at least {least}",
            fix="run vfl align, or set a smaller min_common in the party's own file",
        )
    predicted = party.predicts_others and terms.mode in ("predict", "serve")
    ids = _ids_of(party, predicted=predicted)
    if alignment.table == ids_digest(ids):
        gone = np.setdiff1d(alignment.positions, shorter.positions)
        texts = [one.replace(ID_UNIT, " ") for one in ids[gone[gone >= 0]]]
        for run in sorted((party.store_path / "runs").glob("*")):
            _mark(part_of(run, party), texts)
    shorter.keep(alignment_folder(party, terms))
    more = len(shorter.withdrawn) - len(alignment.withdrawn)
    own_ledger(party).note("withdrawn", run=terms.run, asked_by=terms.label_party, rows=more)


def _mark(part: PartyFolder, ids: Sequence[str]) -> None:
    """Mark a run as one that used rows with these ids, if it used any."""
    with suppress(RunFolderError):  # the run is damaged, or has no training at this party
        known = part.rows()
        if known is not None and known.ids is not None and ids:
            places = np.flatnonzero(np.isin(known.ids, part.digests_of(ids)))
            counts = part.count(known, places)
            if any(counts.values()):
                part.mark_forgotten(counts, _now())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _remove_traces(part: Path) -> bool:
    """Remove the traces of a run; also remove its checkpoints if the run has ended."""
    found = (part / "trace").exists()
    shutil.rmtree(part / "trace", ignore_errors=True)
    if (part / "party.json").exists():
        shutil.rmtree(part / "checkpoints", ignore_errors=True)
    return found


def _cut_lines(path: Path, wanted: _Wanted) -> int:
    """Remove the lines with these ids from a table of predictions; return how many were removed."""
    text = read_bytes(path).decode()
    rows = csv.reader(io.StringIO(text, newline=""))
    head = next(rows, [])
    if "id" not in head:
        return 0
    at = head.index("id")
    gone = {row for row, cells in enumerate(filter(None, rows)) if wanted.has(cells[at])}
    if gone:
        write_bytes(path, _without_lines(text, ",", gone).encode())
    return len(gone)


def _without_lines(text: str, separator: str, gone: Collection[int]) -> str:
    """Remove rows of a CSV text by their number after the header.

    All other bytes stay unchanged.
    """
    lines = io.StringIO(text, newline="").readlines()
    reader = csv.reader(iter(lines), delimiter=separator)
    kept, start, row = list[str](), 0, -2
    for cells in reader:
        row += 1 if cells else 0
        if not cells or row < 0 or row not in gone:
            kept += lines[start : reader.line_num]
        start = reader.line_num
    return "".join(kept)


def _parquet_without(path: Path, target: Path, gone: np.ndarray) -> None:
    """Write a Parquet file without some rows, one row group after another."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source, start = pq.ParquetFile(path), 0
    with pq.ParquetWriter(target, source.schema_arrow) as writer:
        for group in range(source.num_row_groups):
            table = source.read_row_group(group)
            stays = ~np.isin(np.arange(start, start + len(table)), gone)
            start += len(table)
            writer.write_table(table.filter(pa.array(stays)))


def holds(party_folder: Path, store: Path, file: Path) -> Kept | None:
    """Return the entry of `KEPT` for a party's file; None if vfl did not write the file."""
    from fnmatch import fnmatchcase

    name = str(file.relative_to(party_folder))
    if file.is_relative_to(store):
        name = f"store/{file.relative_to(store)}"
    return next((one for one in KEPT if fnmatchcase(name, one.files)), None)
