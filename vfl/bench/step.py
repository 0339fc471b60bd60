"""``vfl bench step``: one training step in one piece, in process and over a stream, side by side.

Every path trains the same network from the same first weights on the same batches of synthetic
rows drawn from the seed, one thread a process. Paths take turns, so that each ratio compares
neighbours in time; what is reported is the median over the turns. CPU time counts all processes.
On a busy machine wall time says little, and processes that share cores and caches with strangers
take more CPU time than one does: small steps over a stream want a quiet machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from vfl.bench.crew import Crew
from vfl.bench.messages import Measurement
from vfl.bench.workloads import PATHS, WORKLOADS, Path, Workload
from vfl.errors import ConfigError, nearest

WARMUP_STEPS = 10
QUICK_STEPS = 20
REPEATS = 5

_Turn = Mapping[Path, Measurement]


@dataclass(frozen=True, slots=True)
class StepRow:
    """What a step cost along one path.

    Attributes:
        model: "cnn" or "mlp".
        batch_rows: rows of a step.
        width: width of each feature party's cut.
        path: "monolith", "inprocess", "tcp" or "tls".
        cpu_ms: user and system time of all processes, a step.
        wall_ms: median duration of a step, at the label party.
        cpu_ratio, wall_ratio: the same, divided by the monolith's of the same turn.
        final_loss: mean training loss over the last epoch's steps; equal on every path.
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


def bench_step(
    models: Sequence[str] = tuple(WORKLOADS),
    *,
    steps: int | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[StepRow]:
    """Measure a training step along every path.

    Args:
        models: which workloads: mlp_small (64 rows, width 128), mlp (256 rows, width 1280), cnn.
        steps: timed steps of one turn; None takes about a second's worth.
        repeats: turns.
        seed: of rows, weights and batch order.
        say: told one line about each workload.

    Raises:
        ConfigError: an unknown workload, or nothing to measure.
    """
    _check(models, steps, repeats)
    rows: list[StepRow] = []
    with Crew() as crew:
        for name in models:
            workload = WORKLOADS[name]
            timed = steps or workload.steps
            say(f"{name}: {repeats} x {timed} steps on {len(PATHS)} paths")
            turns = [
                {path: crew.measure(path, name, seed, WARMUP_STEPS, timed) for path in PATHS}
                for _ in range(repeats)
            ]
            rows += [_row(workload, path, turns) for path in PATHS]
    return rows


def format_table(rows: Sequence[StepRow]) -> str:
    """The rows as a table for people; ratios in brackets, and what CPU time was aimed at."""
    size = f"{'model':<6}{'rows':>5}{'width':>7}  {'path':<10}"
    head = f"{size}{'CPU ms':>17}{'aim':>9}{'wall ms':>17}{'loss':>10}"
    return "\n".join([head, *map(_line, rows)])


def _line(row: StepRow) -> str:
    cpu = f"{row.cpu_ms:.2f} ({row.cpu_ratio:.2f}x)"
    wall = f"{row.wall_ms:.2f} ({row.wall_ratio:.2f}x)"
    size = f"{row.model:<6}{row.batch_rows:>5}{row.width:>7}  {row.path:<10}"
    return f"{size}{cpu:>17}{_aim(row):>9}{wall:>17}{row.final_loss:>10.5f}"


def _aim(row: StepRow) -> str:
    for workload in WORKLOADS.values():
        same = (workload.model, workload.batch_rows, workload.width)
        if same == (row.model, row.batch_rows, row.width) and row.path in workload.aims:
            return f"<= {workload.aims[row.path]:.2f}x"
    return ""


def _row(workload: Workload, path: Path, turns: Sequence[_Turn]) -> StepRow:
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
