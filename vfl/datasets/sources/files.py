"""Where the files of data sets lie, and archives that are fetched.

Archives are fetched from their authors' pages only when asked for, and checked before use.
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
LIMIT_BYTES = 256 * 1024 * 1024  # of an archive that is fetched
CHUNK_BYTES = 2**20
TIMEOUT_S = 60


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
