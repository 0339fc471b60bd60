"""``vfl bench secure``: a training step under each secure mode beside the plain split step.

Both train the same network on the same batches with ``merge = "sum"``, one thread a process. A turn
trains each kind once, the order changing from turn to turn; ratios are of neighbours in time, and
what is reported is the median over the turns. "inprocess" plays all parties in one process, so that
what every party adds shows; "tls" is a process a party over the loopback interface. CPU time counts
all processes; on a busy machine wall time says little. Shared first layers train without momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from vfl.bench.crew import Crew
from vfl.bench.messages import Measurement
from vfl.bench.network import open_network
from vfl.bench.workloads import FEATURE_PARTIES, LABEL_PARTY, Path
from vfl.errors import ConfigError

WORKLOAD = "summed"
MODES = ("none", "sum", "sum:bits=8", "beaver")
PATHS: tuple[Path, ...] = ("inprocess", "tls")
STEPS, REPEATS, WARMUP_STEPS = 30, 40, 10
QUICK_STEPS = 5
#: The most CPU time of a step under a secure sum, in that of the plain one.
AIM = 1.03
#: Those it is the aim of.
_AIMED = ("sum", "sum:bits=8")


@dataclass(frozen=True, slots=True)
class SecureRow:
    """What a step cost.

    Attributes:
        path: "inprocess" or "tls".
        secure: the secure mode.
        cpu_ms: user and system time of all processes, a step.
        wall_ms: median duration of a step, at the label party.
        cpu_ratio, wall_ratio: the same, divided by the plain step's of the same turn.
        final_loss: mean training loss over the last epoch's steps.
    """

    path: Path
    secure: str
    cpu_ms: float
    wall_ms: float
    cpu_ratio: float
    wall_ratio: float
    final_loss: float


def bench_secure(
    *,
    steps: int = STEPS,
    repeats: int = REPEATS,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[SecureRow]:
    """Measure a step of 128 rows and width 500, plain, summed under masks, and on shared layers.

    Args:
        steps: timed steps of one training.
        repeats: turns.
        seed: of rows, weights and batch order.
        say: told one line about each path.

    Raises:
        ConfigError: nothing to measure.
    """
    if steps < 1 or repeats < 1:
        raise ConfigError("nothing to measure", got=f"{steps} steps, {repeats} repeats")
    rows: list[SecureRow] = []
    with open_network([LABEL_PARTY, *FEATURE_PARTIES], None) as network, Crew(network) as crew:
        for path in PATHS:
            say(f"{path}: {repeats} x {steps} steps of each of {', '.join(MODES)}")
            turns = []
            for turn in range(repeats):
                order = MODES if turn % 2 == 0 else MODES[::-1]
                measured = {
                    mode: crew.measure(path, WORKLOAD, seed, WARMUP_STEPS, steps, mode)
                    for mode in order
                }
                turns.append({mode: measured[mode] for mode in MODES})
            rows += [
                _row(path, mode, [turn[mode] for turn in turns], [turn["none"] for turn in turns])
                for mode in MODES
            ]
    return rows


def format_secure(rows: Sequence[SecureRow]) -> str:
    """The rows as a table for people; ratios in brackets, and what CPU time was aimed at."""
    head = f"{'path':<11}{'secure':<12}{'CPU ms':>17}{'aim':>9}{'wall ms':>17}{'loss':>10}"
    lines = []
    for row in rows:
        cpu = f"{row.cpu_ms:.2f} ({row.cpu_ratio:.3f}x)"
        wall = f"{row.wall_ms:.2f} ({row.wall_ratio:.3f}x)"
        aim = f"<= {AIM}x" if row.secure in _AIMED else ""
        lines.append(
            f"{row.path:<11}{row.secure:<12}{cpu:>17}{aim:>9}{wall:>17}{row.final_loss:>10.5f}"
        )
    return "\n".join([head, *lines])


def _row(
    path: Path, secure: str, own: Sequence[Measurement], plain: Sequence[Measurement]
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
    )
