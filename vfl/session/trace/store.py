"""The files of a trace, with their contents and sizes; and a trace that is only in memory.

Files that have no entry in `index.jsonl` remain from a killed run. A party's trace is in the folder
`parties/NAME/trace`, which has these files:

    file                    form                     content
    trace.json              sealed JSON              the party, the recorded parts, and the terms
                                                     of the session
    index.jsonl             lines: JSON, tab, SHA-256  `files` (SHA-256 by name), `step`, and
                                                     `epoch` of a snapshot
    frames-N.npz            arrays of numpy, stored  properties of the frames, as listed below
    payload-N.npy           u8 array of numpy        payloads of the frames, one after another
    snapshot-N.safetensors  sealed safetensors       the party's weights

Arrays of `frames-N.npz`:

    array             type   of each   content
    `exchange_step`   int64  exchange  number of the exchange
    `exchange_epoch`  int64  exchange  number of its epoch, from 1
    `exchange_phase`  text   exchange  train, validation or test
    `exchange_end`    int64  exchange  end of its rows in `rows`
    `rows`            int64  row       position in the aligned rows
    `parties`         text   party     name of the party
    `frame_exchange`  int64  frame     index of its exchange
    `frame_party`     u8     frame     index in `parties`
    `frame_kind`      u8     frame     `kind` in the frame's header
    `frame_up`        bool   frame     whether it went to the label party
    `frame_end`       int64  frame     end of its bytes in `payload-N.npy`
"""

from __future__ import annotations

import hashlib
import hmac
import io
import re
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, StringConstraints, ValidationError
from torch import Tensor

from vfl import compression
from vfl.config import TraceSettings
from vfl.config.toml import Settings
from vfl.core.errors import ConfigError, OversizedFrameError, RunFolderError
from vfl.core.frame import Frame, Kind
from vfl.core.storage import (
    FORMAT,
    Seal,
    append_text,
    damaged,
    pack_weights,
    read_bytes,
    read_sealed_json,
    write_pieces,
    write_sealed_json,
    write_text,
)
from vfl.core.traffic import size
from vfl.core.version import VERSION
from vfl.datasets import Split
from vfl.session import Exchange, Terms, rules

TRAINING = (Kind.CUT, Kind.GRAD)
EVALUATION = (Kind.QUERY,)

#: Largest sizes of a frame, an exchange, a row, a file and a file's name in a trace, without
#: payloads, in bytes.
FRAME_BYTES = 8 + 1 + 1 + 1 + 8
EXCHANGE_BYTES = 8 + 8 + 4 * len("validation") + 8
ROW_BYTES = 8
FILE_BYTES = 3584
PARTY_BYTES = 4 * 32  # at most 32 characters

#: Largest size of a line of the index, in bytes.
ENTRY_BYTES = 384
#: Approximate number of bytes of frames that are buffered in memory before they are written to a
#: file.
HELD_BYTES = 16 * 2**20
_ABOUT = "trace.json"
_INDEX = "index.jsonl"
_NAME = r"(frames-\d+\.npz|payload-\d+\.npy|snapshot-\d+\.safetensors)"
_OURS = re.compile(rf"^\.?{_NAME}")
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_File = Annotated[str, StringConstraints(pattern=rf"^{_NAME}$")]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One frame of a trace: its party, its direction and its bytes."""

    party: str
    direction: str
    kind: Kind
    step: int
    payload: bytes


class Trace:
    """Records selected kinds of frames in memory, as an `Observer` of links.

    Args:
        kinds: kinds of frames to store; `TRAINING` and `EVALUATION` are the usual selections.
        parties: parties whose frames are stored; None stores the frames of all parties.
        limit_bytes: limit of the recorded bytes, so that the trace does not fill the memory.
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
        """Store a frame if its kind and party were selected.

        Raises:
            OversizedFrameError: the trace would exceed its limit.
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


@dataclass(frozen=True, slots=True)
class SentFrame:
    """A frame of an exchange, buffered until it is written to a file."""

    exchange: Exchange
    party: str
    kind: Kind
    up: bool
    payload: bytes


@dataclass(frozen=True, slots=True)
class Replayed(Recorded):
    """A frame read from a trace.

    Attributes:
        phase: phase of the frame's exchange: train, validation or test.
        epoch: number of the epoch, from 1.
        rows: positions of the cut's rows in the aligned rows, int64, in the order of the cut.
    """

    phase: str
    epoch: int
    rows: np.ndarray = field(compare=False)


def pack(frames: Sequence[SentFrame]) -> tuple[bytes, list[bytes]]:
    """Make the contents of two files: the frames' metadata, and the frames' bytes in pieces."""
    exchanges = list({crossed.exchange.step: crossed.exchange for crossed in frames}.values())
    index_of = {exchange.step: index for index, exchange in enumerate(exchanges)}
    parties = sorted({crossed.party for crossed in frames})
    ends = np.cumsum([len(one.payload) for one in frames], dtype=np.int64)
    content = io.BytesIO()
    np.savez(
        content,
        exchange_step=np.array([one.step for one in exchanges], np.int64),
        exchange_epoch=np.array([one.epoch for one in exchanges], np.int64),
        exchange_phase=np.array([one.phase for one in exchanges], np.str_),
        exchange_end=np.cumsum([len(one.rows) for one in exchanges], dtype=np.int64),
        rows=np.concatenate([one.rows for one in exchanges]).astype(np.int64, copy=False),
        parties=np.array(parties, np.str_),
        frame_exchange=np.array([index_of[one.exchange.step] for one in frames], np.int64),
        frame_party=np.array([parties.index(one.party) for one in frames], np.uint8),
        frame_kind=np.array([one.kind for one in frames], np.uint8),
        frame_up=np.array([one.up for one in frames], np.bool_),
        frame_end=ends,
    )
    return content.getvalue(), [_npy_header(int(ends[-1])), *(one.payload for one in frames)]


def unpack(known: bytes, payload: bytes, folder: Path) -> Iterator[Replayed]:
    """Yield the frames that were passed to `pack`; an error names `folder`.

    Raises:
        RunFolderError: `pack` could not have produced these contents; pickled objects are refused
            too.
    """
    try:
        with np.load(io.BytesIO(known), allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        columns["payload"] = np.load(io.BytesIO(payload), allow_pickle=False)
    except (AttributeError, EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile):
        raise RunFolderError("the trace has no frames", where=str(folder)) from None
    rows = np.split(columns["rows"], columns["exchange_end"][:-1])
    content, start = columns["payload"].data, 0
    for index, end in enumerate(columns["frame_end"].tolist()):
        exchange = columns["frame_exchange"][index]
        yield Replayed(
            party=str(columns["parties"][columns["frame_party"][index]]),
            direction="up" if columns["frame_up"][index] else "down",
            kind=Kind(int(columns["frame_kind"][index])),
            step=int(columns["exchange_step"][exchange]),
            payload=bytes(content[start:end]),
            phase=str(columns["exchange_phase"][exchange]),
            epoch=int(columns["exchange_epoch"][exchange]),
            rows=rows[exchange],
        )
        start = end


def _npy_header(count: int) -> bytes:
    """Return the header of a .npy file with `count` bytes."""
    header = io.BytesIO()
    described = {"descr": "|u1", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


class Entry(Settings):
    """An entry of the index: some frames, or a snapshot of weights.

    Attributes:
        files: SHA-256 of each file's content, by name.
        step: for frames, the last checkpoint that was saved before them; for a snapshot, the number
            of the exchange that follows.
        epoch: for a snapshot, the number of epochs trained before it; None for frames.
    """

    files: dict[_File, _Digest]
    step: int = Field(ge=0)
    epoch: int | None = None

    def line(self, owner: str) -> str:
        """Format the entry as a line of the index, sealed for `owner`; see `TraceHeader.owner`."""
        text = self.model_dump_json()
        return f"{text}\t{_sealed(text, owner)}\n"

    @classmethod
    def of_line(cls, line: str, owner: str) -> Entry:
        """Parse one line of the index.

        Raises:
            ValueError: the line is damaged, or sealed for another owner.
        """
        text, _, digest = line.partition("\t")
        if not hmac.compare_digest(_sealed(text, owner).encode(), digest.encode()):
            raise ValueError("the line has another digest")
        return cls.model_validate_json(text)

    def known_at(self, step: int) -> bool:
        """Return whether checkpoint `step` includes the entry; step 0 is before the training."""
        if self.epoch is None:
            return self.step < step
        return step > 0 and self.step <= step


class TraceHeader(Settings):
    """Header of a trace.

    Attributes:
        format: version of the file format; see `vfl.core.storage`.
        vfl: version of vfl that wrote the files.
        party: party that recorded.
        settings: settings of the trace.
        terms: the agreed terms.
        digest: digest of the terms.
    """

    format: int = FORMAT
    vfl: str = VERSION
    party: str
    settings: TraceSettings
    terms: Terms
    digest: str

    @classmethod
    def of(cls, party: str, settings: TraceSettings, terms: Terms) -> TraceHeader:
        """Make the header of a trace on these terms."""
        return cls(party=party, settings=settings, terms=terms, digest=terms.digest())

    @property
    def seal(self) -> Seal:
        """Seal of the trace."""
        return Seal("trace", self.party, self.terms.run)

    @property
    def owner(self) -> str:
        """Text that names the trace; every line of the index is sealed for this text."""
        return f"{self.party}|{self.terms.run}|{self.digest}"


class Store:
    """The files of one party's trace of one training.

    Args:
        folder: folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, party: str, settings: TraceSettings, terms: Terms, step: int) -> None:
        """Prepare the folder to record from exchange `step` on; remove records of later steps.

        Raises:
            RunFolderError: the folder has a trace of other terms or settings.
        """
        about = TraceHeader.of(party, settings, terms)
        kept: list[Entry] = []
        if (self.folder / _ABOUT).exists():
            if self.about() != about:
                raise RunFolderError(
                    "this trace was begun with other settings",
                    where=str(self.folder / _ABOUT),
                    fix="resume with the settings that it was begun with, or move the folder away",
                )
            kept = [entry for entry in self.entries() if entry.known_at(step)]
        record = {"about": about.model_dump(mode="json")}
        write_sealed_json(self.folder / _ABOUT, record, about.seal)
        write_text(self.folder / _INDEX, "".join(entry.line(about.owner) for entry in kept))
        names = {name for entry in kept for name in entry.files}
        for path in self.folder.iterdir():
            if _OURS.match(path.name) and path.name not in names:
                path.unlink()

    def add(
        self, files: Mapping[str, Sequence[bytes]], step: int, epoch: int | None = None
    ) -> None:
        """Write files piece by piece, and then the line of the index that lists them.

        After a crash before the line is written, the files are not in the index.
        """
        digests = {}
        for name, pieces in files.items():
            write_pieces(self.folder / name, pieces)
            digest = hashlib.sha256()
            for piece in pieces:
                digest.update(piece)
            digests[name] = digest.hexdigest()
        entry = Entry(files=digests, step=step, epoch=epoch)
        append_text(self.folder / _INDEX, entry.line(self.about().owner))

    def about(self) -> TraceHeader:
        """Read the header of the trace.

        Raises:
            RunFolderError: there is no trace, or it is damaged or of another format.
        """
        path = self.folder / _ABOUT
        if not path.exists():
            raise RunFolderError(
                "this folder contains no trace",
                where=str(self.folder),
                fix="give the folder RUN/parties/PARTY/trace of a training with [trace] phases",
            )
        # A trace may be read from any folder, so the header itself states for whom it is sealed.
        record = read_sealed_json(path, Seal("trace", None, None))
        try:
            about = TraceHeader.model_validate(record["about"])
        except (KeyError, ValidationError):
            raise damaged(path) from None
        if about.terms.digest() != about.digest or about.seal.party != record["party"]:
            raise damaged(path)
        return about

    def entries(self) -> list[Entry]:
        """Return the entries of the index, in the order of writing.

        Raises:
            RunFolderError: the index is missing or damaged.
        """
        path, owner = self.folder / _INDEX, self.about().owner
        try:
            *whole, _ = path.read_text().split("\n")  # an incomplete last line is left out
            return [Entry.of_line(line, owner) for line in whole]
        except (FileNotFoundError, ValueError):
            raise damaged(path) from None

    def contents(self, entry: Entry) -> list[bytes]:
        """Read the files of an entry as `pack` made them.

        Raises:
            RunFolderError: a file is missing or damaged.
        """
        found = []
        for name, digest in entry.files.items():
            path = self.folder / name
            content = read_bytes(path)
            if not hmac.compare_digest(hashlib.sha256(content).hexdigest(), digest):
                raise damaged(path)
            found.append(content)
        return found


def _sealed(text: str, owner: str) -> str:
    return hashlib.sha256(f"{owner}\n{text}".encode()).hexdigest()


def is_recorded(settings: TraceSettings, exchange: Exchange) -> bool:
    """Return whether the settings select an exchange; the test phase belongs to the last epoch."""
    chosen = exchange.phase == "test" or not settings.epochs or exchange.epoch in settings.epochs
    return chosen and exchange.phase in settings.phases


def links_of(terms: Terms, party: str) -> list[str]:
    """Return the feature parties that a party has links with."""
    return terms.feature_parties if party == terms.label_party else [party]


def expected_bytes(
    settings: TraceSettings,
    terms: Terms,
    party: str,
    split: Split,
    weights: Mapping[str, Tensor],
    start: int = 0,
) -> int:
    """Return the most bytes of one party's trace of a training, from exchange `start` on.

    Args:
        settings: settings of the party's trace.
        terms: the agreed terms.
        party: party that owns the trace.
        split: split of the aligned rows.
        weights: the party's own weights, for the size of a snapshot.
        start: number of the exchange from which a resumed training continues; 0 for a new training.
    """
    codec = compression.make(terms.codec)
    links = links_of(terms, party)
    widths = [codec.wire_width(terms.parties[name].width) for name in links]
    frames_bytes = files = epoch = 0
    unwritten = False
    for exchange in rules.schedule(terms, split, start):
        if exchange.epoch != epoch or exchange.saves:
            files, unwritten = files + unwritten, False
        epoch = exchange.epoch
        if is_recorded(settings, exchange):
            rows = len(exchange.rows)
            each_way = sum(codec.payload_limit(rows, width) + FRAME_BYTES for width in widths)
            frames_bytes += each_way * (2 if exchange.trains else 1)
            frames_bytes += EXCHANGE_BYTES + ROW_BYTES * rows
            unwritten = True
    files += unwritten + frames_bytes // HELD_BYTES
    files_bytes = files * (FILE_BYTES + PARTY_BYTES * len(links) + ENTRY_BYTES)
    about_bytes = len(TraceHeader.of(party, settings, terms).model_dump_json())
    # Snapshots are taken before the first step, at every interval of epochs, and at the end.
    every = settings.snapshots
    snapshots = 1 + -(-terms.train.epochs // every) if every else 0
    snapshots_bytes = snapshots * (
        len(pack_weights(weights, Seal("snapshot", party, terms.run, 10**6))) + ENTRY_BYTES
    )
    return about_bytes + frames_bytes + files_bytes + snapshots_bytes


def check_room(folder: Path, needed_bytes: int) -> None:
    """Refuse a trace that does not fit on the disk.

    Raises:
        ConfigError: the disk has too little free space for the trace; the error states both sizes.
    """
    existing = next(path for path in [folder.resolve(), *folder.resolve().parents] if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            "the disk has no room for the trace",
            where=str(existing),
            got=f"{size(free_bytes)} free",
            want=f"up to {size(needed_bytes)}",
            fix="fewer 'phases' or 'epochs' or rarer 'snapshots' in [trace], or a larger disk",
        )
