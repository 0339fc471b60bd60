"""``vfl bench network``: what the lines between processes really do, beside what they should.

Three parties send each other bytes in the patterns of protocols, over TCP connections that stay
open. Beside the time stands what the model computes and the limit of any protocol that sends as
much in as many hops. The first turn finds TCP cold, with its windows still small, and is told
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from vfl.bench.messages import Door, LinesJob, Play, Played
from vfl.bench.network import Network, Wan, choose, open_network
from vfl.bench.patterns import PARTIES, PATTERNS, Pattern, modelled_s, most_bytes
from vfl.bench.process import Process
from vfl.core.errors import ConfigError

TURNS = 5
_WORKER = "vfl.bench.lines_worker"


@dataclass(frozen=True, slots=True)
class LineRow:
    """One pattern over one network.

    Attributes:
        network: "tun", "proxy" or "model".
        pattern: who sends what.
        milliseconds: median over the turns, from the first byte sent to the last received.
        fastest_ms: the fastest of them; on a busy machine the others wait for a core as well.
        first_ms: the first turn.
        model_ms: as the model computes it, without headers.
        limit_ms: max(bytes / bandwidth) + hops * round trip / 2.
        ratio: milliseconds to the model's.
        mbps: bits a second of the party that sends most.
        bytes_sent: by the party that sends most, a turn; what the network counts.
    """

    network: str
    pattern: str
    milliseconds: float
    fastest_ms: float
    first_ms: float
    model_ms: float
    limit_ms: float
    ratio: float
    mbps: float
    bytes_sent: int


def bench_lines(
    wan: Wan,
    kinds: Sequence[str],
    *,
    turns: int = TURNS,
    patterns: Sequence[str] = tuple(PATTERNS),
    say: Callable[[str], None] = lambda line: None,
) -> list[LineRow]:
    """Try networks with patterns of traffic.

    Args:
        wan: every party's line.
        kinds: networks: tun, proxy, model or auto.
        turns: of each pattern, after the first.
        patterns: names of `PATTERNS`.
        say: told one line about each network.

    Raises:
        ConfigError: nothing to measure.
        BadOptionError: no such network.
        UserError: a network that cannot be had here.
    """
    if turns < 1 or wan == Wan():
        raise ConfigError(
            "nothing to measure",
            got=f"{turns} turns, {wan}",
            want="a turn, and a line with a bandwidth or a delay",
        )
    rows = []
    for kind in map(choose, kinds):
        say(f"{kind}, {wan}: {len(patterns)} patterns")
        rows += _modelled(wan, patterns) if kind == "model" else _tried(wan, kind, patterns, turns)
    return rows


def format_lines(rows: Sequence[LineRow]) -> str:
    """The rows as a table for people."""
    head = (
        f"{'network':<8}{'pattern':<27}{'ms':>9}{'fastest':>9}{'first':>9}{'model':>9}{'limit':>9}"
    )
    lines = [f"{head}{'ratio':>7}{'Mbps':>8}{'bytes sent':>12}"]
    lines += [
        f"{row.network:<8}{row.pattern:<27}{row.milliseconds:>9.1f}{row.fastest_ms:>9.1f}"
        f"{row.first_ms:>9.1f}{row.model_ms:>9.1f}{row.limit_ms:>9.1f}{row.ratio:>7.2f}{row.mbps:>8.2f}"
        f"{row.bytes_sent:>12}"
        for row in rows
    ]
    return "\n".join(lines)


def _modelled(wan: Wan, patterns: Sequence[str]) -> list[LineRow]:
    found = []
    for name in patterns:
        seconds, size = modelled_s(PATTERNS[name], wan), most_bytes(PATTERNS[name])
        found.append(_row("model", name, wan, [seconds, seconds], size))
    return found


def _tried(wan: Wan, kind: str, patterns: Sequence[str], turns: int) -> list[LineRow]:
    """Patterns between processes, a process a party."""
    with ExitStack() as stack:
        network = stack.enter_context(open_network(PARTIES, wan, kind))
        processes = {party: Process(_WORKER, network.command(party)) for party in PARTIES}
        for process in processes.values():
            stack.callback(process.end, at_once=True)
        _connect(network, processes)
        rows = []
        for name in patterns:
            before = network.bytes_sent()
            seconds = [_play(processes, PATTERNS[name]) for _ in range(1 + turns)]
            after = network.bytes_sent()
            most = max(after[party] - before[party] for party in PARTIES)
            rows.append(_row(kind, name, wan, seconds, most // (1 + turns)))
    return rows


def _connect(network: Network, processes: dict[str, Process]) -> None:
    """One connection between each two parties."""
    doors = {}
    for party, process in processes.items():
        process.tell(LinesJob(party=party, host=network.host(party)))
        doors[party] = process.hear(Door)
    for source, target in combinations(PARTIES, 2):
        processes[source].tell(doors[target].seen(network, source, target))
    for process in processes.values():
        process.hear(Played)


def _play(processes: dict[str, Process], pattern: Pattern) -> float:
    """Seconds of one turn; the clock is the machine's, and the same in every process."""
    for process in processes.values():
        process.tell(Play(rounds=pattern))
    played = [process.hear(Played) for process in processes.values()]
    began = min(each.began for each in played if each.began is not None)
    return max(each.ended for each in played if each.ended is not None) - began


def _row(kind: str, name: str, wan: Wan, seconds: Sequence[float], sent: int) -> LineRow:
    pattern, typical = PATTERNS[name], median(seconds[1:])
    model, most = modelled_s(pattern, wan), most_bytes(pattern)
    return LineRow(
        network=kind,
        pattern=name,
        milliseconds=1000 * typical,
        fastest_ms=1000 * min(seconds[1:]),
        first_ms=1000 * seconds[0],
        model_ms=1000 * model,
        limit_ms=1000 * wan.limit_s(most, hops=len(pattern)),
        ratio=typical / model,
        mbps=8e-6 * most / typical,
        bytes_sent=sent,
    )
