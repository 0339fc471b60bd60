"""Reading a trace back: the frames one party saw, decoded as the session decoded them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vfl import compression
from vfl.compression import StepContext
from vfl.config import TraceSettings
from vfl.core.errors import DataError, RunFolderError, SpecError, UserError, nearest
from vfl.core.frame import Kind
from vfl.core.storage import Seal, unpack_weights
from vfl.session import Terms
from vfl.session.trace.store import Replayed, Store, links_of, unpack


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
        training = frame.phase == "train"
        context = StepContext(frame.step, training, rows=frame.rows if training else None)
        if frame.kind is Kind.GRAD:
            if frame.step not in self._cuts:
                raise RunFolderError("a gradient's cut is missing", where=str(self._folder))
            kept = self._codec.encoder_state(self._cuts.pop(frame.step))
            return self._codec.decode_grad(
                frame.payload, kept, len(frame.rows), self._width, context
            )
        self._catch_up(frame)
        values, saved = self._codec.decode(frame.payload, len(frame.rows), self._width, context)
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


def training_cuts(recording: Recording, party: str | None = None) -> Tensor:
    """What one feature party sent in training, decoded, in the order of the steps.

    A lossy codec has left its mark on it, and one with a module made it as wide as that module.

    Args:
        recording: a trace.
        party: the feature party; it may be left out where there is only one.

    Returns:
        The cuts below each other, float32 of axes (rows, width).

    Raises:
        UserError: no such party, or several to choose from.
        DataError: no training frames were recorded.
        SpecError, FrameError, RunFolderError: see `Recording.decoded`.
    """
    party = _chosen(links_of(recording.terms, recording.party), party)
    cuts = [cut for _, cut in recording.decoded(phase="train", party=party, direction="up")]
    if not cuts:
        raise DataError(
            "this trace holds no training cuts",
            got=f"phases {', '.join(recording.settings.phases)}",
            fix="train with -s trace.phases=train",
        )
    return torch.cat(cuts)


def _chosen(known: list[str], party: str | None) -> str:
    if party is None and len(known) == 1:
        return known[0]
    if party is None:
        raise UserError(
            "this trace holds the cuts of several parties",
            got=", ".join(known),
            want="one of them",
            fix=f"--party {known[0]}",
        )
    if party not in known:
        raise UserError(
            f"this trace holds no cuts of '{party}'",
            want=", ".join(known),
            fix=nearest(party, known),
        )
    return party
