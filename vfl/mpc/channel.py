"""Messages between two parties, and counts of the bytes sent and of the values disclosed.

A frame contains the number of its operation and raw ring elements, without a description: both
parties of a link run one program and know in advance the sizes of all messages, and of lists of
indices the largest size. The receiver therefore refuses a frame of another length or with another
operation number, without reading the frame's elements.
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
#: Largest number of bytes of early frames (frames of later operations) that one channel stores
#: until their operations begin.
_EARLY_BYTES = 1 << 28
#: Mask of the operation number that a frame carries: the number modulo 2^32.
_NUMBERS = 0xFFFFFFFF


@runtime_checkable
class Polled(Link, Protocol):
    """A link that a party can poll without waiting; see `vfl.transport.reliable`."""

    def poll(self) -> Frame | None:
        """Return the next frame, or None if no frame has arrived."""

    def read_beside(self, links: Sequence[Any]) -> None:
        """Let this link also read incoming data of other links while it waits to send a frame."""


class Channel:
    """A party's access to the link to another party; it counts operations and bytes.

    Args:
        link: ordered and authenticated link; the code that makes the link decides whether others
            can read its frames.
        peer: name of the other party, for error messages.

    Attributes:
        keeps_early: whether frames of later operations may arrive before the expected frame, as
            frames of a dealer do; the channel stores such frames until their operation begins.
        owed: earlier operations whose frames have not arrived yet.
        sent: bytes of payloads and headers that this party has sent, by phase.
        frames: number of frames that this party has sent, by phase.
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
        """Return whether a frame has arrived that the party has not yet read; never wait.

        Args:
            link: the polled link of this channel.

        Raises:
            PeerError: see `vfl.core.frame.Link`.
        """
        if self._next is None:
            self._next = link.poll()
        return self._next is not None

    def restore(self, frames: Mapping[str, int], sent: Mapping[str, int]) -> None:
        """Continue the counts of bytes and frames from an earlier attempt, by phase."""
        self.frames, self.sent = Counter(frames), Counter(sent)

    def send_bytes(self, payload: bytes | bytearray | memoryview, number: int, phase: str) -> None:
        """Send one frame that belongs to an operation."""
        frame = Frame(Kind.PROTOCOL, number & _NUMBERS, payload)
        self.sent[phase] += frame.wire_bytes
        self.frames[phase] += 1
        self.link.send(frame)

    def receive_bytes(self, number: int, size: int, most: int | None = None) -> memoryview:
        """Receive the next frame, and return its payload.

        Args:
            number: number of the expected operation.
            size: expected length in bytes; if `most` is given, the smallest accepted length.
            most: the largest accepted length in bytes.

        Raises:
            ProtocolError: the frame has another operation number or another length.
            PeerError: see `vfl.core.frame.Link`.
        """
        wanted = number & _NUMBERS
        frame = self._frame_of(wanted)
        if frame.kind is not Kind.PROTOCOL or frame.step != wanted:
            raise ProtocolError(
                f"an unexpected message from {self.peer}",
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
                fix="start all parties with the same network, mode and batch size",
            )
        return memoryview(frame.payload)

    def _frame_of(self, wanted: int) -> Frame:
        """Return the next frame of an operation; refuse the frame of any other operation."""
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
        """Return whether to store a frame for later.

        The frame belongs to a later operation or to one in `owed`, and still fits into the buffer.
        """
        later = 0 < (frame.step - wanted & _NUMBERS) < _NUMBERS // 2
        expected = frame.kind is Kind.PROTOCOL and (later or frame.step in self.owed)
        return (
            self.keeps_early and expected and self._early_bytes + len(frame.payload) < _EARLY_BYTES
        )

    def send(self, elements: Sequence[Tensor], number: int, phase: str = "online") -> None:
        """Send tensors of ring elements in one frame."""
        self.send_bytes(pack(elements), number, phase)

    def receive(self, shapes: Sequence[Shape], number: int) -> list[Tensor]:
        """Receive tensors of ring elements with the given axes; see `receive_bytes`."""
        return unpack(self.receive_bytes(number, sum(map(size_of, shapes))), shapes)

    def send_moved(
        self,
        elements: Sequence[Tensor],
        moved: Sequence[MovedIndices],
        number: int,
        phase: str = "online",
    ) -> None:
        """Send tensors of ring elements, then lists of indices, which take 4 bytes per index."""
        lists = [each.numpy().astype(_INDEX) for pair in moved for each in (pair.large, pair.small)]
        counts = np.array([len(each) for each in lists], dtype=_INDEX)
        tail = b"".join([counts.tobytes(), *(each.tobytes() for each in lists)])
        self.send_bytes(b"".join([pack(elements), tail]), number, phase)

    def receive_moved(
        self, shapes: Sequence[Shape], sizes: Sequence[int], number: int
    ) -> tuple[list[Tensor], list[MovedIndices]]:
        """Receive the tensors and index lists that `send_moved` sent.

        Args:
            shapes: axes of the tensors.
            sizes: for each pair of index lists, in order, the number of elements of the tensor that
                they index.
            number: number of the operation.

        Raises:
            ProtocolError: an index lies outside its tensor or occurs twice, or a list has an
                unexpected length.
        """
        if not sizes:  # a message without a division has no index lists
            return self.receive(shapes, number), []
        elements = sum(map(size_of, shapes))
        least = elements + 2 * _INDEX.itemsize * len(sizes)
        payload = self.receive_bytes(number, least, least + _INDEX.itemsize * sum(sizes))
        if (len(payload) - elements) % _INDEX.itemsize:
            raise self._bad_lists("a length that is not a whole number of indices")
        flat = np.frombuffer(payload[elements:], _INDEX)
        counts, indices = flat[: 2 * len(sizes)].astype(np.int64), flat[2 * len(sizes) :]
        if int(counts.sum()) != len(indices):
            raise self._bad_lists("numbers of indices that do not add up to the list's length")
        lists = [part.astype(np.int64) for part in np.split(indices, np.cumsum(counts)[:-1])]
        moved = []
        for large, small, size in zip(lists[::2], lists[1::2], sizes, strict=True):
            both = np.concatenate([large, small])
            if len(both) and both.max() >= size:
                raise self._bad_lists("an index outside the tensor that it belongs to")
            # Marking the indices in a table is ten times as fast as sorting the lists, as torch's
            # `unique` does.
            marked = np.zeros(size, bool)
            marked[both] = True
            if np.count_nonzero(marked) != len(both):
                raise self._bad_lists("an index twice")
            moved.append(MovedIndices(torch.from_numpy(large), torch.from_numpy(small)))
        return unpack(payload[:elements], shapes), moved

    def _bad_lists(self, got: str) -> ProtocolError:
        return ProtocolError(f"invalid index lists from {self.peer}", got=got)


def pack(elements: Sequence[Tensor]) -> memoryview:
    """Pack tensors as little-endian bytes; for a single tensor, return a view of its memory.

    The caller must not change this tensor afterwards, because the link may have to send its memory
    a second time.
    """
    parts = [each.reshape(-1).numpy() for each in elements]
    if not parts:
        return memoryview(b"")
    joined = np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)
    return joined.astype(_WORD, copy=False).view(np.uint8).data


def unpack(payload: memoryview, shapes: Sequence[Shape]) -> list[Tensor]:
    """Unpack the tensors of `pack`; they are views of the payload if the payload is writable."""
    flat = np.frombuffer(payload, _WORD)
    whole = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
    return parted(whole, shapes)


def parted(whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Split one tensor into consecutive views with the given axes."""
    if len(shapes) == 1:
        return [whole.view(tuple(shapes[0]))]
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    starts = [0, *ends]
    return [
        whole[start:end].view(tuple(shape))
        for start, end, shape in zip(starts, ends, shapes, strict=False)
    ]


def size_of(shape: Shape) -> int:
    """Return the number of bytes of ring elements with these axes.

    >>> size_of((3, 5))
    120
    """
    return ELEMENT_BYTES * math.prod(shape)


def elements_of(payload: Payload, shapes: Sequence[Shape], where: str) -> list[Tensor]:
    """Return the ring elements of a payload that contains exactly these axes; int64.

    Raises:
        TruncatedFrameError: the payload is not exactly as long as elements of these axes are.
    """
    (whole,) = split_payload(payload, [sum(map(size_of, shapes))], where)
    return unpack(whole, shapes)


def split_payload(
    payload: Payload,
    sizes: Sequence[int],
    where: str | None,
    what: str = "a payload of shared numbers has the wrong length",
) -> list[memoryview]:
    """Split a payload into parts of the given sizes in bytes.

    Raises:
        TruncatedFrameError: the payload is not exactly as long as all parts together are.
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
    """Values of one kind that one party learned in the computations of one layer or tensor.

    Attributes:
        observer: party that learned the values, such as P0 or P2.
        what: kind of the values, such as "permuted values", "indices near the wrap-around" or
            "result".
        where: the layer or the tensor whose computation disclosed the values.
        times: number of observations of such values.
        elements: number of real values (without dummies) over all observations; if `what` names
            index lists, number of revealed indices.
        of: number of values among which the learned values are: for index lists, all values that
            could be listed; for permuted values, real values and dummies together.
    """

    observer: str
    what: str
    where: str
    times: int = 0
    elements: int = 0
    of: int = 0


class LeakageLedger:
    """Record of the values that one party learned during a session."""

    def __init__(self, observer: str) -> None:
        self._observer = observer
        self._leaks: dict[tuple[str, str], Leak] = {}

    def count(self, what: str, where: str, elements: int, of: int) -> None:
        """Count one more observation of values of one kind."""
        key = (what, where)
        leak = self._leaks.setdefault(key, Leak(self._observer, what, where))
        leak.times += 1
        leak.elements += elements
        leak.of += of

    def restore(self, leaks: Iterable[Sequence[Any]]) -> None:
        """Continue from earlier observations.

        Each is a list of the values of what, where, times, elements and of.
        """
        for what, where, *counts in leaks:
            self._leaks[what, where] = Leak(self._observer, what, where, *counts)

    def leaks(self) -> list[Leak]:
        """Return all kinds of observations, in the order in which they first happened."""
        return list(self._leaks.values())


PHASES = ("setup", "offline", "online")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic in one direction between two parties in one phase; it includes frame headers."""

    sender: str
    receiver: str
    phase: str
    frames: int
    wire_bytes: int


def bytes_by_phase(rows: Iterable[Traffic]) -> dict[str, int]:
    """Return the total bytes of each phase."""
    totals = dict.fromkeys(PHASES, 0)
    for row in rows:
        totals[row.phase] += row.wire_bytes
    return totals
