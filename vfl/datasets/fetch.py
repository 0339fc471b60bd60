"""Archives from their authors' pages: fetched only when asked for, checked before they are used."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from vfl.errors import DataError, MissingDataError

LIMIT_BYTES = 256 * 1024 * 1024
CHUNK_BYTES = 2**20
TIMEOUT_S = 60


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
