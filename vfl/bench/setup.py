"""What every path of a measurement starts from, the same in every process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch import nn

from vfl.bench.clock import Clock
from vfl.bench.halves import fresh_bottom, fresh_top, synthetic
from vfl.bench.messages import Job, Measurement
from vfl.bench.workloads import FEATURE_PARTIES, LABEL_PARTY, WORKLOADS
from vfl.datasets import PartyData
from vfl.seeds import Secret
from vfl.session import Exchange, Terms


class Setup:
    """Rows, terms, first weights and the clock of one job."""

    def __init__(self, job: Job, now: Callable[[], float] = time.perf_counter) -> None:
        self.job = job
        self.workload = WORKLOADS[job.workload]
        self.experiment = self.workload.experiment(job.seed, job.warmup_steps + job.steps)
        self.terms = Terms.of(self.experiment, "train", self.experiment.name)
        self.data: dict[str, PartyData] = synthetic(self.workload, job.seed)
        self._clock = Clock(job.warmup_steps, job.steps, now)

    def schedule(self) -> Iterator[Exchange]:
        """The exchanges, under the clock."""
        return self._clock.over(self.terms.schedule(self.data[LABEL_PARTY].split))

    def measurement(self, final_loss: float | None = None) -> Measurement:
        """What the clock saw."""
        return self._clock.measurement(final_loss)

    def bottoms(self) -> dict[str, nn.Module]:
        """Every feature party's fresh half."""
        seed = self.job.seed
        return {name: fresh_bottom(self.workload, seed, name) for name in FEATURE_PARTIES}

    def top(self) -> nn.Module:
        """The label party's fresh half."""
        return fresh_top(self.workload, self.job.seed)

    def secret(self, party: str) -> Secret:
        """A party's stand-in secret; nothing here needs protection."""
        return Secret.of_simulation(self.job.seed, party)
