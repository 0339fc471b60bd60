import hashlib
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from vfl.core import storage
from vfl.core.errors import RunFolderError, StorageError
from vfl.core.storage import (
    FORMAT,
    Seal,
    append_line,
    check_format,
    joint_digest,
    load_weights,
    read_json,
    read_lines,
    save_weights,
    weights_digest,
    write_bytes,
    write_text,
)
from vfl.core.version import VERSION

SEAL = Seal("weights", "bank", "loans")


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "deep" / "file"
    write_bytes(path, b"old")
    write_bytes(path, b"new", mode=0o640)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(path.parent) == ["file"]


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def crash(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_told():
    with pytest.raises(StorageError, match="cannot be written") as caught:
        append_line(Path("/dev/full"), {"epoch": 1})
    assert caught.value.got == "No space left on device"
    assert caught.value.where == "/dev/full"


def test_a_folder_that_takes_no_files_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as caught:
        write_bytes(tmp_path / "file" / "deep" / "below", b"x")
    assert caught.value.got == "Not a directory"


def test_the_content_is_durable_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            storage.os, name, lambda *args, n=name, r=real: (calls.append(n), r(*args))
        )
    write_text(tmp_path / "file", "größe")
    assert calls == ["fsync", "replace"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "größe"
    with storage.not_durable():
        write_bytes(tmp_path / "file", b"new")
    assert calls[2:] == ["replace"]


def test_json_that_is_missing_or_damaged(tmp_path):
    path = tmp_path / "record.json"
    with pytest.raises(RunFolderError, match="missing"):
        read_json(path)
    path.write_text('{"a": 1,\n "b"')
    with pytest.raises(RunFolderError, match="not JSON") as caught:
        read_json(path)
    assert caught.value.where == f"{path}:2"


def test_lines_are_appended_and_a_torn_one_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for epoch in (1, 2):
        append_line(path, {"epoch": epoch, "note": "line\u2028break"})
    with path.open("a") as file:
        file.write('{"epoch": 3')
    assert [record["epoch"] for record in read_lines(path)] == [1, 2]


def test_a_damaged_line_is_never_left_out_in_silence(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\x0b{"epoch": 2}\n')  # one flipped bit makes \v of \n
    with pytest.raises(RunFolderError):
        list(read_lines(path))


@pytest.mark.parametrize(
    ("record", "got", "cure"),
    [
        ({"format": 7, "vfl": "9.1.0"}, "format 7, by vfl 9.1.0", "pip install vfl==9.1.0"),
        ({"format": 0}, "format 0, by vfl of a version it does not name", "train again"),
        ({"vfl": "0.0.1"}, "no format number, by vfl 0.0.1", "pip install vfl==0.0.1"),
        ({"format": "1"}, "no format number, by vfl of a version", "train again"),
        ({"format": 7, "vfl": "1; rm -rf"}, "format 7, by vfl of a version", "train again"),
        ({}, "no format number", "train again"),
    ],
)
def test_another_format_is_refused_and_its_writer_named(tmp_path, record, got, cure):
    with pytest.raises(RunFolderError, match="another format") as caught:
        check_format(record, tmp_path)
    assert caught.value.got.startswith(got)
    assert caught.value.want == f"format {FORMAT}, as vfl {VERSION} writes it"
    assert cure in caught.value.fix


def test_shared_and_strided_weights_are_kept(tmp_path):
    path = tmp_path / "weights.safetensors"
    shared = torch.arange(6.0).reshape(2, 3)
    state = {"in": shared, "out": shared, "turned": shared.T, "part": shared[:, 1]}
    save_weights(path, state, SEAL)
    loaded = load_weights(path, SEAL)
    assert all(torch.equal(state[name], value) for name, value in loaded.items())
    assert weights_digest(loaded) == weights_digest(state)
    plain = load_file(path)  # as any other program reads them
    assert all(torch.equal(state[name], value) for name, value in plain.items())


def test_weights_that_are_missing_or_damaged(tmp_path):
    path = tmp_path / "weights.safetensors"
    with pytest.raises(RunFolderError, match="is missing"):
        load_weights(path, SEAL)
    save_weights(path, {"weight": torch.zeros(8)}, SEAL)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunFolderError, match="not as it was written"):
        load_weights(path, SEAL)


def test_weights_of_another_program_are_refused(tmp_path):
    """Their metadata has a digest of the same form, but no format number."""
    packed = save({"a": torch.zeros(2)}, {"sha256": "0" * 64})
    digest = hashlib.sha256(packed).hexdigest().encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(packed.replace(b"0" * 64, digest))
    with pytest.raises(RunFolderError, match="another format") as caught:
        load_weights(path, Seal("weights", None, None))
    assert caught.value.got.startswith("no format number")


def test_the_digest_is_over_names_types_shapes_and_bytes():
    state = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor(3)}
    digest = hashlib.sha256()
    digest.update(b"a|torch.int64|()|" + (3).to_bytes(8, "little"))
    digest.update(b"b|torch.float32|(1, 2)|" + bytes.fromhex("0000803f00000040"))
    assert weights_digest(state) == digest.hexdigest()


def test_the_digest_tells_small_changes_apart():
    zeros = torch.zeros(2, 3)
    variants = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.T},
        {"a": zeros.double()},
        {"a": zeros, "c": torch.zeros(0)},
        {"a": -zeros},
    ]
    assert len({weights_digest(state) for state in variants}) == len(variants)


def test_the_joint_digest_does_not_depend_on_who_reports_first():
    text = "bank:aa\nlender:cc\nshop:bb\n"
    expected = hashlib.sha256(text.encode()).hexdigest()
    reports = [("shop", "bb"), ("lender", "cc"), ("bank", "aa")]
    assert joint_digest(reports) == joint_digest(sorted(reports)) == expected
