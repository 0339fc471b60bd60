"""One link's codec, taken through the recorded frames as it went through the session."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from torch import Tensor

from vfl import compression
from vfl.compression import Moment
from vfl.errors import RunFolderError
from vfl.frame import Kind
from vfl.session import Terms
from vfl.trace.chunk import Replayed


class Decoder:
    """Decodes the frames of one feature party's link in their order.

    Args:
        terms: what the parties had agreed on.
        party: the feature party.
        folder: of the trace, for messages.
    """

    def __init__(self, terms: Terms, party: str, folder: Path) -> None:
        self._codec = compression.make(terms.codec)
        self._width = self._codec.wire_width(terms.parties[party].width)
        self._in_flight = terms.train.in_flight
        self._folder = folder
        self._cuts: dict[int, Any] = {}
        self._uncommitted: deque[int] = deque()
        self._epoch = 0

    def values(self, frame: Replayed) -> Tensor:
        """What the frame's receiver made of it, axes (rows, width).

        Raises:
            RunFolderError: a gradient whose cut is missing.
            FrameError: bytes the codec did not make.
        """
        moment = Moment(frame.step, training=frame.phase == "train")
        if frame.kind is Kind.GRAD:
            if frame.step not in self._cuts:
                raise RunFolderError("a gradient's cut is missing", where=str(self._folder))
            kept = self._codec.kept(self._cuts.pop(frame.step))
            return self._codec.decode_grad(
                frame.payload, kept, len(frame.rows), self._width, moment
            )
        self._catch_up(frame)
        values, saved = self._codec.decode(frame.payload, len(frame.rows), self._width, moment)
        if frame.kind is Kind.CUT:
            self._cuts[frame.step] = saved
            self._uncommitted.append(frame.step)
        return values

    def _catch_up(self, frame: Replayed) -> None:
        """Commit the steps that both ends had committed before they made and read this cut."""
        same_epoch = frame.phase == "train" and frame.epoch == self._epoch
        last = self._in_flight - 1 if same_epoch else 0
        while len(self._uncommitted) > last:
            self._codec.commit(self._uncommitted.popleft())
        self._epoch = frame.epoch
