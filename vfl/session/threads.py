"""Number of threads that torch uses in a party's process: a fixed number, or the fastest one.

By default, torch uses one thread. With one thread, a repeated run on the same kind of processor
gives the same results bit for bit, however busy the machine is. With more threads, some sums are
split among the threads, so that the last bits of results may differ. On a busy machine, several
threads that wait for each other can need many times as long as a single thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from vfl.config.party_file import ThreadCount
from vfl.core.processes import usable_cores
from vfl.core.seeds import scoped

#: If doubling the number of threads gives less than this speedup, it is not worthwhile, because the
#: threads occupy more cores.
_WORTH = 1.2
_REPEATS = 3


def use_threads(asked: ThreadCount, trial: Callable[[], object] | None = None) -> int:
    """Set the number of torch's threads in this process, and return this number.

    Args:
        asked: a number of threads; or "auto", which measures how long `trial` takes with several
            numbers of threads.
        trial: function that does the work of one training step; if it is None, "auto" sets one
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
    """Return the largest power of two up to which each doubling was worthwhile.

    Args:
        trial: function whose duration is measured.
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
    """Return a function that runs forward and backward pass of a new model on a batch of zeros.

    Args:
        build: function that builds the model; it draws the initial weights from a separate
            generator, so that other random numbers stay the same.
        rows: batch size.
        shape: axes of one row of the input.
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
    trial()  # the first call starts torch's threads
    took = []
    for _ in range(_REPEATS):
        started = clock()
        trial()
        took.append(clock() - started)
    return min(took)
