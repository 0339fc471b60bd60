"""A training step in one piece, in process and over a stream, side by side.

Every path trains the same network from the same first weights on the same batches of synthetic
rows drawn from the seed, one thread a process. Paths take turns, so that each ratio compares
neighbours in time; what is reported is the median over the turns. CPU time counts all processes.
On a busy machine wall time says little, and processes that share cores and caches with strangers
take more CPU time than one does: small steps over a stream want a quiet machine.

With a line between the parties (`benchmarks.emulation`) streams go over it, and beside what a step
took stands what bytes and delay alone take, exactly.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any, Self

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
from benchmarks.worker import BenchmarkWorker
from vfl.core.errors import ConfigError, nearest

WARMUP_STEPS = 10
QUICK_STEPS = 20
#: Timed steps over a line, where a step takes a round trip at least.
LINE_STEPS = 20
REPEATS = 5

_Turn = Mapping[Path, Measurement]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step cost, median over the turns.

    Attributes:
        cpu_ms: user and system time of all processes, a step.
        wall_ms: median duration of a step, at the label party.
        cpu_ratio, wall_ratio: the same, divided by what it is compared with in the same turn.
        final_loss: mean training loss over the last epoch's steps; equal on every path.
        network: what streams went over: "loopback", "tun", "proxy" or "model".
        limit_ms: what the line's bandwidth and delay take of a step; None without a line.
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
    """A step along one path, compared with the monolith's.

    Attributes:
        model: "cnn" or "mlp".
        batch_size: rows of a step.
        width: width of each feature party's cut.
        path: "monolith", "inprocess", "tcp" or "tls"; "model" where the line is computed.
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
    say: Callable[[str], None] = harness.silent,
) -> list[StepRow]:
    """Measure a training step along every path.

    Args:
        models: which workloads: mlp_small (64 rows, width 128), mlp (256 rows, width 1280), cnn.
        steps: timed steps of one turn; None takes about a second's worth.
        repeats: turns.
        seed: of rows, weights and batch order.
        wan: the parties' lines; None is the loopback as it is.
        network: how lines are made: auto, tun, proxy or model.
        say: told one line about each workload.

    Raises:
        ConfigError: an unknown workload, or nothing to measure.
        BadOptionError: an unknown network.
        UserError: a network that cannot be had here.
    """
    _check(models, steps, repeats)
    kind = choose(network) if wan else "loopback"
    paths = MODEL_PATHS if kind == "model" else PATHS
    rows: list[StepRow] = []
    with network_of(kind, wan) as between, Parties(between) as parties:
        for name in models:
            workload = WORKLOADS[name]
            timed = steps or (min(workload.steps, LINE_STEPS) if wan else workload.steps)
            say(f"{name}: {repeats} x {timed} steps on {len(paths)} paths, {kind}")
            limit = parties.measure("model", name, seed, 2, 2).wall_ms if wan else None
            turns = [
                {path: parties.measure(path, name, seed, WARMUP_STEPS, timed) for path in paths}
                for _ in range(repeats)
            ]
            rows += [_row(workload, path, turns, kind, limit) for path in paths]
    return rows


def format_table(rows: Sequence[StepRow]) -> str:
    """The rows as a table for people; ratios in brackets, and what CPU time was aimed at."""
    head = f"{'model':<6}{'rows':>5}{'width':>7}  {'path':<10}{timed_head(rows)}"
    lines = [
        f"{row.model:<6}{row.batch_size:>5}{row.width:>7}  {row.path:<10}{timed(row, _aim(row))}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def compared(own: Sequence[Measurement], base: Sequence[Measurement]) -> dict[str, Any]:
    """Medians over the turns, and of the ratios to the base of the same turn."""
    pairs = list(zip(own, base, strict=True))
    assert own[0].final_loss is not None, "the label party knows its loss"
    return {
        "cpu_ms": median(one.cpu_ms for one in own),
        "wall_ms": median(one.wall_ms for one in own),
        "cpu_ratio": median(one.cpu_ms / other.cpu_ms for one, other in pairs),
        "wall_ratio": median(one.wall_ms / other.wall_ms for one, other in pairs),
        "final_loss": own[0].final_loss,
    }


def timed_head(rows: Sequence[StepCost]) -> str:
    """The heads of the columns that `timed` fills."""
    limit = f"{'line ms':>18}" if any(row.limit_ms is not None for row in rows) else ""
    return f"{'CPU ms':>18}{'aim':>9}{'wall ms':>18}{'loss':>10}{limit}"


def timed(row: StepCost, aim: float | None) -> str:
    """Times with their ratios in brackets, and the aim of the first."""
    figures = [(row.cpu_ms, row.cpu_ratio), (row.wall_ms, row.wall_ratio)]
    if row.limit_ms:
        figures.append((row.limit_ms, row.wall_ms / row.limit_ms))
    cpu, wall, *limit = (f"{f'{ms:.2f} ({ratio:.3f}x)':>18}" for ms, ratio in figures)
    wanted = f"<= {aim:.2f}x" if aim else ""
    return f"{cpu}{wanted:>9}{wall}{row.final_loss:>10.5f}{''.join(limit)}"


def network_of(kind: str, wan: Wan | None) -> Network:
    """What streams of a step go over; where lines are computed there are none."""
    parties = (LABEL_PARTY, *FEATURE_PARTIES)
    return Network(parties, wan) if kind == "model" else open_network(parties, wan, kind)


class PartyProcesses:
    """A process a party, started once; a context manager.

    Args:
        network: what connects the parties.
        program: the module of `benchmarks` whose `work` they run.
    """

    def __init__(self, network: Network, program: str) -> None:
        self._network = network
        with ExitStack() as stack:
            self._workers = {
                party: stack.enter_context(BenchmarkWorker(program, network.command(party)))
                for party in network.parties
            }
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _measured(self) -> Measurement:
        """What all processes measured: CPU time of them all, the rest of the label party."""
        found = {party: worker.get(Measurement) for party, worker in self._workers.items()}
        cpu_ms = sum(one.cpu_ms for one in found.values())
        return found[LABEL_PARTY].model_copy(update={"cpu_ms": cpu_ms})


class Parties(PartyProcesses):
    """The parties of vfl, which measure every path in turn.

    Args:
        network: what the parties' streams go over.
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
        """Train once along a path; CPU time of all processes, wall time of the label party.

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
        limit_ms=None if path in ("monolith", "inprocess") else limit_ms,
        **compared([turn[path] for turn in turns], [turn["monolith"] for turn in turns]),
    )


def _check(models: Sequence[str], steps: int | None, repeats: int) -> None:
    for name in models:
        if name not in WORKLOADS:
            raise ConfigError(
                f"no workload is called '{name}'",
                want=", ".join(WORKLOADS),
                fix=nearest(name, WORKLOADS),
            )
    if not models or repeats < 1 or (steps is not None and steps < 1):
        raise ConfigError(
            "nothing to measure",
            got=f"{len(models)} workloads, {steps} steps, {repeats} repeats",
            want="at least one of each",
        )


def main() -> None:
    """The command line."""
    options = harness.parser(
        "step",
        "One training step: monolith, in process, over TCP, over TLS; ratios of one run.",
        wan="",
        quick=True,
    )

    def measure(asked: Namespace) -> list[StepRow]:
        quick: dict[str, Any] = {"steps": QUICK_STEPS, "repeats": 1} if asked.quick else {}
        return bench_step(**quick, **harness.line(asked, options), say=harness.say)

    harness.run(options, measure, format_table)


if __name__ == "__main__":
    main()
