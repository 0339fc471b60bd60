"""A training step as a monolith, split in one process, and split over a network stream.

Every variant trains the same network with the same initial weights on the same batches of synthetic
rows, with one thread in each process. Variants take turns, so that each ratio compares measurements
that are close in time; result rows show the median over the turns. CPU time is the sum over all
processes. On a busy machine, wall time means little, and processes that share cores and caches with
other programs need more CPU time than one process does: small steps over a stream need a quiet
machine.

With an emulated network link between the parties (`benchmarks.emulation`), streams use this link.
The result then also has the exact time that bytes and delays alone would take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.emulation import Network, Wan, choose, open_network
from benchmarks.session import start
from benchmarks.training_step import (
    FEATURE_PARTIES,
    LABEL_PARTY,
    MODEL_PATHS,
    PATHS,
    WORKLOADS,
    Measurement,
    Path,
    StepJob,
    Workload,
)
from benchmarks.worker import processes
from vfl.core.registry import require_choice

WARMUP_STEPS = 10
QUICK_STEPS = 20
#: Number of timed steps over a network link, where a step takes at least one round trip.
LINE_STEPS = 20
REPEATS = 5

_Turn = Mapping[Path, Measurement]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Cost of a step; medians over the turns.

    Attributes:
        cpu_ms: user and system time of all processes, per step, in milliseconds.
        wall_ms: duration of a step at the label party, in milliseconds.
        cpu_ratio, wall_ratio: CPU time and wall time, divided by those of the reference in the same
            turn.
        final_loss: mean training loss over the last epoch's steps; equal for all variants.
        network: network of the streams: "loopback", or a kind of `benchmarks.emulation`: "tun",
            "proxy" or "model".
        limit_ms: least time of a step that bandwidth and delay allow; None without a network link.
    """

    cpu_ms: float
    wall_ms: float
    cpu_ratio: float
    wall_ratio: float
    final_loss: float
    network: str = "loopback"
    limit_ms: float | None = None


@dataclass(frozen=True, slots=True)
class StepRow(StepCost):
    """Cost of a step of one variant, relative to the monolith's step.

    Attributes:
        model: "cnn" or "mlp".
        batch_size: number of rows in a step.
        width: width of each feature party's cut.
        path: "monolith", "module", "split", "inprocess", "tcp" or "tls"; "model" for computed
            network links.
    """

    model: str
    batch_size: int
    width: int
    path: Path


def bench_step(
    models: Sequence[str] = tuple(WORKLOADS),
    *,
    steps: int | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
    wan: Wan | None = None,
    network: str = "auto",
    quick: bool = False,
) -> list[StepRow]:
    """Measure a training step: monolith, modules, split in one process, over TCP, over TLS.

    All ratios come from one run.

    Args:
        models: workloads: mlp_small (64 rows, width 128), mlp (256 rows, width 1280), cnn.
        steps: number of timed steps in a turn; None means about as many as take a second.
        repeats: number of turns.
        seed: seed of rows, weights and batch order.
        wan: network link of every party, such as 80mbps,40ms; None leaves the loopback interface
            unchanged.
        network: kind of the emulated network: auto, tun, proxy or model; see
            `benchmarks.emulation`.
        quick: whether to only check that the benchmark runs.

    Raises:
        BadOptionError: no workload or network has this name.
        UserError: the network is not available on this machine.
    """
    for name in models:
        require_choice("workload", name, tuple(WORKLOADS))
    if quick:
        steps, repeats = QUICK_STEPS, 1
    kind = choose(network) if wan else "loopback"
    paths = MODEL_PATHS if kind == "model" else PATHS
    rows: list[StepRow] = []
    with network_of(kind, wan) as between, Parties(between) as parties:
        for name in models:
            workload = WORKLOADS[name]
            timed = steps or (min(workload.steps, LINE_STEPS) if wan else workload.steps)
            harness.say(f"{name}: {repeats} x {timed} steps on {len(paths)} paths, {kind}")
            limit = parties.measure("model", name, seed, 2, 2).wall_ms if wan else None
            turns = [
                {path: parties.measure(path, name, seed, WARMUP_STEPS, timed) for path in paths}
                for _ in range(repeats)
            ]
            rows += [_row(workload, path, turns, kind, limit) for path in paths]
    return rows


def step_table(*columns: harness.Column, aim: Callable[[Any], float | None]) -> harness.Shown:
    """Return a function that formats columns, times with ratios in brackets, and CPU targets.

    Args:
        columns: columns that come before the times.
        aim: function that returns the largest CPU ratio that a row should have (its target), or
            None.
    """

    def aimed(row: StepCost) -> str:
        wanted = aim(row)
        return f"<= {wanted:.2f}x" if wanted else ""

    def of_line(row: StepCost) -> str | None:
        limit = row.limit_ms
        return harness.beside(limit, row.wall_ms / limit) if limit else None

    return harness.table(
        *columns,
        ("CPU ms", ">18", lambda row: harness.beside(row.cpu_ms, row.cpu_ratio)),
        ("aim", ">9", aimed),
        ("wall ms", ">18", lambda row: harness.beside(row.wall_ms, row.wall_ratio)),
        ("loss", ">10.5f", "final_loss"),
        ("line ms", ">18", of_line),
    )


def compared(own: Sequence[Measurement], base: Sequence[Measurement]) -> dict[str, Any]:
    """Return the medians over turns, and medians of the ratios to `base` in the same turn."""
    pairs = list(zip(own, base, strict=True))
    assert own[0].final_loss is not None, "the label party knows its loss"
    return harness.middle(own, "cpu_ms", "wall_ms") | {
        "cpu_ratio": median(one.cpu_ms / other.cpu_ms for one, other in pairs),
        "wall_ratio": median(one.wall_ms / other.wall_ms for one, other in pairs),
        "final_loss": own[0].final_loss,
    }


def network_of(kind: str, wan: Wan | None) -> Network:
    """Return the network for a step's streams; computed network links have no streams."""
    parties = (LABEL_PARTY, *FEATURE_PARTIES)
    return Network(parties, wan) if kind == "model" else open_network(parties, wan, kind)


class PartyProcesses(ExitStack):
    """One process for each party, started once; use it as a context manager.

    Args:
        network: network that connects the parties.
        program: module of `benchmarks` whose `work` the processes run.
    """

    def __init__(self, network: Network, program: str) -> None:
        super().__init__()
        self._network = network
        self._workers = self.enter_context(processes(program, network))

    def _measured(self) -> Measurement:
        """Combine all measurements: add CPU times; all other values are from the label party."""
        found = {party: worker.get(Measurement) for party, worker in self._workers.items()}
        cpu_ms = sum(one.cpu_ms for one in found.values())
        return found[LABEL_PARTY].model_copy(update={"cpu_ms": cpu_ms})


class Parties(PartyProcesses):
    """The processes of vfl's parties, which measure all variants in turn.

    Args:
        network: network for the streams between the parties.
    """

    def __init__(self, network: Network) -> None:
        super().__init__(network, "training_step")

    def measure(
        self,
        path: Path,
        workload: str,
        seed: int,
        warmup_steps: int,
        steps: int,
        secure: str = "none",
    ) -> Measurement:
        """Train once with a variant; return all parties' CPU time and the label party's wall time.

        Raises:
            LostPeerError: a process ended early; its standard error says why.
        """
        job = StepJob(
            path=path,
            workload=workload,
            seed=seed,
            warmup_steps=warmup_steps,
            steps=steps,
            secure=secure,
            tls=path == "tls",
            wan=str(self._network.wan),
        )
        if path not in ("tcp", "tls"):
            self._workers[LABEL_PARTY].put(job)
            return self._workers[LABEL_PARTY].get(Measurement)
        start(self._workers, self._network, LABEL_PARTY, job)
        return self._measured()


def _aim(row: StepRow) -> float | None:
    for workload in WORKLOADS.values():
        same = (workload.model, workload.batch_size, workload.width)
        if same == (row.model, row.batch_size, row.width):
            return workload.aims.get(row.path)
    return None


def _row(
    workload: Workload, path: Path, turns: Sequence[_Turn], kind: str, limit_ms: float | None
) -> StepRow:
    return StepRow(
        model=workload.model,
        batch_size=workload.batch_size,
        width=workload.width,
        path=path,
        network=kind,
        limit_ms=None if path in ("monolith", "module", "split", "inprocess") else limit_ms,
        **compared([turn[path] for turn in turns], [turn["monolith"] for turn in turns]),
    )


TABLE = step_table(
    ("model", "<6", "model"),
    ("rows", ">5", "batch_size"),
    ("width", ">7", "width"),
    ("  path", "<12", lambda row: f"  {row.path}"),
    aim=_aim,
)


main = harness.command(bench_step, TABLE)


if __name__ == "__main__":
    main()
