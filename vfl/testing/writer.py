"""Contract tests for a writer of runs, which stores a run in another tool's format.

class TestMine(RunWriterContract):
    specs = ["mine"]
    module = "mine.writer"
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import MissingPackageError
from vfl.testing.base import Contract
from vfl.training.writers import WRITERS

#: File content that belongs to one party of a run, and that no other party may read.
_PLANTED = b"cell-5e1f"
#: Files whose presence shows that a run has ended.
_ENDED = ("summary.json", "traffic.csv")
#: Program that exports a run in a separate process; any attempt to reach a network ends the
#: process.
_ALONE = """
import importlib, os, sys, time
from pathlib import Path
from vfl.config.run_folder import RunFolder
from vfl.core.traffic import Ledger
from vfl.training.writers import write_run
path, spec, module, patience_s = sys.argv[1:]
if module:
    importlib.import_module(module)
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        print("it reaches for a network:", event, file=sys.stderr, flush=True)
        os._exit(9)
sys.addaudithook(refuse)
folder, found = RunFolder.open(Path(path)), []
for _ in range(3):
    found.append(write_run(folder, spec))
    if len(found) == 1:
        folder.finish({"bytes_up": {"bank": 21}, "bytes_down": {"bank": 9}}, Ledger())
assert len(set(found)) == 1, "it writes the same run to two places"
print(found[0], flush=True)
time.sleep(float(patience_s))
"""


class RunWriterContract(Contract):
    """Properties of every writer of runs.

    Attributes:
        specs: the writers under test, at least one.
        module: module that the writing process imports first; it can register writers from other
            packages.
        patience_s: seconds during which the test watches for threads that still run after the
            writer has returned.
    """

    family = "run writer"
    module: ClassVar[str] = ""
    patience_s: ClassVar[float] = 1.0

    def test_export_is_private_and_leaves_the_run_unchanged(
        self, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Check exports of a run before and after its end, without single parties' files."""
        try:
            WRITERS.make(spec).check()
        except MissingPackageError as absent:
            pytest.skip(str(absent.what))
        home = tmp_path / "home"
        home.mkdir()
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
            monkeypatch.setenv(name, str(home))
        folder = _run(tmp_path / "runs" / "one")
        own = _files(tmp_path)
        written, after = self._write(folder, spec, home), _files(tmp_path)
        made = after.keys() - own.keys() - {folder.path / name for name in _ENDED}
        assert written.exists(), "the address that the writer names does not exist"
        assert own.items() <= after.items(), "it changes the run"
        assert made, "it writes nothing"
        assert not [path for path in made if home in path.parents], "it writes elsewhere"
        readable = [path for path in made if path.stat().st_mode & 0o077]
        assert not readable, "other users can read files that the writer wrote"
        leaking = [path for path in made if _PLANTED in path.read_bytes()]
        assert not leaking, "the writer discloses content of a party's own folder"

    def _write(self, folder: RunFolder, spec: str, home: Path) -> Path:
        done = subprocess.run(
            [sys.executable, "-c", _ALONE, folder.path, spec, self.module, str(self.patience_s)],
            capture_output=True,
            text=True,
            check=False,
            cwd=home,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.splitlines()[-1])


def _run(path: Path) -> RunFolder:
    experiment = Experiment.model_validate({"name": "trial", "parties": {"bank": {"width": 3}}})
    folder = RunFolder.create(path, experiment, "in-process", "vfl train x")
    folder.party("bank").mkdir(parents=True)
    (folder.party("bank") / "encoder.json").write_bytes(_PLANTED)
    folder.epoch({"epoch": 1, "steps": 3, "train_loss": 1.0})
    return folder


def _files(folder: Path) -> dict[Path, str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}
