"""What one party says to another: arrays in frames, their sizes known before they come.

A frame carries the number of the operation it belongs to and raw words, nothing that describes
them: both ends follow one program, so a frame of another length or number is refused unread.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vfl.errors import ProtocolError
from vfl.frame import Frame, Kind
from vfl.link import Link
from vfl.mpc.ring import WORD_BYTES
from vfl.mpc.truncation import Moved

Shape = Sequence[int]
_INDEX = np.dtype("<u4")
_WORD = np.dtype("<i8")


class Channel:
    """One party's end of a pair.

    Args:
        link: ordered and authenticated; who else can read it is for its maker to know.
        peer: name of the other end, for messages.

    Attributes:
        sent: payload and header bytes this end has sent, by phase.
        frames: how many frames that were, by phase.
    """

    def __init__(self, link: Link, peer: str) -> None:
        self.link = link
        self.peer = peer
        self.sent: Counter[str] = Counter()
        self.frames: Counter[str] = Counter()

    def send_bytes(self, payload: bytes | bytearray | memoryview, number: int, phase: str) -> None:
        """Hand over one frame of an operation."""
        frame = Frame(Kind.PROTOCOL, number & 0xFFFFFFFF, payload)
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
            PeerError: see `vfl.link.Link`.
        """
        frame = self.link.receive()
        wanted = number & 0xFFFFFFFF
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

    def send(self, words: Sequence[Tensor], number: int, phase: str = "online") -> None:
        """Arrays of ring words, one after the other."""
        self.send_bytes(pack(words), number, phase)

    def receive(self, shapes: Sequence[Shape], number: int) -> list[Tensor]:
        """Arrays of the given axes; see `receive_bytes`."""
        sizes = [WORD_BYTES * math.prod(shape) for shape in shapes]
        return unpack(self.receive_bytes(number, sum(sizes)), shapes)

    def send_moved(
        self, words: Sequence[Tensor], moved: Sequence[Moved], number: int, phase: str = "online"
    ) -> None:
        """Arrays of ring words and, behind them, index lists: 4 bytes an index, 8 a pair."""
        lists = [each.numpy().astype(_INDEX) for pair in moved for each in (pair.large, pair.small)]
        counts = np.array([len(each) for each in lists], dtype=_INDEX)
        tail = b"".join([counts.tobytes(), *(each.tobytes() for each in lists)])
        self.send_bytes(b"".join([pack(words), tail]), number, phase)

    def receive_moved(
        self, shapes: Sequence[Shape], sizes: Sequence[int], number: int
    ) -> tuple[list[Tensor], list[Moved]]:
        """What `send_moved` sent.

        Args:
            shapes: of the arrays.
            sizes: elements of each scaled tensor, in the order of the lists.
            number: of the operation.

        Raises:
            ProtocolError: an index outside its tensor, twice, or lists of another length.
        """
        if not sizes:  # nothing was divided
            return self.receive(shapes, number), []
        words = WORD_BYTES * sum(math.prod(shape) for shape in shapes)
        least = words + 2 * _INDEX.itemsize * len(sizes)
        payload = self.receive_bytes(number, least, least + _INDEX.itemsize * sum(sizes))
        if (len(payload) - words) % _INDEX.itemsize:
            raise self._bad_lists("a length that is no number of indices")
        flat = np.frombuffer(payload[words:], _INDEX)
        counts, indices = flat[: 2 * len(sizes)].astype(np.int64), flat[2 * len(sizes) :]
        if int(counts.sum()) != len(indices):
            raise self._bad_lists("counts that do not add up")
        lists = [part.astype(np.int64) for part in np.split(indices, np.cumsum(counts)[:-1])]
        moved = []
        for large, small, size in zip(lists[::2], lists[1::2], sizes, strict=True):
            both = np.concatenate([large, small])
            if len(np.unique(both)) != len(both) or (len(both) and both.max() >= size):
                raise self._bad_lists("an index outside its tensor, or twice")
            moved.append(Moved(torch.from_numpy(large), torch.from_numpy(small)))
        return unpack(payload[:words], shapes), moved

    def _bad_lists(self, got: str) -> ProtocolError:
        return ProtocolError(f"index lists of {self.peer} cannot be", got=got)


def pack(words: Sequence[Tensor]) -> memoryview:
    """Arrays one after the other as little-endian bytes; of one array the memory itself.

    Whoever hands it over does not change it any more: a link may send it again.
    """
    parts = [each.reshape(-1).numpy() for each in words]
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
