"""Links of three parties of whom one stands between the other two, and cannot read what it carries.

In a session every party has one stream, to the label party. What another party is to get travels
sealed from end to end through it (`vfl.mpc.secure.keys`): with the dealer's masks the openings of
the two holders would tell everything, and with a holder's openings what the dealer sends the other.
What a party sends the one in the middle is a PROTOCOL frame, what goes further an OPENING.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from vfl.core.errors import ProtocolError
from vfl.core.frame import Frame, Kind, Link
from vfl.mpc.secure.keys import TAG_BYTES, Sealing

#: More frames than this are never under way to a party that waits for another one's.
_MOST_WAITING = 64
#: Bytes that sealing adds to a frame.
SEALED_BYTES = TAG_BYTES


class OuterLinks:
    """The links of a party that has a stream to the one in the middle only; used by one thread.

    Args:
        stream: to the party in the middle.
        middle: its role.
        other: the role of the third party, whose messages come and go through it.
        outgoing, incoming: of the pair with the third party, from `vfl.mpc.secure.keys`.
        also: further kinds that come on the stream, which `receive` takes.

    Attributes:
        links: by role; see `vfl.mpc.Party`.
    """

    def __init__(
        self,
        stream: Link,
        middle: int,
        other: int,
        outgoing: Sealing,
        incoming: Sealing,
        also: Iterable[Kind] = (),
    ) -> None:
        self._stream = stream
        self._kinds = {Kind.PROTOCOL, Kind.OPENING, *also}
        self._waiting: dict[Kind, deque[Frame]] = defaultdict(deque)
        self.links: dict[int, Link] = {
            middle: _Direct(stream.send, partial(self.receive, Kind.PROTOCOL)),
            other: _sealed(stream.send, partial(self.receive, Kind.OPENING), outgoing, incoming),
        }

    def receive(self, kind: Kind) -> Frame:
        """The next frame of a kind; those of other kinds wait for who asks for them.

        Raises:
            ProtocolError: a kind that does not belong here, or more than anybody can wait for.
            PeerError: see `vfl.core.frame.Link`.
        """
        while not self._waiting[kind]:
            _keep(self._waiting, self._stream.receive(), self._kinds, "the party in the middle")
        return self._waiting[kind].popleft()


class MiddleLinks:
    """The links of the party in the middle, which carries what the others send each other.

    It carries while it waits for a frame of its own. What one of them sends the other may come when
    it has nothing more to compute, so at the end it waits for a last word of each. Used by one
    thread.

    Args:
        roles: of all three, by name.
        streams: to the two others, by name.
        receive_any: the next frame of whoever sends first, and who it is.
        also: further kinds that come on the streams, which `receive` takes.

    Attributes:
        links: by role; see `vfl.mpc.Party`.
        relayed_bytes: of frames that were carried, headers included.
    """

    def __init__(
        self,
        roles: Mapping[str, int],
        streams: Mapping[str, Link],
        receive_any: Callable[[], tuple[str, Frame]],
        also: Iterable[Kind] = (),
    ) -> None:
        self._streams = streams
        self._receive_any = receive_any
        self._kinds = {Kind.PROTOCOL, *also}
        self._waiting: dict[str, dict[Kind, deque[Frame]]] = {
            name: defaultdict(deque) for name in streams
        }
        self.relayed_bytes = 0
        self.links: dict[int, Link] = {
            roles[name]: _Direct(stream.send, partial(self.receive, name, Kind.PROTOCOL))
            for name, stream in streams.items()
        }

    def receive(self, name: str, kind: Kind) -> Frame:
        """The next frame of a kind from one of the others; see `OuterLinks.receive`."""
        waiting = self._waiting[name][kind]
        while not waiting:
            sender, frame = self._receive_any()
            if frame.kind is Kind.OPENING:
                (receiver,) = self._streams.keys() - {sender}
                self._streams[receiver].send(frame)
                self.relayed_bytes += frame.wire_bytes
            else:
                _keep(self._waiting[sender], frame, self._kinds, f"party '{sender}'")
        return waiting.popleft()


class _Direct:
    """One end of a pair; by itself the stream is the link."""

    def __init__(self, send: Callable[[Frame], None], receive: Callable[[], Frame]) -> None:
        self.send = send
        self.receive = receive

    def close(self) -> None:
        """The stream is closed by who opened it."""


def _sealed(
    send: Callable[[Frame], None],
    receive: Callable[[], Frame],
    outgoing: Sealing,
    incoming: Sealing,
) -> _Direct:
    """One end of a pair whose messages somebody else carries."""

    def seal(frame: Frame) -> None:
        send(Frame(Kind.OPENING, frame.step, outgoing.seal(frame.payload, _about(frame))))

    def unseal() -> Frame:
        frame = receive()
        opened = incoming.open(frame.payload, _about(frame))
        return Frame(Kind.PROTOCOL, frame.step, bytearray(opened))

    return _Direct(seal, unseal)


def _about(frame: Frame) -> str:
    return f"operation {frame.step}"


def _keep(
    waiting: Mapping[Kind, deque[Frame]], frame: Frame, kinds: Iterable[Kind], sender: str
) -> None:
    if frame.kind not in kinds or frame.branch != 0:
        raise ProtocolError(
            f"a message out of turn from {sender}",
            got=f"{frame.kind.name} of operation {frame.step}, branch {frame.branch}",
            want=", ".join(sorted(kind.name for kind in kinds)),
        )
    if len(waiting[frame.kind]) >= _MOST_WAITING:
        raise ProtocolError(
            f"{sender} sends without waiting for answers", want=f"at most {_MOST_WAITING} frames"
        )
    waiting[frame.kind].append(frame)
