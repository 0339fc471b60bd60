"""Parties as threads of one process: for tests, measurements, `private` and whole simulations.

A process that runs all parties protects no secret; only its messages are the same as in a session
with separate processes. Each frame on the links between the threads carries a number: the length of
the chain of messages that led to it. The largest such number among a party's received frames is the
depth of the party. The largest depth of all parties is the number of messages that had to follow
one another (hops).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import combinations
from queue import Empty, SimpleQueue
from typing import Any, Generic, Self, TypeVar

from vfl.core.errors import LostPeerError, PeerFailedError, ProtocolError, VFLError
from vfl.core.frame import Frame, Link
from vfl.mpc.channel import Leak, Traffic
from vfl.mpc.engine import Peer, traffic
from vfl.mpc.rules import name_of
from vfl.transport.link import Depth, LocalLink, Sent, local_pair, opened, sent_nothing

_Result = TypeVar("_Result")
_Peer = TypeVar("_Peer", bound=Peer)


def mesh(timeout_s: float = 30.0, count: int = 3) -> tuple[list[dict[int, LocalLink]], list[Depth]]:
    """Return each party's links, by the other party's role number, and the parties' depths."""
    depths = [Depth() for _ in range(count)]
    links: list[dict[int, LocalLink]] = [{} for _ in range(count)]
    for one, two in combinations(range(count), 2):
        names, both = (name_of(one), name_of(two)), (depths[one], depths[two])
        links[one][two], links[two][one] = local_pair(names, timeout_s, both)
    return links, depths


def together(
    pool: Executor, played: Iterable[tuple[str, Callable[[], _Result], Iterable[LocalLink]]]
) -> list[_Result]:
    """Run each party in its own thread, and wait until all have ended.

    Args:
        pool: thread pool with one thread for each party.
        played: for each party, its name, its program and its links.

    Raises:
        Exception: a party's program failed; a cause is raised before the errors that it caused at
            other parties. The other parties receive a `VFLError` without the text of other errors.
    """

    def one(name: str, program: Callable[[], _Result], links: Iterable[LocalLink]) -> _Result:
        try:
            return program()
        except Exception as problem:
            told = problem
            if not isinstance(told, VFLError):  # the text of the error may contain data
                told = ProtocolError(
                    "a party stopped with an error", where=name, got=type(problem).__name__
                )
            for link in links:
                link.fail(told)
            raise

    futures = [pool.submit(one, *each) for each in played]
    if errors := [error for future in futures if (error := future.exception()) is not None]:
        raise min(errors, key=_rank)
    return [future.result() for future in futures]


def _rank(error: BaseException) -> int:
    """Rank an error, so that a cause sorts before the errors that it caused at other parties."""
    if isinstance(error, PeerFailedError):
        return 2
    return 3 if isinstance(error, LostPeerError) else 1


class Star:
    """Streams between several threads and one middle party; see `LocalStreams` of `vfl.session`.

    Args:
        names: names of all parties.
        middle: name of the party to which all other parties have a stream.
        timeout_s: seconds that each party waits for a frame.

    Attributes:
        outer: each outer party's stream to the middle party; the key is the outer party's name.
        inner: the middle party's streams to the outer parties, which can only send; the key is the
            outer party's name.
    """

    def __init__(self, names: Iterable[str], middle: str, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._arriving: SimpleQueue[tuple[str, Sent]] = SimpleQueue()
        self.outer: dict[str, LocalLink] = {}
        self.inner: dict[str, LocalLink] = {}
        for name in names:
            if name == middle:
                continue
            down: SimpleQueue[Sent] = SimpleQueue()
            unused: SimpleQueue[Sent] = SimpleQueue()
            up = partial(self._arrived, name)
            self.outer[name] = LocalLink(up, down, middle, timeout_s)
            self.inner[name] = LocalLink(down.put, unused, name, timeout_s)

    def _arrived(self, name: str, sent: Sent) -> None:
        self._arriving.put((name, sent))

    def receive_any(self) -> tuple[str, Frame]:
        """At the middle party, receive the next frame; return the sender's name and the frame.

        Raises:
            LostPeerError: no frame arrived in time, or a link was closed.
            PeerFailedError: the sender reported an error.
        """
        try:
            name, sent = self._arriving.get(timeout=self._timeout_s)
        except Empty:
            raise sent_nothing("every other party", self._timeout_s) from None
        _, frame = opened(sent, name)
        return name, frame

    def play(self, programs: Mapping[str, Callable[[], object]]) -> None:
        """Run each party's program in its own thread; the keys are the parties' names.

        Raises:
            Exception: a party failed; see `together`.
        """
        ends = {name: [link] for name, link in self.outer.items()}
        inner = list(self.inner.values())
        played = [(name, one, ends.get(name, inner)) for name, one in programs.items()]
        with ThreadPoolExecutor(len(programs), thread_name_prefix="vfl-mpc") as pool:
            together(pool, played)


class LocalParties(Generic[_Peer]):
    """All parties as threads of this process; the end of its `with` block ends the threads.

    Args:
        make: function that makes a party from its role number and its links.
        timeout_s: seconds that a party waits for a message.
        count: number of parties.

    Attributes:
        parties: the objects of the parties P0, P1, P2 and so on.
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
        """Agree on fresh keys for every pair of parties; all parties must run the same program."""
        session = secrets.token_hex(16)
        self.run(lambda party: party.agree(terms, session))

    def run(
        self, program: Callable[[_Peer], _Result], roles: Sequence[int] | None = None
    ) -> list[_Result]:
        """Run a program at some parties, or at all; return each party's result.

        Raises:
            Exception: a party failed, see `together`; the session has then ended.
            LostPeerError: the session had ended before.
        """
        if self._ended:
            raise LostPeerError("this session has ended", fix="begin a new session, with new keys")
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
        """Return the number of messages that followed one another since the last call."""
        deepest = max(depth.hops for depth in self._depths)
        for depth in self._depths:
            depth.hops = 0
        return deepest

    def traffic(self) -> list[Traffic]:
        """Return the traffic since the session began."""
        return [each for party in self.parties for each in traffic(party)]

    def leaks(self) -> list[Leak]:
        """Return the values that the parties have learned since the session began."""
        return [leak for party in self.parties for leak in party.leakage.leaks()]

    def close(self, *, wait: bool = True) -> None:
        """End the session; a second call has no effect.

        Args:
            wait: whether to wait until the threads have ended. If the garbage collector calls this
                method, a thread may be starting, so the call must not wait for threads.
        """
        self._ended = True
        for links in self._links:
            for link in links.values():
                link.close()
        self._pool.shutdown(wait=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
