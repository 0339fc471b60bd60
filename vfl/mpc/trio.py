"""The three parties as threads of one process: for tests, for measurements and for `private`.

One process that plays all three protects nobody; what is real are the messages. Each frame on the
links between the threads carries how many messages lie before it one after the other; the largest
such number a party has seen is its depth, and the depth of the last party is the count of hops.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from vfl.core.errors import LostPeerError, PeerFailedError, ProtocolError, VFLError
from vfl.core.frame import Frame, Link
from vfl.mpc.channel import Leak, Traffic
from vfl.mpc.fast import FastDealer, FastHolder
from vfl.mpc.party import Party, traffic
from vfl.mpc.rules import NAMES, P0, P1, P2, Rules
from vfl.mpc.thesis import ThesisDealer, ThesisHolder

_Result = TypeVar("_Result")
_CLOSED = LostPeerError("an in-process link is closed")


#: A frame with its depth, or the error that ended the link.
_Sent = tuple[int, Frame] | VFLError


class _Outgoing(Protocol):
    """Where a link puts what it sends."""

    def put(self, sent: _Sent, /) -> None: ...


@dataclass(slots=True)
class Depth:
    """How many messages had to follow one another to bring one party to where it is."""

    hops: int = 0


class MemoryLink:
    """One end of a pair; used by one thread.

    Args:
        own, peer: roles of the two ends, for messages.
        outgoing, incoming: frames with their depth, or the error that ended the link.
        depth: of this party, shared by its links.
        timeout_s: how long `receive` waits.
    """

    def __init__(
        self,
        own: int,
        peer: int,
        outgoing: _Outgoing,
        incoming: queue.SimpleQueue[_Sent],
        depth: Depth,
        timeout_s: float,
    ) -> None:
        self._own = NAMES[own]
        self._peer = NAMES[peer]
        self._outgoing = outgoing
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
            raise LostPeerError(_CLOSED.what)
        self._outgoing.put((self._depth.hops + 1, frame))

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

    def fail(self, error: VFLError) -> None:
        """Tell the other end what went wrong here, then close."""
        if not self._closed.is_set():
            self._closed.set()
            self._outgoing.put(
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
        if not self._closed.is_set():
            self._closed.set()
            self._outgoing.put(LostPeerError(_CLOSED.what))


def triangle(timeout_s: float = 30.0) -> tuple[list[dict[int, MemoryLink]], list[Depth]]:
    """Links between three parties: of each, by the role at the other end; and their depths."""
    depths = [Depth() for _ in range(3)]
    links: list[dict[int, MemoryLink]] = [{} for _ in range(3)]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        there: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
        back: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
        links[one][two] = MemoryLink(one, two, there, back, depths[one], timeout_s)
        links[two][one] = MemoryLink(two, one, back, there, depths[two], timeout_s)
    return links, depths


class Star:
    """Streams of two threads to a third one, which stands between them; see `vfl.mpc.relay`.

    Args:
        middle: role of the third.
        timeout_s: how long each end waits.

    Attributes:
        outer: the stream's end of each of the two, by role.
        inner: the end in the middle, by the role at the other one; it only sends.
    """

    def __init__(self, middle: int, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._arriving: queue.SimpleQueue[tuple[int, _Sent]] = queue.SimpleQueue()
        self.outer: dict[int, MemoryLink] = {}
        self.inner: dict[int, MemoryLink] = {}
        for role in {P0, P1, P2} - {middle}:
            down: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
            up = _Tagged(role, self._arriving)
            unused: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
            self.outer[role] = MemoryLink(role, middle, up, down, Depth(), timeout_s)
            self.inner[role] = MemoryLink(middle, role, down, unused, Depth(), timeout_s)

    def receive_any(self) -> tuple[int, Frame]:
        """In the middle: the next frame of whoever sends first, with its role.

        Raises:
            LostPeerError: nothing came in time, or an end was closed.
            PeerFailedError: the other end said what went wrong there.
        """
        try:
            role, received = self._arriving.get(timeout=self._timeout_s)
        except queue.Empty:
            raise LostPeerError(
                "nobody sent anything in time", want=f"a frame within {self._timeout_s:g} s"
            ) from None
        if isinstance(received, VFLError):
            raise received
        return role, received[1]

    def play(self, programs: Mapping[int, Callable[[], object]]) -> None:
        """Let each of the three follow its program in a thread of its own, by role.

        Raises:
            VFLError: what went wrong first; the others were told.
        """
        ends = {role: [link] for role, link in self.outer.items()}

        def one(role: int) -> None:
            try:
                programs[role]()
            except Exception as problem:
                told = problem if isinstance(problem, VFLError) else broke_off(problem, role)
                for link in ends.get(role, list(self.inner.values())):
                    link.fail(told)
                raise

        with ThreadPoolExecutor(len(programs), thread_name_prefix="vfl-mpc") as pool:
            futures = [pool.submit(one, role) for role in programs]
            errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=_rank)


class _Tagged:
    """Puts what one party sends among what the other one sends."""

    def __init__(self, role: int, arriving: queue.SimpleQueue[tuple[int, _Sent]]) -> None:
        self._role = role
        self._arriving = arriving

    def put(self, sent: _Sent, /) -> None:
        self._arriving.put((self._role, sent))


def make_party(role: int, links: Mapping[int, Link], rules: Rules) -> Party:
    """P0, P1 or P2 of a mode; it has no keys before `Party.agree`."""
    if rules.mode == "thesis":
        return (ThesisDealer if role == P2 else ThesisHolder)(role, links, rules)
    return (FastDealer if role == P2 else FastHolder)(role, links, rules)


class Trio:
    """A context manager; the three threads end with it.

    Args:
        rules: the same for all.
        terms: what the parties compare before they begin.
        timeout_s: how long a party waits for a message.
        agreed: False for a program that begins with `Party.agree` of its own.

    Attributes:
        parties: P0, P1 and P2.
    """

    def __init__(
        self,
        rules: Rules,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
        *,
        agreed: bool = True,
    ) -> None:
        self._ended = False
        self._links, self._depths = triangle(timeout_s)
        self.parties = [make_party(role, self._links[role], rules) for role in range(3)]
        self._pool = ThreadPoolExecutor(3, thread_name_prefix="vfl-mpc")
        if agreed:
            session = secrets.token_hex(16)
            self.run(lambda party: party.agree(terms or {}, session))

    def run(self, program: Callable[[Party], _Result]) -> list[_Result]:
        """Follow a program at all three parties; what it gave each.

        Raises:
            VFLError: what went wrong first; the session has then ended.
        """
        if self._ended:
            raise LostPeerError("this session has ended", fix="begin a new one; its keys are new")
        futures = [self._pool.submit(self._one, program, party) for party in self.parties]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self.close()
            raise min(errors, key=_rank)
        return [future.result() for future in futures]

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

    def __enter__(self) -> Trio:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _one(self, program: Callable[[Party], _Result], party: Party) -> _Result:
        try:
            return program(party)
        except Exception as problem:
            told = problem if isinstance(problem, VFLError) else broke_off(problem, party.role)
            for link in self._links[party.role].values():
                link.fail(told)
            raise


def broke_off(problem: Exception, role: int) -> VFLError:
    """What others are told of an unexpected error: not its text, which may hold data."""
    return ProtocolError("a party broke off", where=NAMES[role], got=type(problem).__name__)


def _rank(error: BaseException) -> int:
    """The cause before its consequences at the other parties."""
    if isinstance(error, PeerFailedError):
        return 2
    return 3 if isinstance(error, LostPeerError) else 1
