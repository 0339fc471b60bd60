"""How often the rule of `vfl.experiments.statistics.judge` errs, by simulation.

    python -m benchmarks.verdicts --runs 4000

Victims are drawn with a gain of exactly the margin (a wrong "no easier"), of exactly 0 (a wrong
"easier", and what label-free bottoms are), from three laws: normal, exponential in either direction
and two-point. The cut costs a two-point victim's attacker no more than the margin. All figures are
in points, the margin is 1; each is the worst over deviations of 0.3 to 3.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from vfl.experiments.statistics import judge, steady_interval

#: Draws gains of deviation 1 around 0, axes (runs, victims).
Law = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
MARGIN, SPREADS = 1.0, (0.3, 0.5, 1.0, 3.0)


def two_points(share: float) -> Law:
    """So many victims are above the mean, all by as much."""
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
    """How often each verdict is given, and how often the interval holds the mean."""
    rng = np.random.default_rng(victims)
    gains = mean + spread * law(rng, (runs, victims))
    given = [judge(one, MARGIN).verdict for one in gains.tolist()]
    found = {name: given.count(name) / runs for name in ("no easier", "easier", "undecided")}
    ends = np.array([steady_interval(one, MARGIN / 4) for one in gains.tolist()])
    return found | {"covered": float(((ends[:, 0] <= mean) & (mean <= ends[:, 1])).mean())}


def main() -> None:
    """Print a line for each law and number of victims."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4000, help="runs of each line")
    runs = parser.parse_args().runs
    print("| law | victims | wrong no easier | wrong easier | covered |")
    print("| --- | --- | --- | --- | --- |")
    for name, law in LAWS.items():
        for victims in (3, 4, 5, 7, 10):
            at = [shares(law, victims, MARGIN, spread, runs) for spread in SPREADS]
            kept = SPREADS[:3] if name.startswith("two-point") else SPREADS
            none = [shares(law, victims, 0.0, spread, runs) for spread in kept]
            wrong = max(one["no easier"] for one in at)
            above = max(one["easier"] for one in none)
            covered = min(one["covered"] for one in (*at, *none))
            print(f"| {name} | {victims} | {wrong:.3f} | {above:.3f} | {covered:.3f} |")
    print("\n| no gain, deviation (points) | victims | no easier |")
    print("| --- | --- | --- |")
    for spread in (0.2, 0.3, 0.4, 0.5):
        for victims in (5, 7, 10):
            found = shares(LAWS["normal"], victims, 0.0, spread, runs)
            print(f"| {spread} | {victims} | {found['no easier']:.3f} |")


if __name__ == "__main__":
    main()
