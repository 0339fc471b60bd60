"""Recorders write the frames on a party's links during a training to disk (a trace).

A recorder is called with every frame on the party's links, and follows the schedule in order to
know the rows of each frame. A recorder writes its buffer to disk at the end of every epoch, when
the buffer is large, and before every checkpoint. If the training returns to a checkpoint, the files
that were written up to this checkpoint therefore form a complete trace, even if frames were in
transit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from vfl.config import PartyFile, TraceSettings
from vfl.core.errors import ConfigError, ExposedCutError
from vfl.core.frame import Frame, Kind
from vfl.core.storage import Seal, pack_weights
from vfl.core.traffic import size
from vfl.datasets import PartyData, Split
from vfl.session import Checkpoints, Exchange, Terms, rules
from vfl.session.store.party_folder import own_folder
from vfl.session.trace.store import (
    HELD_BYTES,
    SentFrame,
    Store,
    check_room,
    expected_bytes,
    is_recorded,
    links_of,
    pack,
)

#: Name of the folder with the trace, in a party's part of a run.
TRACE = "trace"
Weights = Callable[[], Mapping[str, Tensor]]
#: When a training resumes at an exchange, gradients of at most this many exchanges before it may
#: still arrive.
_BEHIND = 64
_ENDS = (Kind.GRAD, Kind.ACK)
_KEPT = (Kind.CUT, Kind.GRAD, Kind.QUERY)  # an ACK frame contains no cut and no gradient


class Recorder:
    """Records one party's frames of one training; the party's links call it with each frame.

    Args:
        folder: folder of the trace's files.
        party: name of the party that records.
        settings: settings of the trace, from the party's own file.
        terms: the agreed terms.
        split: split of the aligned rows.
    """

    def __init__(
        self, folder: Path, party: str, settings: TraceSettings, terms: Terms, split: Split
    ) -> None:
        self.folder = folder
        self.party = party
        self._settings = settings
        self._terms = terms
        self._split = split
        self._store = Store(self.folder)
        self._links = len(links_of(terms, party))
        # each exchange, with the links that still expect frames
        self._open: dict[int, tuple[Exchange, int]] = {}
        self._held: list[SentFrame] = []
        self._held_bytes = 0
        self._files = 0
        self._checkpoint = 0
        self._epoch = 0
        self._next = 0
        self._weights: Weights = dict

    def __call__(self, party: str, direction: str, frame: Frame) -> None:
        """Buffer a frame for the trace if the settings select its exchange."""
        found = self._open.get(frame.step)
        if found is None:
            return
        exchange, links = found
        if frame.kind in _KEPT:
            payload = bytes(frame.payload)
            self._held.append(SentFrame(exchange, party, frame.kind, direction == "up", payload))
            self._held_bytes += len(payload)
        if frame.kind in _ENDS:
            if links > 1:
                self._open[frame.step] = exchange, links - 1
            else:
                del self._open[frame.step]
        if self._held_bytes > HELD_BYTES:
            self._write()

    def expected_bytes(self, weights: Mapping[str, Tensor], start: int) -> int:
        """Return the largest possible size of the trace on disk in bytes; see `expected_bytes`."""
        return expected_bytes(self._settings, self._terms, self.party, self._split, weights, start)

    def begin(self, start: int, weights: Weights) -> None:
        """Prepare to record from exchange `start` on; remove records of this and later exchanges.

        Raises:
            RunFolderError: the folder contains a trace that was recorded with other settings.
        """
        self._store.begin(self.party, self._settings, self._terms, start)
        self._files = sum(entry.epoch is None for entry in self._store.entries())
        self._checkpoint = self._next = start
        self._weights = weights
        for exchange in rules.schedule(self._terms, self._split, max(0, start - _BEHIND)):
            if exchange.step >= start:
                break
            self._note(exchange)

    def follow(self, schedule: Iterable[Exchange]) -> Iterator[Exchange]:
        """Yield the same exchanges and record their frames.

        Write the buffer to disk between epochs.
        """
        for exchange in schedule:
            if exchange.epoch != self._epoch and (self._epoch or exchange.step == 0):
                self._end_epoch(last=False)
            self._epoch, self._next = exchange.epoch, exchange.step + 1
            self._note(exchange)
            yield exchange

    def save(self, step: int) -> None:
        """Write all buffered frames to disk.

        The party calls this before it saves checkpoint `step`.
        """
        self._write()
        self._checkpoint = step

    def end(self) -> None:
        """Complete the trace after a training that ended without an error."""
        self._end_epoch(last=True)

    def _note(self, exchange: Exchange) -> None:
        if is_recorded(self._settings, exchange):
            self._open[exchange.step] = exchange, self._links

    def _end_epoch(self, *, last: bool) -> None:
        self._write()
        every = self._settings.snapshots
        if every and (last or self._epoch % every == 0):
            seal = Seal("snapshot", self.party, self._terms.run, self._epoch)
            content = pack_weights(self._weights(), seal)
            name = f"snapshot-{self._epoch:06d}.safetensors"
            self._store.add({name: [content]}, self._next, self._epoch)

    def _write(self) -> None:
        if not self._held:
            return
        self._files += 1
        known, payload = pack(self._held)
        files = {
            f"frames-{self._files:06d}.npz": [known],
            f"payload-{self._files:06d}.npy": payload,
        }
        self._store.add(files, self._checkpoint)
        self._held, self._held_bytes = [], 0


def recorders_of(
    settings: TraceSettings,
    parties: Path | None,
    terms: Terms,
    data: PartyData,
    checkpoints: Checkpoints | None,
) -> list[Recorder]:
    """Make the recorder of a party, in a list; the list is empty if no trace is requested.

    Args:
        settings: settings of the trace, from the party's own file.
        parties: folder with one folder for each party's part of the run; None records nothing.
        terms: the agreed terms.
        data: aligned rows of the party.
        checkpoints: the party's checkpoints; before each of them, the recorder writes the trace to
            disk.

    Raises:
        ExposedCutError: the session masks the single cuts, so the party cannot record them.
    """
    if parties is None or terms.mode != "train" or not settings.enabled:
        return []
    if terms.masks_cuts:
        raise trace_of_masked_cuts()
    recorder = Recorder(parties / data.name / TRACE, data.name, settings, terms, data.split)
    if checkpoints is not None:
        checkpoints.before_save = recorder.save
    return [recorder]


def trace_of_masked_cuts() -> ExposedCutError:
    """Make the error for a party that requests a trace in a session with masked cuts."""
    return ExposedCutError(
        "a trace contains single cuts, but in this secure mode each party knows only its own cuts",
        got="[trace]",
        want="no [trace], or secure = 'none'",
    )


def own_recorders(
    party: PartyFile, terms: Terms, data: PartyData, checkpoints: Checkpoints | None
) -> list[Recorder]:
    """Make the recorders of a party in a federation.

    The list is empty if its file requests no trace.

    Raises:
        ConfigError: the party's file requests a trace, but some party lacks rows, or a party other
            than the label party receives cuts.
        ExposedCutError: see `recorders_of`.
    """
    if terms.takers and party.trace.enabled:
        raise ConfigError(
            "a trace can contain links to one label party only, but other parties receive cuts in "
            "this session",
            where="[trace]",
            fix="remove [trace] from the party's own file",
        )
    if data.held and party.trace.enabled:
        raise ConfigError(
            "a trace requires that every party has every row, but in this session some parties "
            "lack rows",
            where="[trace]",
            fix="remove [trace], or set data.missing_rows = 'intersection'",
        )
    parties = own_folder(party, terms).path.parent
    return recorders_of(party.trace, parties, terms, data, checkpoints)


@contextmanager
def recording(
    recorders: Sequence[Recorder],
    schedule: Iterable[Exchange],
    start: int,
    weights: Mapping[str, Weights],
    say: Callable[[str], None],
) -> Iterator[Iterable[Exchange]]:
    """Yield the same exchanges; if there are recorders, these record the frames of the exchanges.

    Args:
        recorders: recorders of the parties in this process.
        schedule: the exchanges of the session, from `start` on.
        start: number of the first exchange.
        weights: for each party, a function that returns its present weights.
        say: function that is called with a text about the largest size of the trace.

    Raises:
        ConfigError: the disk has too little free space for the trace; nothing was written.
        RunFolderError: the run's folder contains an earlier trace with other settings.
    """
    if not recorders:
        yield schedule
        return
    needed = sum(one.expected_bytes(weights[one.party](), start) for one in recorders)
    check_room(recorders[0].folder, needed)
    say(
        f"the trace of {', '.join(one.party for one in recorders)} takes up to {size(needed)} on "
        "disk"
    )
    for one in recorders:
        one.begin(start, weights[one.party])
        schedule = one.follow(schedule)
    yield schedule
    for one in recorders:
        one.end()
