"""What every path of a measurement starts from, the same in every process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch import nn

from vfl.bench.clock import Clock
from vfl.bench.halves import fresh_bottom, fresh_top, synthetic
from vfl.bench.messages import Job, Measurement
from vfl.bench.workloads import FEATURE_PARTIES, KNOWN, LABEL_PARTY
from vfl.config import Experiment
from vfl.core.seeds import Secret
from vfl.datasets import PartyData
from vfl.mpc.secure.keys import Agreement
from vfl.session import Exchange, Terms, secure
from vfl.session.secure import shares_weights


class Setup:
    """Rows, terms, first weights and the clock of one job."""

    def __init__(self, job: Job, now: Callable[[], float] = time.perf_counter) -> None:
        self.job = job
        self.workload = KNOWN[job.workload]
        whole = self.workload.experiment(job.seed, job.warmup_steps + job.steps)
        self.experiment = _secured(whole, job.secure)
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

    def agreement(self, party: str) -> Agreement:
        """A feature party's side of an agreement on keys, with keys that protect nobody."""
        mode = secure.make(self.terms.secure)
        everybody = {name: self.secret(name) for name in FEATURE_PARTIES}
        keys = mode.simulated_keys(everybody, self.terms, self.job.session, 0)[party]
        assert isinstance(keys, Agreement), "a mode that sums cuts"
        return keys

    def secret(self, party: str) -> Secret:
        """A party's stand-in secret; nothing here needs protection."""
        return Secret.of_simulation(self.job.seed, party)


def _secured(experiment: Experiment, secure: str) -> Experiment:
    """The experiment under a secure mode; weights that are shared take no momentum."""
    secured = experiment.model_copy(update={"secure": secure})
    if not shares_weights(secured):
        return secured
    train = experiment.train.model_copy(update={"momentum": 0.0})
    return secured.model_copy(update={"train": train})
