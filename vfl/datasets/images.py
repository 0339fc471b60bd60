"""MNIST and Fashion-MNIST from their idx files; the network is used only when asked for."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from vfl.datasets.picture_set import ENVIRONMENT, data_folder
from vfl.errors import DataError, MissingDataError

FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
LIMIT_BYTES = 2**30


def read_images(
    source: str, root: Path | None = None, download: bool = False
) -> tuple[np.ndarray, np.ndarray, int]:
    """All pictures of a set, its training rows first.

    Args:
        source: "mnist" or "fashion_mnist".
        root: folder that holds ``MNIST/raw/...`` as torchvision lays it out; without it the
            environment's VFL_DATA, then ``~/.cache/vfl``.
        download: let torchvision fetch what is not there.

    Returns:
        pictures, uint8, axes (rows, 1, height, width); labels, int64, axes (rows,); and how many of
        the rows are training rows.

    Raises:
        MissingDataError: the files are not there.
        DataError: a file is cut short or of another format.
    """
    base = data_folder(root)
    if download:
        _download(source, base)
    raw = base / FOLDERS[source] / "raw"
    parts = [(_read(raw, f"{part}-images-idx3-ubyte"), part) for part in ("train", "t10k")]
    labels = [_read(raw, f"{part}-labels-idx1-ubyte") for _, part in parts]
    for (pictures, part), own in zip(parts, labels, strict=True):
        if pictures.ndim != 3 or own.ndim != 1 or len(pictures) != len(own):
            raise DataError(f"pictures and labels of '{part}' differ in number", where=str(raw))
    together = np.concatenate([pictures for pictures, _ in parts])
    return together[:, None], np.concatenate(labels).astype(np.int64), len(labels[0])


def _download(source: str, base: Path) -> None:
    from torchvision import datasets

    getattr(datasets, FOLDERS[source])(str(base), download=True)


def _read(raw: Path, name: str) -> np.ndarray:
    for path in (raw / name, raw / f"{name}.gz"):
        if path.is_file():
            return read_idx(path)
    raise MissingDataError(
        f"the file '{name}' is not there, plain or as .gz",
        where=str(raw),
        fix=f"pass --download, or set {ENVIRONMENT} to the folder above "
        f"'{raw.parent.name}/{raw.name}'",
    )


def read_idx(path: Path) -> np.ndarray:
    """One idx or idx.gz file of bytes: ``0 0 8 axes``, a big-endian u32 an axis, then the cells.

    Raises:
        DataError: another format, a file cut short, or one above 1 GiB.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            axes = magic[3] if len(magic) == 4 and magic[:3] == b"\0\0\x08" else 0
            shape = np.frombuffer(file.read(4 * axes), dtype=">u4").tolist()
            wanted = math.prod(shape)
            cells = file.read(wanted + 1) if wanted <= LIMIT_BYTES else b""
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            "this file cannot be read", where=str(path), got=type(error).__name__
        ) from None
    if not axes or len(shape) != axes or len(cells) != wanted:
        raise DataError(
            "this is not a whole idx file of bytes",
            where=str(path),
            fix="remove it and fetch it again",
        )
    return np.frombuffer(cells, dtype=np.uint8).reshape(shape)
