"""What one party says to another, and the accounts of it: bytes sent, and what was learned.

A frame carries the number of the operation it belongs to and raw ring elements, nothing that
describes them: both ends follow one program and know the sizes before they come, so a frame of
another length or number is refused unread.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import ProtocolError, TruncatedFrameError
from vfl.core.frame import Frame, Kind, Link, Payload
from vfl.mpc.ring import ELEMENT_BYTES
from vfl.mpc.shares import MovedIndices

Shape = Sequence[int]
_INDEX = np.dtype("<u4")
_WORD = np.dtype("<i8")
#: Bytes that wait for later operations at one party.
_EARLY_BYTES = 1 << 28
#: Numbers of operations are sent modulo one more than this.
_NUMBERS = 0xFFFFFFFF


@runtime_checkable
class Polled(Link, Protocol):
    """A link that can be asked without waiting; see `vfl.transport.reliable`."""

    def poll(self) -> Frame | None:
        """The next frame if it is there."""

    def read_beside(self, links: Sequence[Any]) -> None:
        """While a frame waits to be sent, read what comes over links of the same kind too."""


class Channel:
    """One party's end of a pair.

    Args:
        link: ordered and authenticated; who else can read it is for its maker to know.
        peer: name of the other end, for messages.

    Attributes:
        keeps_early: frames of later operations may come before one that is waited for, as those of
            a dealer do, and are kept for their turn.
        owed: earlier operations of which frames are still to come.
        sent: payload and header bytes this end has sent, by phase.
        frames: how many frames that were, by phase.
    """

    def __init__(self, link: Link, peer: str) -> None:
        self.link = link
        self.peer = peer
        self.sent: Counter[str] = Counter()
        self.frames: Counter[str] = Counter()
        self.keeps_early = False
        self.owed: set[int] = set()
        self._early: dict[int, deque[Frame]] = {}
        self._early_bytes = 0
        self._next: Frame | None = None

    def has_come(self, link: Polled) -> bool:
        """Whether a frame is there that was not taken yet; it never waits.

        Args:
            link: this channel's.

        Raises:
            PeerError: see `vfl.core.frame.Link`.
        """
        if self._next is None:
            self._next = link.poll()
        return self._next is not None

    def restore(self, frames: Mapping[str, int], sent: Mapping[str, int]) -> None:
        """Count on from what was sent before, by phase."""
        self.frames, self.sent = Counter(frames), Counter(sent)

    def send_bytes(self, payload: bytes | bytearray | memoryview, number: int, phase: str) -> None:
        """Hand over one frame of an operation."""
        frame = Frame(Kind.PROTOCOL, number & _NUMBERS, payload)
        self.sent[phase] += frame.wire_bytes
        self.frames[phase] += 1
        self.link.send(frame)

    def receive_bytes(self, number: int, size: int, most: int | None = None) -> memoryview:
        """The next frame's payload.

        Args:
            number: of the operation that is waited for.
            size: its length in bytes, or its least length if `most` is given.
            most: the largest length that is accepted.

        Raises:
            ProtocolError: another operation, or another length.
            PeerError: see `vfl.core.frame.Link`.
        """
        wanted = number & _NUMBERS
        frame = self._frame_of(wanted)
        if frame.kind is not Kind.PROTOCOL or frame.step != wanted:
            raise ProtocolError(
                f"a message out of turn from {self.peer}",
                got=f"{frame.kind.name}, operation {frame.step}",
                want=f"operation {wanted}",
            )
        count = len(frame.payload)
        if not size <= count <= (size if most is None else most):
            more = "" if most is None else f" to {most}"
            raise ProtocolError(
                f"a message of another size from {self.peer}",
                where=f"operation {wanted}",
                got=f"{count} bytes",
                want=f"{size}{more} bytes, from shapes that all parties know",
                fix="start all parties with one network, mode and batch",
            )
        return memoryview(frame.payload)

    def _frame_of(self, wanted: int) -> Frame:
        """The next frame of an operation, or one that nobody waits for, which is refused."""
        if kept := self._early.get(wanted):
            frame = kept.popleft()
            self._early_bytes -= frame.wire_bytes
            if not kept:
                del self._early[wanted]
            return frame
        while True:
            frame, self._next = self._next or self.link.receive(), None
            if frame.step == wanted or not self._is_early(frame, wanted):
                return frame
            self._early.setdefault(frame.step, deque()).append(frame)
            self._early_bytes += frame.wire_bytes

    def _is_early(self, frame: Frame, wanted: int) -> bool:
        """Whether it is of an operation whose turn comes, and there is room for it."""
        later = 0 < (frame.step - wanted & _NUMBERS) < _NUMBERS // 2
        expected = frame.kind is Kind.PROTOCOL and (later or frame.step in self.owed)
        return (
            self.keeps_early and expected and self._early_bytes + len(frame.payload) < _EARLY_BYTES
        )

    def send(self, elements: Sequence[Tensor], number: int, phase: str = "online") -> None:
        """Arrays of ring elements, one after the other."""
        self.send_bytes(pack(elements), number, phase)

    def receive(self, shapes: Sequence[Shape], number: int) -> list[Tensor]:
        """Arrays of the given axes; see `receive_bytes`."""
        return unpack(self.receive_bytes(number, sum(map(size_of, shapes))), shapes)

    def send_moved(
        self,
        elements: Sequence[Tensor],
        moved: Sequence[MovedIndices],
        number: int,
        phase: str = "online",
    ) -> None:
        """Arrays of ring elements and, behind them, index lists: 4 bytes an index, 8 a pair."""
        lists = [each.numpy().astype(_INDEX) for pair in moved for each in (pair.large, pair.small)]
        counts = np.array([len(each) for each in lists], dtype=_INDEX)
        tail = b"".join([counts.tobytes(), *(each.tobytes() for each in lists)])
        self.send_bytes(b"".join([pack(elements), tail]), number, phase)

    def receive_moved(
        self, shapes: Sequence[Shape], sizes: Sequence[int], number: int
    ) -> tuple[list[Tensor], list[MovedIndices]]:
        """What `send_moved` sent.

        Args:
            shapes: of the arrays.
            sizes: elements of each scaled tensor, in the order of the lists.
            number: of the operation.

        Raises:
            ProtocolError: an index outside its tensor, an index twice, or lists of another length.
        """
        if not sizes:  # nothing was divided
            return self.receive(shapes, number), []
        elements = sum(map(size_of, shapes))
        least = elements + 2 * _INDEX.itemsize * len(sizes)
        payload = self.receive_bytes(number, least, least + _INDEX.itemsize * sum(sizes))
        if (len(payload) - elements) % _INDEX.itemsize:
            raise self._bad_lists("a length that is no number of indices")
        flat = np.frombuffer(payload[elements:], _INDEX)
        counts, indices = flat[: 2 * len(sizes)].astype(np.int64), flat[2 * len(sizes) :]
        if int(counts.sum()) != len(indices):
            raise self._bad_lists("counts that do not add up")
        lists = [part.astype(np.int64) for part in np.split(indices, np.cumsum(counts)[:-1])]
        moved = []
        for large, small, size in zip(lists[::2], lists[1::2], sizes, strict=True):
            both = np.concatenate([large, small])
            if len(both) and both.max() >= size:
                raise self._bad_lists("an index outside its tensor")
            # A mark an element: sorting the lists, as `unique` does, takes ten times as long.
            marked = np.zeros(size, bool)
            marked[both] = True
            if np.count_nonzero(marked) != len(both):
                raise self._bad_lists("an index twice")
            moved.append(MovedIndices(torch.from_numpy(large), torch.from_numpy(small)))
        return unpack(payload[:elements], shapes), moved

    def _bad_lists(self, got: str) -> ProtocolError:
        return ProtocolError(f"index lists of {self.peer} cannot be", got=got)


def pack(elements: Sequence[Tensor]) -> memoryview:
    """Arrays one after the other as little-endian bytes; of one array the memory itself.

    Whoever hands it over does not change it any more: a link may send it again.
    """
    parts = [each.reshape(-1).numpy() for each in elements]
    if not parts:
        return memoryview(b"")
    joined = np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)
    return joined.astype(_WORD, copy=False).view(np.uint8).data


def unpack(payload: memoryview, shapes: Sequence[Shape]) -> list[Tensor]:
    """The arrays of `pack`, as views of the payload where it is writable."""
    flat = np.frombuffer(payload, _WORD)
    whole = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
    return parted(whole, shapes)


def parted(whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Views of one array as arrays of the given axes, one after the other."""
    if len(shapes) == 1:
        return [whole.view(tuple(shapes[0]))]
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    starts = [0, *ends]
    return [
        whole[start:end].view(tuple(shape))
        for start, end, shape in zip(starts, ends, shapes, strict=False)
    ]


def size_of(shape: Shape) -> int:
    """Bytes of ring elements of these axes.

    >>> size_of((3, 5))
    120
    """
    return ELEMENT_BYTES * math.prod(shape)


def elements_of(payload: Payload, shapes: Sequence[Shape], where: str) -> list[Tensor]:
    """The ring elements of a payload of exactly these axes; int64.

    Raises:
        TruncatedFrameError: it is not exactly as long as all of them.
    """
    (whole,) = split_payload(payload, [sum(map(size_of, shapes))], where)
    return unpack(whole, shapes)


def split_payload(
    payload: Payload,
    sizes: Sequence[int],
    where: str | None,
    what: str = "a payload of shared numbers has the wrong length",
) -> list[memoryview]:
    """The parts of a payload, by their sizes in bytes.

    Raises:
        TruncatedFrameError: it is not exactly as long as all of them.
    """
    if len(payload) != sum(sizes):
        raise TruncatedFrameError(
            what,
            where=where,
            got=f"{len(payload)} bytes",
            want=f"{sum(sizes)} bytes",
        )
    whole, start, parts = memoryview(payload), 0, []
    for size in sizes:
        parts.append(whole[start : start + size])
        start += size
    return parts


@dataclass(slots=True)
class Leak:
    """One kind of thing that one party saw at one place.

    Attributes:
        observer: P0, P1 or P2.
        what: "permuted values", "indices near the turning point", "result" or "digest of row ids".
        where: the layer, or whose ids.
        times: how often.
        elements: how many real values, all times together; of index lists, the indices revealed.
        of: the values among which those indices lie; for permuted values, real ones and dummies.
    """

    observer: str
    what: str
    where: str
    times: int = 0
    elements: int = 0
    of: int = 0


class LeakageLedger:
    """Adds up what one party saw."""

    def __init__(self, observer: str) -> None:
        self._observer = observer
        self._leaks: dict[tuple[str, str], Leak] = {}

    def count(self, what: str, where: str, elements: int, of: int) -> None:
        """One more observation."""
        key = (what, where)
        leak = self._leaks.setdefault(key, Leak(self._observer, what, where))
        leak.times += 1
        leak.elements += elements
        leak.of += of

    def restore(self, leaks: Iterable[Sequence[Any]]) -> None:
        """Count on from earlier observations: what, where, times, elements and of."""
        for what, where, *counts in leaks:
            self._leaks[what, where] = Leak(self._observer, what, where, *counts)

    def leaks(self) -> list[Leak]:
        """All of them, in the order in which they first happened."""
        return list(self._leaks.values())


PHASES = ("setup", "offline", "online")


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went one way between two parties in one phase, frame headers included."""

    sender: str
    receiver: str
    phase: str
    frames: int
    wire_bytes: int


def bytes_by_phase(rows: Iterable[Traffic]) -> dict[str, int]:
    """Total bytes of each phase."""
    totals = dict.fromkeys(PHASES, 0)
    for row in rows:
        totals[row.phase] += row.wire_bytes
    return totals
