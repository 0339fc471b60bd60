"""Files of data sets: their folder, and the download of archives.

Archives are fetched from their authors' pages only on request, and checked before use.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from vfl.core.errors import DataError, MissingDataError

ENVIRONMENT = "VFL_DATA"
LIMIT_BYTES = 256 * 1024 * 1024  # limit of a fetched archive
CHUNK_BYTES = 2**20
TIMEOUT_S = 60


def data_folder(root: Path | None) -> Path:
    """Return the folder of data sets: `root`, or VFL_DATA, or ``~/.cache/vfl``."""
    return root or Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "vfl")


def existing_file(
    path: Path, want: str | None = None, first: str = "", folder: str | None = None
) -> Path:
    """Path of a file of a data set, if it exists.

    Args:
        path: path of the file.
        want: expected file, for the message.
        first: another cure in the message, before the folder of data sets.
        folder: name of the set's folder in it; by default the file's own.

    Raises:
        MissingDataError: the file does not exist.
    """
    if path.is_file():
        return path
    above = f"the folder above '{folder or path.parent.name}'"
    raise MissingDataError(
        f"the file '{path.name}' does not exist",
        where=str(path.parent),
        want=want,
        fix=f"{first}set {ENVIRONMENT} to {above}",
    )


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar.gz archive on the network.

    Attributes:
        url: address at its authors.
        sha256: digest of the whole file.
        folder: folder that it unpacks to.
    """

    url: str
    sha256: str
    folder: str


def fetch(archive: Archive, base: Path) -> None:
    """Unpack an archive into its folder under `base`, completely or not at all.

    Raises:
        MissingDataError: the archive cannot be downloaded.
        DataError: the archive differs from the published file, or cannot be unpacked.
    """
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base, prefix=".fetch-") as name:
        path = Path(name) / "archive.tar.gz"
        if _download(archive.url, path) != archive.sha256:
            raise DataError(
                "the fetched file is not the published archive",
                where=archive.url,
                want=f"sha256 {archive.sha256}",
                fix="fetch it again, and check for a proxy between this machine and its authors",
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
    """Download a URL to a file; returns its SHA-256."""
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
