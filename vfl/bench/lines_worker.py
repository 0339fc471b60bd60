"""A process of ``vfl bench network``: one party that sends and receives plain bytes.

Started as ``python -m vfl.bench.lines_worker``; it reads its job, then the doors of the parties it
is to connect to, then what to play, from standard input.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from vfl.bench.messages import Door, LinesJob, Play, Played
from vfl.bench.patterns import PARTIES, Pattern
from vfl.bench.process import tell

_PATIENCE_S = 60.0


class Player:
    """One party and its connections, by the name of the party at the other end."""

    def __init__(self, job: LinesJob, lines: Iterator[str]) -> None:
        self._party = job.party
        place = PARTIES.index(job.party)
        self._peers: dict[str, socket.socket] = {}
        with socket.create_server((job.host, 0)) as listener:
            listener.settimeout(_PATIENCE_S)
            tell(Door(host=job.host, port=listener.getsockname()[1]))
            for peer in PARTIES[place + 1 :]:
                door = Door.model_validate_json(next(lines))
                end = socket.create_connection((door.host, door.port), _PATIENCE_S)
                end.sendall(bytes([place]))
                self._add(peer, end)
            for _ in PARTIES[:place]:
                end, _ = listener.accept()
                end.settimeout(_PATIENCE_S)
                self._add(PARTIES[end.recv(1)[0]], end)

    def _add(self, peer: str, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[peer] = end

    def play(self, pattern: Pattern, pool: ThreadPoolExecutor) -> Played:
        """This party's part of a pattern; a thread sends to each peer while this one reads."""
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
            raise EOFError("the other party has gone")
        left -= got


def main() -> None:
    """Play whatever is asked for until the input ends."""
    lines = iter(sys.stdin)
    player = Player(LinesJob.model_validate_json(next(lines)), lines)
    tell(Played())
    with ThreadPoolExecutor(len(PARTIES)) as pool:
        for line in lines:
            tell(player.play(Play.model_validate_json(line).rounds, pool))


if __name__ == "__main__":
    main()
