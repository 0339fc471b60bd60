"""``vfl bench secure``: a training step under each secure mode beside the plain split step.

Both train the same network on the same batches with ``merge = "sum"``, one thread a process. A turn
trains each kind once, the order changing from turn to turn; ratios are of neighbours in time, and
what is reported is the median over the turns. "inprocess" plays all parties in one process, so that
what every party adds shows; "tls" is a process a party over the loopback interface. CPU time counts
all processes; on a busy machine wall time says little. Shared first layers train without momentum.

With a line between the parties (`vfl.bench.network`) streams alone are measured, and beside wall
time stands what bytes and delay of that mode take, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from vfl.bench.crew import Crew
from vfl.bench.messages import Measurement
from vfl.bench.network import Wan, choose
from vfl.bench.step import LINE_STEPS, network_of
from vfl.bench.workloads import Path
from vfl.core.errors import ConfigError

WORKLOAD = "summed"
MODES = ("none", "sum", "sum:bits=8", "beaver")
PATHS: tuple[Path, ...] = ("inprocess", "tls")
STEPS, REPEATS, WARMUP_STEPS = 30, 40, 10
#: Turns over a line, where a step takes a round trip at least.
LINE_REPEATS = 5
QUICK_STEPS = 5
#: The most CPU time of a step under a secure sum, in that of the plain one.
AIM = 1.03
#: Those it is the aim of.
_AIMED = ("sum", "sum:bits=8")


@dataclass(frozen=True, slots=True)
class SecureRow:
    """What a step cost.

    Attributes:
        path: "inprocess" or "tls"; "model" where the line is computed.
        secure: the secure mode.
        cpu_ms: user and system time of all processes, a step.
        wall_ms: median duration of a step, at the label party.
        cpu_ratio, wall_ratio: the same, divided by the plain step's of the same turn.
        final_loss: mean training loss over the last epoch's steps.
        network: what streams went over: "loopback", "tun", "proxy" or "model".
        limit_ms: what the line's bandwidth and delay take of a step; None without a line.
    """

    path: Path
    secure: str
    cpu_ms: float
    wall_ms: float
    cpu_ratio: float
    wall_ratio: float
    final_loss: float
    network: str = "loopback"
    limit_ms: float | None = None


def bench_secure(
    *,
    steps: int | None = None,
    repeats: int | None = None,
    seed: int = 0,
    wan: Wan | None = None,
    network: str = "auto",
    say: Callable[[str], None] = lambda line: None,
) -> list[SecureRow]:
    """Measure a step of 128 rows and width 500, plain, summed under masks, and on shared layers.

    Args:
        steps: timed steps of one training; 30 unless given, 20 over a line.
        repeats: turns; 40 unless given, 5 over a line.
        seed: of rows, weights and batch order.
        wan: the parties' lines; None is the loopback as it is.
        network: how lines are made: auto, tun, proxy or model.
        say: told one line about each path.

    Raises:
        ConfigError: nothing to measure.
        BadOptionError: an unknown network.
        UserError: a network that cannot be had here.
    """
    kind = choose(network) if wan else "loopback"
    steps = (LINE_STEPS if wan else STEPS) if steps is None else steps
    repeats = (LINE_REPEATS if wan else REPEATS) if repeats is None else repeats
    if steps < 1 or repeats < 1:
        raise ConfigError("nothing to measure", got=f"{steps} steps, {repeats} repeats")
    rows: list[SecureRow] = []
    with network_of(kind, wan) as between, Crew(between) as crew:
        for path in _paths(kind):
            say(f"{path}: {repeats} x {steps} steps of each of {', '.join(MODES)}, {kind}")
            turns = [_turn(crew, path, seed, steps, turn) for turn in range(repeats)]
            plain = [one["none"] for one in turns]
            for mode in MODES:
                limit = crew.measure("model", WORKLOAD, seed, 2, 2, mode).wall_ms if wan else None
                rows.append(_row(path, mode, [one[mode] for one in turns], plain, kind, limit))
    return rows


def _paths(kind: str) -> tuple[Path, ...]:
    if kind == "loopback":
        return PATHS
    return ("model",) if kind == "model" else ("tls",)


def _turn(crew: Crew, path: Path, seed: int, steps: int, turn: int) -> dict[str, Measurement]:
    """Every mode once, the first one last in every other turn."""
    order = MODES if turn % 2 == 0 else MODES[::-1]
    return {mode: crew.measure(path, WORKLOAD, seed, WARMUP_STEPS, steps, mode) for mode in order}


def format_secure(rows: Sequence[SecureRow]) -> str:
    """The rows as a table for people; ratios in brackets, and what CPU time was aimed at."""
    head = f"{'path':<11}{'secure':<12}{'CPU ms':>17}{'aim':>9}{'wall ms':>18}{'loss':>10}"
    if any(row.limit_ms is not None for row in rows):
        head += f"{'line ms':>18}"
    lines = []
    for row in rows:
        cpu = f"{row.cpu_ms:.2f} ({row.cpu_ratio:.3f}x)"
        wall = f"{row.wall_ms:.2f} ({row.wall_ratio:.3f}x)"
        aim = f"<= {AIM}x" if row.secure in _AIMED else ""
        line = f"{row.path:<11}{row.secure:<12}{cpu:>17}{aim:>9}{wall:>18}{row.final_loss:>10.5f}"
        if row.limit_ms is not None:
            line += f"{f'{row.limit_ms:.2f} ({row.wall_ms / row.limit_ms:.2f}x)':>18}"
        lines.append(line)
    return "\n".join([head, *lines])


def _row(
    path: Path,
    secure: str,
    own: Sequence[Measurement],
    plain: Sequence[Measurement],
    network: str,
    limit_ms: float | None,
) -> SecureRow:
    final_loss = own[0].final_loss
    assert final_loss is not None, "the label party knows its loss"
    pairs = list(zip(own, plain, strict=True))
    return SecureRow(
        path=path,
        secure=secure,
        cpu_ms=median(one.cpu_ms for one in own),
        wall_ms=median(one.wall_ms for one in own),
        cpu_ratio=median(one.cpu_ms / base.cpu_ms for one, base in pairs),
        wall_ratio=median(one.wall_ms / base.wall_ms for one, base in pairs),
        final_loss=final_loss,
        network=network,
        limit_ms=limit_ms,
    )
