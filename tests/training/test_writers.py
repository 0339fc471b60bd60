"""Runs written for TensorBoard and MLflow, read back with their own readers; no network, no id."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import MissingPackageError, UnknownNameError
from vfl.core.ledger import Ledger
from vfl.training import writers
from vfl.training.writers import WRITERS, RunWriter, write_run

PLANTED = "cell-5e1f"
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
#: Writes a run in a process whose every attempt to reach a network ends it.
ALONE = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        print("NETWORK", event, file=sys.stderr, flush=True)
        import os
        os._exit(9)
from pathlib import Path
from vfl.config.run_folder import RunFolder
from vfl.training.writers import write_run
sys.addaudithook(refuse)
for spec in sys.argv[2:]:
    print(write_run(RunFolder.open(Path(sys.argv[1])), spec))
import time
time.sleep(1.0)
"""


@pytest.fixture
def run(tmp_path):
    experiment = Experiment.model_validate({"name": "trial", "parties": {"bank": {"width": 3}}})
    folder = RunFolder.create(tmp_path / "runs" / "one", experiment, "in-process", "vfl train x")
    party = folder.party("bank")
    party.mkdir(parents=True)
    (party / "encoder.json").write_text(PLANTED)
    for record in EPOCHS:
        folder.epoch(record)
    folder.finish(SUMMARY, Ledger())
    return folder


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"vfl[{package}] is not here")


@pytest.fixture
def written(run, tmp_path, monkeypatch):
    """Writes the run in a process of its own, twice; what its home holds afterwards is nothing."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(home))

    def write(spec):
        done = subprocess.run(
            [sys.executable, "-c", ALONE, str(run.path), spec, spec],
            capture_output=True,
            text=True,
            check=False,
            cwd=home,
        )
        assert done.returncode == 0, done.stderr
        assert "NETWORK" not in done.stderr
        assert [str(path) for path in home.rglob("*") if path.is_file()] == []
        return done.stdout.split()[-1]

    return write


def said_by(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(sys.argv[1]); read.Reload()
tags = read.Tags()["scalars"]
print(json.dumps({tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in tags}))
"""


@needs("tensorboard")
def test_tensorboard_reads_what_was_written(run, written):
    path = written("tensorboard")
    found = said_by(TENSORBOARD, path)
    assert found["train_loss"] == [
        [n, pytest.approx(1 / n)] for n in (1, 2, 3)
    ]  # once, though it was written twice
    assert found["bytes_up/bank"] == [[3, 21.0]]
    assert found["steps_per_second"] == [[3, 12.5]]
    files = list((run.path / "tensorboard").iterdir())
    assert len(files) == 1
    assert files[0].stat().st_mode & 0o777 == 0o600
    assert PLANTED.encode() not in files[0].read_bytes()


MLFLOW = """
import json, os, sys
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri="sqlite:///" + sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
points = client.get_metric_history(run.info.run_id, "train_loss")
print(json.dumps({"losses": sorted((one.step, one.value) for one in points),
    "metrics": run.data.metrics, "params": run.data.params, "status": run.info.status}))
"""


@needs("mlflow")
def test_mlflow_reads_what_was_written(run, written):
    path = written("mlflow")
    assert path == str(run.path.parent / "mlflow.db")
    found = said_by(MLFLOW, path)
    assert found["losses"] == [[n, pytest.approx(1 / n)] for n in (1, 2, 3)]
    assert found["metrics"]["bytes_up/bank"] == 21.0
    assert found["params"]["parties.bank.width"] == "3"
    assert found["status"] == "FINISHED"
    store = run.path.parent / "mlflow.db"
    assert store.stat().st_mode & 0o777 == 0o600
    assert PLANTED.encode() not in store.read_bytes()


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


def test_an_unknown_writer_is_refused_with_the_known_ones():
    with pytest.raises(UnknownNameError) as caught:
        WRITERS.make("tensorbord")
    assert "mlflow, tensorboard" in caught.value.want


def test_a_writer_from_outside_gets_the_run(run):
    class Outside(RunWriter):
        def check(self):
            pass

        def write(self, folder):
            assert folder.experiment().name == "trial"
            return folder.path

    WRITERS.register("outside", Outside)
    try:
        assert write_run(run, "outside") == run.path
    finally:
        del WRITERS._members["outside"]
