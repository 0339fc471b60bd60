"""A grid of attacks whose processes are killed with -9 again and again: the undisturbed table."""

import csv
import subprocess
import sys
import time

import pytest

from vfl.experiments.scores import SCORES

pytestmark = pytest.mark.net
PATIENCE_S = 120
#: What tells one attack on one victim from all others.
JOB = ("cell", "subject", "k", "draw")
#: Adversaries whose state is in checkpoints, attacks on what is recorded, and further queries.
EVERYTHING = """\
name = "killed"
data = { rows = 500, validation = 0.2 }
train = { epochs = 6, checkpoint_every = 3 }
label.top = "linear"

[parties.client]
width = 8

[grid]
adversaries = ["hijacking", "noisy_labels", "replacement:target=3"]
attacks = ["logistic", "inversion:steps=30", "attribute", "membership"]
baselines = ["scratch", "raw"]
leaks = [1, 3]
draws = 2
seeds = [0]
pictures = 0
"""


def start(file, out, jobs):
    words = [sys.executable, "-m", "vfl", "grid", str(file), "--out", str(out), "--jobs", str(jobs)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(words, **silent)


def scored(out):
    return sum(len(path.read_text().splitlines()) for path in out.rglob(SCORES))


def table(out):
    with (out / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["evaluator"] in ("attack", "quality")]
    return [{key: row[key] for key in row if key != "seconds"} for row in rows]


def test_killed_again_and_again(tmp_path):
    step = 5  # of 28 scores in all
    file = tmp_path / "killed.toml"
    file.write_text(EVERYTHING)
    assert start(file, tmp_path / "whole", 1).wait(PATIENCE_S) == 0
    out, before = tmp_path / "killed", 0
    for jobs in (2, 1, 2, 1):
        process = start(file, out, jobs)
        end = time.monotonic() + PATIENCE_S
        while scored(out) < before + step:
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < end
            time.sleep(0.01)
        process.kill()
        process.wait()
        before = scored(out)
    for path in out.rglob(SCORES):  # as if the last kill had torn each line
        path.write_bytes(path.read_bytes()[:-7])
    end = time.monotonic() + PATIENCE_S
    while (process := start(file, out, 2)).wait(PATIENCE_S) == 2:  # a worker may still be ending
        assert time.monotonic() < end
        time.sleep(0.2)
    assert process.returncode == 0
    assert table(out) == table(tmp_path / "whole")
    attacks = [row for row in table(out) if row["evaluator"] == "attack"]
    assert len({tuple(row[key] for key in JOB) for row in attacks}) == 20
