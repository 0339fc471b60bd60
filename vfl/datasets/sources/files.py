"""Files of data sets: the folder that contains them, and the download of archives.

An archive is downloaded from its authors' page only on request, and is checked before use.
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
LIMIT_BYTES = 256 * 1024 * 1024  # limit of the size of a downloaded archive
CHUNK_BYTES = 2**20
TIMEOUT_S = 60


def data_folder(root: Path | None) -> Path:
    """Return the folder of all data sets: `root`, or VFL_DATA, or ``~/.cache/vfl``."""
    return root or Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "vfl")


def existing_file(
    path: Path, want: str | None = None, first: str = "", folder: str | None = None
) -> Path:
    """Return the path of a data set's file, and raise an error if the file does not exist.

    Args:
        path: path of the file.
        want: description of the expected file, for the error.
        first: beginning of the error's advice, before the advice to set VFL_DATA.
        folder: folder that VFL_DATA must contain; by default, the folder of the file.

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
    """A tar.gz archive that the authors of a data set publish.

    Attributes:
        url: address of the archive.
        sha256: SHA-256 of the whole archive.
        folder: folder that the archive unpacks to.
    """

    url: str
    sha256: str
    folder: str


def fetch(archive: Archive, base: Path) -> None:
    """Download an archive and unpack it into its folder under `base`, completely or not at all.

    Raises:
        MissingDataError: the archive cannot be downloaded.
        DataError: the archive is not the published one, or cannot be unpacked.
    """
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base, prefix=".fetch-") as name:
        path = Path(name) / "archive.tar.gz"
        if _download(archive.url, path) != archive.sha256:
            raise DataError(
                "the fetched file is not the published archive",
                where=archive.url,
                want=f"sha256 {archive.sha256}",
                fix="fetch it again; a proxy may have changed the download",
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
    """Download a URL to a file; return the SHA-256 of the file."""
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
