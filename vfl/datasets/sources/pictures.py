"""Picture sets by name, alone or joined by plus signs, read from their files.

Sources: LeCun et al. 1998 (MNIST); Xiao et al. 2017 (Fashion-MNIST); Krizhevsky, "Learning Multiple
Layers of Features from Tiny Images", 2009 (CIFAR); Le and Yang, "Tiny ImageNet Visual Recognition
Challenge", 2015.
"""

from __future__ import annotations

import gzip
import io
import math
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from vfl.core.errors import DataError, MissingDataError
from vfl.datasets.sources.base import Bundled, DataSource, Request, interleaved
from vfl.datasets.sources.files import ENVIRONMENT, Archive, data_folder, existing_file, fetch
from vfl.datasets.sources.picture_set import Part, PictureSet, first_classes, resized, stacked
from vfl.datasets.table import Classes

#: Limit of the unpacked size of a file of pictures.
LIMIT_BYTES = 2**30

FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

CIFAR_SIDE = 32
CIFAR_BYTES = 3 * CIFAR_SIDE * CIFAR_SIDE
CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz"

TINY_FOLDER = "tiny-imagenet-200"
TINY_SIDE = 64
TINY_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_TRAIN = "train_000_099.npz"  # the first 100 training pictures of each class

Channels = tuple[float, ...]


class PictureSource(DataSource):
    """A set of pictures of one size; a subclass implements `pictures`.

    Attributes:
        mean, scale: mean and standard deviation of the training pixels of each channel, where a
            pixel is between 0 and 1.
    """

    follows = ("side", "classes")
    own_parts = ("test",)
    mean: ClassVar[Channels]
    scale: ClassVar[Channels]

    @abstractmethod
    def pictures(self, asked: Request) -> PictureSet:
        """Open the whole set without decoding it; `read` decodes only the requested pictures.

        Raises:
            MissingDataError, DataError: see `read`.
        """

    def read(self, asked: Request) -> Bundled:
        return JoinedPictures([self]).read(asked)


class JoinedPictures(DataSource):
    """One picture set, or several joined into one set whose classes are numbered in sequence."""

    follows, own_parts = PictureSource.follows, PictureSource.own_parts

    def __init__(self, sources: Sequence[PictureSource]) -> None:
        self._sources = sources

    def read(self, asked: Request) -> Bundled:
        sets = [one.pictures(asked) for one in self._sources]
        if asked.form.side is not None:
            sets = [resized(each, asked.form.side) for each in sets]
        found = stacked(sets)
        if asked.form.classes is not None:
            found = first_classes(found, asked.form.classes)
        pictures, labels, train_rows = found.read(asked.limit)
        mean, scale = channel_mean_and_std(self._sources)
        return Bundled(
            cells=pictures,
            labels=labels,
            classes=found.classes,
            mean=tuple(255 * channel for channel in mean),
            scale=tuple(255 * channel for channel in scale),
            train_rows=train_rows,
        )


class MNIST(PictureSource):
    """Handwritten digits: 70,000 grey pictures of 28 x 28 pixels."""

    mean, scale = (0.1307,), (0.3081,)

    def pictures(self, asked: Request) -> PictureSet:
        return read_mnist("MNIST", tuple(range(10)), asked.root, asked.download)


class FashionMNIST(PictureSource):
    """Pieces of clothing: 70,000 grey pictures of 28 x 28 pixels."""

    mean, scale = (0.2860,), (0.3530,)

    def pictures(self, asked: Request) -> PictureSet:
        return read_mnist("FashionMNIST", FASHION, asked.root, asked.download)


class CIFAR10(PictureSource):
    """Vehicles and animals of 10 classes: 60,000 colour pictures of 32 x 32 pixels."""

    mean, scale = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def pictures(self, asked: Request) -> PictureSet:
        return read_cifar("cifar10", asked.root, asked.download)


class CIFAR100(PictureSource):
    """Things, plants and animals of 100 fine classes: 60,000 colour pictures of 32 x 32 pixels."""

    mean, scale = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)

    def pictures(self, asked: Request) -> PictureSet:
        return read_cifar("cifar100", asked.root, asked.download)


class TinyImageNet(PictureSource):
    """Things and animals of 200 classes: colour pictures of 64 x 64 pixels."""

    mean, scale = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)

    def pictures(self, asked: Request) -> PictureSet:
        return read_tiny_imagenet(asked.root)


def channel_mean_and_std(sources: Sequence[PictureSource]) -> tuple[Channels, Channels]:
    """Return mean and scale, by channel, that standardise the pictures of all given sets alike.

    All sets share one mean and one scale, to which each set contributes equally. Separate values
    for each set would require knowing the set of a picture, which reveals a part of its label. The
    scale is the standard deviation of full-size pictures, whatever `side` is.

    Args:
        sources: picture sets whose pictures have the same number of channels.

    >>> [round(each[0], 3) for each in channel_mean_and_std([MNIST(), FashionMNIST()])]
    [0.208, 0.34]
    """
    means = np.array([one.mean for one in sources])
    spreads = np.array([one.scale for one in sources])
    spread = np.sqrt((spreads**2).mean(axis=0) + means.var(axis=0))
    return tuple(means.mean(axis=0).tolist()), tuple(spread.tolist())


def read_mnist(
    folder: str, classes: Classes, root: Path | None = None, download: bool = False
) -> PictureSet:
    """Read MNIST or Fashion-MNIST from idx files; use the network only if `download` is true.

    Args:
        folder: "MNIST" or "FashionMNIST", which is torchvision's name of the set and of its folder.
        classes: names of the classes, by code.
        root: folder that contains ``MNIST/raw/...`` or ``FashionMNIST/raw/...``, as torchvision
            stores them; by default VFL_DATA, then ``~/.cache/vfl``.
        download: whether torchvision may download missing files.

    Raises:
        MissingDataError: files are missing.
        DataError: a file is truncated or has another format.
    """
    base = data_folder(root)
    if download:
        from torchvision import datasets

        getattr(datasets, folder)(str(base), download=True)
    raw = base / folder / "raw"
    parts = []
    for part in ("train", "t10k"):
        names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
        pictures, labels = (read_idx(_plain_or_zipped(raw / name)) for name in names)
        if pictures.ndim != 3 or labels.ndim != 1 or len(pictures) != len(labels):
            raise DataError(f"pictures and labels of '{part}' differ in number", where=str(raw))
        parts.append(Part.of(pictures[:, None], labels))
    train, test = parts
    return PictureSet(train, test, classes)


def _plain_or_zipped(path: Path) -> Path:
    for file in (path, path.with_name(f"{path.name}.gz")):
        if file.is_file():
            return file
    raw = path.parent
    raise MissingDataError(
        f"the file '{path.name}' does not exist, plain or as .gz",
        where=str(raw),
        fix=f"pass --download, or set {ENVIRONMENT} to the folder above "
        f"'{raw.parent.name}/{raw.name}'",
    )


def read_idx(path: Path) -> np.ndarray:
    """Read an idx or idx.gz file of bytes: ``0 0 8 axes``, one big-endian u32 per axis, then cells.

    Raises:
        DataError: the file has another format, is truncated, or is larger than 1 GiB.
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
            "this is not a complete idx file of bytes",
            where=str(path),
            fix="remove it and fetch it again",
        )
    return np.frombuffer(cells, dtype=np.uint8).reshape(shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of the files of a CIFAR data set.

    Attributes:
        archive: archive that the authors publish.
        train, test: binary files in the archive's folder.
        names: file in that folder with the class names, one per line.
        classes: number of classes.
        label_bytes: number of label bytes at the start of a row, before the pixels; the last of
            them is the label that is used.
        jpeg_folder: folder with ``train.npz`` and ``test.npz``, which is read if the archive's
            folder is missing.
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
            f"{CIFAR_PAGE}/cifar-10-binary.tar.gz",
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
            f"{CIFAR_PAGE}/cifar-100-binary.tar.gz",
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
    """Read CIFAR-10 or CIFAR-100 from binary files, or CIFAR-10 from JPEGs.

    A row of a binary file has one label byte (CIFAR-100: a byte for the coarse label, then one for
    the fine label) and 3,072 bytes of pixels, one channel after the other.

    Args:
        source: "cifar10" or "cifar100"; CIFAR-100 gets the fine labels.
        root: folder that contains ``cifar-10-batches-bin`` or ``cifar-100-binary``. JPEGs of
            CIFAR-10 in ``CIFAR10-jpeg`` are accepted too, though their pixels differ a little from
            the original ones.
        download: whether to download the binary files if no folder of the set exists.

    Raises:
        MissingDataError: files are missing.
        DataError: a file is truncated or has another format.
    """
    layout, base = LAYOUTS[source], data_folder(root)
    folder = base / layout.archive.folder
    if not folder.is_dir():
        if layout.jpeg_folder and (jpegs := base / layout.jpeg_folder).is_dir():
            parts = (_cifar_file(jpegs / f"{part}.npz") for part in ("train", "test"))
            return _read_archives(parts, "names", CIFAR_SIDE)
        if download:
            fetch(layout.archive, base)
    text = _cifar_file(folder / layout.names).read_bytes().decode("ascii", errors="replace")
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if len(names) != layout.classes:
        raise DataError(
            "some class names of a picture set are missing",
            where=str(folder / layout.names),
            got=f"{len(names)} names",
            want=f"{layout.classes} names",
        )
    train, test = (_read_cifar_rows(folder, files, layout) for files in (layout.train, layout.test))
    return PictureSet(train, test, names)


def _read_cifar_rows(folder: Path, files: tuple[str, ...], layout: Layout) -> Part:
    row_bytes = layout.label_bytes + CIFAR_BYTES
    found = [_cifar_file(folder / name).read_bytes() for name in files]
    for name, cells in zip(files, found, strict=True):
        if not cells or len(cells) % row_bytes:
            raise DataError(
                "this is not a complete binary file of CIFAR",
                where=str(folder / name),
                got=f"{len(cells)} bytes",
                want=f"rows of {row_bytes} bytes",
                fix="remove its folder and fetch it again",
            )
    rows = np.frombuffer(b"".join(found), dtype=np.uint8).reshape(-1, row_bytes)
    pictures = rows[:, layout.label_bytes :].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)
    return Part.of(pictures, rows[:, layout.label_bytes - 1])


def _cifar_file(path: Path) -> Path:
    return existing_file(path, first="pass --download, or ")


def read_tiny_imagenet(root: Path | None = None) -> PictureSet:
    """Read Tiny-ImageNet, 200 classes, from its original folder or from JPEGs in npz files.

    vfl does not download the data set, because its authors published no checksum. The published
    validation pictures serve as test rows, because the labels of the published test pictures are
    not public.

    Args:
        root: folder that contains ``tiny-imagenet-200``. That folder has either the published
            ``wnids.txt``, ``train/`` and ``val/``, or ``train_000_099.npz`` and ``val.npz``, with a
            fifth of the training pictures.

    Raises:
        MissingDataError: files are missing.
        DataError: a file has another format.
    """
    folder = data_folder(root) / TINY_FOLDER
    if not (folder / "train").is_dir():
        parts = (_tiny_file(folder / name) for name in (TINY_TRAIN, "val.npz"))
        return _read_archives(parts, "wnid", TINY_SIDE)
    classes = tuple(_tiny_file(folder / "wnids.txt").read_text().split())
    number = {name: code for code, name in enumerate(classes)}
    train = [
        (path, code)
        for name, code in number.items()
        for path in sorted(
            (folder / "train" / name / "images").glob("*.JPEG"),
            # This key sorts file number 2 before file number 10.
            key=lambda path: (len(path.name), path.name),
        )
    ]
    lines = _tiny_file(folder / "val" / "val_annotations.txt").read_text().splitlines()
    named = [line.split("\t")[:2] for line in lines]
    try:
        test = [(folder / "val" / "images" / file, number[name]) for file, name in named]
    except (KeyError, ValueError):
        raise DataError(
            "the validation pictures name unknown classes",
            where=str(folder / "val" / "val_annotations.txt"),
            want="a file and a class of wnids.txt in every line",
        ) from None
    return PictureSet(_tiny_files(train, folder), _tiny_files(test, folder), classes)


def _tiny_files(named: list[tuple[Path, int]], folder: Path) -> Part:
    labels = np.array([code for _, code in named], dtype=np.int64)
    return jpeg_part(labels, lambda row: _tiny_file(named[row][0]).read_bytes(), TINY_SIDE, folder)


def _tiny_file(path: Path) -> Path:
    return existing_file(path, first=f"unpack {TINY_URL} and ", folder=TINY_FOLDER)


def _read_archives(parts: Iterable[Path], names: str, side: int) -> PictureSet:
    paths = tuple(parts)
    (train, classes), (test, others) = (read_jpeg_archive(path, names, side) for path in paths)
    if classes != others:
        raise DataError(
            "training and validation pictures have different classes", where=str(paths[0].parent)
        )
    return PictureSet(train, test, classes)


def jpeg_part(labels: np.ndarray, raw: Callable[[int], bytes], side: int, where: Path) -> Part:
    """Make a part that decodes pictures when they are read, in an order that alternates classes.

    Args:
        labels: class codes, axes (rows,), in the order of the files.
        raw: function that returns the bytes of a JPEG, by its position in that order.
        side: height and width that every picture must have.
        where: file or folder of the pictures, for messages.
    """
    order = interleaved(labels)

    def take(rows: np.ndarray) -> np.ndarray:
        pictures = np.empty((len(rows), 3, side, side), dtype=np.uint8)
        for row, position in enumerate(order[rows].tolist()):
            pictures[row] = decode_jpeg(raw(position), side, where)
        return pictures

    return Part(labels[order].astype(np.int64), take)


def decode_jpeg(raw: bytes, side: int, where: Path) -> np.ndarray:
    """Decode a picture to uint8, axes (3, side, side); a grey one gets three equal channels.

    Raises:
        DataError: the bytes are not a JPEG, are damaged, or hold a picture of another size.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(raw), formats=("JPEG",)) as picture:
            if picture.size == (side, side):  # the header gives the size before decoding
                return np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
            got = "another size"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        got = type(error).__name__
    raise DataError(
        "a picture cannot be read", where=str(where), got=got, want=f"a JPEG of {side} x {side}"
    )


def read_jpeg_archive(path: Path, names: str, side: int) -> tuple[Part, tuple[str, ...]]:
    """Read JPEGs from an npz with the arrays ``jpeg`` (bytes), ``offset`` (rows + 1) and ``label``.

    Args:
        path: path of the file.
        names: name of the array with the class names.
        side: height and width that every picture must have.

    Returns:
        The pictures and labels, in an order that alternates classes; and the names of the classes.

    Raises:
        DataError: the file has another format, is truncated, or is larger than 1 GiB.
    """
    try:
        with zipfile.ZipFile(path) as members:
            if sum(member.file_size for member in members.infolist()) > LIMIT_BYTES:
                raise ValueError("too large")
        with np.load(path, allow_pickle=False) as found:
            blob, offset, labels = (found[key] for key in ("jpeg", "offset", "label"))
            classes = tuple(map(str, found[names]))
        fits = (
            blob.dtype == np.uint8
            and offset.dtype.kind == labels.dtype.kind.replace("u", "i") == "i"
            and (blob.ndim, offset.ndim, labels.ndim) == (1, 1, 1)
            and len(offset) == len(labels) + 1
            and offset[0] == 0
            and offset[-1] == len(blob)
            and (np.diff(offset) > 0).all()
        )
        if not fits:
            raise ValueError("offsets do not split the bytes into one JPEG for each label")
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ):
        raise DataError(
            "this is not a complete npz file of JPEG pictures",
            where=str(path),
            want=f"the arrays jpeg, offset, label and {names}, at most 1 GiB",
        ) from None
    part = jpeg_part(labels, lambda row: blob[offset[row] : offset[row + 1]].tobytes(), side, path)
    return part, classes
