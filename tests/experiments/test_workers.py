"""Processes that train cells: they end with who started them, and may die."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vfl.experiments import is_done
from vfl.experiments.scheduler import ProcessWorker

pytestmark = pytest.mark.net
ROOT = Path(__file__).parents[2]
PATIENCE_S = 60


def until(happened):
    end = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return found


def test_a_worker_that_is_killed_is_replaced(written, tiny, tmp_path):
    folder, (cell, other, *_) = written(tmp_path / "grid", tiny(seeds=[0]))
    worker = ProcessWorker(folder, "cpu")
    worker.run(other)
    first = worker.pid
    os.kill(first, signal.SIGKILL)
    worker.run(cell)
    assert worker.pid != first
    worker.stop()
    assert is_done(folder.cells_path / cell.name)


def children(pid):
    """Of all its threads, each of which has started its own."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(one) for listed in lists for one in listed.read_text().split()]


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_comparison_that_is_killed_takes_its_workers_along_and_goes_on(tmp_path):
    text = """
        name = "tiny"
        parties.client = { width = 16, bottom = "mlp:hidden=16,last=relu" }
        train = { epochs = 30, checkpoint_every = 20 }
        compare = { codecs = ["none", "topk:k=2"], seeds = [0] }
    """
    (tmp_path / "tiny.toml").write_text(text)
    words = [sys.executable, "-m", "vfl", "compare", "tiny.toml", "--jobs", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    cells = tmp_path / "runs" / "tiny" / "cells"
    try:
        until(lambda: len(list(cells.glob("*/parties/label/checkpoints/committed.json"))) == 2)
        workers = children(process.pid)
        assert len(workers) == 2
    finally:
        process.kill()
        process.wait()
    until(lambda: not any(is_there(pid) for pid in workers))
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 of 2" in done.stderr
    for path in cells.iterdir():
        assert is_done(path)
