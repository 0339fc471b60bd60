"""Number of torch's threads in a party's process: a fixed number, or the fastest for its model.

One thread is the default. The results of one thread are the same bit for bit on every machine,
however busy it is. With more threads, some sums are split among the threads, so that the last bits
of results may differ. On a busy machine, several threads that wait for each other can take many
times as long as one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from vfl.config.party_file import ThreadCount
from vfl.core.processes import usable_cores
from vfl.core.seeds import scoped

#: Least speedup that makes doubling the threads worthwhile, because the threads occupy more cores.
_WORTH = 1.2
_REPEATS = 3


def use_threads(asked: ThreadCount, trial: Callable[[], object] | None = None) -> int:
    """Set the number of torch's threads in this process; return that number.

    Args:
        asked: a number of threads, or "auto", which measures the time of `trial`.
        trial: function that does the work of one training step; if it is None, "auto" sets 1
            thread.
    """
    count = 1 if asked == "auto" else asked
    if asked == "auto" and trial is not None:
        count = fastest(trial, usable_cores())
    torch.set_num_threads(count)
    return count


def fastest(
    trial: Callable[[], object], most: int, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Return the largest power of two up to which each doubling of the threads was faster.

    Args:
        trial: function with the work to time.
        most: largest number of threads.
        clock: function that returns the time in seconds.
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
    """Make a trial function: forward and backward pass of a new model on a batch of zeros.

    Args:
        build: function that builds the model; the model's weights and the trial's random numbers
            come from a separate generator.
        rows: batch size.
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
    trial()  # the first call starts the threads
    took = []
    for _ in range(_REPEATS):
        started = clock()
        trial()
        took.append(clock() - started)
    return min(took)
