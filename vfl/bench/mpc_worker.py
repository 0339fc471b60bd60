"""A process of ``vfl bench mpc``: one of our three parties, one thread, plain TCP.

Started as ``python -m vfl.bench.mpc_worker``; it speaks the messages of `vfl.bench.mpc_messages`.
There is no TLS, for the systems it stands beside have none either.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import lru_cache

from vfl.bench.mpc_messages import Doors, Go, Place, Port, Ready, Task, Turn
from vfl.bench.mpc_model import rules_of
from vfl.bench.process import tell
from vfl.core.seeds import use_one_thread
from vfl.mpc import make_party
from vfl.mpc.channel import bytes_by_phase
from vfl.mpc.measure import Seat
from vfl.mpc.party import traffic
from vfl.mpc.rules import NAMES, P2, Mode
from vfl.mpc.workloads import Example, workload_named
from vfl.transport import Credential, Hello, TcpHub, TcpLink, TransportLink
from vfl.triple.door import CALLS, LISTENS

_JOIN_S = 60.0


class Links:
    """This party's two connections, as `vfl.triple.links` has them but without TLS.

    Args:
        place: the process's.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._hub: TcpHub | None = None
        self._links: dict[int, TransportLink] = {}
        if callers := LISTENS[place.rank]:
            known = {NAMES[each]: Credential(NAMES[each], place.token) for each in callers}
            self._hub = TcpHub(place.host, 0, place.session, known, plaintext=True)
        self.port = self._hub.port if self._hub else 0

    def connect(self, doors: Doors) -> dict[int, TransportLink]:
        """Links to the two others, by role."""
        place, callers = self._place, LISTENS[self._place.rank]
        hello = Hello(place.session, NAMES[place.rank], place.token)
        for role in CALLS[place.rank]:
            self._links[role] = TcpLink.connect(*doors.doors[role], hello, None, plaintext=True)
        if self._hub is not None:
            self._hub.wait_all([NAMES[each] for each in callers], _JOIN_S)
            self._links |= {each: self._hub.link(NAMES[each]) for each in callers}
        return self._links

    def close(self) -> None:
        """Close them, and the door."""
        for link in self._links.values():
            link.close()
        if self._hub is not None:
            self._hub.close()


@lru_cache(maxsize=1)
def _example(name: str) -> Example:
    return Example.of(workload_named(name))


def play(place: Place, links: dict[int, TransportLink], task: Task, lines: Iterator[str]) -> Turn:
    """Prepare a run, wait for "go", and do it."""
    mode: Mode = "thesis" if task.system == "thesis" else "fast"
    workload = workload_named(task.workload)
    party = make_party(place.rank, links, rules_of(workload, mode))
    party.agree({"workload": task.workload, "fresh": task.fresh}, task.session)
    example = None if place.rank == P2 else _example(task.workload)
    seat = Seat(party, workload, example)
    seat.prepare(inputs_opened=not task.fresh)
    before, dealing = bytes_by_phase(traffic(party)), time.monotonic()
    seat.deal_ahead()
    offline_ms = 1000 * (time.monotonic() - dealing)
    tell(Ready())
    begin_at = Go.model_validate_json(next(lines)).at
    time.sleep(max(0.0, begin_at - time.monotonic()))
    began, busy = time.monotonic(), time.process_time()
    outputs = seat.execute()
    ended, cpu_ms = time.monotonic(), 1000 * (time.process_time() - busy)
    after = bytes_by_phase(traffic(party))
    found = seat.results(outputs)
    error = None
    if found and example is not None:
        error = max(float((found[key] - want).abs().max()) for key, want in example.wanted.items())
    return Turn(
        began=began,
        ended=ended,
        cpu_ms=cpu_ms,
        offline_ms=offline_ms if mode == "fast" else 0.0,
        bytes_setup=before["setup"],
        bytes_offline=after["offline"] - before["offline"],
        bytes_online=after["online"] - before["online"],
        max_error=error,
    )


def main() -> None:
    """Play runs until the input ends."""
    use_one_thread()
    lines = iter(sys.stdin)
    place = Place.model_validate_json(next(lines))
    links = Links(place)
    tell(Port(port=links.port))
    try:
        connected = links.connect(Doors.model_validate_json(next(lines)))
        tell(Ready())
        for line in lines:
            tell(play(place, connected, Task.model_validate_json(line), lines))
    finally:
        links.close()


if __name__ == "__main__":
    main()
