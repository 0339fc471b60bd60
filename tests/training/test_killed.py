"""10,000 steps in one process that is killed with -9 every 500: the weights of the undisturbed."""

import subprocess
import sys
import time

import pytest

from vfl.config import read_experiment
from vfl.core.storage import read_json, read_lines
from vfl.training.run import train

BETWEEN, STEPS = 500, 10_000
EXPERIMENT = """\
codec = "randtopk:k=3,alpha=0.2,values=8"

[data]
rows = 600

[parties.left]
width = 8
bottom = "mlp:hidden=16,dropout=0.3,batch_norm=true"

[parties.right]
width = 8

[train]
epochs = 190
batch_size = 8
checkpoint_every = 100
"""


def start(file, runs, *options):
    command = ["train", str(file), "--runs", str(runs), *options]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", "vfl", *command], **silent)


def wait_for_step(process, runs, step, timeout_s=120):
    """Block until the run in a folder has ended an epoch beyond a step; the run."""
    deadline = time.monotonic() + timeout_s
    while True:
        for metrics in runs.glob("*/metrics.jsonl"):
            if any(record["steps"] >= step for record in read_lines(metrics)):
                return metrics.parent
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_process_that_is_killed_every_500_steps(tmp_path):
    file, runs = tmp_path / "experiment.toml", tmp_path / "runs"
    file.write_text(EXPERIMENT)
    options, kills = (), 0
    for step in range(BETWEEN, STEPS, BETWEEN):
        process = start(file, runs, *options)
        run = wait_for_step(process, runs, step)
        process.kill()
        process.wait()
        options, kills = ("--resume", str(run)), kills + 1
    assert start(file, runs, *options).wait(180) == 0
    assert kills == STEPS // BETWEEN - 1
    whole = train(read_experiment(file), tmp_path, "whole")
    killed = read_json(run / "summary.json")
    assert whole["steps"] >= STEPS
    for figure in ("weights_sha256", "bytes_up", "bytes_down", "steps"):
        assert killed[figure] == whole[figure]
    losses = [
        [record["train_loss"] for record in read_lines(folder / "metrics.jsonl")]
        for folder in (run, tmp_path / "whole")
    ]
    assert losses[0] == losses[1]
