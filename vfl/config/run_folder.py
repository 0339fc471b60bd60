"""The run folder: what one training leaves behind, versioned, readable while it is written.

    file              form                    content
    run.json          sealed JSON             name, time, version, mode (`in-process`,
                                              `federated` or `module`), command, `config_sha256`
    config.toml       TOML                    the experiment with every default;
                                              `config_sha256` is its SHA-256
    environment.json  JSON                    versions and processor
    metrics.jsonl     one JSON object a line  an epoch: `epoch`, `seconds`, `bytes_up`,
                                              `bytes_down`, figures
    progress.json     JSON                    how far the session is, once a second
    notes.txt         text                    who came and went, in a federation
    traffic.csv       CSV with a head         the ledger: `party`, `direction`, `phase`, `frames`,
                                              `payload_bytes`, `wire_bytes`, `seconds`
    summary.json      sealed JSON             the figures of a run that ended well
    scored.json       sealed JSON             validation and test rows in counts: of two classes
                                              by probability, in at most 1000 groups; of up to 50
                                              by class and guess; of a regression residuals in ten
                                              bands. Test rows before a calibration, too
    label_alone.json  sealed JSON             what the label party's own columns reach
    failure.json      JSON                    `code`, `what`, `where`, `got`, `want`, `fix` of a
                                              run that did not
    evaluations/      sealed JSON a file      figures of each `vfl evaluate`, from 0001.json on
    predictions.csv   CSV with a head         `id`, `prediction`, `probability_CLASS` for each
                                              class; `uncalibrated_CLASS` before a calibration;
                                              `trained` (yes, validation, no, unknown) where
                                              rows of the training are among them
    parties/NAME/     folder                  a party's own model, checkpoints and trace; in a
                                              federation the label party's alone
    report.html       HTML                    a page of all this
    .lock             text                    number of the process that works in the folder;
                                              in `serving` of the one that serves the run

Each may be read while it is written.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vfl.config import Experiment, read_experiment, to_toml
from vfl.core.errors import RunFolderError, StorageError, VFLError
from vfl.core.storage import (
    Seal,
    append_line,
    append_text,
    damaged,
    is_empty,
    private_folder,
    read_bytes,
    read_lines,
    read_sealed_json,
    write_json,
    write_pieces,
    write_sealed_json,
    write_text,
)
from vfl.core.text import printable
from vfl.core.traffic import Ledger
from vfl.core.version import VERSION

PROGRESS = "progress.json"
_HEAD, _CONFIG, _SUMMARY = "run.json", "config.toml", "summary.json"
_AUDIT, _EVALUATIONS, _SCORED = "audit.json", "evaluations", "scored.json"
_LABEL_ALONE = "label_alone.json"
_SERVING = "serving"
#: Where an earlier vfl kept the figures of the last evaluation alone.
_LAST_EVALUATION = "evaluation.json"
#: What a seal adds to the figures of a run. They name their run themselves.
_OF_SEAL = ("format", "vfl", "kind", "party", "step", "sha256", "run_sha256")
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
        config = to_toml(experiment)
        write_text(path / _CONFIG, config)
        about = {
            "name": experiment.name,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "mode": mode,
            "command": command,
            "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        }
        write_sealed_json(path / _HEAD, about, Seal("run", experiment.label.party, path.name))
        write_json(path / "environment.json", environment())
        write_text(path / "metrics.jsonl", "")
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder, its record and configuration checked.

        Raises:
            RunFolderError: no run there, one of another format, or one whose record or
                configuration is not as it was written.
        """
        if not (path / _HEAD).exists():
            raise RunFolderError(
                "there is no run here",
                where=str(path),
                fix="give the folder that vfl train printed",
            )
        folder = cls(path)
        folder.config()
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of a training that did not end well, to go on with it.

        Raises:
            RunFolderError: no run there, one of another format, or one that has ended.
        """
        folder = cls.open(path)
        if (path / _SUMMARY).exists():
            raise RunFolderError("this run has ended; there is nothing to resume", where=str(path))
        (path / "failure.json").unlink(missing_ok=True)
        return folder

    @property
    def mode(self) -> str:
        """How it was trained: "in-process" or "federated", or by a caller's functions, "module"."""
        return str(self.about()["mode"])

    def require_experiment(self) -> None:
        """Refuse a run whose models and rows its experiment does not describe.

        Raises:
            RunFolderError: functions of a caller made them.
        """
        if self.mode == "module":
            raise RunFolderError(
                "functions of a caller made the models and rows of this run",
                where=str(self.path),
                want="a run of an experiment file",
                fix="call vfl.grid or vfl.compare with these functions on the grid's folder again",
            )

    def about(self) -> dict[str, Any]:
        """The run's own record.

        Raises:
            RunFolderError: it is missing, not as it was written, or of another format.
        """
        return read_sealed_json(self.path / _HEAD, Seal("run", None, None))

    def config(self) -> str:
        """The text of the experiment the run was made with.

        Raises:
            RunFolderError: it is missing, or not the text that was written.
        """
        content = read_bytes(self.path / _CONFIG)
        if hashlib.sha256(content).hexdigest() != self.about().get("config_sha256"):
            raise damaged(self.path / _CONFIG)
        return content.decode()

    def summary(self) -> dict[str, Any]:
        """The figures of a run that ended well.

        Raises:
            RunFolderError: it has not, or its record is not as it was written or another run's.
        """
        return self._figures(_SUMMARY)

    def evaluations(self) -> list[dict[str, Any]]:
        """The figures of every evaluation, the earliest first; see `summary`."""
        files = sorted((self.path / _EVALUATIONS).glob("*.json"))
        names = [f"{_EVALUATIONS}/{one.name}" for one in files]
        earlier = [_LAST_EVALUATION] if (self.path / _LAST_EVALUATION).exists() else []
        return [self._figures(name, "evaluation") for name in [*earlier, *names]]

    def evaluation(self) -> dict[str, Any]:
        """The figures of the last evaluation; see `summary`.

        Raises:
            RunFolderError: there was none, or its record is not as it was written.
        """
        if found := self.evaluations():
            return found[-1]
        raise RunFolderError(
            "this run has not been evaluated since it was trained",
            where=str(self.path),
            fix="vfl evaluate RUN",
        )

    def audit(self) -> dict[str, Any] | None:
        """What the last audit of its privacy proved; None where there was none. See `summary`."""
        return self._figures(_AUDIT) if (self.path / _AUDIT).exists() else None

    def audited(self, report: Mapping[str, Any]) -> None:
        """Keep what an audit proved."""
        self._write_figures(_AUDIT, report)

    def _figures(self, name: str, kind: str | None = None) -> dict[str, Any]:
        record = read_sealed_json(self.path / name, Seal(kind or Path(name).stem, None, None))
        if record.get("run_sha256") != self.about()["sha256"]:
            raise RunFolderError(
                "these figures belong to another run",
                where=str(self.path / name),
                fix="put the right file back from a copy, or train again",
            )
        return {key: value for key, value in record.items() if key not in _OF_SEAL}

    def _write_figures(
        self, name: str, figures: Mapping[str, Any], kind: str | None = None
    ) -> None:
        head = self.about()
        seal = Seal(kind or Path(name).stem, head["party"], str(self.path))
        write_sealed_json(self.path / name, {**figures, "run_sha256": head["sha256"]}, seal)

    def party(self, name: str) -> Path:
        """Where one party's own files lie."""
        return self.path / "parties" / name

    def experiment(self) -> Experiment:
        """The experiment the run was made with.

        Raises:
            RunFolderError: its text is missing, or not as it was written.
        """
        self.config()
        return read_experiment(self.path / _CONFIG)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Add the record of one epoch; after a resume it replaces that epoch and those after."""
        path = self.path / "metrics.jsonl"
        content = read_bytes(path)
        try:
            earlier = [one for one in read_lines(path) if one["epoch"] < record["epoch"]]
        except (KeyError, TypeError):
            raise RunFolderError("a line of this file is no record", where=str(path)) from None
        if content.count(b"\n") == len(earlier) and (not content or content.endswith(b"\n")):
            append_line(path, dict(record))
        else:
            records = [*earlier, dict(record)]
            write_text(path, "".join(json.dumps(one) + "\n" for one in records))

    def progress(self, record: Mapping[str, Any]) -> None:
        """How far a session is, for whoever looks; nothing waits for the disk or fails with it."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({**record, "at": now, "process": os.getpid()})
        with suppress(StorageError):
            write_pieces(self.path / PROGRESS, [text.encode()], durable=False)

    def note(self, line: str) -> None:
        """Add one line about what happened; whoever follows the run shows it."""
        append_text(self.path / "notes.txt", f"{printable(line)}\n")

    def label_alone(self) -> dict[str, Any]:
        """What the label party reaches alone; empty where that was not measured. See `summary`."""
        return self._figures(_LABEL_ALONE) if (self.path / _LABEL_ALONE).exists() else {}

    def keep_label_alone(self, figures: Mapping[str, float]) -> None:
        """Keep what the label party reaches alone."""
        self._write_figures(_LABEL_ALONE, figures)

    def scored(self) -> dict[str, Any]:
        """Rows in counts, part by part; empty where there is no record. See `summary`."""
        return self._figures(_SCORED) if (self.path / _SCORED).exists() else {}

    def finish(
        self, summary: Mapping[str, Any], ledger: Ledger, scored: Mapping[str, Any] | None = None
    ) -> None:
        """The run ended well.

        Args:
            summary: its figures.
            ledger: its traffic.
            scored: rows in counts, part by part.
        """
        if scored:
            self._write_figures(_SCORED, scored)
        write_text(self.path / "traffic.csv", ledger.to_csv())
        self._write_figures(_SUMMARY, summary)

    def check_weights(self, digest: str) -> None:
        """Refuse an answer of other weights than those the training ended with.

        Args:
            digest: joint one of all parties' weights, as `vfl.core.storage.joint_digest` gives it.

        Raises:
            RunFolderError: they are others.
        """
        trained = str(self.summary().get("weights_sha256"))
        if digest != trained:
            raise RunFolderError(
                "these are not the weights the training ended with",
                where=str(self.path / _SUMMARY),
                got=f"weights {digest[:8]}...",
                want=f"weights {trained[:8]}...",
                fix="put the weights of that training back at every party, or train again",
            )

    def evaluated(self, summary: Mapping[str, Any]) -> None:
        """Add the figures of a later evaluation; those before it stay."""
        path = next_evaluation(self.path)
        private_folder(path.parent)
        now = {"evaluated": datetime.now(UTC).isoformat(timespec="seconds")}
        self._write_figures(str(path.relative_to(self.path)), {**summary, **now}, "evaluation")

    def fail(self, error: VFLError) -> None:
        """The run ended badly; the reason can be read by whoever started it."""
        write_json(self.path / "failure.json", error.record() | {"exit": error.exit_code})


def locked_for(run: Path, mode: str) -> Path:
    """The folder whose lock a session on a run takes, or on a party's part of one.

    A run that is served may be evaluated and predicted with meanwhile.
    """
    return run / _SERVING if mode == "serve" else run


def next_evaluation(run: Path) -> Path:
    """Where the next evaluation of a run, or of a party's part of one, is kept."""
    folder = run / _EVALUATIONS
    numbers = [int(one.stem) for one in folder.glob("[0-9]*.json")]
    return folder / f"{max(numbers, default=0) + 1:04d}.json"


def new_run_name(label: str) -> str:
    """A name for a run started now: date, time to the millisecond, and the experiment's name."""
    now = datetime.now(UTC)
    return f"{now:%Y-%m-%d_%H%M%S}-{now.microsecond // 1000:03d}_{label}"


def _processor_model() -> str:
    """The name of the processor, where the system says it."""
    with suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                return printable(line.partition(":")[2].strip())
    return platform.processor()


def _accelerators() -> list[str]:
    """Names of the accelerators that PyTorch has been loaded with."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]


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
        "processor_model": _processor_model(),
        "accelerators": _accelerators(),
        "cores": os.cpu_count(),
        "byte_order": sys.byteorder,
    } | versions
