"""What the named sets have in common: a request, what comes of it, and where their files lie.

Archives are fetched from their authors' pages only when asked for, and checked before use.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd

from vfl.core.errors import BadOptionError, DataError, MissingDataError
from vfl.datasets.table import Classes

ENVIRONMENT = "VFL_DATA"
LIMIT_BYTES = 256 * 1024 * 1024  # of an archive that is fetched
CHUNK_BYTES = 2**20
TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class SetFormat:
    """What is made of a data set; None leaves it as it is, or takes the set's own default.

    Attributes:
        side: pictures of so many pixels in height and width.
        classes: only rows of the first so many classes of a picture set.
        length: words or items a row; longer rows are cut, shorter ones end in zeros.
        vocabulary: different numbers a word may have, padding and the unknown word included.
    """

    side: int | None = None
    classes: int | None = None
    length: int | None = None
    vocabulary: int | None = None

    def check(self, source: str, *known: str) -> None:
        """Refuse what a data set cannot do.

        Args:
            source: the data set.
            known: names of the attributes that it can follow.

        Raises:
            BadOptionError: another one is given.
        """
        given = [each.name for each in fields(self) if getattr(self, each.name) is not None]
        foreign = [name for name in given if name not in known]
        if foreign:
            options = ", ".join(f"data.{name}" for name in known)
            raise BadOptionError(
                f"data set '{source}' has no use for data.{foreign[0]}",
                where=f"data.{foreign[0]}",
                want=f"of these settings only {options}" if options else "none of these settings",
                fix=f"leave data.{foreign[0]} out",
            )


class Unnumbered(Protocol):
    """Rows that become numbers once it is known which of them are training rows."""

    def rows(self, train: np.ndarray) -> np.ndarray:
        """All rows, axes (rows, steps), by what the training rows hold."""


@dataclass(frozen=True, eq=False)
class Bundled:
    """One data set before it is cut into parties.

    Attributes:
        cells: pictures, axes (rows, channels, height, width); a table of number columns; rows of
            whole numbers, axes (rows, steps); or texts.
        labels: int64 codes, axes (rows,).
        classes: what the codes stand for.
        mean, scale: ``(pixel - mean) / scale`` standardises a picture, one of each a channel;
            unused for anything else.
        train_rows: rows before the set's own validation and test rows; None where it has none.
        validation_rows: rows between those of training and test; 0 where they are yet to be drawn.
    """

    cells: np.ndarray | pd.DataFrame | Unnumbered
    labels: np.ndarray
    classes: Classes
    mean: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)
    train_rows: int | None = None
    validation_rows: int = 0

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of a data set; see `read_bundled`."""

    source: str
    root: Path | None
    download: bool
    limit: int | None
    form: SetFormat
    seed: int


def in_proportion(counts: Sequence[int], limit: int | None) -> list[int]:
    """How many rows of each part a limit on all rows leaves.

    >>> in_proportion([60_000, 10_000], 700), in_proportion([3, 1], None)
    ([600, 100], [3, 1])
    """
    every = sum(counts)
    rows = min(limit or every, every)
    ends = [round(rows * end / max(every, 1)) for end in accumulate(counts, initial=0)]
    return [end - start for start, end in pairwise(ends)]


def first_rows(sizes: Sequence[int], limit: int | None) -> tuple[np.ndarray, list[int]]:
    """The first rows of every part, one part after another, and how many of each."""
    counts = in_proportion(sizes, limit)
    starts = np.cumsum([0, *sizes])[:-1]
    kept = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return np.concatenate(kept), counts


def interleaved(labels: np.ndarray) -> np.ndarray:
    """An order that takes one row of each class in turn, for files that keep classes together.

    >>> interleaved(np.array([0, 0, 0, 1, 1, 2])).tolist()
    [0, 3, 5, 1, 4, 2]
    """
    by_class = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[by_class] = np.arange(len(labels)) - np.repeat(starts, counts)
    order: np.ndarray = np.lexsort((labels, rank))
    return order


def data_folder(root: Path | None) -> Path:
    """The folder of data sets: `root`, else the environment's VFL_DATA, else ``~/.cache/vfl``."""
    return root or Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "vfl")


def existing_file(
    path: Path, want: str | None = None, first: str = "", folder: str | None = None
) -> Path:
    """A file of a data set, if it is there.

    Args:
        path: the file.
        want: what should be there, for the message.
        first: what else to do, ahead of naming the folder of data sets.
        folder: the set's folder, which that one holds; the file's own unless it is said.

    Raises:
        MissingDataError: it is not there.
    """
    if path.is_file():
        return path
    above = f"the folder above '{folder or path.parent.name}'"
    raise MissingDataError(
        f"the file '{path.name}' is not there",
        where=str(path.parent),
        want=want,
        fix=f"{first}set {ENVIRONMENT} to {above}",
    )


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar.gz on the network.

    Attributes:
        url: where its authors keep it.
        sha256: of the whole file.
        folder: the folder it unpacks to.
    """

    url: str
    sha256: str
    folder: str


def fetch(archive: Archive, base: Path) -> None:
    """Unpack an archive into its folder under `base`, whole or not at all.

    Raises:
        MissingDataError: it cannot be fetched.
        DataError: it is not the file its authors published, or cannot be unpacked.
    """
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base, prefix=".fetch-") as name:
        path = Path(name) / "archive.tar.gz"
        if _download(archive.url, path) != archive.sha256:
            raise DataError(
                "what was fetched is not the published archive",
                where=archive.url,
                want=f"sha256 {archive.sha256}",
                fix="fetch it again, and look what stands between you and its authors",
            )
        try:
            with tarfile.open(path, "r:gz") as found:
                found.extractall(name, filter="data")
            (Path(name) / archive.folder).rename(base / archive.folder)
        except (tarfile.TarError, OSError) as error:
            raise DataError(
                "the archive cannot be unpacked",
                where=str(base / archive.folder),
                got=type(error).__name__,
            ) from None


def _download(url: str, path: Path) -> str:
    """Write what stands behind a URL to a file; its sha256."""
    digest, left_bytes = hashlib.sha256(), LIMIT_BYTES
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, path.open("wb") as file:
            while left_bytes > 0 and (chunk := answer.read(CHUNK_BYTES)):
                left_bytes -= len(chunk)
                digest.update(chunk)
                file.write(chunk)
    except OSError as error:
        raise MissingDataError(
            "an archive cannot be fetched",
            where=url,
            got=type(error).__name__,
            fix=f"fetch it by hand and unpack it in {path.parent.parent}",
        ) from None
    return digest.hexdigest()
