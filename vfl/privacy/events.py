"""Events of Gaussian noise that affect a record; accountants compute the epsilon that they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vfl.core.registry import require

#: Largest number of steps in one `GaussianSteps`.
MOST_STEPS = 10**9


@dataclass(frozen=True, slots=True)
class GaussianSteps:
    """Steps that add Gaussian noise to a sum over records, described for a single record.

    Attributes:
        noise: standard deviation of the noise divided by the sensitivity.
        steps: number of steps.
        sampling_rate: probability that a step includes the record, independently in each step
            (Poisson sampling); 1 means that every step includes it.

    Raises:
        BadOptionError: a number is out of range.
    """

    noise: float
    steps: int
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        require("noise", self.noise, "above 0", 0 < self.noise < math.inf)
        require("steps", self.steps, f"0 to {MOST_STEPS}", 0 <= self.steps <= MOST_STEPS)
        rate = self.sampling_rate
        require("sampling_rate", rate, "above 0, at most 1", 0 < rate <= 1)


#: Noise steps of one kind, or a sequence of several kinds of noise steps.
Steps = GaussianSteps | Sequence[GaussianSteps]


def poisson_steps(rows: int, batch_size: int) -> int:
    """Return the number of steps in an epoch whose Poisson sampling rate is batch_size / rows.

    >>> poisson_steps(60_000, 600), poisson_steps(5, 600)
    (100, 1)
    """
    return max(1, round(rows / batch_size))
