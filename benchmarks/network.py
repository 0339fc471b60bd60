"""Measured behaviour of emulated network links between processes, compared with their model.

Three parties send each other bytes in patterns that protocols use, over TCP connections that stay
open. The table shows the measured time beside two computed times: the time of the model, and the
least time of any protocol that sends as many bytes in as many sequential messages. In the first
turn, TCP windows are still small, so the time of this turn is reported separately.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import NamedTuple

from benchmarks import harness
from benchmarks.emulation import LinkModel, Network, Wan, available, choose, open_network
from benchmarks.worker import BenchmarkWorker, Endpoint, Parent, processes
from vfl.config.toml import Settings
from vfl.core.errors import ConfigError

TURNS = 5
_PATIENCE_S = 60.0
PARTIES = ("P0", "P1", "P2")


class Send(NamedTuple):
    """One message."""

    source: str
    target: str
    size: int


#: Type: rounds of messages; a party begins a round when it has received all messages of the round
#: before.
Pattern = tuple[tuple[Send, ...], ...]

_P0, _P1, _P2 = PARTIES
#: Bytes of a cut of 128 rows and width 500 in float32.
_CUT = 4 * 128 * 500
PATTERNS: dict[str, Pattern] = {
    "there and back, 1 byte": ((Send(_P0, _P1, 1),), (Send(_P1, _P0, 1),)),
    "one way, 256 kB": ((Send(_P0, _P2, _CUT),),),
    "both ways at once, 256 kB": ((Send(_P0, _P1, _CUT), Send(_P1, _P0, _CUT)),),
    "two to one, 256 kB each": ((Send(_P0, _P2, _CUT), Send(_P1, _P2, _CUT)),),
    "one to two, 256 kB each": ((Send(_P2, _P0, _CUT), Send(_P2, _P1, _CUT)),),
    "three hops, 64 kB each": (
        (Send(_P0, _P1, _CUT // 4),),
        (Send(_P1, _P2, _CUT // 4),),
        (Send(_P2, _P0, _CUT // 4),),
    ),
    "one way, 8 MB": ((Send(_P0, _P1, 8_000_000),),),
}


def most_bytes(pattern: Pattern) -> int:
    """Return the number of bytes that the party with the most traffic sends."""
    sent = Counter[str]()
    for each in (send for step in pattern for send in step):
        sent[each.source] += each.size
    return max(sent.values())


def modelled_s(pattern: Pattern, wan: Wan) -> float:
    """Return the computed seconds of the pattern, measured on the parties' simulated clocks."""
    model = LinkModel(PARTIES, wan)
    for step in pattern:
        sent = [(send.target, model.send(send.source, send.size)) for send in step]
        for target, arriving in sent:
            model.receive(target, arriving)
    return model.seconds


class LinesJob(Settings):
    """Job: run one party of a network test in a process; contains the party's own address."""

    party: str
    host: str


class Play(Settings):
    """Job: messages to exchange, in rounds of (from, to, bytes)."""

    rounds: tuple[tuple[Send, ...], ...]


class Played(Settings):
    """Times of a party's first send and of its last receipt, on the machine's clock."""

    began: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class LineRow:
    """Measurement of one pattern of messages on one network.

    Attributes:
        network: "tun", "proxy" or "model".
        pattern: name of the pattern.
        milliseconds: median time over the turns, from the first sent byte to the last received
            byte.
        fastest_ms: time of the fastest turn; on a busy machine, other turns also wait for a core.
        first_ms: time of the first turn.
        model_ms: computed time, without headers.
        limit_ms: max(bytes / bandwidth) + hops * round trip / 2.
        ratio: `milliseconds` divided by `model_ms`.
        mbps: bit rate of the party that sends the most bytes, in Mbit/s.
        bytes_sent: bytes per turn of the party that sends the most bytes, as the network counted
            them.
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
    wan: Wan = Wan(80, 40),  # noqa: B008 (it does not change)
    network: Sequence[str] = (),
    *,
    turns: int = TURNS,
    pattern: Sequence[harness.Whole] = tuple(PATTERNS),
) -> list[LineRow]:
    """Measure the network links that other benchmarks use, and compare them with their model.

    Args:
        wan: network link of every party.
        network: tun, proxy or model (see `benchmarks.emulation`); by default all networks that are
            available.
        turns: number of turns of each pattern, after the first turn.
        pattern: names of patterns; by default, all of them.

    Raises:
        ConfigError: there is no network link to measure.
        BadOptionError: no network has this name.
        UserError: the network is not available on this machine.
    """
    if wan in (None, Wan()):
        raise ConfigError("nothing to measure", want="a line with a bandwidth or a delay")
    rows = []
    for kind in map(choose, network or available(harness.say)):
        harness.say(f"{kind}, {wan}: {len(pattern)} patterns")
        rows += _modelled(wan, pattern) if kind == "model" else _measured(wan, kind, pattern, turns)
    return rows


TABLE = harness.table(
    ("network", "<8", "network"),
    ("pattern", "<27", "pattern"),
    ("ms", ">9.1f", "milliseconds"),
    ("fastest", ">9.1f", "fastest_ms"),
    ("first", ">9.1f", "first_ms"),
    ("model", ">9.1f", "model_ms"),
    ("limit", ">9.1f", "limit_ms"),
    ("ratio", ">7.2f", "ratio"),
    ("Mbps", ">8.2f", "mbps"),
    ("bytes sent", ">12", "bytes_sent"),
)


def _modelled(wan: Wan, patterns: Sequence[str]) -> list[LineRow]:
    found = []
    for name in patterns:
        seconds, size = modelled_s(PATTERNS[name], wan), most_bytes(PATTERNS[name])
        found.append(_row("model", name, wan, [seconds, seconds], size))
    return found


def _measured(wan: Wan, kind: str, patterns: Sequence[str], turns: int) -> list[LineRow]:
    """Measure patterns between processes; each party is a process."""
    with open_network(PARTIES, wan, kind) as network, processes("network", network) as workers:
        _connect(network, workers)
        rows = []
        for name in patterns:
            before = network.bytes_sent()
            seconds = [_play(workers, PATTERNS[name]) for _ in range(1 + turns)]
            after = network.bytes_sent()
            most = max(after[party] - before[party] for party in PARTIES)
            rows.append(_row(kind, name, wan, seconds, most // (1 + turns)))
    return rows


def _connect(network: Network, workers: dict[str, BenchmarkWorker]) -> None:
    """Connect every pair of parties."""
    endpoints = {}
    for party, worker in workers.items():
        worker.put(LinesJob(party=party, host=network.host(party)))
        endpoints[party] = worker.get(Endpoint)
    for source, target in combinations(PARTIES, 2):
        workers[source].put(endpoints[target].seen(network, source, target))
    for worker in workers.values():
        worker.get(Played)


def _play(workers: dict[str, BenchmarkWorker], pattern: Pattern) -> float:
    """Return the seconds of one turn; all processes use the machine's clock."""
    for worker in workers.values():
        worker.put(Play(rounds=pattern))
    played = [worker.get(Played) for worker in workers.values()]
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


class Player:
    """One party and its connections, by the name of the peer."""

    def __init__(self, job: LinesJob, parent: Parent) -> None:
        self._party = job.party
        rank = PARTIES.index(job.party)
        self._peers: dict[str, socket.socket] = {}
        with socket.create_server((job.host, 0)) as listener:
            listener.settimeout(_PATIENCE_S)
            parent.put(Endpoint(host=job.host, port=listener.getsockname()[1]))
            for peer in PARTIES[rank + 1 :]:
                target = parent.get(Endpoint)
                end = socket.create_connection((target.host, target.port), _PATIENCE_S)
                end.sendall(bytes([rank]))
                self._add(peer, end)
            for _ in PARTIES[:rank]:
                end, _ = listener.accept()
                end.settimeout(_PATIENCE_S)
                self._add(PARTIES[end.recv(1)[0]], end)

    def _add(self, peer: str, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[peer] = end

    def play(self, pattern: Pattern, pool: ThreadPoolExecutor) -> Played:
        """Send and receive this party's messages in a pattern.

        One thread for each peer sends to this peer; the calling thread receives from all peers.
        """
        began = ended = None
        for step in pattern:
            sending = []
            for send in (each for each in step if each.source == self._party):
                began = began or time.monotonic()
                end = self._peers[send.target]
                sending.append(pool.submit(end.sendall, bytes(send.size)))
            for send in (each for each in step if each.target == self._party):
                _receive(self._peers[send.source], send.size)
                ended = time.monotonic()
            for done in sending:
                done.result()
        return Played(began=began, ended=ended)


def _receive(end: socket.socket, size: int) -> None:
    left = size
    while left:
        got = len(end.recv(min(left, 1 << 20)))
        if not got:
            raise EOFError("the other party has ended")
        left -= got


def work(parent: Parent) -> None:
    """Run one party's sends and receipts in the requested patterns."""
    player = Player(parent.get(LinesJob), parent)
    parent.put(Played())
    with ThreadPoolExecutor(len(PARTIES)) as pool:
        for asked in parent.each(Play):
            parent.put(player.play(asked.rounds, pool))


main = harness.command(bench_lines, TABLE)


if __name__ == "__main__":
    main()
