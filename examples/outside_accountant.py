"""An accountant of your own in one file: zero-concentrated differential privacy.

This file registers the accountant in the process that runs the file. A package instead declares its
member in the package's pyproject.toml:

    [project.entry-points."vfl.accountants"]
    zcdp = "outside_accountant:Concentrated"

The package tests the accountant with `vfl.testing`:

    class TestMine(AccountantContract):
        specs = ["zcdp"]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vfl.privacy.accountants import ACCOUNTANTS, Accountant, GaussianSteps, epsilon_by


class Concentrated(Accountant):
    """Zero-concentrated differential privacy (zCDP); sampling does not improve its bound.

    Bun and Steinke 2016: a Gaussian step with noise s satisfies 1 / (2 s^2)-zCDP (proposition 1.6).
    The zCDP parameters of several steps are added (lemma 1.7). The sum rho gives epsilon = rho + 2
    sqrt(rho log(1 / delta)) (proposition 1.3).
    """

    def epsilon(self, steps: Sequence[GaussianSteps], delta: float) -> float:
        rho = sum(one.steps / (2 * one.noise**2) for one in steps)
        return rho + 2 * math.sqrt(rho * math.log(1 / delta))


ACCOUNTANTS.register("zcdp", Concentrated)

if __name__ == "__main__":
    steps = GaussianSteps(noise=20.0, steps=100)
    for name in ("zcdp", "rdp"):
        print(f"{name} epsilon {epsilon_by(steps, 1e-5, name):.3f}")
