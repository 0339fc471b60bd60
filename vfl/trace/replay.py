"""Reading a trace back: the frames one party saw, decoded as the session decoded them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from vfl import compression
from vfl.compression import Codec, Moment
from vfl.config import TraceSettings
from vfl.errors import RunFolderError, SpecError
from vfl.frame import Kind
from vfl.session import Terms
from vfl.storage import unpack_weights
from vfl.trace.chunk import Replayed, unpack
from vfl.trace.store import Store


class Snapshot(NamedTuple):
    """A party's own weights at one moment.

    Attributes:
        epoch: epochs trained by then; 0 is before the first step.
        step: the first exchange after it.
        weights: by name, with what codec and defense had learned.
    """

    epoch: int
    step: int
    weights: dict[str, Tensor]


class Recording:
    """What one party recorded of its own side of a training; see `read`.

    Attributes:
        party: whose side it is.
        settings: what was recorded.
        terms: what the parties had agreed on: codec, defense, widths, seed, schedule.
    """

    party: str
    settings: TraceSettings
    terms: Terms

    def __init__(self, folder: Path) -> None:
        self._store = Store(folder)
        about = self._store.about()
        self.party, self.settings, self.terms = about.party, about.settings, about.terms

    def frames(
        self, *, phase: str | None = None, party: str | None = None, direction: str | None = None
    ) -> Iterator[Replayed]:
        """The frames that crossed, in their order, as the bytes they were.

        Args:
            phase: only those of "train", "validation" or "test".
            party: only those of this feature party's link.
            direction: only those that went "up" to the label party, or "down".

        Raises:
            RunFolderError: a file is missing or damaged.
        """
        for entry in self._store.entries():
            if entry.epoch is None:
                known, payload = self._store.contents(entry)
                for frame in unpack(known, payload, self._store.folder):
                    if (
                        phase in (None, frame.phase)
                        and party in (None, frame.party)
                        and direction in (None, frame.direction)
                    ):
                        yield frame

    def decoded(
        self, *, phase: str | None = None, party: str | None = None, direction: str | None = None
    ) -> Iterator[tuple[Replayed, Tensor]]:
        """Each frame and what its receiver made of it: a cut or a gradient, axes (rows, width).

        The arguments are those of `frames`.

        Raises:
            RunFolderError: a file is missing or damaged.
            FrameError: bytes the codec did not make.
            SpecError: a codec that changes while it trains; a trace has not all it went through.
        """
        codec = compression.make(self.terms.codec)
        if codec.state_dict():
            raise SpecError(
                "this codec changes while it trains, so its frames cannot be decoded one by one",
                got=self.terms.codec,
            )
        cuts: dict[tuple[str, int], Any] = {}
        for frame in self.frames(phase=phase, party=party):
            values = self._decode(codec, frame, cuts)
            if direction in (None, frame.direction):
                yield frame, values

    def snapshots(self) -> Iterator[Snapshot]:
        """The party's own weights, in the order of the epochs.

        Raises:
            RunFolderError: a file is missing or damaged.
        """
        for entry in self._store.entries():
            if entry.epoch is not None:
                (content,) = self._store.contents(entry)
                weights = unpack_weights(content, self._store.folder)
                yield Snapshot(entry.epoch, entry.step, weights)

    def _decode(self, codec: Codec, frame: Replayed, cuts: dict[tuple[str, int], Any]) -> Tensor:
        """One frame's values; `cuts` holds what to keep of a cut until its gradient comes."""
        rows, key = len(frame.rows), (frame.party, frame.step)
        width = codec.wire_width(self.terms.parties[frame.party].width)
        moment = Moment(frame.step, training=frame.phase == "train")
        if frame.kind is Kind.GRAD:
            if key not in cuts:
                raise RunFolderError("a gradient's cut is missing", where=str(self._store.folder))
            kept = codec.kept(cuts.pop(key))
            return codec.decode_grad(frame.payload, kept, rows, width, moment)
        values, saved = codec.decode(frame.payload, rows, width, moment)
        if frame.kind is Kind.CUT:
            cuts[key] = saved
        return values


def read(folder: Path) -> Recording:
    """The trace in a folder, ``RUN/parties/PARTY/trace``.

    Raises:
        RunFolderError: there is none, or it is damaged or of another format.
    """
    return Recording(Path(folder))
