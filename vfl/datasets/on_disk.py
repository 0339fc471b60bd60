"""Arrays larger than memory, in unnamed files: written in any order, read by memory mapping.

An unnamed file has no path in a folder, so no other program can find or replace it there; only
processes of the same user, or of root, can reach it through the running process. The file always
disappears with its process, so no data of a party's table stay in a file. Pages of a mapped file
that were read are released above a limit; see `Pages`. The system may keep these pages in its
cache, which does not count as memory of the process.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import methodcaller
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vfl.core.errors import DataError
from vfl.core.storage import private_folder

#: `MAP_NORESERVE`: reserve no swap space, because a map is larger than memory and hardly any page
#: is changed.
_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
_PART_BYTES = 1 << 17  # mapped files are counted in parts of Linux's default read-ahead
_SPLITTERS_A_RUN, _RANGES_A_RUN = 256, 8


@dataclass(frozen=True)
class OnDisk:
    """A folder for a party's rows on disk, and the limit of memory for them.

    Attributes:
        folder: folder of the unnamed files, which only their owner can access.
        memory_bytes: bytes of memory for rows. The program itself needs memory in addition to this,
            and a few bytes for each row; with a private alignment, also each row's id.
    """

    folder: Path
    memory_bytes: int

    def file(self, owner: object) -> IO[bytes]:
        """Make an unnamed file, which is closed when the object `owner` is deleted."""
        private_folder(self.folder)
        file: Any = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        weakref.finalize(owner, file.close)
        return file  # type: ignore[no-any-return]

    def share(self, part: int) -> int:
        """Return the memory for one use: the limit divided by `part`, at least 64 KiB."""
        return max(1 << 16, self.memory_bytes // part)


def scratch(folder: Path | None = None) -> OnDisk:
    """Return storage for intermediate results: 256 MiB of memory, and TMPDIR as default folder."""
    return OnDisk(folder or Path(tempfile.gettempdir()), 1 << 28)


class Pages:
    """A memory map of a file that counts the mapped parts and releases them above a limit.

    The system maps a file in parts of up to `_PART_BYTES`, even if less is read. So the class
    counts parts.

    Args:
        file: the file, which must not be empty.
        limit_bytes: most mapped bytes to keep in memory; if twice the bytes of a read is more, that
            number applies.
    """

    def __init__(self, file: IO[bytes], limit_bytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self.map = mmap.mmap(file.fileno(), 0, flags=_FLAGS, prot=protection)
        self._held = np.zeros(len(self.map) // _PART_BYTES + 1, dtype=bool)
        self._most, self._count = max(1, limit_bytes // _PART_BYTES), 0

    def read(self, start: int, stop: int) -> None:
        """Count the mapped parts for a read of some bytes; release parts above the limit."""
        self._read(np.arange(start // _PART_BYTES, max(start, stop - 1) // _PART_BYTES + 1))

    def read_rows(self, rows: np.ndarray, row_bytes: int) -> None:
        """Count the mapped parts for a read of some rows; release parts above the limit."""
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
            # Otherwise, one batch would release parts that it has just read.
            self._most = max(self._most, 2 * len(fresh))
        self._held[fresh] = True
        self._count += len(fresh)

    def release(self) -> None:
        """Release all pages."""
        self.map.madvise(mmap.MADV_DONTNEED)
        self._held[:] = False
        self._count = 0


def _bytes_of(rows: np.ndarray) -> memoryview:
    return memoryview(rows.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _pread(file: IO[bytes], start: int, stop: int) -> np.ndarray:
    """Read bytes of a file without mapping it, as mapped pages count as process memory; uint8."""
    found = np.empty(stop - start, dtype=np.uint8)
    content = memoryview(found)  # type: ignore[arg-type]
    while content:
        done = os.preadv(file.fileno(), [content], stop - len(content))
        assert done, "the file still has the written bytes"
        content = content[done:]
    return found


def _pwrite(file: IO[bytes], content: memoryview, at: int, most_bytes: int | None = None) -> None:
    """Write bytes at a position of a file, by calls of at most `most_bytes`."""
    while content:
        done = os.pwrite(file.fileno(), content[:most_bytes], at)
        content, at = content[done:], at + done


class DiskBytes:
    """Bytes in a file that are appended and read in parts, such as a message larger than memory.

    Args:
        place: where the file is stored.

    >>> found = DiskBytes(scratch())
    >>> found.write(b"a message")
    >>> len(found), found[2:5]
    (9, b'mes')
    """

    def __init__(self, place: OnDisk) -> None:
        self.place, self._file, self._size = place, place.file(self), 0

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes.

        Raises:
            DataError: the disk is full.
        """
        with _room(self.place, len(content)):
            _pwrite(self._file, memoryview(content), self._size)
        self._size += len(content)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self._size)
        return _pread(self._file, start, max(start, stop)).tobytes()

    def __bytes__(self) -> bytes:
        return self[:]


class DiskColumn:
    """A file to which numbers of one type are appended.

    Args:
        place: where the file is stored.
        dtype: type of the numbers.
    """

    def __init__(self, place: OnDisk, dtype: Any) -> None:
        self.dtype, self._bytes = np.dtype(dtype), DiskBytes(place)

    def write(self, numbers: np.ndarray) -> None:
        """Append numbers, axes (numbers,)."""
        self._bytes.write(_bytes_of(np.ascontiguousarray(numbers, self.dtype)))

    def __len__(self) -> int:
        return len(self._bytes) // int(self.dtype.itemsize)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        size = self.dtype.itemsize
        return np.frombuffer(self._bytes[start * size : stop * size], self.dtype)

    def read(self, limit_bytes: int) -> np.ndarray:
        """Map all numbers, with at most `limit_bytes` of them in memory."""
        return _mapped(self._bytes._file, (len(self),), self.dtype, limit_bytes)


class DiskArray:
    """An array in a file.

    Args:
        place: where the file is stored.
        shape: axes (rows, ...).
        dtype: type of the numbers.

    Raises:
        DataError: the disk is full.
    """

    def __init__(self, place: OnDisk, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.row_bytes = self.dtype.itemsize * int(np.prod(shape[1:]))
        self._file, size = place.file(self), self.row_bytes * shape[0]
        if size:
            with _room(place, size):
                os.posix_fallocate(self._file.fileno(), 0, size)
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead

    def write(self, start: int, rows: np.ndarray) -> None:
        """Write rows at the positions from `start` on."""
        content = _bytes_of(np.ascontiguousarray(rows, self.dtype))
        _pwrite(self._file, content, start * self.row_bytes, _PART_BYTES)

    def read(self, limit_bytes: int) -> np.ndarray:
        """Map the array, with at most `limit_bytes` of it in memory."""
        return _mapped(self._file, self.shape, self.dtype, limit_bytes)

    def most(self) -> float:
        """Return the largest number, or -1 if the array is empty."""
        rows = max(1, _PART_BYTES // max(1, self.row_bytes))
        starts = range(0, self.shape[0], rows)
        parts = (self.part(start, min(start + rows, self.shape[0])) for start in starts)
        return max((part.max() for part in parts), default=-1)

    def part(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of some rows, without leaving parts of the file in memory."""
        content = _pread(self._file, start * self.row_bytes, stop * self.row_bytes)
        found: np.ndarray = content.view(self.dtype).reshape(stop - start, *self.shape[1:])
        return found


def _mapped(
    file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any], limit_bytes: int
) -> np.ndarray:
    if not math.prod(shape) * dtype.itemsize:
        return np.empty(shape, dtype)
    pages = Pages(file, limit_bytes)
    found = np.frombuffer(pages.map, dtype).reshape(shape).view(MappedArray)
    found.pages = pages
    return found


class MappedArray(np.ndarray):
    """A mapped array; selections by slices and arrays are copies, and `pages` counts their parts.

    If the array is read without a selection, all of it stays in memory until `pages` releases it.
    """

    pages: Pages | None = None

    def __getitem__(self, key: Any) -> Any:
        """Return a selection as a plain array."""
        plain = self.view(np.ndarray)
        if self.pages is None or not isinstance(key, np.ndarray | slice):
            return plain[key]
        note(self.pages, key, len(self), self.itemsize * int(np.prod(self.shape[1:])))
        return plain[key].copy() if isinstance(key, slice) else plain[key]


def note(pages: Pages, key: np.ndarray | slice, rows: int, row_bytes: int) -> None:
    """Count the parts that a read of some of an array's rows maps; see `Pages`.

    Args:
        pages: pages of the mapped array.
        key: positions of the rows, or a slice; a boolean mask counts as reading all rows.
        rows: number of rows in the array.
        row_bytes: number of bytes of one row.
    """
    if isinstance(key, np.ndarray) and key.dtype != bool:
        pages.read_rows(key, row_bytes)
        return
    start, stop, step = key.indices(rows) if isinstance(key, slice) else (0, rows, 1)
    first, last = (start, stop) if step > 0 else (stop + 1, start + 1)
    if first < last:
        pages.read(first * row_bytes, last * row_bytes)


class Buckets:
    """Records that are written with a bucket number, and read again bucket by bucket.

    Args:
        place: where the file is stored.
        record: dtype of one record.
        count: number of buckets.
    """

    def __init__(self, place: OnDisk, record: np.dtype[Any], count: int) -> None:
        self.record, self.count, self._place = record, count, place
        self.sizes = np.zeros(count, dtype=np.int64)
        self._ends: list[np.ndarray] = []  # end of each bucket in each written piece
        self._file: IO[bytes] | None = None

    def add(self, numbers: np.ndarray, records: np.ndarray) -> None:
        """Add records with their bucket numbers; both have axes (records,).

        Raises:
            DataError: the disk is full.
        """
        self._file = self._file or self._place.file(self)
        sizes = np.bincount(numbers, minlength=self.count)
        content = _bytes_of(records[np.argsort(numbers, kind="stable")])
        at = int(self.sizes.sum()) * self.record.itemsize
        with _room(self._place, content.nbytes):
            _pwrite(self._file, content, at)
        self.sizes += sizes
        self._ends.append(np.cumsum(sizes))

    def read(self, number: int) -> Iterator[np.ndarray]:
        """Yield the records of a bucket in the order of writing, in pieces."""
        start, size = 0, self.record.itemsize
        for ends in self._ends:
            first = start + int(ends[number - 1]) if number else start
            last, start = start + int(ends[number]), start + int(ends[-1])
            if first < last:
                assert self._file is not None, "there are records"
                yield _pread(self._file, first * size, last * size).view(self.record)

    def whole(self, number: int) -> np.ndarray:
        """Return the records of a bucket in the order of writing, as one array."""
        found, start = np.empty(self.sizes[number], self.record), 0
        for piece in self.read(number):
            found[start : start + len(piece)] = piece
            start += len(piece)
        return found

    def close(self) -> None:
        """Close the file now, before this object is deleted."""
        if self._file is not None:
            self._file.close()


class Scatter:
    """Writes rows that arrive in any order to their target positions.

    The target positions are divided into ranges that fit into memory. A file collects the rows of
    each range in pieces; when all rows have arrived, each range is sorted. Rows that arrive at
    consecutive positions are written at once.

    Args:
        place: folder for the files.
        shape: axes (rows, ...) of the result.
        dtype: type of the numbers; positions without a row contain 0.
    """

    def __init__(self, place: OnDisk, shape: tuple[int, ...], dtype: Any) -> None:
        self.found = DiskArray(place, shape, dtype)
        record = np.dtype([("at", "<i8"), ("row", self.found.dtype, shape[1:])])
        self._rows = max(1, place.share(6) // record.itemsize)
        self._ranges = Buckets(place, record, -(-shape[0] // self._rows))
        self._straight = False

    def add(self, at: np.ndarray, rows: np.ndarray) -> None:
        """Add rows for the target positions `at`, int64, axes (rows,)."""
        if not len(at):
            return
        if at[-1] - at[0] == len(at) - 1 and (np.diff(at) == 1).all():
            self.found.write(int(at[0]), rows)
            self._straight = True
            return
        records = np.empty(len(at), self._ranges.record)
        records["at"], records["row"] = at, rows
        self._ranges.add(at // self._rows, records)

    def finish(self) -> DiskArray:
        """Return the array with all rows at their positions."""
        for number in np.flatnonzero(self._ranges.sizes):
            start = int(number) * self._rows
            stop = min(start + self._rows, self.found.shape[0])
            if self._straight:
                out = self.found.part(start, stop)
            else:
                out = np.zeros((stop - start, *self.found.shape[1:]), self.found.dtype)
            for records in self._ranges.read(int(number)):
                out[records["at"] - start] = records["row"]
            self.found.write(start, out)
        self._ranges.close()
        return self.found


def shuffled(
    place: OnDisk, count: int, blocks: Iterable[np.ndarray], draw: Callable[[int], bytes]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows in a uniformly random order, with each row's original position.

    Each row goes to a random bucket; then the rows of each bucket, which fit into memory, are
    permuted (Rao 1961, Sandelius 1962).

    Args:
        place: where the files are stored.
        count: number of rows.
        blocks: the rows in their original order, in blocks, axes (rows, ...).
        draw: function that returns a number of random bytes.
    """
    buckets, start = None, 0
    for block in blocks:
        if buckets is None:
            record = np.dtype([("at", "<i8"), ("row", block.dtype, block.shape[1:])])
            buckets = Buckets(place, record, bucket_count(place, count * record.itemsize))
        records = np.empty(len(block), buckets.record)
        records["at"], records["row"] = np.arange(start, start + len(block)), block
        drawn = np.frombuffer(draw(4 * len(block)), "<u4").astype(np.int64)
        # The number of buckets is a power of two, so the remainder is uniform.
        buckets.add(drawn % buckets.count, records)
        start += len(block)
    for number in range(0 if buckets is None else buckets.count):
        assert buckets is not None, "there are rows"
        records = buckets.whole(number)
        order = np.argsort(np.frombuffer(draw(8 * len(records)), "<u8"), kind="stable")
        yield records["at"][order], records["row"][order]


def bucket_count(place: OnDisk, size_bytes: int) -> int:
    """Return the number of buckets, a power of two, with which each bucket fits into memory."""
    return 1 << max(0, math.ceil(math.log2(max(1, size_bytes) / place.share(16))))


def gathered(place: OnDisk, source: DiskColumn, at: DiskColumn) -> tuple[DiskArray, bool]:
    """Return a column's numbers at some positions, and whether a position occurs twice.

    Args:
        place: where the files are stored.
        source: the column.
        at: the positions, int64, axes (positions,).
    """
    size = max(1, place.share(16) // source.dtype.itemsize)
    record = np.dtype([("at", "<i8"), ("to", "<i8")])
    ranges = Buckets(place, record, max(1, -(-len(source) // size)))
    step = max(1, place.share(32) // record.itemsize)
    for start in range(0, len(at), step):
        positions = at[start : start + step]
        records = np.empty(len(positions), record)
        records["at"], records["to"] = positions, np.arange(start, start + len(positions))
        ranges.add(positions // size, records)
    found, twice = Scatter(place, (len(at),), source.dtype), False
    for number in range(ranges.count):
        rows, start = source[number * size : (number + 1) * size], number * size
        seen = np.zeros(len(rows), dtype=bool)
        for records in ranges.read(number):
            own = records["at"] - start
            twice = twice or bool(seen[own].any()) or len(np.unique(own)) < len(own)
            seen[own] = True
            found.add(records["to"], rows[own])
    ranges.close()
    return found.finish(), twice


class SortedIds:
    """Ids in ascending order, each with its row in the table, for tables larger than memory.

    Runs of ids that fit into memory are sorted, and each run is written to a file. Splitters, drawn
    from all runs, divide the ids into ranges. The parts of each range are then sorted together. All
    ids of a range come before the ids of the next range, and equal ids are in the same range.

    Args:
        place: where the files are stored.
        blocks: ids in the order of the table, without missing ones, in blocks of int64 or
            large_string.

    Attributes:
        in_order: whether the table is already sorted by id.
        repeated: number of rows in the ranges read so far that repeat an earlier row's id.
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
        """Yield ids in ascending order, with their rows in the table, range by range."""
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
        """Return splitters for ranges smaller than a run, since sorting makes copies."""
        every = pa.concat_arrays([run.drawn(_SPLITTERS_A_RUN) for run in self._runs])
        every = pc.take(every, pc.sort_indices(every))
        at = np.linspace(0, len(every), _RANGES_A_RUN * len(self._runs), dtype=int)[1:-1]
        return pc.take(every, pa.array(at))


def _before(low: pa.Scalar, high: pa.Scalar) -> bool:
    return bool(pc.less(low, high).as_py())


class _Run:
    """Sorted ids with their rows in the table, in a file.

    Attributes:
        in_order: whether the table's ids were already sorted.
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

    # The next methods read few rows all over the file, so the system maps many pages.

    def drawn(self, count: int) -> pa.Array:
        """Return some of the ids, evenly spaced."""
        at = np.linspace(0, len(self.ids) - 1, count, dtype=int)
        found = pc.take(self.ids, pa.array(at))
        self.pages.release()
        return found

    def cut(self, splitters: pa.Array) -> list[int]:
        """Return, for each splitter, the number of ids that are below this splitter."""
        value = methodcaller("as_py")
        found = [bisect_left(self.ids, value(one), key=value) for one in splitters]
        self.pages.release()
        return found


class _room:
    """Context that turns any failed write into an error about a full disk, the likely cause."""

    def __init__(self, place: OnDisk, size: int) -> None:
        self._place, self._size = place, size

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, OSError):
            raise DataError(
                "the disk is too full for a table",
                where=str(self._place.folder),
                got=f"less than {max(1, self._size >> 20)} MiB free",
                fix="free disk space, or put the party's store on a larger disk",
            ) from None


class DiskTexts:
    """A file to which texts are appended.

    Args:
        place: where the file is stored.
    """

    def __init__(self, place: OnDisk) -> None:
        self._place, self._file = place, place.file(self)
        schema = pa.schema([pa.field("", pa.large_string())])
        self._writer: Any = pa.ipc.new_stream(self._file, schema)

    def write(self, texts: pa.Array) -> None:
        """Append texts."""
        with _room(self._place, texts.nbytes):
            self._writer.write_batch(pa.record_batch([texts], names=[""]))

    def read(self) -> pa.ChunkedArray:
        """Map all texts; only texts that are read are in memory."""
        self._writer.close()
        pages = Pages(self._file, self._place.memory_bytes)
        return pa.ipc.open_stream(pa.py_buffer(pages.map)).read_all().column(0)
