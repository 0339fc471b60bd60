"""The processes of a benchmark: one for the label party, one for each feature party.

They are started once, with one thread each, and measure every path in turn.
"""

from __future__ import annotations

import secrets
from types import TracebackType

from vfl.bench.messages import Door, Job, Measurement, Role
from vfl.bench.network import Network
from vfl.bench.process import Process
from vfl.bench.workloads import FEATURE_PARTIES, LABEL_PARTY, Path

_WORKER = "vfl.bench.worker"


class Crew:
    """A context manager; the processes end with it, whatever they are doing.

    Args:
        network: what the parties' streams go over.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._label = Process(_WORKER, network.command(LABEL_PARTY))
        self._features = {
            party: Process(_WORKER, network.command(party)) for party in FEATURE_PARTIES
        }

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in [self._label, *self._features.values()]:
            process.end(at_once=error is not None)

    def measure(
        self,
        path: Path,
        workload: str,
        seed: int,
        warmup_steps: int,
        steps: int,
        secure: str = "none",
    ) -> Measurement:
        """Train once along a path; CPU time of all processes, wall time of the label party.

        Raises:
            PeerFailedError: a process ended early; its standard error says why.
        """
        role: Role = "host" if path == "tcp" or path == "tls" else path
        job = Job(
            role=role,
            workload=workload,
            seed=seed,
            warmup_steps=warmup_steps,
            steps=steps,
            host=self._network.host(LABEL_PARTY),
            wan=str(self._network.wan),
            secure=secure,
        )
        if role == "host":
            return self._over_stream(job, tls=path == "tls")
        self._label.tell(job)
        return self._label.hear(Measurement)

    def _over_stream(self, job: Job, *, tls: bool) -> Measurement:
        tokens = {party: secrets.token_urlsafe(32) for party in self._features}
        job = job.model_copy(
            update={"session": secrets.token_hex(16), "tokens": tokens, "tls": tls}
        )
        self._label.tell(job)
        door = self._label.hear(Door)
        for party, process in self._features.items():
            near = door.seen(self._network, party, LABEL_PARTY)
            own = {"role": "join", "tokens": {party: tokens[party]}, "door": near}
            process.tell(job.model_copy(update=own))
        label = self._label.hear(Measurement)
        others = [process.hear(Measurement).cpu_ms for process in self._features.values()]
        return label.model_copy(update={"cpu_ms": label.cpu_ms + sum(others)})
