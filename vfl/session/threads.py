"""Threads of torch in a party's process: a number, or the number that its model runs fastest with.

One thread is the default. Its results are the same bit for bit on every machine and however busy
the machine is. More threads split some sums, so that last bits may differ. On a busy machine,
threads that wait for each other can take many times the time of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from vfl.config.party_file import ThreadCount
from vfl.core.processes import usable_cores
from vfl.core.seeds import scoped

#: Speedup that twice the threads must reach to be worth their cores.
_WORTH = 1.2
_REPEATS = 3


def use_threads(asked: ThreadCount, trial: Callable[[], object] | None = None) -> int:
    """Set torch's threads in this process; returns their number.

    Args:
        asked: a number, or "auto", which times the trial.
        trial: the work of a training step; without it, "auto" means 1.
    """
    count = 1 if asked == "auto" else asked
    if asked == "auto" and trial is not None:
        count = fastest(trial, usable_cores())
    torch.set_num_threads(count)
    return count


def fastest(
    trial: Callable[[], object], most: int, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Find the largest power of two of threads for which each doubling was faster.

    Args:
        trial: work to time.
        most: largest number of threads.
        clock: returns the time in seconds.
    """
    best, took = 1, _seconds(trial, 1, clock)
    while 2 * best <= most:
        now = _seconds(trial, 2 * best, clock)
        if now * _WORTH > took:
            break
        best, took = 2 * best, now
    return best


def step_of(
    build: Callable[[], nn.Module], rows: int, shape: tuple[int, ...]
) -> Callable[[], None]:
    """Make a trial: forward and backward pass of a new model on a batch of zeros.

    Args:
        build: builds the model; model and trial draw from a separate generator.
        rows: rows of a batch.
        shape: axes of one row.
    """

    def trial() -> None:
        with scoped(0):
            if not made:
                made.append(build())
            inputs = torch.zeros(rows, *shape, requires_grad=True)
            made[0](inputs).float().sum().backward()

    made: list[nn.Module] = []
    return trial


def _seconds(trial: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    torch.set_num_threads(count)
    trial()  # starts the threads
    took = []
    for _ in range(_REPEATS):
        started = clock()
        trial()
        took.append(clock() - started)
    return min(took)
