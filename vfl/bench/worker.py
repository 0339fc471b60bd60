"""A benchmark's process: reads jobs from standard input, writes what it measured to its output.

Started as ``python -m vfl.bench.worker``; it ends when its input does.
"""

from __future__ import annotations

import sys

import torch

from vfl.bench.messages import Job, Measurement
from vfl.bench.paths import in_process, modelled, monolith
from vfl.bench.process import tell
from vfl.bench.setup import Setup
from vfl.bench.stream import host, join


def work(job: Job) -> Measurement:
    """Do one job."""
    if job.role == "model":
        return modelled(job)
    setup = Setup(job)
    if job.role == "monolith":
        return monolith(setup)
    if job.role == "inprocess":
        return in_process(setup)
    if job.role == "host":
        return host(setup, tell)
    return join(setup)


def main() -> None:
    """Work until the input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        tell(work(Job.model_validate_json(line)))


if __name__ == "__main__":
    main()
