"""``vfl bench step``: one training step in one piece, in process and over a stream, side by side.

Every path trains the same network from the same first weights on the same batches of synthetic
rows drawn from the seed, one thread a process. Paths take turns, so that each ratio compares
neighbours in time; what is reported is the median over the turns. CPU time counts all processes.
On a busy machine wall time says little, and processes that share cores and caches with strangers
take more CPU time than one does: small steps over a stream want a quiet machine.

With a line between the parties (`vfl.bench.network`) streams go over it, and beside what a step
took stands what bytes and delay alone take, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from vfl.bench.crew import Crew
from vfl.bench.messages import Measurement
from vfl.bench.network import Network, Wan, choose, open_network
from vfl.bench.workloads import (
    FEATURE_PARTIES,
    LABEL_PARTY,
    MODEL_PATHS,
    PATHS,
    WORKLOADS,
    Path,
    Workload,
)
from vfl.core.errors import ConfigError, nearest

WARMUP_STEPS = 10
QUICK_STEPS = 20
#: Timed steps over a line, where a step takes a round trip at least.
LINE_STEPS = 20
REPEATS = 5

_Turn = Mapping[Path, Measurement]


@dataclass(frozen=True, slots=True)
class StepRow:
    """What a step cost along one path.

    Attributes:
        model: "cnn" or "mlp".
        batch_rows: rows of a step.
        width: width of each feature party's cut.
        path: "monolith", "inprocess", "tcp" or "tls"; "model" where the line is computed.
        cpu_ms: user and system time of all processes, a step.
        wall_ms: median duration of a step, at the label party.
        cpu_ratio, wall_ratio: the same, divided by the monolith's of the same turn.
        final_loss: mean training loss over the last epoch's steps; equal on every path.
        network: what streams went over: "loopback", "tun", "proxy" or "model".
        limit_ms: what the line's bandwidth and delay take of a step; None without a line.
    """

    model: str
    batch_rows: int
    width: int
    path: Path
    cpu_ms: float
    wall_ms: float
    cpu_ratio: float
    wall_ratio: float
    final_loss: float
    network: str = "loopback"
    limit_ms: float | None = None


def bench_step(
    models: Sequence[str] = tuple(WORKLOADS),
    *,
    steps: int | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
    wan: Wan | None = None,
    network: str = "auto",
    say: Callable[[str], None] = lambda line: None,
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
    with network_of(kind, wan) as between, Crew(between) as crew:
        for name in models:
            workload = WORKLOADS[name]
            timed = steps or (min(workload.steps, LINE_STEPS) if wan else workload.steps)
            say(f"{name}: {repeats} x {timed} steps on {len(paths)} paths, {kind}")
            limit = crew.measure("model", name, seed, 2, 2).wall_ms if wan else None
            turns = [
                {path: crew.measure(path, name, seed, WARMUP_STEPS, timed) for path in paths}
                for _ in range(repeats)
            ]
            rows += [_row(workload, path, turns, kind, limit) for path in paths]
    return rows


def format_table(rows: Sequence[StepRow]) -> str:
    """The rows as a table for people; ratios in brackets, and what CPU time was aimed at."""
    size = f"{'model':<6}{'rows':>5}{'width':>7}  {'path':<10}"
    head = f"{size}{'CPU ms':>17}{'aim':>9}{'wall ms':>17}{'loss':>10}"
    if any(row.limit_ms is not None for row in rows):
        head += f"{'line ms':>17}"
    return "\n".join([head, *map(_line, rows)])


def _line(row: StepRow) -> str:
    cpu = f"{row.cpu_ms:.2f} ({row.cpu_ratio:.2f}x)"
    wall = f"{row.wall_ms:.2f} ({row.wall_ratio:.2f}x)"
    size = f"{row.model:<6}{row.batch_rows:>5}{row.width:>7}  {row.path:<10}"
    line = f"{size}{cpu:>17}{_aim(row):>9}{wall:>17}{row.final_loss:>10.5f}"
    if row.limit_ms:
        line += f"{f'{row.limit_ms:.2f} ({row.wall_ms / row.limit_ms:.2f}x)':>17}"
    return line


def _aim(row: StepRow) -> str:
    for workload in WORKLOADS.values():
        same = (workload.model, workload.batch_rows, workload.width)
        if same == (row.model, row.batch_rows, row.width) and row.path in workload.aims:
            return f"<= {workload.aims[row.path]:.2f}x"
    return ""


def network_of(kind: str, wan: Wan | None) -> Network:
    """What streams of a step go over; where lines are computed there are none."""
    parties = (LABEL_PARTY, *FEATURE_PARTIES)
    return Network(parties, wan) if kind == "model" else open_network(parties, wan, kind)


def _row(
    workload: Workload, path: Path, turns: Sequence[_Turn], kind: str, limit_ms: float | None
) -> StepRow:
    own = [turn[path] for turn in turns]
    whole = [turn["monolith"] for turn in turns]
    final_loss = own[0].final_loss
    assert final_loss is not None, "the label party knows its loss"
    return StepRow(
        model=workload.model,
        batch_rows=workload.batch_rows,
        width=workload.width,
        path=path,
        cpu_ms=median(one.cpu_ms for one in own),
        wall_ms=median(one.wall_ms for one in own),
        cpu_ratio=median(one.cpu_ms / base.cpu_ms for one, base in zip(own, whole, strict=True)),
        wall_ratio=median(one.wall_ms / base.wall_ms for one, base in zip(own, whole, strict=True)),
        final_loss=final_loss,
        network=kind,
        limit_ms=None if path in ("monolith", "inprocess") else limit_ms,
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
