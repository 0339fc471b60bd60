"""Reading a trace back: the frames one party saw, decoded as the session decoded them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from vfl import compression
from vfl.config import TraceSettings
from vfl.errors import SpecError
from vfl.session import Terms
from vfl.storage import Seal, unpack_weights
from vfl.trace.chunk import Replayed, unpack
from vfl.trace.decoder import Decoder
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
            SpecError: a codec that learns while it trains, and a trace of some epochs only.
        """
        learns = compression.make(self.terms.codec).learns
        if learns and (self.settings.epochs or "train" not in self.settings.phases):
            raise SpecError(
                "this codec learns while it trains, so its frames follow from all before them",
                got=self.terms.codec,
                fix="record the training frames of every epoch",
            )
        decoders: dict[str, Decoder] = {}
        for frame in self.frames(party=party, phase=None if learns else phase):
            if frame.party not in decoders:
                decoders[frame.party] = Decoder(self.terms, frame.party, self._store.folder)
            values = decoders[frame.party].values(frame)
            if phase in (None, frame.phase) and direction in (None, frame.direction):
                yield frame, values

    def snapshots(self) -> Iterator[Snapshot]:
        """The party's own weights, in the order of the epochs.

        Raises:
            RunFolderError: a file is missing or damaged.
        """
        for entry in self._store.entries():
            if entry.epoch is not None:
                (content,) = self._store.contents(entry)
                seal = Seal("snapshot", self.party, self.terms.run, entry.epoch)
                weights, _ = unpack_weights(content, seal, self._store.folder)
                yield Snapshot(entry.epoch, entry.step, weights)


def read(folder: Path) -> Recording:
    """The trace in a folder, ``RUN/parties/PARTY/trace``.

    Raises:
        RunFolderError: there is none, or it is damaged or of another format.
    """
    return Recording(Path(folder))
