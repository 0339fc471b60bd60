"""Tiny-ImageNet, 200 classes of 64 x 64 pixels, from its own folder or from JPEGs in npz.

Source: Le and Yang, "Tiny ImageNet Visual Recognition Challenge", 2015. Its validation pictures are
the test rows here, for the labels of its test pictures were never published.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vfl.datasets.jpeg import jpeg_part, read_jpeg_archive
from vfl.datasets.picture_set import ENVIRONMENT, Part, PictureSet, data_folder
from vfl.errors import DataError, MissingDataError

FOLDER = "tiny-imagenet-200"
SIDE = 64
URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TRAIN_ARCHIVE = "train_000_099.npz"  # the first 100 pictures of each class


def read_tiny_imagenet(root: Path | None = None) -> PictureSet:
    """The set as it is there; nothing is fetched, for no checksum of it was published.

    Args:
        root: folder that holds ``tiny-imagenet-200``, either with the published ``wnids.txt``,
            ``train/`` and ``val/``, or with ``train_000_099.npz`` and ``val.npz``, a fifth of the
            training pictures.

    Raises:
        MissingDataError: the files are not there.
        DataError: a file is of another format.
    """
    folder = data_folder(root) / FOLDER
    return _read_folder(folder) if (folder / "train").is_dir() else _read_archives(folder)


def _read_archives(folder: Path) -> PictureSet:
    train, test = (
        read_jpeg_archive(_there(folder / name), "wnid", SIDE)
        for name in (TRAIN_ARCHIVE, "val.npz")
    )
    if train.names != test.names:
        raise DataError("training and validation pictures have other classes", where=str(folder))
    return PictureSet(train.part, test.part, train.names)


def _read_folder(folder: Path) -> PictureSet:
    classes = tuple(_there(folder / "wnids.txt").read_text().split())
    number = {name: code for code, name in enumerate(classes)}
    train = [
        (path, code)
        for name, code in number.items()
        for path in sorted(
            (folder / "train" / name / "images").glob("*.JPEG"),
            key=lambda path: (len(path.name), path.name),  # 2 ahead of 10
        )
    ]
    lines = _there(folder / "val" / "val_annotations.txt").read_text().splitlines()
    named = [line.split("\t")[:2] for line in lines]
    try:
        test = [(folder / "val" / "images" / file, number[name]) for file, name in named]
    except (KeyError, ValueError):
        raise DataError(
            "the validation pictures name classes that are not there",
            where=str(folder / "val" / "val_annotations.txt"),
            want="a file and a class of wnids.txt in every line",
        ) from None
    return PictureSet(_files(train, folder), _files(test, folder), classes)


def _files(named: list[tuple[Path, int]], folder: Path) -> Part:
    labels = np.array([code for _, code in named], dtype=np.int64)
    return jpeg_part(labels, lambda row: _there(named[row][0]).read_bytes(), SIDE, folder)


def _there(path: Path) -> Path:
    if path.is_file():
        return path
    raise MissingDataError(
        f"the file '{path.name}' is not there",
        where=str(path.parent),
        fix=f"unpack {URL} and set {ENVIRONMENT} to the folder above '{FOLDER}'",
    )
