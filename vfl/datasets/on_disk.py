"""Arrays larger than memory: in files without a name, written in any order and read through a map.

A file without a name is nobody else's to open, and gone with the process, however that ends; so
nothing of a party's table is left behind, and nothing can be put in its place. Pages of a map that
were read are given back before they take more than what was set; the system keeps what it likes of
them in its cache, which costs no process anything.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vfl.core.errors import DataError
from vfl.core.storage import private_folder

#: Of `MAP_NORESERVE`: a map is larger than memory, and hardly a page of it is ever changed.
_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
_PART_BYTES = 1 << 17  # also what Linux reads ahead
_SPLITTERS_A_RUN = 256


@dataclass(frozen=True)
class OnDisk:
    """Where a party's rows lie, and how much memory handling them may take.

    Attributes:
        folder: in which files without a name are made, for their owner alone.
        memory_bytes: for rows, beside the program itself and a few bytes a row.
    """

    folder: Path
    memory_bytes: int

    def file(self, owner: object) -> IO[bytes]:
        """A new file without a name, which is closed when its owner is gone."""
        private_folder(self.folder)
        file: Any = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        weakref.finalize(owner, file.close)
        return file  # type: ignore[no-any-return]

    def share(self, part: int) -> int:
        """Bytes for one of so many uses."""
        return max(1 << 16, self.memory_bytes // part)


class Pages:
    """A file's map, which gives back what was read of it.

    The system maps a file in parts of up to `_PART_BYTES`, as large as they were written, whatever
    is read of them; so these are counted.

    Args:
        file: not empty.
        limit_bytes: most that may be held of it, or twice a reading of more.
    """

    def __init__(self, file: IO[bytes], limit_bytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self.map = mmap.mmap(file.fileno(), 0, flags=_FLAGS, prot=protection)
        self._held = np.zeros(len(self.map) // _PART_BYTES + 1, dtype=bool)
        self._most, self._count = max(1, limit_bytes // _PART_BYTES), 0

    def read(self, start: int, stop: int) -> None:
        """Note that the bytes from `start` to `stop` are about to be read."""
        self._read(np.arange(start // _PART_BYTES, max(start, stop - 1) // _PART_BYTES + 1))

    def read_rows(self, rows: np.ndarray, row_bytes: int) -> None:
        """Note that some rows are about to be read."""
        parts = rows * row_bytes // _PART_BYTES
        self._read(parts)
        if row_bytes > 1:
            self._read((rows * row_bytes + row_bytes - 1) // _PART_BYTES)

    def _read(self, parts: np.ndarray) -> None:
        fresh = parts[~self._held[parts]]
        if not len(fresh):
            return
        fresh = np.unique(fresh)
        if self._count + len(fresh) > self._most and self._count:
            self.release()
            fresh = np.unique(parts)
            self._most = max(self._most, 2 * len(fresh))  # else each batch drops the window's parts
        self._held[fresh] = True
        self._count += len(fresh)

    def release(self) -> None:
        """Give all back."""
        self.map.madvise(mmap.MADV_DONTNEED)
        self._held[:] = False
        self._count = 0


def _bytes_of(rows: np.ndarray) -> memoryview:
    return memoryview(rows.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


class DiskArray:
    """An array in a file.

    Args:
        place: where.
        shape: axes (rows, ...).
        dtype: of its numbers.

    Raises:
        DataError: there is no room for it.
    """

    def __init__(self, place: OnDisk, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.row_bytes = self.dtype.itemsize * int(np.prod(shape[1:]))
        self._file, size = place.file(self), self.row_bytes * shape[0]
        if size:
            with _room(place, size):
                os.posix_fallocate(self._file.fileno(), 0, size)
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no parts read ahead

    def write(self, start: int, rows: np.ndarray) -> None:
        """Put rows at position `start` and after it."""
        content = _bytes_of(np.ascontiguousarray(rows, self.dtype))
        at = start * self.row_bytes
        while content:
            done = os.pwrite(self._file.fileno(), content[:_PART_BYTES], at)
            content, at = content[done:], at + done

    def read(self, limit_bytes: int) -> np.ndarray:
        """The array; at most so many bytes of it are in memory."""
        if not self.row_bytes * self.shape[0]:
            return np.empty(self.shape, self.dtype)
        pages = Pages(self._file, limit_bytes)
        found = np.frombuffer(pages.map, self.dtype).reshape(self.shape).view(MappedArray)
        found.pages = pages
        return found


class MappedArray(np.ndarray):
    """An array over a file, whose parts are copies; what was read of the file is given back.

    Whoever reads all of it at once has all of it in memory, until a part is read again.
    """

    pages: Pages | None = None

    def __getitem__(self, key: Any) -> Any:
        """A part: a plain array."""
        plain = self.view(np.ndarray)
        if self.pages is None or not isinstance(key, np.ndarray | slice):
            return plain[key]
        note(self.pages, key, len(self), self.itemsize * int(np.prod(self.shape[1:])))
        return plain[key].copy() if isinstance(key, slice) else plain[key]


def note(pages: Pages, key: np.ndarray | slice, rows: int, row_bytes: int) -> None:
    """Note that a part of an array's rows is about to be read.

    Args:
        pages: of the array.
        key: which rows: positions, or a slice; booleans read all.
        rows: how many the array has.
        row_bytes: of one.
    """
    if isinstance(key, np.ndarray) and key.dtype != bool:
        pages.read_rows(key, row_bytes)
        return
    start, stop, step = key.indices(rows) if isinstance(key, slice) else (0, rows, 1)
    first, last = (start, stop) if step > 0 else (stop + 1, start + 1)
    if first < last:
        pages.read(first * row_bytes, last * row_bytes)


class Scatter:
    """Rows that come in any order, to be written in another: kept by where they will lie.

    The positions are cut into ranges that fit memory. Rows of a range are collected in a file, one
    piece after another, and put in order when all are there. Rows that come in order go straight to
    their place.

    Args:
        place: where.
        shape: axes (rows, ...) of the result.
        dtype: of its numbers; 0 at a position that no row has.
    """

    def __init__(self, place: OnDisk, shape: tuple[int, ...], dtype: Any) -> None:
        self._place, self.found = place, DiskArray(place, shape, dtype)
        self._record = np.dtype([("at", "<i8"), ("row", self.found.dtype, shape[1:])])
        self._rows = max(1, place.share(6) // self._record.itemsize)
        self._straight = False
        self._pieces: dict[int, list[tuple[int, int]]] = {}
        self._file: IO[bytes] | None = None
        self._size = 0

    def add(self, at: np.ndarray, rows: np.ndarray) -> None:
        """Put rows at positions `at`, int64, axes (rows,)."""
        if not len(at):
            return
        if at[-1] - at[0] == len(at) - 1 and (np.diff(at) == 1).all():
            self.found.write(int(at[0]), rows)
            self._straight = True
            return
        records = np.empty(len(at), self._record)
        ranges = at // self._rows
        order = np.argsort(ranges, kind="stable")
        records["at"], records["row"] = at[order], rows[order]
        ranges = ranges[order]
        starts = np.flatnonzero(np.r_[True, np.diff(ranges) > 0])
        self._file = self._file or self._place.file(self)
        for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
            content = _bytes_of(records[start:stop])
            with _room(self._place, content.nbytes):
                if os.pwrite(self._file.fileno(), content, self._size) < content.nbytes:
                    raise OSError
            self._pieces.setdefault(int(ranges[start]), []).append((self._size, content.nbytes))
            self._size += content.nbytes

    def finish(self) -> DiskArray:
        """The rows in their order."""
        for number, pieces in sorted(self._pieces.items()):
            start = number * self._rows
            stop = min(start + self._rows, self.found.shape[0])
            out = self._before(start, stop)
            for at, size in pieces:
                assert self._file is not None, "there are pieces"
                records = np.frombuffer(os.pread(self._file.fileno(), size, at), self._record)
                out[records["at"] - start] = records["row"]
            self.found.write(start, out)
        if self._file is not None:
            self._file.close()
        return self.found

    def _before(self, start: int, stop: int) -> np.ndarray:
        """What was written straight to a range."""
        if not self._straight:
            return np.zeros((stop - start, *self.found.shape[1:]), self.found.dtype)
        size = (stop - start) * self.found.row_bytes
        there = os.pread(self.found._file.fileno(), size, start * self.found.row_bytes)
        shape = (stop - start, *self.found.shape[1:])
        return np.frombuffer(there, self.found.dtype).reshape(shape).copy()


class SortedIds:
    """Ids put in ascending order, and where each row of the table comes in it.

    Sorted runs that fit memory are written to a file each. Splitters drawn from all of them cut the
    runs into ranges, and range by range their parts are sorted again: every id of a range comes
    before those of the next, and equal ones fall into one.

    Args:
        place: where.
        blocks: the ids in the order of the table, int64 or large_string, without missing ones.

    Attributes:
        in_order: whether they stand so in the table already.
        repeated: rows whose id an earlier one has, of the ranges that were read.
    """

    def __init__(self, place: OnDisk, blocks: Iterable[pa.Array]) -> None:
        self._place, self.repeated = place, 0
        self._runs = [_Run(place, *run) for run in self._sorted_runs(blocks)]
        last = [(run.ids[0], run.ids[len(run.ids) - 1]) for run in self._runs]
        self.in_order = all(run.in_order for run in self._runs) and all(
            _before(high, low) for (_, high), (low, _) in pairwise(last)
        )

    def _sorted_runs(self, blocks: Iterable[pa.Array]) -> Iterator[tuple[pa.Array, int]]:
        waiting, size, start = list[pa.Array](), 0, 0
        for block in blocks:
            if not len(block):
                continue
            waiting.append(block)
            size += block.nbytes
            if size > self._place.share(12):
                yield pa.concat_arrays(waiting), start
                start += sum(map(len, waiting))
                waiting, size = [], 0
        if waiting:
            yield pa.concat_arrays(waiting), start

    def ranges(self) -> Iterator[tuple[pa.Array, np.ndarray]]:
        """Ids in ascending order and their rows in the table, one range after another."""
        for ids, rows in self._runs_in_order() if self.in_order else self._merged():
            self.repeated += pc.sum(pc.equal(ids[1:], ids[:-1])).as_py() or 0
            yield ids, rows

    def _runs_in_order(self) -> Iterator[tuple[pa.Array, np.ndarray]]:
        for run in self._runs:
            yield run.ids, run.rows
            run.pages.release()

    def _merged(self) -> Iterator[tuple[pa.Array, np.ndarray]]:
        splitters = self._splitters()
        ends = [[0, *run.cut(splitters), len(run.ids)] for run in self._runs]
        for number in range(len(splitters) + 1):
            parts = [
                (run, end[number], end[number + 1])
                for run, end in zip(self._runs, ends, strict=True)
                if end[number] < end[number + 1]
            ]
            if not parts:
                continue
            ids = pa.concat_arrays([run.ids[start:stop] for run, start, stop in parts])
            rows = np.concatenate([run.rows[start:stop] for run, start, stop in parts])
            for run, *_ in parts:
                run.pages.release()
            order = pc.sort_indices(ids).to_numpy().view(np.int64)
            yield pc.take(ids, pa.array(order)), rows[order]

    def _splitters(self) -> pa.Array:
        """So many that a range has about as many bytes as a run."""
        drawn = [
            pc.take(
                run.ids, pa.array(np.linspace(0, len(run.ids) - 1, _SPLITTERS_A_RUN, dtype=int))
            )
            for run in self._runs
        ]
        every = pa.concat_arrays(drawn)
        every = pc.take(every, pc.sort_indices(every))
        at = np.linspace(0, len(every), 2 * len(self._runs), dtype=int)[1:-1]
        return pc.take(every, pa.array(at))


def _before(low: pa.Scalar, high: pa.Scalar) -> bool:
    return bool(pc.less(low, high).as_py())


class _Run:
    """Sorted ids and their rows in the table, in a file.

    Attributes:
        in_order: whether they stand so in the table.
    """

    def __init__(self, place: OnDisk, ids: pa.Array, start: int) -> None:
        order = pc.sort_indices(ids).to_numpy().view(np.int64)
        self.in_order = bool((np.diff(order) == 1).all())
        if not self.in_order:
            ids = pc.take(ids, pa.array(order))
        batch = pa.record_batch([ids, pa.array(order + start)], names=["id", "row"])
        self._file = place.file(self)
        with _room(place, batch.nbytes), pa.ipc.new_file(self._file, batch.schema) as writer:
            writer.write_batch(batch)
        self.pages = Pages(self._file, place.share(12))
        mapped = pa.ipc.open_file(pa.py_buffer(self.pages.map)).get_batch(0)
        self.ids: pa.Array = mapped.column(0)
        self.rows: np.ndarray = mapped.column(1).to_numpy()

    def cut(self, splitters: pa.Array) -> list[int]:
        """Where the splitters come among the ids: behind all that are smaller."""
        found: list[int] = pc.search_sorted(self.ids, splitters, side="left").to_pylist()
        return found


class _room:
    """Says that a disk is full where a write fails for it."""

    def __init__(self, place: OnDisk, size: int) -> None:
        self._place, self._size = place, size

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, OSError):
            raise DataError(
                "there is no room for a table on disk",
                where=str(self._place.folder),
                got=f"no {max(1, self._size >> 20)} MiB more",
                fix="free some room, or put the party's store on a larger disk",
            ) from None


class DiskTexts:
    """Texts in a file, written in their order.

    Args:
        place: where.
    """

    def __init__(self, place: OnDisk) -> None:
        self._place, self._file = place, place.file(self)
        schema = pa.schema([pa.field("", pa.large_string())])
        self._writer: Any = pa.ipc.new_stream(self._file, schema)

    def write(self, texts: pa.Array) -> None:
        """Put more texts behind those that are there."""
        with _room(self._place, texts.nbytes):
            self._writer.write_batch(pa.record_batch([texts], names=[""]))

    def read(self) -> pa.ChunkedArray:
        """All of them; only what is looked at comes into memory."""
        self._writer.close()
        pages = Pages(self._file, self._place.memory_bytes)
        return pa.ipc.open_stream(pa.py_buffer(pages.map)).read_all().column(0)
