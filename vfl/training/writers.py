"""Export of a run's metrics to TensorBoard and MLflow.

Both writers write only to disks of this machine. The writers write settings, metrics of epochs and
bytes of parties; the run's folder already contains all of these. They write no data of single rows.
"""

from __future__ import annotations

import importlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vfl.config.run_folder import RunFolder
from vfl.core.errors import MissingPackageError
from vfl.core.registry import Registry
from vfl.core.storage import private_folder, read_lines, worker_of

_NO_FIGURES = ("epoch", "steps")
_PARAMETER, _MOST_RUNS = 500, 10_000  # most characters of a setting; most runs to search


class RunWriter(ABC):
    """Writes a run into another tool's store; each call replaces earlier output of the run."""

    @abstractmethod
    def check(self) -> None:
        """Raise an error if the tool is not installed, before anything is written.

        Raises:
            MissingPackageError: the tool is not installed.
        """

    @abstractmethod
    def write(self, folder: RunFolder) -> Path:
        """Write the current results of a run; return the written folder or file.

        Raises:
            MissingPackageError: the tool is not installed.
            RunFolderError: the record of the run cannot be read.
        """


class TensorBoard(RunWriter):
    """Event files in RUN/tensorboard, for `tensorboard --logdir RUN/..`."""

    def check(self) -> None:
        _imported("torch.utils.tensorboard", "tensorboard")

    def write(self, folder: RunFolder) -> Path:
        writers = _imported("torch.utils.tensorboard", "tensorboard")
        path = folder.path / "tensorboard"
        private_folder(path)
        for earlier in path.glob("events.out.tfevents.*"):
            earlier.unlink()
        with writers.SummaryWriter(str(path)) as writer:
            writer.add_text("settings", f"```\n{folder.config()}\n```")
            for step, figures in _points(folder):
                for name, value in figures.items():
                    writer.add_scalar(name, value, step)
        for made in path.iterdir():
            made.chmod(0o600)
        return path


class MLflow(RunWriter):
    """Writes a run to an SQLite store, by default `mlflow.db` next to the run folders.

    Since 3.13, MLflow refuses by default to open its file store. MLflow's telemetry is switched off
    before the import.

    Args:
        store: path of the store's file.
    """

    def __init__(self, store: str = "") -> None:
        self._store = store

    def check(self) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"
        for module in ("mlflow.tracking", "sqlalchemy", "alembic"):
            _imported(module, "mlflow")

    def write(self, folder: RunFolder) -> Path:
        self.check()
        tracking = _imported("mlflow.tracking", "mlflow")
        entities = _imported("mlflow.entities", "mlflow")
        path = Path(self._store or folder.path.parent / "mlflow.db").absolute()
        private_folder(path.parent)
        path.touch(mode=0o600)
        client = tracking.MlflowClient(tracking_uri=f"sqlite:///{path}")
        about, name = folder.about(), folder.path.name
        found = client.get_experiment_by_name(str(about["name"]))
        artifacts = (path.parent / "mlflow-artifacts").as_uri()
        experiment = (
            found.experiment_id
            if found
            else client.create_experiment(str(about["name"]), artifact_location=artifacts)
        )
        for earlier in client.search_runs([experiment], max_results=_MOST_RUNS):
            if earlier.data.tags.get("vfl.run") == name:
                client.delete_run(earlier.info.run_id)
        run = client.create_run(experiment, run_name=name, tags={"vfl.run": name}).info.run_id
        now = int(time.time() * 1000)
        settings = _flat(folder.experiment().model_dump(mode="json", exclude_none=True))
        parameters = [entities.Param(key, str(text)[:_PARAMETER]) for key, text in settings]
        for start in range(0, len(parameters), 100):  # entries that MLflow accepts per call
            client.log_batch(run, params=parameters[start : start + 100])
        for step, figures in _points(folder):
            metrics = [entities.Metric(key, value, now, step) for key, value in figures.items()]
            client.log_batch(run, metrics=metrics)
        if (folder.path / "summary.json").exists():
            client.set_terminated(run, status="FINISHED")
        elif worker_of(folder.path) is None:
            client.set_terminated(run, status="FAILED")
        return path


WRITERS: Registry[RunWriter] = Registry(
    "run writer",
    RunWriter,  # type: ignore[type-abstract]
    {"tensorboard": f"{__name__}:TensorBoard", "mlflow": f"{__name__}:MLflow"},
    "vfl.run_writers",
)


def write_run(folder: RunFolder, spec: str) -> Path:
    """Write a run with a writer such as ``tensorboard`` or ``mlflow:store=/data/mlflow.db``.

    Raises:
        SpecError: no writer has this name.
        MissingPackageError, RunFolderError: see `RunWriter.write`.
    """
    return WRITERS.make(spec).write(folder)


def _points(folder: RunFolder) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield metrics by step: metrics of each epoch; at the end also bytes per party, and speed."""
    last = 0
    for record in read_lines(folder.path / "metrics.jsonl"):
        last = int(record["epoch"])
        yield last, _numbers({key: record[key] for key in record if key not in _NO_FIGURES})
    if (folder.path / "summary.json").exists():
        summary = folder.summary()
        sent = {
            f"{direction}/{party}": count
            for direction in ("bytes_up", "bytes_down")
            for party, count in summary[direction].items()
        }
        more = ("steps_per_second", "wire_ratio", "best_epoch")
        yield last, _numbers(sent | {key: summary.get(key) for key in more})


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in record.items() if isinstance(value, int | float)}


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPackageError(
            f"{package} is not installed here", want=package, fix=f"pip install 'vfl[{package}]'"
        ) from None
