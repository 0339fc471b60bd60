"""Runs written for TensorBoard and MLflow, read back with their own readers; no network, no id."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import MissingPackageError
from vfl.core.traffic import Ledger
from vfl.testing import RunWriterContract
from vfl.training import writers
from vfl.training.writers import WRITERS

EPOCHS = [
    {"epoch": n, "steps": 3 * n, "train_loss": 1 / n, "bytes_up": 7 * n, "bytes_down": 3 * n}
    for n in (1, 2, 3)
]
SUMMARY = {
    "bytes_up": {"bank": 21},
    "bytes_down": {"bank": 9},
    "steps_per_second": 12.5,
    "codec": "none",
    "run": "one",
}


class TestWriters(RunWriterContract):
    specs = tuple(WRITERS.names())


@pytest.fixture
def run(tmp_path):
    experiment = Experiment.model_validate({"name": "trial", "parties": {"bank": {"width": 3}}})
    folder = RunFolder.create(tmp_path / "runs" / "one", experiment, "in-process", "vfl train x")
    for record in EPOCHS:
        folder.epoch(record)
    folder.finish(SUMMARY, Ledger())
    return folder


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"vfl[{package}] is not here")


def said_by(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WRITE = """
import json, sys
from pathlib import Path
from vfl.config.run_folder import RunFolder
from vfl.training.writers import write_run
first, path = (write_run(RunFolder.open(Path(sys.argv[1])), sys.argv[2]) for _ in range(2))
assert first == path
"""
TENSORBOARD = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(str(path)); read.Reload()
tags = read.Tags()["scalars"]
print(json.dumps({tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in tags}))
"""


@needs("tensorboard")
def test_tensorboard_reads_what_was_written(run):
    found = said_by(WRITE + TENSORBOARD, run.path, "tensorboard")
    assert found["train_loss"] == [
        [n, pytest.approx(1 / n)] for n in (1, 2, 3)
    ]  # once, though it was written twice
    assert found["bytes_up/bank"] == [[3, 21.0]]
    assert found["steps_per_second"] == [[3, 12.5]]
    assert len(list((run.path / "tensorboard").iterdir())) == 1


MLFLOW = """
assert path == Path(sys.argv[1]).parent / "mlflow.db"
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{path}")
(run,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
points = client.get_metric_history(run.info.run_id, "train_loss")
print(json.dumps({"losses": sorted((one.step, one.value) for one in points),
    "metrics": run.data.metrics, "params": run.data.params, "status": run.info.status}))
"""


@needs("mlflow")
def test_mlflow_reads_what_was_written(run):
    found = said_by(WRITE + MLFLOW, run.path, "mlflow")
    assert found["losses"] == [[n, pytest.approx(1 / n)] for n in (1, 2, 3)]
    assert found["metrics"]["bytes_up/bank"] == 21.0
    assert found["params"]["parties.bank.width"] == "3"
    assert found["status"] == "FINISHED"


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_tool_that_is_not_here_is_named_with_its_cure(run, monkeypatch, name):
    def absent(module):
        raise ImportError(module)

    writer = WRITERS.make(name)
    monkeypatch.setattr(writers.importlib, "import_module", absent)
    with pytest.raises(MissingPackageError, match=name) as caught:
        writer.check()
    assert caught.value.fix == f"pip install 'vfl[{name}]'"
    assert not (run.path.parent / "mlflow.db").exists()
