"""A trace in memory: frames as they crossed a link, for a loop of one's own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from vfl.errors import OversizedFrameError
from vfl.frame import Frame, Kind

TRAINING = (Kind.CUT, Kind.GRAD)
EVALUATION = (Kind.QUERY,)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One frame of a trace: who it belongs to, which way it went, and its bytes."""

    party: str
    direction: str
    kind: Kind
    step: int
    payload: bytes


class Trace:
    """Records frames of chosen kinds; an `Observer`.

    Args:
        kinds: which frames to keep; `TRAINING` and `EVALUATION` name the usual choices.
        parties: whose frames to keep; None keeps everybody's.
        limit_bytes: recording more than this is refused rather than filling the memory.
    """

    def __init__(
        self,
        kinds: Collection[Kind] = TRAINING + EVALUATION,
        parties: Collection[str] | None = None,
        limit_bytes: int = 2**31,
    ) -> None:
        self.kinds = frozenset(kinds)
        self.parties = None if parties is None else frozenset(parties)
        self.limit_bytes = limit_bytes
        self.payload_bytes = 0
        self._frames: list[Recorded] = []

    def __call__(self, party: str, direction: str, frame: Frame) -> None:
        """Keep a frame if its kind and party were asked for.

        Raises:
            OversizedFrameError: the trace would grow past its limit.
        """
        if frame.kind not in self.kinds or (self.parties is not None and party not in self.parties):
            return
        self.payload_bytes += len(frame.payload)
        if self.payload_bytes > self.limit_bytes:
            raise OversizedFrameError(
                "the trace is full",
                got=f"more than {self.limit_bytes} bytes",
                fix="record fewer kinds or parties, or raise limit_bytes",
            )
        payload = bytes(frame.payload)
        self._frames.append(Recorded(party, direction, frame.kind, frame.step, payload))

    def __iter__(self) -> Iterator[Recorded]:
        return iter(self._frames)

    def __len__(self) -> int:
        return len(self._frames)
