"""Parties as threads of one process: for tests, for measurements and for `private`.

One process that plays all of them protects nobody; what is real are the messages. Each frame on the
links between the threads carries how many messages lie before it one after the other; the largest
such number a party has seen is its depth, and the depth of the last party is the count of hops.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Generic, Self, TypeVar

from vfl.core.errors import LostPeerError, PeerFailedError, ProtocolError, VFLError
from vfl.core.frame import Frame, Link
from vfl.mpc.channel import Leak, Traffic
from vfl.mpc.engine import Peer, traffic
from vfl.mpc.rules import name_of

_Result = TypeVar("_Result")
_Peer = TypeVar("_Peer", bound=Peer)
_CLOSED = "an in-process link is closed"


#: A frame with its depth, or the error that ended the link.
_Sent = tuple[int, Frame] | VFLError


@dataclass(slots=True)
class Depth:
    """How many messages had to follow one another to bring one party to where it is."""

    hops: int = 0


class MemoryLink:
    """One end of a pair; used by one thread.

    Args:
        own, peer: names of the two ends, for messages.
        put: takes what is sent: frames with their depth, or the error that ended the link.
        incoming: what the other end sent, likewise.
        depth: of this party, shared by its links.
        timeout_s: how long `receive` waits.
    """

    def __init__(
        self,
        own: str,
        peer: str,
        put: Callable[[_Sent], None],
        incoming: queue.SimpleQueue[_Sent],
        depth: Depth,
        timeout_s: float,
    ) -> None:
        self._own = own
        self._peer = peer
        self._put = put
        self._incoming = incoming
        self._depth = depth
        self._timeout_s = timeout_s
        self._closed = threading.Event()

    def send(self, frame: Frame) -> None:
        """Hand over one frame.

        Raises:
            LostPeerError: this end was closed.
        """
        if self._closed.is_set():
            raise LostPeerError(_CLOSED)
        self._put((self._depth.hops + 1, frame))

    def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            LostPeerError: nothing came in time, or the other end was closed.
            PeerFailedError: the other end said what went wrong there.
        """
        try:
            received = self._incoming.get(timeout=self._timeout_s)
        except queue.Empty:
            raise LostPeerError(
                f"{self._peer} sent nothing in time", want=f"a frame within {self._timeout_s:g} s"
            ) from None
        if isinstance(received, VFLError):
            self._incoming.put(received)
            raise received
        hops, frame = received
        self._depth.hops = max(self._depth.hops, hops)
        return frame

    def poll(self) -> Frame | None:
        """The next frame if it is there.

        Raises:
            LostPeerError, PeerFailedError: see `receive`.
        """
        return None if self._incoming.empty() else self.receive()

    def read_beside(self, links: Sequence[Any]) -> None:
        """Nothing here waits to be sent."""

    def fail(self, error: VFLError) -> None:
        """Tell the other end what went wrong here, then close."""
        self._end(
            PeerFailedError(
                f"{self._own} stopped with {error.code}: {error.what}",
                where=error.where,
                got=error.got,
                want=error.want,
                fix=error.fix,
            )
        )

    def close(self) -> None:
        """Release the link; closing twice is harmless."""
        self._end(LostPeerError(_CLOSED))

    def _end(self, error: VFLError) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._put(error)


def mesh(
    timeout_s: float = 30.0, count: int = 3
) -> tuple[list[dict[int, MemoryLink]], list[Depth]]:
    """Links between parties: of each, by the role at the other end; and their depths."""
    depths = [Depth() for _ in range(count)]
    links: list[dict[int, MemoryLink]] = [{} for _ in range(count)]
    for one, two in combinations(range(count), 2):
        there: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
        back: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
        ends = name_of(one), name_of(two)
        links[one][two] = MemoryLink(*ends, there.put, back, depths[one], timeout_s)
        links[two][one] = MemoryLink(*ends[::-1], back.put, there, depths[two], timeout_s)
    return links, depths


def together(
    pool: Executor, played: Iterable[tuple[str, Callable[[], _Result], Iterable[MemoryLink]]]
) -> list[_Result]:
    """Let parties play in threads of their own, and wait for all of them.

    Args:
        pool: with a thread for each.
        played: each party's name, its program and its links.

    Raises:
        VFLError: what went wrong first; the others were told.
    """

    def one(name: str, program: Callable[[], _Result], links: Iterable[MemoryLink]) -> _Result:
        try:
            return program()
        except Exception as problem:
            told = problem
            if not isinstance(told, VFLError):  # whose text may hold data
                told = ProtocolError("a party broke off", where=name, got=type(problem).__name__)
            for link in links:
                link.fail(told)
            raise

    futures = [pool.submit(one, *each) for each in played]
    if errors := [error for future in futures if (error := future.exception()) is not None]:
        raise min(errors, key=_rank)
    return [future.result() for future in futures]


def _rank(error: BaseException) -> int:
    """The cause before its consequences at the other parties."""
    if isinstance(error, PeerFailedError):
        return 2
    return 3 if isinstance(error, LostPeerError) else 1


class Star:
    """Streams of threads to one that stands between the others; see `LocalStreams` of sessions.

    Args:
        names: of all parties.
        middle: of the one that the others have a stream to.
        timeout_s: how long each end waits.

    Attributes:
        outer: the stream's end of each of the others, by its name.
        inner: the end in the middle, by the name at the other one; it only sends.
    """

    def __init__(self, names: Iterable[str], middle: str, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._arriving: queue.SimpleQueue[tuple[str, _Sent]] = queue.SimpleQueue()
        self.outer: dict[str, MemoryLink] = {}
        self.inner: dict[str, MemoryLink] = {}
        for name in names:
            if name == middle:
                continue
            down: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
            unused: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
            up = partial(self._arrived, name)
            self.outer[name] = MemoryLink(name, middle, up, down, Depth(), timeout_s)
            self.inner[name] = MemoryLink(middle, name, down.put, unused, Depth(), timeout_s)

    def _arrived(self, name: str, sent: _Sent) -> None:
        self._arriving.put((name, sent))

    def receive_any(self) -> tuple[str, Frame]:
        """In the middle: the next frame of whoever sends first, and who it is.

        Raises:
            LostPeerError: nothing came in time, or an end was closed.
            PeerFailedError: the other end said what went wrong there.
        """
        try:
            name, received = self._arriving.get(timeout=self._timeout_s)
        except queue.Empty:
            raise LostPeerError(
                "nobody sent anything in time", want=f"a frame within {self._timeout_s:g} s"
            ) from None
        if isinstance(received, VFLError):
            raise received
        return name, received[1]

    def play(self, programs: Mapping[str, Callable[[], object]]) -> None:
        """Let each party follow its program in a thread of its own, by name.

        Raises:
            VFLError: what went wrong first; the others were told.
        """
        ends = {name: [link] for name, link in self.outer.items()}
        inner = list(self.inner.values())
        played = [(name, one, ends.get(name, inner)) for name, one in programs.items()]
        with ThreadPoolExecutor(len(programs), thread_name_prefix="vfl-mpc") as pool:
            together(pool, played)


class LocalParties(Generic[_Peer]):
    """All parties as threads of this process; a context manager, with which the threads end.

    Args:
        make: a party of a role and its links, by role.
        timeout_s: how long a party waits for a message.
        count: of parties.

    Attributes:
        parties: P0, P1, P2 and so on.
    """

    def __init__(
        self,
        make: Callable[[int, Mapping[int, Link]], _Peer],
        timeout_s: float = 30.0,
        count: int = 3,
    ) -> None:
        self._ended = False
        self._links, self._depths = mesh(timeout_s, count)
        self.parties = [make(role, self._links[role]) for role in range(count)]
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="vfl-mpc")

    def agree(self, terms: Mapping[str, Any]) -> None:
        """Fresh keys for every pair, for parties that are about to do the same."""
        session = secrets.token_hex(16)
        self.run(lambda party: party.agree(terms, session))

    def run(
        self, program: Callable[[_Peer], _Result], roles: Sequence[int] | None = None
    ) -> list[_Result]:
        """Follow a program at some parties, or all; what it gave each.

        Raises:
            VFLError: what went wrong first; the session has then ended.
        """
        if self._ended:
            raise LostPeerError("this session has ended", fix="begin a new one; its keys are new")
        played = [
            (name_of(role), partial(program, self.parties[role]), self._links[role].values())
            for role in (range(len(self.parties)) if roles is None else roles)
        ]
        try:
            return together(self._pool, played)
        except BaseException:
            self.close()
            raise

    def hops(self) -> int:
        """Messages that had to follow one another since the last call."""
        deepest = max(depth.hops for depth in self._depths)
        for depth in self._depths:
            depth.hops = 0
        return deepest

    def traffic(self) -> list[Traffic]:
        """What was sent since the session began."""
        return [each for party in self.parties for each in traffic(party)]

    def leaks(self) -> list[Leak]:
        """What the parties saw since the session began."""
        return [leak for party in self.parties for leak in party.leakage.leaks()]

    def close(self) -> None:
        """End the session; closing twice is harmless."""
        self._ended = True
        for links in self._links:
            for link in links.values():
                link.close()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
