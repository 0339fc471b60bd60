"""A training step in each secure mode, compared with a plain step of split training.

The secure and the plain step train the same network on the same batches with ``merge = "sum"``,
with one thread in each process. A turn trains each kind of step once, in an order that changes from
turn to turn. Ratios compare measurements that are close in time, and result rows show the median
over the turns. "inprocess" runs all parties in one process, so that the work of all parties is
counted; "tls" runs a process for each party, over the loopback interface. CPU time is the sum over
all processes; on a busy machine, wall time means little. Shared first layers train without
momentum.

With an emulated network link between the parties (`benchmarks.emulation`), only "tls" is measured.
The result then also has the exact time that the mode's bytes and delays alone would take.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import harness
from benchmarks.emulation import Wan, choose
from benchmarks.step import LINE_STEPS, Parties, StepCost, compared, network_of, step_table
from benchmarks.training_step import Measurement, Path

WORKLOAD = "summed"
MODES = ("none", "sum", "sum:bits=8", "beaver")
PATHS: tuple[Path, ...] = ("inprocess", "tls")
STEPS, REPEATS, WARMUP_STEPS = 30, 40, 10
#: Number of turns over a network link, where a step takes at least one round trip.
LINE_REPEATS = 5
QUICK_STEPS = 5
#: Target: largest CPU time of a step with a secure sum, relative to the plain step.
AIM = 1.03
#: Variants to which this target applies.
_AIMED = ("sum", "sum:bits=8")


@dataclass(frozen=True, slots=True)
class SecureRow(StepCost):
    """Cost of a step in one secure mode, compared with the plain step.

    Attributes:
        path: "inprocess" or "tls"; "model" for computed network links.
        secure: name of the secure mode.
    """

    path: Path
    secure: str


def bench_secure(
    *,
    steps: int | None = None,
    repeats: int | None = None,
    seed: int = 0,
    wan: Wan | None = None,
    network: str = "auto",
    quick: bool = False,
) -> list[SecureRow]:
    """Measure a step in each secure mode, and the plain step, with 128 rows and width 500.

    Args:
        steps: number of timed steps of a training; by default 30, or 20 over a network link.
        repeats: number of turns; by default 40, or 5 over a network link.
        seed: seed of rows, weights and batch order.
        wan: network link between the parties; None leaves the loopback interface unchanged.
        network: kind of the emulated network: auto, tun, proxy or model; see
            `benchmarks.emulation`.
        quick: whether to only check that the benchmark runs.

    Raises:
        BadOptionError: no network has this name.
        UserError: the network is not available on this machine.
    """
    kind = choose(network) if wan else "loopback"
    usual = (LINE_STEPS, LINE_REPEATS) if wan else (STEPS, REPEATS)
    quickest = (QUICK_STEPS, 1) if quick else usual
    steps, repeats = steps or quickest[0], repeats or quickest[1]
    rows: list[SecureRow] = []
    with network_of(kind, wan) as between, Parties(between) as parties:
        for path in _paths(kind):
            harness.say(f"{path}: {repeats} x {steps} steps of each of {', '.join(MODES)}, {kind}")
            turns = [_turn(parties, path, seed, steps, turn) for turn in range(repeats)]
            plain = [one["none"] for one in turns]
            for mode in MODES:
                limit = (
                    parties.measure("model", WORKLOAD, seed, 2, 2, mode).wall_ms if wan else None
                )
                costs = compared([one[mode] for one in turns], plain)
                rows.append(SecureRow(path, mode, **costs, network=kind, limit_ms=limit))
    return rows


def _paths(kind: str) -> tuple[Path, ...]:
    if kind == "loopback":
        return PATHS
    return ("model",) if kind == "model" else ("tls",)


def _turn(parties: Parties, path: Path, seed: int, steps: int, turn: int) -> dict[str, Measurement]:
    """Measure every mode once; every second turn has the reverse order."""
    order = MODES if turn % 2 == 0 else MODES[::-1]
    return {
        mode: parties.measure(path, WORKLOAD, seed, WARMUP_STEPS, steps, mode) for mode in order
    }


TABLE = step_table(
    ("path", "<11", "path"),
    ("secure", "<12", "secure"),
    aim=lambda row: AIM if row.secure in _AIMED else None,
)


main = harness.command(bench_secure, TABLE)


if __name__ == "__main__":
    main()
