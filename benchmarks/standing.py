"""`vfl serve` on a real federation under load, while runs are promoted and parties are killed.

Every party runs its own commands on this machine: `vfl up` with Flower's SuperLink or SuperNode,
and streams over TLS on the loopback interface. Clients send HTTP requests without a pause. In every
round, a feature party is killed (SIGKILL) and started again, and another run is promoted; in every
second round, the run is promoted while the party is down. Each answer is compared bit for bit with
the result of `vfl predict` for the run that the answer names. A 503 is correct while the party that
it names is down; any other failure is a fault.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks import harness
from benchmarks.serving import Load, wait_ready
from vfl.core.errors import LostPeerError, UserError
from vfl.core.processes import Service
from vfl.training import demo

CLIENTS, MINUTES, ROUND_S, AWAY_S = 8, 10.0, 60.0, 10.0
SIDES = ("left", "right")
_PATIENCE_S, _LOOK_S = 180.0, 0.02
#: Seconds without a kill at the beginning of the load, and after the last kill's answer.
_CALM_S = 3.0
_COMMAND = (sys.executable, "-m", "vfl")
_CLIENT_APP = "flwr-clientapp"

#: Victims of a kill: the process of a session; the command `vfl up`, whose child processes have to
#: notice it; or everything that the party runs, as in a power failure.
Kill = Literal["session", "command", "machine"]
KILLS: tuple[Kill, ...] = ("machine", "command", "session")


@dataclass(slots=True)
class Loss:
    """A party that was killed; all times are from one clock, in seconds.

    Attributes:
        party: name of the party.
        kill: victim of the kill; see `Kill`.
        killed_at, back_at: time of the kill, and time when the SuperNode had connected again. For a
            session, whose SuperNode stays connected, the two times are equal.
        answered_at: time of the first answer after the party's return.
        left: number of the party's processes that outlived the command which had started them.
    """

    party: str
    kill: Kill
    killed_at: float
    back_at: float = np.inf
    answered_at: float = np.inf
    left: int = 0


@dataclass(slots=True)
class Outcome:
    """Results of all clients of a load test.

    Attributes:
        losses: parties that were killed.
        promotions: duration of each promotion in seconds.
        answered: number of right answers, by name of the run.
        unavailable: time of each 503, and the party that it named.
        faults: wrong answers, other refusals and lost connections, described without ids.
    """

    losses: list[Loss] = field(default_factory=list)
    promotions: list[float] = field(default_factory=list)
    answered: dict[str, int] = field(default_factory=dict)
    unavailable: list[tuple[float, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def unexcused(self) -> list[str]:
        """Return all faults, and every 503 at a time when the party that it names was running."""
        return self.faults + [
            f"503 names {party} at {at:.1f} s, which was there"
            for at, party in self.unavailable
            if not any(
                loss.party == party and loss.killed_at <= at <= loss.answered_at
                for loss in self.losses
            )
        ]


@dataclass(frozen=True, slots=True)
class StandingRow:
    """Results of one kind of event, or of the whole load.

    Attributes:
        what: the kind of kill, "promotion", or "all".
        times: number of events.
        slowest_s, median_s: seconds from the return of the party to the first answer, or of a
            promotion; None for the whole load.
        answered: number of right answers; like the following fields only for the whole load.
        unavailable: number of 503 answers that named a party that was down.
        faults: number of all other results.
        left: number of processes that outlived a killed command.
    """

    what: str
    times: int
    median_s: float | None = None
    slowest_s: float | None = None
    answered: int | None = None
    unavailable: int | None = None
    faults: int | None = None
    left: int | None = None


class Standing:
    """The demo project, with a running command for each party, two trained runs and a service.

    Args:
        folder: folder for all files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.label = demo.write_demo(folder / "project", ["train.epochs=3"])
        self._running: dict[str, Service] = {}
        self._logs = folder / "logs"
        self.runs: list[Path] = []

    def start(self) -> None:
        """Start all parties, train twice, predict with both runs, and serve the first run."""
        self._start("label", "up", self.label.path, marker="listens on")
        for side in SIDES:
            self.bring(side)
        for seed in (0, 1):
            run = Path(json.loads(self.vfl("train", self.label.path, "-s", f"seed={seed}"))["run"])
            self.vfl("predict", run)
            self.runs.append(run)
        self.vfl("promote", self.runs[0])
        limits = ("--probability-decimals", "off", "--max-rows-per-day", "off")
        serve = ("serve", self.label.path, "--port", 0, *limits)
        self._start("service", *serve, marker="listens at")

    def vfl(self, *arguments: object) -> str:
        """Run a command of vfl that must succeed; return its JSON output."""
        done = subprocess.run(
            [*_COMMAND, *map(str, arguments), "--json"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LostPeerError(f"vfl {arguments[0]} failed", got=done.stderr[-2000:])
        return done.stdout

    def bring(self, side: str) -> None:
        """Start a feature party, also after a kill; return once it is connected."""
        if side in self._running:
            self._running[side].stop()
        self._start(side, "up", self.folder / "project" / side, marker="is connected")

    def kill(self, side: str, kill: Kill) -> set[int]:
        """Kill some processes of a party; return its others, which must end by themselves."""
        top = self._running[side].pid
        family = {pid: harness.called(pid) for pid in harness.family(top)}
        match kill:
            case "machine":
                chosen = set(family)
            case "command":
                chosen = {top}
            case "session":
                chosen = {pid for pid, name in family.items() if name == _CLIENT_APP}
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)
        return set() if kill == "session" else family.keys() - chosen

    def expected(self) -> dict[str, dict[str, tuple[str, list[np.float32]]]]:
        """Return the predictions and probabilities of `vfl predict`, by run and id."""
        return {run.name: _predicted(run / "predictions.csv") for run in self.runs}

    def load(self) -> Load:
        """Return the clients of the service, once the service is ready."""
        first = self.runs[0]
        address = json.loads((first / "serving.json").read_text())["address"]
        token = (first / "serve.token").read_text().strip()
        wait_ready(address)
        return Load(address, token, list(_predicted(first / "predictions.csv")))

    def _start(self, name: str, *arguments: object, marker: str) -> None:
        service = Service(
            name, [*_COMMAND, *map(str, arguments)], os.environ, self._logs / f"{name}.log"
        )
        self._running[name] = service
        service.wait_for(marker, _PATIENCE_S)

    def close(self) -> None:
        """End every command; the service ends first."""
        for name in ("service", *SIDES, "label"):
            if name in self._running:
                self._running[name].stop(30)


def _predicted(path: Path) -> dict[str, tuple[str, list[np.float32]]]:
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    shown = [at for at, name in enumerate(head) if name.startswith("probability_")]
    return {row[0]: (row[1], [np.float32(row[at]) for at in shown]) for row in rows}


@contextmanager
def standing() -> Iterator[Standing]:
    """Yield a federation that serves, and end it afterwards."""
    with tempfile.TemporaryDirectory(prefix="vfl-standing-") as name:
        made = Standing(Path(name))
        try:
            made.start()
            yield made
        finally:
            made.close()


class Recorder:
    """Compares every answer with the expected one, and records when each party was down."""

    def __init__(self, expected: Mapping[str, Mapping[str, tuple[str, list[np.float32]]]]) -> None:
        self.outcome, self._expected = Outcome(), expected
        self._last_answer = 0.0

    def checked(self, each: str, status: int, body: bytes) -> None:
        """Record the answer to a request; status 0 is a lost connection."""
        now, outcome = time.monotonic(), self.outcome
        told = json.loads(body) if body else {}
        if status == 200:
            (row,), run = told["predictions"], told["version"]
            got = str(row["prediction"]), [np.float32(p) for p in row["probabilities"]]
            if got != self._expected[run][each]:
                outcome.faults.append(f"a wrong answer by {run}")
                return
            outcome.answered[run] = outcome.answered.get(run, 0) + 1
            for loss in outcome.losses:
                if loss.back_at < now < loss.answered_at and not self._named(loss, now):
                    loss.answered_at = now
        elif status == 503:
            outcome.unavailable.append((now, str(told.get("party"))))
        else:
            outcome.faults.append(f"status {status}, {told.get('code', 'no code')}")

    def _named(self, loss: Loss, now: float) -> bool:
        """Return whether an answer may ignore a party's loss, because detection takes time."""
        told = any(at >= loss.killed_at for at, _ in self.outcome.unavailable)
        return not told and now < loss.killed_at + 1.0


def play(
    made: Standing,
    clients: int,
    seconds: float,
    round_s: float,
    away_s: float,
    kills: Sequence[Kill],
) -> Outcome:
    """Send requests to a service during rounds of kills and promotions.

    Args:
        made: the federation that serves.
        clients: number of simultaneous clients.
        seconds: duration of the load in seconds, in whole rounds.
        round_s: seconds between two kills.
        away_s: seconds between the kill of a party and its restart.
        kills: victims of the kills, in turn; see `Kill`.
    """
    recorder, load = Recorder(made.expected()), made.load()
    load.checked = recorder.checked
    rounds = max(1, round(seconds / round_s))
    most_s = rounds * (round_s + 2 * _PATIENCE_S)
    asking = threading.Thread(target=load.run, args=(clients, most_s))
    asking.start()
    began = time.monotonic()
    try:
        for number in range(rounds):
            time.sleep(max(0.0, began + number * round_s + _CALM_S - time.monotonic()))
            loss = Loss(SIDES[number % 2], kills[number % len(kills)], time.monotonic())
            recorder.outcome.losses.append(loss)
            _round(made, recorder.outcome, loss, away_s, number)
        time.sleep(max(_CALM_S, began + rounds * round_s - time.monotonic()))
    finally:
        load.over = True
        asking.join()
    return recorder.outcome


def _round(made: Standing, outcome: Outcome, loss: Loss, away_s: float, number: int) -> None:
    """Kill a party, restart it and promote a run, in every second round during the outage."""

    def promote() -> None:
        since = time.monotonic()
        try:
            made.vfl("promote", made.runs[(number + 1) % len(made.runs)])
        except LostPeerError as error:
            outcome.faults.append(f"a promotion failed: {error.got}")
        else:
            outcome.promotions.append(time.monotonic() - since)

    promoting, meanwhile = threading.Thread(target=promote), number % 2 == 1
    left = made.kill(loss.party, loss.kill)
    harness.say(f"killed the {loss.kill} of {loss.party}")
    if meanwhile:
        promoting.start()
    if loss.kill == "session":
        loss.back_at = loss.killed_at
    else:
        time.sleep(away_s)
        made.bring(loss.party)
        loss.back_at = time.monotonic()
    late = time.monotonic() + _PATIENCE_S
    while time.monotonic() < late and not np.isfinite(loss.answered_at):
        time.sleep(_LOOK_S)
    harness.say(f"answers came {loss.answered_at - loss.back_at:.1f} s after its return")
    if not meanwhile:
        promoting.start()
    promoting.join()
    loss.left = sum(Path(f"/proc/{pid}").exists() for pid in left)


def bench_standing(
    minutes: float = MINUTES,
    clients: int = CLIENTS,
    round_s: float = ROUND_S,
    away_s: float = AWAY_S,
    kills: Sequence[str] = KILLS,
) -> list[StandingRow]:
    """Send requests to a serving federation while runs are promoted and parties are killed.

    Args:
        minutes: duration of the load in minutes.
        clients: number of simultaneous clients, each of which requests one row after another.
        round_s: seconds between two kills.
        away_s: seconds from the kill of a party to the restart of its command.
        kills: victims of the kills, one after the other: machine, command, session.

    Raises:
        UserError: the operating system does not list its processes, or a kind of kill is unknown.
        LostPeerError: a process did not start.
    """
    if not sys.platform.startswith("linux"):
        raise UserError("processes can be found only under Linux", got=sys.platform)
    if unknown := set(kills) - set(KILLS):
        raise UserError("an unknown kind of loss", got=", ".join(unknown), want=", ".join(KILLS))
    with standing() as made:
        outcome = play(made, clients, 60 * minutes, round_s, away_s, kills)  # type: ignore[arg-type]
    for fault in outcome.unexcused()[:20]:
        harness.say(fault)
    return rows_of(outcome)


def rows_of(outcome: Outcome) -> list[StandingRow]:
    """Return a row for each kind of event, and a row for the whole load test."""
    took = {
        f"{kill} killed": [
            loss.answered_at - loss.back_at for loss in outcome.losses if loss.kill == kill
        ]
        for kill in KILLS
    } | {"promotion": outcome.promotions}
    rows = [
        StandingRow(what, len(seconds), float(np.median(seconds)), max(seconds))
        for what, seconds in took.items()
        if seconds
    ]
    faults = outcome.unexcused()
    whole = StandingRow(
        "all",
        len(outcome.losses) + len(outcome.promotions),
        answered=sum(outcome.answered.values()),
        unavailable=len(outcome.unavailable) - (len(faults) - len(outcome.faults)),
        faults=len(faults),
        left=sum(loss.left for loss in outcome.losses),
    )
    return [*rows, whole]


TABLE = harness.table(
    ("", "<18", "what"),
    ("times", ">6", "times"),
    ("median s", ">10.1f", "median_s"),
    ("slowest s", ">10.1f", "slowest_s"),
    ("as predicted", ">14", "answered"),
    ("503 by name", ">13", "unavailable"),
    ("faults", ">8", "faults"),
    ("left", ">6", "left"),
)


main = harness.command(bench_standing, TABLE, lambda row: not (row.faults or row.left))


if __name__ == "__main__":
    main()
