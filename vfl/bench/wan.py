"""``vfl bench wan``: what several cuts in flight gain over a slow link, and what they cost.

Label party and feature parties are processes of their own, with slow lines between them
(`vfl.bench.network`), or one process that computes what the lines take. Every depth starts from the
same weights and sees the same batches. The clock runs while training does, at the label party; the
tests in between do not count. Before each test the gradients in flight are waited for, as they are
at the end of every epoch anyway.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from vfl.bench.messages import Door, Mark, Marks, WanJob
from vfl.bench.network import Network, Wan, choose, open_network
from vfl.bench.process import Process
from vfl.config import DataSettings, Experiment, with_overrides
from vfl.config.experiment import LabelSettings, PartySettings, TrainSettings
from vfl.core.errors import ConfigError
from vfl.experiments.plan import check_specs

TESTS_AN_EPOCH = 4
_WORKER = "vfl.bench.wan_worker"


@dataclass(frozen=True, slots=True)
class WanRow:
    """A training over the slow link.

    Attributes:
        in_flight: cuts that awaited their gradients at once.
        exchanges_per_second: over the whole training.
        exchanges, seconds: training until the accuracy was first reached at a test; None if never.
        final_accuracy: at the last test.
        best_accuracy: at the best test.
        speedup: how much sooner the accuracy was reached than in the first row.
        accuracies: at every test, in order.
    """

    in_flight: int
    exchanges_per_second: float
    exchanges: int | None
    seconds: float | None
    final_accuracy: float
    best_accuracy: float
    speedup: float | None
    accuracies: tuple[float, ...]


def wan_experiment(
    source: str, codec: str, batch_rows: int, learning_rate: float, epochs: int, seed: int
) -> Experiment:
    """Two halves of a picture, bottoms n-64-32, top 64-64-classes, Adam."""
    party = PartySettings(width=32, bottom="mlp:hidden=64")
    return Experiment(
        name="wan",
        seed=seed,
        codec=codec,
        data=DataSettings(source=source, validation=0.0),
        parties={"left": party, "right": party},
        label=LabelSettings(top="mlp:hidden=64"),
        train=TrainSettings(epochs=epochs, batch_rows=batch_rows, learning_rate=learning_rate),
    )


def bench_wan(
    experiment: Experiment,
    in_flight: Sequence[int],
    wan: Wan,
    until: float,
    *,
    network: str = "auto",
    tests: int = TESTS_AN_EPOCH,
    rows: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[WanRow]:
    """Train once for each depth.

    Args:
        experiment: what is trained, on pictures with a name.
        in_flight: depths to compare, the one that others are compared with first.
        wan: every party's line.
        until: test accuracy that is waited for, 0 to 1.
        network: how lines are made: auto, tun, proxy or model.
        tests: how often an epoch the test rows are asked.
        rows: use only so many rows of the data set.
        say: told one line about each depth.

    Raises:
        ConfigError: nothing to compare, or a depth that is no setting.
        SpecError: the codec cannot be used, or no such network.
        UserError: a network that cannot be had here.
        PeerFailedError: a process ended early; its standard error says why.
    """
    if not in_flight or tests < 1 or wan == Wan():
        raise ConfigError(
            "nothing to measure",
            got=f"{len(in_flight)} depths, {tests} tests an epoch, {wan}",
            want="at least one depth and one test, and a line with a bandwidth or a delay",
        )
    check_specs(experiment)
    asked = [with_overrides(experiment, [f"train.in_flight={depth}"]) for depth in in_flight]
    kind = choose(network)
    found: list[WanRow] = []
    for depth, each in zip(in_flight, asked, strict=True):
        say(f"{depth} in flight, {wan}, {kind}")
        job = WanJob(party=each.label.party, experiment=each, tests=tests, rows=rows)
        marks = _compute(job, wan) if kind == "model" else _train(job, wan, kind)
        found.append(_row(depth, marks, until, found[0].seconds if found else None))
    return found


def format_wan(rows: Sequence[WanRow]) -> str:
    """The rows as a table for people."""
    head = f"{'in flight':>9}{'exchanges/s':>13}{'exchanges':>11}{'seconds':>9}{'sooner':>8}"
    lines = [f"{head}{'best':>9}{'final':>9}"]
    for row in rows:
        reached = f"{'never':>11}{'':>9}"
        if row.exchanges is not None:
            reached = f"{row.exchanges:>11}{row.seconds:>9.1f}"
        sooner = f"{row.speedup:.1f}x" if row.speedup else ""
        lines.append(
            f"{row.in_flight:>9}{row.exchanges_per_second:>13.1f}{reached}{sooner:>8}"
            f"{row.best_accuracy:>9.4f}{row.final_accuracy:>9.4f}"
        )
    return "\n".join(lines)


def _compute(job: WanJob, wan: Wan) -> Sequence[Mark]:
    """One training in a process that plays all parties."""
    with ExitStack() as stack:
        process = _start(stack)
        process.tell(job.model_copy(update={"wan": str(wan)}))
        return process.hear(Marks).marks


def _train(job: WanJob, wan: Wan, kind: str) -> Sequence[Mark]:
    """One training with a process a party and slow lines between them."""
    label, experiment = job.party, job.experiment
    tokens = {party: secrets.token_urlsafe(32) for party in experiment.feature_parties}
    with ExitStack() as stack:
        network = stack.enter_context(open_network([label, *tokens], wan, kind))
        processes = {party: _start(stack, network, party) for party in network.parties}
        shared = {"session": secrets.token_hex(16), "tokens": tokens, "host": network.host(label)}
        job = job.model_copy(update=shared)
        processes[label].tell(job)
        door = processes[label].hear(Door)
        for party, token in tokens.items():
            near = door.seen(network, party, label)
            own = {"party": party, "tokens": {party: token}, "door": near}
            processes[party].tell(job.model_copy(update=own))
        marks = processes[label].hear(Marks).marks
        for party in tokens:
            processes[party].hear(Marks)
    return marks


def _start(stack: ExitStack, network: Network | None = None, party: str = "") -> Process:
    process = Process(_WORKER, network.command(party) if network else ())
    stack.callback(process.end, at_once=True)
    return process


def _row(depth: int, marks: Sequence[Mark], until: float, first_seconds: float | None) -> WanRow:
    reached = next((mark for mark in marks if mark.accuracy >= until), None)
    seconds = reached.seconds if reached else None
    return WanRow(
        in_flight=depth,
        exchanges_per_second=marks[-1].exchanges / marks[-1].seconds,
        exchanges=reached.exchanges if reached else None,
        seconds=seconds,
        final_accuracy=marks[-1].accuracy,
        best_accuracy=max(mark.accuracy for mark in marks),
        speedup=first_seconds / seconds if first_seconds and seconds else None,
        accuracies=tuple(mark.accuracy for mark in marks),
    )
