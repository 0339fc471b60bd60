"""Writers that break the contract, each found by its test."""

import importlib
import re

import pytest

from vfl.core.traffic import Ledger
from vfl.testing import RunWriterContract
from vfl.training.writers import WRITERS, write_run

SPOILERS = """
import socket
from pathlib import Path
from vfl.training.writers import WRITERS, RunWriter

class Honest(RunWriter):
    def check(self):
        pass

    def write(self, folder):
        made = folder.path / "told.txt"
        made.touch(mode=0o600)
        made.write_text(str(len(list(folder.path.glob("metrics.jsonl")))))
        return made

class Calling(Honest):
    def write(self, folder):
        socket.create_connection(("127.0.0.1", 9), timeout=1)

class Leaving(Honest):
    def write(self, folder):
        (Path.home() / "cache").touch(mode=0o600)
        return super().write(folder)

class Peeking(Honest):
    def write(self, folder):
        made = super().write(folder)
        made.write_bytes((folder.party("bank") / "encoder.json").read_bytes())
        return made

class Open(Honest):
    def write(self, folder):
        made = super().write(folder)
        made.chmod(0o644)
        return made

class Spoiling(Honest):
    def write(self, folder):
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write("{}")
        return super().write(folder)

class Late(Honest):
    def write(self, folder):
        folder.summary()
        return super().write(folder)

class Spread(Honest):
    count = 0
    def write(self, folder):
        Spread.count += 1
        made = super().write(folder)
        return made.rename(made.with_suffix(f".{Spread.count}"))

class Silent(Honest):
    def write(self, folder):
        return folder.path

for kind in (Honest, Calling, Leaving, Peeking, Open, Spoiling, Late, Spread, Silent):
    WRITERS.register(kind.__name__.lower(), kind)
"""
FOUND = {
    "calling": "reaches for a network",
    "leaving": "writes elsewhere",
    "peeking": "of a party's own folder",
    "open": "other users can read",
    "spoiling": "changes the run",
    "late": "summary",
    "spread": "two places",
    "silent": "writes nothing",
}


@pytest.fixture(scope="module")
def spoilers(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("outside")
        (folder / "spoilers.py").write_text(SPOILERS)
        patch.syspath_prepend(folder)
        before = dict(WRITERS._members)
        importlib.import_module("spoilers")
        yield
        WRITERS._members.clear()
        WRITERS._members.update(before)


#: What shows in files alone needs no process of its own.
BY_ITS_FILES = ("leaving", "peeking", "open", "spoiling", "silent")


class Spoiled(RunWriterContract):
    specs = ("honest", *FOUND)
    module, patience_s = "spoilers", 0.0

    def _write(self, folder, spec, home):
        if spec not in BY_ITS_FILES:
            return super()._write(folder, spec, home)
        write_run(folder, spec)
        folder.finish({"bytes_up": {"bank": 21}, "bytes_down": {"bank": 9}}, Ledger())
        return write_run(folder, spec)


@pytest.mark.parametrize("spec", Spoiled.specs)
def test_a_writer_that_breaks_the_contract_is_found(spoilers, spec, tmp_path, monkeypatch):
    def hold():
        Spoiled().test_export_is_private_and_leaves_the_run_unchanged(spec, tmp_path, monkeypatch)

    if spec == "honest":
        hold()
        return
    with pytest.raises(AssertionError, match=re.escape(FOUND[spec])):
        hold()
