"""Cost of a training step at the label party with 2 to 64 feature parties over TLS.

    python -m benchmarks.hub
    python -m benchmarks.hub --wan 40ms

The label party runs in its own process. The feature parties are threads of two processes, unlike
real parties, so the result rows show only the label party's CPU time. Emulated network links delay
bytes (`benchmarks.emulation.proxy`). The limit (`limit_ms`) is the time that delay and bandwidth
alone would take for a step.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from benchmarks import harness
from benchmarks.emulation import Network, Wan, open_network
from benchmarks.training_step import (
    KNOWN,
    LABEL_PARTY,
    Measurement,
    Setup,
    StepJob,
    host,
    join,
    modelled,
)
from benchmarks.worker import BenchmarkWorker, Endpoint, Parent
from vfl.config.toml import Settings

COUNTS, STEPS, REPEATS, WARMUP_STEPS = (2, 8, 64), 40, 3, 5
#: Number of processes that run the feature parties.
_HOSTS = 2


class Parts(Settings):
    """Parties that a process runs: the label party, or a thread for each feature party."""

    jobs: list[StepJob]


class HubRow(Settings):
    """Cost of a step for one number of parties; medians over the turns.

    Attributes:
        parties: number of feature parties.
        wan: network link of every party; "" on the loopback interface.
        wall_ms: wall time of a step at the label party, in milliseconds.
        cpu_ms: CPU time of a step in the label party's process, in milliseconds.
        cpu_a_party_us: CPU time of a step per feature party, in microseconds.
        limit_ms: least time of a step that the network links allow; 0 on the loopback interface.
    """

    parties: int
    wan: str
    wall_ms: float
    cpu_ms: float
    cpu_a_party_us: float
    limit_ms: float


def bench_hub(
    parties: Sequence[int] = COUNTS,
    wan: Wan | None = None,
    steps: int = STEPS,
    repeats: int = REPEATS,
) -> list[HubRow]:
    """Measure a label party that trains with many feature parties over TLS.

    Args:
        parties: numbers of feature parties to measure, among 2, 4, 8, 16, 32 and 64.
        wan: network link of every party, such as 40ms; None means the loopback interface.
        steps: number of timed steps in a turn.
        repeats: number of turns.
    """
    turns: dict[int, list[Measurement]] = {count: [] for count in parties}
    for turn in range(repeats):
        for count in parties:
            harness.say(f"{count} parties, turn {turn + 1} of {repeats}")
            turns[count].append(_measure(_job(count, steps, turn), wan))
    return [_row(count, turns[count], _job(count, steps, 0), wan) for count in parties]


def _job(count: int, steps: int, seed: int) -> StepJob:
    return StepJob(
        path="tls", workload=f"many_{count}", seed=seed, warmup_steps=WARMUP_STEPS, steps=steps
    )


def _measure(job: StepJob, wan: Wan | None) -> Measurement:
    parties = KNOWN[job.workload].parties
    with ExitStack() as stack:
        network: Network = stack.enter_context(open_network([LABEL_PARTY, *parties], wan, "proxy"))
        label, *hosts = (stack.enter_context(BenchmarkWorker("hub")) for _ in range(1 + _HOSTS))
        tokens = {party: secrets.token_urlsafe(32) for party in parties}
        session = {"session": secrets.token_hex(16), "tokens": tokens}
        own = session | {"party": LABEL_PARTY, "host": network.host(LABEL_PARTY)}
        label.put(Parts(jobs=[job.model_copy(update=own)]))
        listens = label.get(Endpoint)
        for number, worker in enumerate(hosts):
            played = [
                job.model_copy(
                    update=session
                    | {"party": party, "tokens": {party: tokens[party]}}
                    | {"endpoint": listens.seen(network, party, LABEL_PARTY)}
                )
                for party in parties[number::_HOSTS]
            ]
            worker.put(Parts(jobs=played))
        for worker in hosts:
            worker.get(Measurement)
        return label.get(Measurement)


def _row(count: int, turns: Sequence[Measurement], job: StepJob, wan: Wan | None) -> HubRow:
    took = harness.middle(turns, "wall_ms", "cpu_ms")
    limit = modelled(job.model_copy(update={"wan": str(wan)})).wall_ms if wan else 0.0
    return HubRow(
        parties=count,
        wan=str(wan or ""),
        cpu_a_party_us=1000 * took["cpu_ms"] / count,
        limit_ms=limit,
        **took,
    )


def work(parent: Parent) -> None:
    """Run the parties that the received job names."""
    for parts in parent.each(Parts):
        setups = [Setup(job) for job in parts.jobs]
        if parts.jobs[0].party == LABEL_PARTY:
            parent.put(host(setups[0], parent))
            continue
        with ThreadPoolExecutor(len(setups)) as pool:
            first, *_ = pool.map(join, setups)
            parent.put(first)


TABLE = harness.table(
    ("parties", ">8", "parties"),
    ("line", ">10", lambda row: row.wan or "-"),
    ("wall ms", ">10.2f", "wall_ms"),
    ("limit ms", ">10.2f", "limit_ms"),
    ("CPU ms", ">9.2f", "cpu_ms"),
    ("us a party", ">12.0f", "cpu_a_party_us"),
)


main = harness.command(bench_hub, TABLE)


if __name__ == "__main__":
    main()
