"""Pictures kept as JPEG: files of their own, or many in one npz."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vfl.datasets.picture_set import Part, interleaved
from vfl.errors import DataError

LIMIT_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class JpegArchive:
    """An npz of JPEG files joined end to end.

    Attributes:
        part: its rows, one of each class in turn.
        names: what the labels stand for.
    """

    part: Part
    names: tuple[str, ...]


def jpeg_part(labels: np.ndarray, raw: Callable[[int], bytes], side: int, where: Path) -> Part:
    """Rows whose pictures are decoded when they are wanted, one of each class in turn.

    Args:
        labels: axes (rows,), in the order of the files.
        raw: the bytes of the JPEG at a position in that order.
        side: height and width every picture must have.
        where: the file or folder, for messages.
    """
    order = interleaved(labels)

    def take(rows: np.ndarray) -> np.ndarray:
        pictures = np.empty((len(rows), 3, side, side), dtype=np.uint8)
        for row, position in enumerate(order[rows].tolist()):
            pictures[row] = decode_jpeg(raw(position), side, where)
        return pictures

    return Part(labels[order].astype(np.int64), take)


def decode_jpeg(raw: bytes, side: int, where: Path) -> np.ndarray:
    """One picture, grey ones as three equal channels; uint8, axes (3, side, side).

    Raises:
        DataError: no JPEG, a broken one, or one of another size.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(raw), formats=("JPEG",)) as picture:
            if picture.size == (side, side):  # known before anything is decoded
                return np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
            got = "another size"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        got = type(error).__name__
    raise DataError(
        "a picture cannot be read", where=str(where), got=got, want=f"a JPEG of {side} x {side}"
    )


def read_jpeg_archive(path: Path, names: str, side: int) -> JpegArchive:
    """The JPEGs of an npz with the arrays ``jpeg`` (bytes), ``offset`` (rows + 1) and ``label``.

    Args:
        path: the file.
        names: its array of class names.
        side: height and width of every picture.

    Raises:
        DataError: another format, a file cut short, or one above 1 GiB.
    """
    try:
        with zipfile.ZipFile(path) as members:
            if sum(member.file_size for member in members.infolist()) > LIMIT_BYTES:
                raise ValueError("too large")
        with np.load(path, allow_pickle=False) as found:
            blob, offset, labels = (found[key] for key in ("jpeg", "offset", "label"))
            classes = tuple(map(str, found[names]))
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ):
        raise _bad_archive(path, names) from None
    if not _fits(blob, offset, labels):
        raise _bad_archive(path, names)
    part = jpeg_part(labels, lambda row: blob[offset[row] : offset[row + 1]].tobytes(), side, path)
    return JpegArchive(part, classes)


def _fits(blob: np.ndarray, offset: np.ndarray, labels: np.ndarray) -> bool:
    """Whether the offsets cut the bytes into one JPEG a label."""
    return (
        blob.dtype == np.uint8
        and offset.dtype.kind == labels.dtype.kind.replace("u", "i") == "i"
        and (blob.ndim, offset.ndim, labels.ndim) == (1, 1, 1)
        and len(offset) == len(labels) + 1
        and offset[0] == 0
        and offset[-1] == len(blob)
        and bool((np.diff(offset) > 0).all())
    )


def _bad_archive(path: Path, names: str) -> DataError:
    return DataError(
        "this is not a whole npz of JPEG pictures",
        where=str(path),
        want=f"the arrays jpeg, offset, label and {names}, at most 1 GiB",
    )
