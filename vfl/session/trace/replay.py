"""Reads a trace: the frames of one party, decoded to the values that the session used."""

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
    """A party's weights at one point of the training.

    Attributes:
        epoch: number of epochs that were trained before this point; 0 is before the first step.
        step: number of the first exchange after this point.
        weights: weights by name, including the state of codec and defense.
    """

    epoch: int
    step: int
    weights: dict[str, Tensor]


class Recording:
    """A party's trace of a training; `read` opens a trace.

    Attributes:
        party: party that made the recording.
        settings: settings of the trace.
        terms: the agreed terms: codec, defense, widths, seed, schedule.
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
        """Yield the recorded frames in their recorded order, with the bytes that were sent.

        Args:
            phase: yield only frames of "train", "validation" or "test".
            party: yield only frames of this feature party's link.
            direction: yield only frames "up" to the label party, or "down" from it.

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
        """Yield each frame with its decoded cut or gradient, both with axes (rows, width).

        The arguments are those of `frames`.

        Raises:
            RunFolderError: a file is missing or damaged.
            FrameError: the codec cannot have produced these bytes.
            SpecError: the codec has state that changes during training, but the trace contains only
                some epochs.
        """
        learns = compression.make(self.terms.codec).learns
        if learns and (self.settings.epochs or "train" not in self.settings.phases):
            raise SpecError(
                "this codec's state changes in training, so decoding a frame needs all frames "
                "before it",
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
        """Yield snapshots of the party's weights, in the order of the epochs.

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
    """Open the trace in a folder, ``RUN/parties/PARTY/trace``.

    Raises:
        RunFolderError: the folder has no trace, or the trace is damaged or has another format
            version.
    """
    return Recording(Path(folder))


class Decoder:
    """Decodes frames between a feature party and the label party, in recorded order.

    Args:
        terms: the agreed terms.
        party: the feature party.
        folder: folder of the trace, named in error messages.
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
        """Decode a frame to the values that its receiver computed with, axes (rows, width).

        Raises:
            RunFolderError: the trace lacks the cut that belongs to this gradient.
            FrameError: the codec cannot have produced these bytes.
        """
        training = frame.phase == "train"
        context = StepContext(frame.step, training, rows=frame.rows if training else None)
        if frame.kind is Kind.GRAD:
            if frame.step not in self._cuts:
                raise RunFolderError(
                    "the trace does not contain the cut that belongs to this gradient",
                    where=str(self._folder),
                )
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
        """Repeat in the codec the step commits that both parties had made before this cut."""
        same_epoch = frame.phase == "train" and frame.epoch == self._epoch
        last = self._in_flight - 1 if same_epoch else 0
        while len(self._uncommitted) > last:
            self._codec.commit(self._uncommitted.popleft())
        self._epoch = frame.epoch


def training_cuts(recording: Recording, party: str | None = None) -> Tensor:
    """Decode all training cuts that one feature party sent, in the order of the steps.

    The values contain the error of a lossy codec; if the codec has a trained module, the width is
    the width of the module's output.

    Args:
        recording: a trace.
        party: the feature party; optional if there is only one.

    Returns:
        All cuts in one tensor, float32, axes (rows, width).

    Raises:
        UserError: the party does not exist, or `party` is None although there are several feature
            parties.
        DataError: the trace contains no training frames.
        SpecError, FrameError, RunFolderError: see `Recording.decoded`.
    """
    party = _chosen(links_of(recording.terms, recording.party), party)
    cuts = [cut for _, cut in recording.decoded(phase="train", party=party, direction="up")]
    if not cuts:
        raise DataError(
            "this trace contains no training cuts",
            got=f"phases {', '.join(recording.settings.phases)}",
            fix="train with -s trace.phases=train",
        )
    return torch.cat(cuts)


def _chosen(known: list[str], party: str | None) -> str:
    if party is None and len(known) == 1:
        return known[0]
    if party is None:
        raise UserError(
            "this trace contains the cuts of several parties",
            got=", ".join(known),
            want="one of these parties",
            fix=f"--party {known[0]}",
        )
    if party not in known:
        raise UserError(
            f"this trace contains no cuts of '{party}'",
            want=", ".join(known),
            fix=nearest(party, known),
        )
    return party
