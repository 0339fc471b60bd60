"""The run folder: what one training leaves behind, versioned, readable while it is written.

run.json            format, name, time, version, mode, command
config.toml         the experiment with every default written out
environment.json    versions and processor
metrics.jsonl       one line an epoch
notes.txt           what happened meanwhile: who came, who went away, restarts (federation)
traffic.csv         the ledger
summary.json        the figures of the whole run; its presence means the run ended well
failure.json        why it did not
evaluation.json     figures of a later `vfl evaluate`
predictions.csv     what the last `vfl predict` gave
parties/NAME/       what belongs to one party (only the label party's in a federation)
report.html         built from the above
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vfl.config import Experiment, read_experiment, to_toml
from vfl.core.errors import RunFolderError, VFLError
from vfl.core.ledger import Ledger
from vfl.core.storage import (
    append_line,
    append_text,
    check_format,
    is_empty,
    private_folder,
    read_json,
    read_lines,
    stamp,
    write_json,
    write_text,
)
from vfl.core.text import printable
from vfl.core.version import VERSION

_PACKAGES = ("torch", "numpy", "flwr", "pandas", "scikit-learn", "cryptography")


class RunFolder:
    """One run's folder.

    Args:
        path: an existing run folder; use `create` for a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, experiment: Experiment, mode: str, command: str) -> RunFolder:
        """Start a folder: who, what, with which versions.

        Raises:
            RunFolderError: there is a run at that path already.
        """
        if path.exists() and not is_empty(path):
            raise RunFolderError("there is a run of that name already", where=str(path))
        private_folder(path)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        about = stamp() | {"name": experiment.name, "created": now}
        write_json(path / "run.json", about | {"mode": mode, "command": command})
        write_text(path / "config.toml", to_toml(experiment))
        write_json(path / "environment.json", environment())
        write_text(path / "metrics.jsonl", "")
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder, its format checked.

        Raises:
            RunFolderError: no run there, or one of another format.
        """
        if not (path / "run.json").exists():
            raise RunFolderError(
                "there is no run here",
                where=str(path),
                fix="give the folder that vfl train printed",
            )
        check_format(read_json(path / "run.json"), path)
        return cls(path)

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of a training that did not end well, to go on with it.

        Raises:
            RunFolderError: no run there, one of another format, or one that has ended.
        """
        folder = cls.open(path)
        if (path / "summary.json").exists():
            raise RunFolderError("this run has ended; there is nothing to resume", where=str(path))
        (path / "failure.json").unlink(missing_ok=True)
        return folder

    @property
    def mode(self) -> str:
        """How it was trained: "in-process" or "federated"."""
        return str(read_json(self.path / "run.json")["mode"])

    def party(self, name: str) -> Path:
        """Where one party's own files lie."""
        return self.path / "parties" / name

    def experiment(self) -> Experiment:
        """The experiment the run was made with."""
        return read_experiment(self.path / "config.toml")

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Add the record of one epoch; after a resume it replaces that epoch and those after."""
        path = self.path / "metrics.jsonl"
        text = path.read_text()
        earlier = [one for one in read_lines(path) if one["epoch"] < record["epoch"]]
        if text.count("\n") == len(earlier) and (not text or text.endswith("\n")):
            append_line(path, dict(record))
        else:
            records = [*earlier, dict(record)]
            write_text(path, "".join(json.dumps(one) + "\n" for one in records))

    def note(self, line: str) -> None:
        """Add one line about what happened; whoever follows the run shows it."""
        append_text(self.path / "notes.txt", f"{printable(line)}\n")

    def finish(self, summary: Mapping[str, Any], ledger: Ledger) -> None:
        """The run ended well."""
        write_text(self.path / "traffic.csv", ledger.to_csv())
        write_json(self.path / "summary.json", dict(summary))

    def check_weights(self, digest: str) -> None:
        """Refuse an answer of other weights than those the training ended with.

        Args:
            digest: joint one of all parties' weights, as `vfl.core.storage.joint_digest` gives it.

        Raises:
            RunFolderError: they are others.
        """
        path = self.path / "summary.json"
        trained = str(read_json(path).get("weights_sha256"))
        if digest != trained:
            raise RunFolderError(
                "these are not the weights the training ended with",
                where=str(path),
                got=f"weights {digest[:8]}...",
                want=f"weights {trained[:8]}...",
                fix="put the weights of that training back at every party, or train again",
            )

    def evaluated(self, summary: Mapping[str, Any]) -> None:
        """Add the figures of a later evaluation."""
        write_json(self.path / "evaluation.json", dict(summary))

    def fail(self, error: VFLError) -> None:
        """The run ended badly; the reason can be read by whoever started it."""
        write_json(self.path / "failure.json", error.record() | {"exit": error.exit_code})


def new_run_name(label: str) -> str:
    """A name for a run started now: date, time to the millisecond, and the experiment's name."""
    now = datetime.now(UTC)
    return f"{now:%Y-%m-%d_%H%M%S}-{now.microsecond // 1000:03d}_{label}"


def environment() -> dict[str, Any]:
    """Versions and processor, what somebody needs to repeat a run."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "vfl": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "byte_order": sys.byteorder,
    } | versions
