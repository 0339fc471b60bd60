"""Error rate of the rule `vfl.experiments.statistics.judge`, measured by simulation.

    python -m benchmarks.verdicts --runs 4000

The simulated victims have one of two gains: exactly the margin, for which the verdict "no easier"
is wrong, or exactly 0, for which "easier" is wrong. Label-free bottoms have a gain of 0. The gains
follow three distributions: normal, exponential in either direction, and two-point. Two-point
distributions use only standard deviations up to 1, so that having the cut costs an attacker at most
the margin. All values are in percentage points, and the margin is 1; each value is the worst one
over standard deviations from 0.3 to 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks import harness
from vfl.experiments.statistics import judge, steady_interval


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """Fractions of runs; each value is the worst one over several standard deviations.

    Attributes:
        law, victims: distribution of the victims' gains, and number of victims.
        wrong_no_easier, wrong_easier: fraction of wrong verdicts, for gains of exactly the margin
            and of exactly 0.
        covered: fraction of the intervals that contain the true mean.
        no_easier: fraction of verdicts "no easier" for gains with mean exactly 0 and the one
            standard deviation that `law` names.
    """

    law: str
    victims: int
    wrong_no_easier: float | None = None
    wrong_easier: float | None = None
    covered: float | None = None
    no_easier: float | None = None


#: Type: draws gains with mean 0 and standard deviation 1; axes (runs, victims).
Law = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
MARGIN, SPREADS = 1.0, (0.3, 0.5, 1.0, 3.0)


def two_points(share: float) -> Law:
    """Return a two-point distribution with this fraction of victims above the mean."""
    high, low = np.sqrt((1 - share) / share), np.sqrt(share / (1 - share))
    return lambda rng, axes: np.where(rng.random(axes) < share, high, -low)


LAWS: dict[str, Law] = {
    "normal": lambda rng, axes: rng.normal(size=axes),
    "skewed": lambda rng, axes: rng.exponential(size=axes) - 1,
    "skewed to the left": lambda rng, axes: 1 - rng.exponential(size=axes),
    "two-point, half leak": two_points(0.5),
    "two-point, a fifth leak": two_points(0.2),
}


def shares(law: Law, victims: int, mean: float, spread: float, runs: int) -> dict[str, float]:
    """Return the fraction of each verdict, and of intervals that contain the mean."""
    rng = np.random.default_rng(victims)
    gains = mean + spread * law(rng, (runs, victims))
    given = [judge(one, MARGIN).verdict for one in gains.tolist()]
    found = {name: given.count(name) / runs for name in ("no easier", "easier", "undecided")}
    ends = np.array([steady_interval(one, MARGIN / 4) for one in gains.tolist()])
    return found | {"covered": float(((ends[:, 0] <= mean) & (mean <= ends[:, 1])).mean())}


def bench_verdicts(runs: int = 4000) -> list[VerdictRow]:
    """Measure the error rate of the rule `vfl.experiments.statistics.judge`.

    Args:
        runs: number of simulated runs for each row.
    """
    found = []
    for name, law in LAWS.items():
        for victims in (3, 4, 5, 7, 10):
            at = [shares(law, victims, MARGIN, spread, runs) for spread in SPREADS]
            kept = SPREADS[:3] if name.startswith("two-point") else SPREADS
            none = [shares(law, victims, 0.0, spread, runs) for spread in kept]
            above = max(one["easier"] for one in none)
            covered = min(one["covered"] for one in (*at, *none))
            wrong = max(one["no easier"] for one in at)
            found.append(VerdictRow(name, victims, wrong, above, covered))
    for spread in (0.2, 0.3, 0.4, 0.5):
        for victims in (5, 7, 10):
            held = shares(LAWS["normal"], victims, 0.0, spread, runs)["no easier"]
            found.append(VerdictRow(f"no gain, deviation {spread}", victims, no_easier=held))
    return found


TABLE = harness.table(
    ("law", "", "law"),
    ("victims", "", "victims"),
    ("wrong no easier", ".3f", "wrong_no_easier"),
    ("wrong easier", ".3f", "wrong_easier"),
    ("covered", ".3f", "covered"),
    ("no easier", ".3f", "no_easier"),
    markdown=True,
)


main = harness.command(bench_verdicts, TABLE)


if __name__ == "__main__":
    main()
