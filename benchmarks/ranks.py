"""A training step with several ranks or threads per party, compared with one of each.

One feature party and the label party train on the same batches, over TLS on the loopback interface,
with a process for each rank and one thread in each process. Trainings with one rank, with one rank
of two threads, and with two ranks take turns, so that each ratio compares measurements that are
close in time. Result rows show the median over the turns. In a step, the two parties work one after
the other. So one rank per party keeps one core busy, and two ranks keep two cores busy.

The machine cannot run eight ranks at once, so the time of their step is computed as the sum of two
measured times. The first is the CPU time of a step on an eighth of the batch in one rank. The
second is the time in which eight ranks at the same time sum gradients of the same size and gather
the outputs. For two ranks, the time computed in the same way is shown beside the measured time. The
computation neglects network time, and the memory bandwidth that cores share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn, optim

from benchmarks import harness
from benchmarks.emulation import Network, open_network
from benchmarks.session import start
from benchmarks.training_step import (
    KNOWN,
    LABEL_PARTY,
    SHARED,
    Measurement,
    StepJob,
    Workload,
    fresh_bottom,
    fresh_top,
    meeting,
)
from benchmarks.worker import BenchmarkWorker

WARMUP_STEPS, STEPS, REPEATS = 3, 10, 5
QUICK_STEPS = 3
_COMPUTED = (2, 8)

#: Type: measurements, by party, of the processes that have the same rank number.
_Step = Mapping[str, Measurement]


@dataclass(frozen=True, slots=True)
class RankRow:
    """Cost of a step with a number of ranks per party.

    Attributes:
        model, batch_size: model and batch size of the workload.
        ranks: number of ranks of each of the two parties.
        threads: number of torch threads of each rank.
        how: "measured" or "computed".
        cpu_ms: CPU time of the two parties' processes with the same rank number; these two
            processes work one after the other.
        collectives_ms: part of `cpu_ms` that messages between ranks take, summed over both parties;
            0 for one rank.
        wall_ms: median duration of a step at rank 0 of the label party; 0 for computed rows.
        speed: speed relative to one rank of one thread, by wall time; computed rows use CPU time.
        work: CPU time of all processes, divided by the CPU time with one rank.
        final_loss: training loss of the last epoch, equal up to rounding for all numbers of ranks
            and threads; 0 for computed rows.
    """

    model: str
    batch_size: int
    ranks: int
    threads: int
    how: str
    cpu_ms: float
    collectives_ms: float
    wall_ms: float
    speed: float
    work: float
    final_loss: float


def bench_ranks(
    names: Sequence[str] = tuple(SHARED),
    *,
    steps: int = STEPS,
    repeats: int = REPEATS,
    seed: int = 0,
    quick: bool = False,
) -> list[RankRow]:
    """Measure a step with one and two ranks or threads per party, and compute it for eight ranks.

    Args:
        names: names of workloads in `SHARED`.
        steps: number of timed steps in a turn.
        repeats: number of turns.
        seed: seed of rows, weights and batch order.
        quick: whether to only check that the benchmark runs.
    """
    if quick:
        steps, repeats = QUICK_STEPS, 1
    rows: list[RankRow] = []
    with open_network((LABEL_PARTY, "left"), None, "loopback") as network, ExitStack() as stack:
        ranks = [
            {
                party: stack.enter_context(BenchmarkWorker("training_step"))
                for party in (LABEL_PARTY, "left")
            }
            for _ in range(2)
        ]
        for name in names:
            harness.say(
                f"{name}: {repeats} x {steps} steps in one rank, in two threads and in two ranks"
            )
            turns = []
            for _ in range(repeats):
                one, threaded, two, eighth = (
                    _measure(ranks[:size], network, _job(which, seed, steps, threads))
                    for size, threads, which in (
                        (1, 1, name),
                        (1, 2, name),
                        (2, 1, name),
                        (1, 1, f"{name}_8th"),
                    )
                )
                said = {size: collectives_ms(KNOWN[name], size, steps) for size in _COMPUTED}
                turns.append(_Turn(one[0], threaded[0], two, eighth[0], said))
            rows += _rows(KNOWN[name], turns)
    return rows


@dataclass(frozen=True, slots=True)
class _Turn:
    one: _Step
    threaded: _Step
    two: Sequence[_Step]
    eighth: _Step
    collectives: Mapping[int, float]


def _job(workload: str, seed: int, steps: int, threads: int) -> StepJob:
    return StepJob(
        path="tls",
        workload=workload,
        seed=seed,
        warmup_steps=WARMUP_STEPS,
        steps=steps,
        threads=threads,
    )


def _measure(
    ranks: Sequence[Mapping[str, BenchmarkWorker]], network: Network, job: StepJob
) -> list[_Step]:
    """Train once; return, for each rank number, the measurements of its processes."""
    with TemporaryDirectory() as folder:
        for rank, workers in enumerate(ranks):
            own = {"rank": rank, "ranks": len(ranks), "meeting": folder}
            start(workers, network, LABEL_PARTY, job.model_copy(update=own))
        return [
            {party: worker.get(Measurement) for party, worker in workers.items()}
            for workers in ranks
        ]


def collectives_ms(workload: Workload, size: int, steps: int) -> float:
    """Return a rank's CPU time to sum the gradients of both parties and to gather the outputs.

    The ranks are threads of this process with equal work, so each rank counts an equal part of the
    process's time.
    """
    parts = [fresh_bottom(workload, 0, "left"), fresh_top(workload, 0)]
    outputs = torch.zeros(workload.batch_size // size, workload.outputs)
    spent: list[float] = []

    def rank(number: int, folder: str) -> None:
        ends = [meeting(name, number, size, folder) for name in ("bottom", "top")]
        optimizers = [_still(end.together, part) for end, part in zip(ends, parts, strict=True)]
        for step in range(WARMUP_STEPS + steps):
            if step == WARMUP_STEPS:
                ends[0].count_at_first([0])
                if number == 0:
                    spent.append(time.process_time())
            for optimizer in optimizers:
                optimizer.step()
            ends[1].whole(outputs, 0.0, size * len(outputs))
        ends[0].count_at_first([0])
        if number == 0:
            spent.append(time.process_time())

    with TemporaryDirectory() as folder:
        threads = [threading.Thread(target=rank, args=(each, folder)) for each in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return 1000 * (spent[1] - spent[0]) / steps / size


def _still(together: Callable[[Any], Any], part: nn.Module) -> Any:
    """Return an optimiser that sums gradients over the ranks but leaves the weights unchanged."""
    weights = [nn.Parameter(weight.detach().clone()) for weight in part.parameters()]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    return together(lambda own: optim.SGD(own, lr=0.0))(weights)


def _rows(workload: Workload, turns: Sequence[_Turn]) -> list[RankRow]:
    """Return measured rows of one rank, two threads and two ranks; computed rows of more ranks."""

    def cpu(step: _Step) -> float:
        return sum(one.cpu_ms for one in step.values())

    def row(ranks: int, how: str, threads: int = 1, **figures: float) -> RankRow:
        rest = {"collectives_ms": 0.0, "wall_ms": 0.0, "final_loss": 0.0} | figures
        return RankRow(workload.model, workload.batch_size, ranks, threads, how, **rest)

    def of_label(step: _Step) -> Measurement:
        return step[LABEL_PARTY]

    whole = [cpu(turn.one) for turn in turns]
    rows = [
        row(
            1,
            "measured",
            cpu_ms=median(whole),
            wall_ms=median(of_label(turn.one).wall_ms for turn in turns),
            speed=1.0,
            work=1.0,
            final_loss=of_label(turns[0].one).final_loss or 0.0,
        ),
        row(
            1,
            "measured",
            threads=2,
            cpu_ms=median(cpu(turn.threaded) for turn in turns),
            wall_ms=median(of_label(turn.threaded).wall_ms for turn in turns),
            speed=median(of_label(t.one).wall_ms / of_label(t.threaded).wall_ms for t in turns),
            work=median(cpu(t.threaded) / one for t, one in zip(turns, whole, strict=True)),
            final_loss=of_label(turns[0].threaded).final_loss or 0.0,
        ),
        row(
            2,
            "measured",
            cpu_ms=median(cpu(turn.two[0]) for turn in turns),
            collectives_ms=median(turn.collectives[2] for turn in turns),
            wall_ms=median(of_label(turn.two[0]).wall_ms for turn in turns),
            speed=median(of_label(t.one).wall_ms / of_label(t.two[0]).wall_ms for t in turns),
            work=median(sum(map(cpu, t.two)) / one for t, one in zip(turns, whole, strict=True)),
            final_loss=of_label(turns[0].two[0]).final_loss or 0.0,
        ),
    ]
    for size in _COMPUTED:
        # The part of the cost that does not depend on rows is constant. So the cost is linear in
        # the batch size, from an eighth of the batch to the whole batch.
        part = (8 / size - 1) / 7
        own = [cpu(t.eighth) + part * (cpu(t.one) - cpu(t.eighth)) for t in turns]
        steps = [mine + t.collectives[size] for mine, t in zip(own, turns, strict=True)]
        pairs = list(zip(whole, steps, strict=True))
        rows.append(
            row(
                size,
                "computed",
                cpu_ms=median(steps),
                collectives_ms=median(turn.collectives[size] for turn in turns),
                speed=median(one / mine for one, mine in pairs),
                work=median(size * mine / one for one, mine in pairs),
            )
        )
    return rows


TABLE = harness.table(
    ("model", "<6", "model"),
    ("rows", ">5", "batch_size"),
    ("ranks", ">6", "ranks"),
    ("threads", ">8", "threads"),
    ("  how", "<11", lambda row: f"  {row.how}"),
    ("CPU ms", ">9.1f", "cpu_ms"),
    ("collectives", ">12.2f", "collectives_ms"),
    ("wall ms", ">9.1f", lambda row: row.wall_ms or None),
    ("speed", ">8", lambda row: harness.times(row.speed)),
    ("work", ">7", lambda row: harness.times(row.work)),
    ("loss", ">9.5f", lambda row: row.final_loss or None),
)


main = harness.command(bench_ranks, TABLE)


if __name__ == "__main__":
    main()
