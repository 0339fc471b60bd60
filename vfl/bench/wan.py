"""``vfl bench wan``: what several cuts in flight gain over a slow link, and what they cost.

Label party and feature parties are processes of their own; the stream's TLS connections go through
a proxy that delays them. Every depth starts from the same weights and sees the same batches. The
clock runs while training does, at the label party; the tests in between do not count. Before each
test the gradients in flight are waited for, as they are at the end of every epoch anyway.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from vfl.bench.crew import Process
from vfl.bench.messages import Door, Mark, Marks, WanJob
from vfl.bench.slow_link import SlowLink
from vfl.config import DataSettings, Experiment, with_overrides
from vfl.config.experiment import LabelSettings, PartySettings, TrainSettings
from vfl.errors import ConfigError
from vfl.plan import check_specs

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
    delay_ms: float,
    mbps: float | None,
    until: float,
    *,
    tests: int = TESTS_AN_EPOCH,
    rows: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[WanRow]:
    """Train once for each depth.

    Args:
        experiment: what is trained, on pictures with a name.
        in_flight: depths to compare, the one that others are compared with first.
        delay_ms: one way.
        mbps: bandwidth in each direction, shared by the parties; None is no limit.
        until: test accuracy that is waited for, 0 to 1.
        tests: how often an epoch the test rows are asked.
        rows: use only so many rows of the data set.
        say: told one line about each depth.

    Raises:
        ConfigError: nothing to compare, or a depth that is no setting.
        SpecError: the codec cannot be used.
        PeerFailedError: a process ended early; its standard error says why.
    """
    if not in_flight or tests < 1 or delay_ms < 0:
        raise ConfigError(
            "nothing to measure",
            got=f"{len(in_flight)} depths, {tests} tests an epoch, {delay_ms:g} ms",
            want="at least one depth and one test, and no negative delay",
        )
    check_specs(experiment)
    asked = [with_overrides(experiment, [f"train.in_flight={depth}"]) for depth in in_flight]
    found: list[WanRow] = []
    for depth, each in zip(in_flight, asked, strict=True):
        say(f"{depth} in flight, {2 * delay_ms:g} ms there and back")
        marks = _train(each, tests, rows, delay_ms, mbps)
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


def _train(
    experiment: Experiment, tests: int, rows: int | None, delay_ms: float, mbps: float | None
) -> Sequence[Mark]:
    """One training with a process a party and the slow link between them."""
    tokens = {party: secrets.token_urlsafe(32) for party in experiment.feature_parties}
    job = WanJob(
        party=experiment.label.party,
        experiment=experiment,
        tests=tests,
        rows=rows,
        session=secrets.token_hex(16),
        tokens=tokens,
    )
    with ExitStack() as stack:
        label, *features = (_start(stack) for _ in range(1 + len(tokens)))
        label.tell(job)
        door = label.hear(Door)
        link = stack.enter_context(SlowLink(door.port, delay_ms, mbps))
        slow = door.model_copy(update={"port": link.port})
        for (party, token), process in zip(tokens.items(), features, strict=True):
            own = {"party": party, "tokens": {party: token}, "door": slow}
            process.tell(job.model_copy(update=own))
        marks = label.hear(Marks).marks
        for process in features:
            process.hear(Marks)
    return marks


def _start(stack: ExitStack) -> Process:
    process = Process(_WORKER)
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
