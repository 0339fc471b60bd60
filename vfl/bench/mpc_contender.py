"""The processes of a system in ``vfl bench mpc``, one a party, and one run of them together."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vfl.bench.mpc_messages import Doors, Go, Place, Port, Ready, Task, Turn
from vfl.bench.network import LOOPBACK, Network
from vfl.bench.network.namespace import DEVICE
from vfl.bench.process import Process
from vfl.core.errors import BadOptionError, UserError, nearest
from vfl.mpc.rules import NAMES

_TALK = Path(__file__).parent / "peers" / "talk.py"
#: The systems of an adapter, `vfl/bench/peers/NAME_peer.py`, and how many parties each has.
PEERS: Mapping[str, Mapping[str, int]] = {
    "spu": {"spu-semi2k": 2, "spu-aby3": 3},
    "crypten": {"crypten": 2},
}


#: A run begins so much later than it is told: long enough for all parties to hear it.
_AHEAD_S = 0.002


@dataclass(frozen=True, slots=True)
class Contender:
    """A system and how its processes are started.

    Attributes:
        name: such as "spu-semi2k".
        parties: how many processes it has.
        command: what each of them runs; our own party if empty.
    """

    name: str
    parties: int = 3
    command: tuple[str, ...] = ()


#: The three parties of `vfl.mpc`; they play either mode.
OURS = Contender("vfl")


@dataclass(frozen=True, slots=True)
class Taken:
    """One run of a system.

    Attributes:
        milliseconds: from the first party's begin to the last one's end.
        cpu_ms: of all parties.
        offline_ms: of the party that took longest with what was dealt ahead.
        bytes_setup, bytes_offline, bytes_online: of all parties; None if not counted.
        max_error: against float64 in clear.
    """

    milliseconds: float
    cpu_ms: float
    offline_ms: float
    bytes_setup: int | None
    bytes_offline: int | None
    bytes_online: int | None
    max_error: float


def peers(spec: str) -> list[Contender]:
    """The systems of a peer, from its name and the interpreter that has it installed.

    >>> [each.name for each in peers("spu=/opt/spu/bin/python")]
    ['spu-semi2k', 'spu-aby3']

    Args:
        spec: such as ``crypten=/opt/crypten/bin/python``.

    Raises:
        BadOptionError: no such peer, or no interpreter.
    """
    name, _, python = spec.partition("=")
    if name not in PEERS or not python:
        raise BadOptionError(
            "no peer like that",
            where="option 'peer'",
            got=f"'{spec}'",
            want=f"{' or '.join(PEERS)}, '=' and the Python that has it installed",
            fix=nearest(name, PEERS),
        )
    command = (python, "-I", str(_TALK), name)
    return [Contender(system, count, command) for system, count in PEERS[name].items()]


class Running:
    """The processes of a system; a context manager, which ends them.

    Args:
        contender: what they run.
        network: what they talk over.
    """

    def __init__(self, contender: Contender, network: Network) -> None:
        if contender.name == "crypten" and network.kind == "proxy":
            raise UserError(
                "CrypTen's connections would pass the proxies by",
                where="network 'proxy'",
                fix="--network tun, or leave CrypTen out",
            )
        self.contender = contender
        self._network = network
        self._parties = NAMES[: contender.parties]
        with ExitStack() as stack:
            self._processes: list[Process] = []
            for party in self._parties:
                at = network.command(party)
                process = Process("vfl.bench.mpc_worker", at, command=contender.command)
                stack.callback(process.end, at_once=True)
                self._processes.append(process)
            self._connect()
            self._stack = stack.pop_all()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def take(self, task: Task) -> Taken:
        """One run; all parties begin when all are ready.

        Raises:
            PeerFailedError: a process ended; its standard error says why.
        """
        self._tell_all([task] * len(self._processes))
        for process in self._processes:
            process.hear(Ready)
        before = self._network.bytes_sent()
        self._tell_all([Go(at=time.monotonic() + _AHEAD_S)] * len(self._processes))
        turns = [process.hear(Turn) for process in self._processes]
        sent = self._network.bytes_sent()
        counted = sum(sent[party] - before[party] for party in self._parties) if sent else None
        online = _total([turn.bytes_online for turn in turns])
        errors = [turn.max_error for turn in turns if turn.max_error is not None]
        assert errors, "somebody has the result"
        return Taken(
            1000 * (max(turn.ended for turn in turns) - min(turn.began for turn in turns)),
            sum(turn.cpu_ms for turn in turns),
            max(turn.offline_ms for turn in turns),
            _total([turn.bytes_setup for turn in turns]),
            _total([turn.bytes_offline for turn in turns]),
            counted if self.contender.command else online,
            max(errors),
        )

    def _connect(self) -> None:
        """Tell every process who it is and where it finds the others."""
        session, token = secrets.token_hex(16), secrets.token_urlsafe(32)
        places = [
            Place(
                rank=rank,
                parties=len(self._parties),
                system=self.contender.name,
                host=self._network.host(party),
                device="lo" if self._network.host(party) == LOOPBACK else DEVICE,
                session=session,
                token=token,
            )
            for rank, party in enumerate(self._parties)
        ]
        self._tell_all(places)
        ports = [process.hear(Port).port for process in self._processes]
        self._tell_all([self._doors(party, ports) for party in self._parties])
        for process in self._processes:
            process.hear(Ready)

    def _doors(self, source: str, ports: Sequence[int]) -> Doors:
        """Where one party finds all; itself where it listens."""
        doors: list[tuple[str, int]] = []
        for target, port in zip(self._parties, ports, strict=True):
            own = target == source or not port
            host, port = (
                (self._network.host(target), port)
                if own
                else self._network.reach(source, target, port)
            )
            doors.append((host, port))
        return Doors(doors=tuple(doors))

    def _tell_all(self, messages: Sequence[Place | Doors | Task | Go]) -> None:
        for process, message in zip(self._processes, messages, strict=True):
            process.tell(message)


def _total(counts: Sequence[int | None]) -> int | None:
    """The sum, if everybody can tell."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
