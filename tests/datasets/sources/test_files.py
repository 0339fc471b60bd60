from __future__ import annotations

import io
import tarfile
from hashlib import sha256

import pytest

from vfl.core.errors import DataError, MissingDataError
from vfl.datasets.sources import files
from vfl.datasets.sources.files import Archive, fetch


def published(path, members, folder="set"):
    """A tar.gz with some files, and what is known of it."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return Archive(path.as_uri(), sha256(path.read_bytes()).hexdigest(), folder)


def test_a_folder_comes_whole_and_alone(tmp_path):
    archive = published(tmp_path / "a.tar.gz", {"set/a.bin": b"abc", "stray": b"x"})
    fetch(archive, tmp_path / "base")
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["set"]
    assert (tmp_path / "base" / "set" / "a.bin").read_bytes() == b"abc"


def test_another_file_than_the_published_one_is_not_opened(tmp_path, monkeypatch):
    archive = published(tmp_path / "a.tar.gz", {"set/a.bin": b"abc"})
    published(tmp_path / "a.tar.gz", {"set/a.bin": b"abd"})
    monkeypatch.setattr(tarfile, "open", lambda *given: pytest.fail("opened"))
    with pytest.raises(DataError, match="not the published archive"):
        fetch(archive, tmp_path / "base")
    assert list((tmp_path / "base").iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "set/../../evil"])
def test_a_file_outside_the_folder_is_refused(tmp_path, name):
    archive = published(tmp_path / "a.tar.gz", {"set/a.bin": b"abc", name: b"evil"})
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(archive, tmp_path / "base")
    assert list((tmp_path / "base").iterdir()) == []
    assert list(tmp_path.rglob("evil")) == []


def test_a_path_from_the_root_stays_in_the_folder(tmp_path):
    outside = tmp_path / "evil"
    fetch(published(tmp_path / "a.tar.gz", {"set/a": b"", str(outside): b"x"}), tmp_path / "base")
    assert not outside.exists()


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("set")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(entry)
    known = Archive(path.as_uri(), sha256(path.read_bytes()).hexdigest(), "set")
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(known, tmp_path / "base")


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_what_is_no_archive_is_refused(tmp_path, content):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(Archive(path.as_uri(), sha256(content).hexdigest(), "set"), tmp_path / "base")


def test_a_download_that_fails_or_never_ends(tmp_path, monkeypatch):
    missing = Archive((tmp_path / "nowhere").as_uri(), "0" * 64, "set")
    with pytest.raises(MissingDataError, match="cannot be fetched"):
        fetch(missing, tmp_path / "base")

    class Endless(io.RawIOBase):
        def read(self, size=-1):
            return bytes(size)

    monkeypatch.setattr(files, "LIMIT_BYTES", 3 * files.CHUNK_BYTES)
    monkeypatch.setattr(files.urllib.request, "urlopen", lambda url, timeout: Endless())
    with pytest.raises(DataError, match="not the published archive"):
        fetch(missing, tmp_path / "base")
    assert list((tmp_path / "base").iterdir()) == []
