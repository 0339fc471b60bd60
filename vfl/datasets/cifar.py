"""CIFAR-10 and CIFAR-100 from their binary files, or CIFAR-10 from JPEGs.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. A row of a binary
file is its label (CIFAR-100: the coarse one, then the fine one) and 3,072 bytes, one channel after
the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vfl.datasets.fetch import Archive, fetch
from vfl.datasets.jpeg import read_jpeg_archive
from vfl.datasets.picture_set import ENVIRONMENT, Part, PictureSet, data_folder
from vfl.errors import DataError, MissingDataError

SIDE = 32
PIXEL_BYTES = 3 * SIDE * SIDE
PAGE = "https://www.cs.toronto.edu/~kriz"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of a set stand.

    Attributes:
        archive: what its authors publish.
        train, test: the binary files in its folder.
        names: the file of class names there, one a line.
        classes: how many there are.
        label_bytes: bytes ahead of the pixels; the last one is the label.
        jpeg_folder: a folder with ``train.npz`` and ``test.npz``, read where the other is missing.
    """

    archive: Archive
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    classes: int
    label_bytes: int
    jpeg_folder: str | None = None


LAYOUTS = {
    "cifar10": Layout(
        archive=Archive(
            f"{PAGE}/cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            "cifar-10-batches-bin",
        ),
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        names="batches.meta.txt",
        classes=10,
        label_bytes=1,
        jpeg_folder="CIFAR10-jpeg",
    ),
    "cifar100": Layout(
        archive=Archive(
            f"{PAGE}/cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            "cifar-100-binary",
        ),
        train=("train.bin",),
        test=("test.bin",),
        names="fine_label_names.txt",
        classes=100,
        label_bytes=2,
    ),
}


def read_cifar(source: str, root: Path | None = None, download: bool = False) -> PictureSet:
    """One of the two sets.

    Args:
        source: "cifar10" or "cifar100"; the fine labels of the latter.
        root: folder that holds ``cifar-10-batches-bin`` or ``cifar-100-binary``; JPEGs of CIFAR-10
            in ``CIFAR10-jpeg`` do as well, though they differ a little from the original pixels.
        download: fetch the binary files where neither folder is there.

    Raises:
        MissingDataError: the files are not there.
        DataError: a file is cut short or of another format.
    """
    layout, base = LAYOUTS[source], data_folder(root)
    folder = base / layout.archive.folder
    jpeg_folder = base / layout.jpeg_folder if layout.jpeg_folder else None
    if not folder.is_dir():
        if jpeg_folder is not None and jpeg_folder.is_dir():
            return _read_jpegs(jpeg_folder)
        if download:
            fetch(layout.archive, base)
    return _read_binary(folder, layout)


def _read_binary(folder: Path, layout: Layout) -> PictureSet:
    text = _read(folder / layout.names).decode("ascii", errors="replace")
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if len(names) != layout.classes:
        raise DataError(
            "the class names of a picture set are not all there",
            where=str(folder / layout.names),
            got=f"{len(names)} names",
            want=f"{layout.classes} names",
        )
    train, test = (_read_rows(folder, files, layout) for files in (layout.train, layout.test))
    return PictureSet(train, test, names)


def _read_rows(folder: Path, files: tuple[str, ...], layout: Layout) -> Part:
    row_bytes = layout.label_bytes + PIXEL_BYTES
    found = [_read(folder / name) for name in files]
    for name, cells in zip(files, found, strict=True):
        if not cells or len(cells) % row_bytes:
            raise DataError(
                "this is not a whole binary file of CIFAR",
                where=str(folder / name),
                got=f"{len(cells)} bytes",
                want=f"rows of {row_bytes} bytes",
                fix="remove its folder and fetch it again",
            )
    rows = np.frombuffer(b"".join(found), dtype=np.uint8).reshape(-1, row_bytes)
    pictures = rows[:, layout.label_bytes :].reshape(-1, 3, SIDE, SIDE)
    return Part.of(pictures, rows[:, layout.label_bytes - 1])


def _read_jpegs(folder: Path) -> PictureSet:
    train, test = (
        read_jpeg_archive(_there(folder / f"{part}.npz"), "names", SIDE)
        for part in ("train", "test")
    )
    return PictureSet(train.part, test.part, train.names)


def _read(path: Path) -> bytes:
    return _there(path).read_bytes()


def _there(path: Path) -> Path:
    if path.is_file():
        return path
    raise MissingDataError(
        f"the file '{path.name}' is not there",
        where=str(path.parent),
        fix=f"pass --download, or set {ENVIRONMENT} to the folder above '{path.parent.name}'",
    )
