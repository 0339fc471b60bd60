"""The run folder: versioned results of one training, readable while it is being written.

    file              form                    content
    run.json          sealed JSON             name, time, version, mode (`in-process`,
                                              `federated` or `module`), command, `config_sha256`
    config.toml       TOML                    the experiment, defaults included;
                                              `config_sha256` is its SHA-256
    environment.json  JSON                    versions of packages, and the processor
    metrics.jsonl     one JSON object a line  for each epoch: `epoch`, `seconds`, metrics, and
                                              `bytes_up`, `bytes_down` since the training began
    progress.json     JSON                    progress of the session, once a second
    notes.txt         text                    joins and losses of parties in a federation
    traffic.csv       CSV with a header       the ledger: `party`, `direction`, `phase`, `frames`,
                                              `payload_bytes`, `wire_bytes`, `seconds`
    summary.json      sealed JSON             metrics of a run that succeeded
    scored.json       sealed JSON             counts of validation and test rows: for two classes
                                              by probability, in at most 1000 groups; for up to
                                              50 by class and predicted class; for a regression
                                              by residual, in ten bands. Test rows are also
                                              counted before a calibration
    label_alone.json  sealed JSON             metrics of the label party's columns alone
    failure.json      JSON                    `code`, `what`, `where`, `got`, `want`, `fix` of a
                                              run that failed; serving/failure.json is a service's
    evaluations/      sealed JSON a file      metrics of each `vfl evaluate`, from 0001.json on
    audit.json        sealed JSON             report of the last `vfl privacy audit`
    attacks.jsonl     one JSON object a line  scores of attacks; attacks.json lists the current ones
    predictions.csv   CSV with a header       `id`, `prediction`, `probability_CLASS` for each
                                              class; `uncalibrated_CLASS` before a calibration;
                                              `trained` (yes, validation, no, unknown) if some
                                              of the rows were used in the training
    parties/NAME/     folder                  a party's own model, checkpoints and trace; in a
                                              federation only those of the label party
    report.html       HTML                    a page with all these results
    .lock             text                    id of the last process that wrote in the folder;
                                              serving/.lock has the id of a serving process

Each file may be read while the program writes the run.
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
from functools import cache
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
#: File in which earlier versions of vfl stored the metrics of only the last evaluation.
_LAST_EVALUATION = "evaluation.json"
#: Entries that the seal of a file adds to a run's metrics. When the metrics are read, the current
#: path of the run replaces the stored name of the run.
_OF_SEAL = ("format", "vfl", "kind", "party", "step", "sha256", "run_sha256")
_PACKAGES = ("torch", "numpy", "flwr", "pandas", "scikit-learn", "cryptography")


class RunFolder:
    """The folder of one run.

    Args:
        path: path of an existing run folder; use `create` for a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, experiment: Experiment, mode: str, command: str) -> RunFolder:
        """Create the folder of a new run, and store the command, the experiment and versions.

        Raises:
            RunFolderError: the folder already contains a run.
        """
        if path.exists() and not is_empty(path):
            raise RunFolderError("a run of that name exists already", where=str(path))
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
        """Open an existing run folder, and check its record and its configuration.

        Raises:
            RunFolderError: the folder contains no run, the run has another format, or its record or
                configuration is damaged.
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
        """Open the folder of a failed or interrupted training in order to continue the training.

        Raises:
            RunFolderError: the folder contains no run, the run has another format, or the run has
                ended.
        """
        folder = cls.open(path)
        if (path / _SUMMARY).exists():
            raise RunFolderError("this run has ended; there is nothing to resume", where=str(path))
        failure_of(path, "train").unlink(missing_ok=True)
        return folder

    @property
    def mode(self) -> str:
        """Kind of the training: "in-process", "federated", or "module" for a caller's code."""
        return str(self.about()["mode"])

    def require_experiment(self) -> None:
        """Raise an error if the models and data of the run do not come from its experiment.

        Raises:
            RunFolderError: functions of a caller made the models or the data.
        """
        if self.mode == "module":
            raise RunFolderError(
                "a caller's functions made the models and the data of this run",
                where=str(self.path),
                want="a run of an experiment file",
                fix="call vfl.grid or vfl.compare with these functions on the grid's folder again",
            )

    def about(self) -> dict[str, Any]:
        """Return the record of the run: name, time, version, mode and command.

        Raises:
            RunFolderError: the record is missing or damaged, or has another format.
        """
        return read_sealed_json(self.path / _HEAD, Seal("run", None, None))

    def config(self) -> str:
        """Return the text of the run's experiment.

        Raises:
            RunFolderError: the text is missing, or has been changed.
        """
        content = read_bytes(self.path / _CONFIG)
        if hashlib.sha256(content).hexdigest() != self.about().get("config_sha256"):
            raise damaged(self.path / _CONFIG)
        return content.decode()

    def summary(self) -> dict[str, Any]:
        """Return the metrics of a run that ended well.

        Raises:
            RunFolderError: the run has not ended well, or its record is damaged or belongs to
                another run.
        """
        return self._figures(_SUMMARY)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the metrics of every evaluation, the earliest first; see `summary`."""
        files = sorted((self.path / _EVALUATIONS).glob("*.json"))
        names = [f"{_EVALUATIONS}/{one.name}" for one in files]
        earlier = [_LAST_EVALUATION] if (self.path / _LAST_EVALUATION).exists() else []
        return [self._figures(name, "evaluation") for name in [*earlier, *names]]

    def evaluation(self) -> dict[str, Any]:
        """Return the metrics of the last evaluation after the training; see `summary`.

        Raises:
            RunFolderError: the run was never evaluated after its training, or the record of an
                evaluation is damaged.
        """
        if found := self.evaluations():
            return found[-1]
        raise RunFolderError(
            "there was no evaluation of this run since its training",
            where=str(self.path),
            fix="vfl evaluate RUN",
        )

    def audit(self) -> dict[str, Any] | None:
        """Return the report of the last privacy audit, None without an audit; see `summary`."""
        return self._figures(_AUDIT) if (self.path / _AUDIT).exists() else None

    def audited(self, report: Mapping[str, Any]) -> None:
        """Store the report of a privacy audit."""
        self._write_figures(_AUDIT, report)

    def _figures(self, name: str, kind: str | None = None) -> dict[str, Any]:
        record = read_sealed_json(self.path / name, Seal(kind or Path(name).stem, None, None))
        if record.get("run_sha256") != self.about()["sha256"]:
            raise RunFolderError(
                "these metrics belong to another run",
                where=str(self.path / name),
                fix="restore the right file from a copy, or train again",
            )
        figures = {key: value for key, value in record.items() if key not in _OF_SEAL}
        # the recorded name may differ, because the folder may have been moved
        return figures | {"run": str(self.path)}

    def _write_figures(
        self, name: str, figures: Mapping[str, Any], kind: str | None = None
    ) -> None:
        head = self.about()
        seal = Seal(kind or Path(name).stem, head["party"], self.path.name)
        content = {**figures, "run": seal.run, "run_sha256": head["sha256"]}
        write_sealed_json(self.path / name, content, seal)

    def party(self, name: str) -> Path:
        """Return the folder of one party's own files."""
        return self.path / "parties" / name

    def experiment(self) -> Experiment:
        """Return the experiment of the run.

        Raises:
            RunFolderError: the text of the experiment is missing or damaged.
        """
        self.config()
        return read_experiment(self.path / _CONFIG)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Append an epoch's record; after a resumed training, replace records of later epochs."""
        path = self.path / "metrics.jsonl"
        content = read_bytes(path)
        try:
            earlier = [one for one in read_lines(path) if one["epoch"] < record["epoch"]]
        except (KeyError, TypeError):
            raise RunFolderError("a line of this file is not a record", where=str(path)) from None
        if content.count(b"\n") == len(earlier) and (not content or content.endswith(b"\n")):
            append_line(path, dict(record))
        else:
            records = [*earlier, dict(record)]
            write_text(path, "".join(json.dumps(one) + "\n" for one in records))

    def progress(self, record: Mapping[str, Any]) -> None:
        """Write the progress of a session; a slow or failing disk does not delay the session."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({**record, "at": now, "process": os.getpid()})
        with suppress(StorageError):
            write_pieces(self.path / PROGRESS, [text.encode()], durable=False)

    def note(self, line: str) -> None:
        """Append one line about an event, which commands that follow the run show."""
        append_text(self.path / "notes.txt", f"{printable(line)}\n")

    def label_alone(self) -> dict[str, Any]:
        """Return metrics of a model of the label party's columns; empty if unknown."""
        return self._figures(_LABEL_ALONE) if (self.path / _LABEL_ALONE).exists() else {}

    def keep_label_alone(self, figures: Mapping[str, float]) -> None:
        """Store the metrics of a model that has only the label party's columns."""
        self._write_figures(_LABEL_ALONE, figures)

    def scored(self) -> dict[str, Any]:
        """Return numbers of scored rows by split; empty if there is no record. See `summary`."""
        return self._figures(_SCORED) if (self.path / _SCORED).exists() else {}

    def finish(
        self, summary: Mapping[str, Any], ledger: Ledger, scored: Mapping[str, Any] | None = None
    ) -> None:
        """Store the results of a run that ended well.

        Args:
            summary: metrics of the run.
            ledger: ledger with the traffic of the run.
            scored: numbers of scored rows in each split.
        """
        if scored:
            self._write_figures(_SCORED, scored)
        write_text(self.path / "traffic.csv", ledger.to_csv())
        self._write_figures(_SUMMARY, summary)

    def check_weights(self, digest: str) -> None:
        """Raise an error if an evaluation uses weights other than the training's final weights.

        Args:
            digest: joint digest of all parties' weights, from `vfl.core.storage.joint_digest`.

        Raises:
            RunFolderError: the weights differ from the weights of the record.
        """
        trained = str(self.summary().get("weights_sha256"))
        if digest != trained:
            raise RunFolderError(
                "these are not the final weights of the training",
                where=str(self.path / _SUMMARY),
                got=f"weights {digest[:8]}...",
                want=f"weights {trained[:8]}...",
                fix="restore the weights of that training at every party, or train again",
            )

    def evaluated(self, summary: Mapping[str, Any]) -> None:
        """Append the metrics of one more evaluation; metrics of earlier evaluations are kept."""
        path = next_evaluation(self.path)
        private_folder(path.parent)
        now = {"evaluated": datetime.now(UTC).isoformat(timespec="seconds")}
        self._write_figures(str(path.relative_to(self.path)), {**summary, **now}, "evaluation")

    def fail(self, error: VFLError, mode: str = "train") -> None:
        """Store the error of a failed session, for the user who started the session."""
        write_json(failure_of(self.path, mode), error.record() | {"exit": error.exit_code})


def locked_for(run: Path, mode: str) -> Path:
    """Return the folder that a session must lock for a run, or for a party's part of a run.

    A run that is being served may be evaluated and used for predictions at the same time.
    """
    return run / _SERVING if mode == "serve" else run


def failure_of(run: Path, mode: str) -> Path:
    """Return the file for the error of a session; sessions that may run together have two files."""
    return locked_for(run, mode) / "failure.json"


def next_evaluation(run: Path) -> Path:
    """Return the path for the next evaluation of a run, or of a party's part of a run."""
    folder = run / _EVALUATIONS
    numbers = [int(one.stem) for one in folder.glob("[0-9]*.json")]
    return folder / f"{max(numbers, default=0) + 1:04d}.json"


def new_run_name(label: str) -> str:
    """Return a new run's name: date, time to the millisecond, and the experiment's name."""
    now = datetime.now(UTC)
    return f"{now:%Y-%m-%d_%H%M%S}-{now.microsecond // 1000:03d}_{label}"


def _processor_model() -> str:
    """Return the name of the processor, if the system reports it."""
    with suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                return printable(line.partition(":")[2].strip())
    return platform.processor()


def _accelerators() -> list[str]:
    """Return the names of the accelerators that PyTorch finds, if PyTorch is loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]


def environment() -> dict[str, Any]:
    """Return versions and the processor, which are needed to repeat a run."""
    return {
        "vfl": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "processor_model": _processor_model(),
        "accelerators": _accelerators(),
        "cores": os.cpu_count(),
        "byte_order": sys.byteorder,
        **{package: _version(package) for package in _PACKAGES},
    }


@cache  # a grid writes this record for thousands of short runs
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
