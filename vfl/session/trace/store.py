"""The files of a trace (recorded frames of a training): their contents and sizes.

The class `Trace` stores a trace in memory. A file that has no entry in `index.jsonl` was left by a
run that was killed. A party's trace is in the folder `parties/NAME/trace`, which has these files:

    file                    form                     content
    trace.json              sealed JSON              the party, the recorded parts, and the terms
                                                     of the session
    index.jsonl             lines: JSON, tab, SHA-256  `files` (SHA-256 by name), `step`, and
                                                     `epoch` of a snapshot
    frames-N.npz            arrays of numpy, stored  properties of the frames, as listed below
    payload-N.npy           u8 array of numpy        payloads of the frames, one after another
    snapshot-N.safetensors  sealed safetensors       the party's weights

Arrays in the file `frames-N.npz`:

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
    existing_folder,
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

#: Largest sizes in bytes, in a trace, of the metadata of a frame, of an exchange and of a row, of a
#: file's fixed part, and of a party's name.
FRAME_BYTES = 8 + 1 + 1 + 1 + 8
EXCHANGE_BYTES = 8 + 8 + 4 * len("validation") + 8
ROW_BYTES = 8
FILE_BYTES = 3584
PARTY_BYTES = 4 * 32  # a name has at most 32 characters

#: Largest size of a line of `index.jsonl`, in bytes.
ENTRY_BYTES = 384
#: Approximate size of frames in bytes that are buffered in memory before they are written to a
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
    """One recorded frame: the feature party that sent or received it, and the frame's contents."""

    party: str
    direction: str
    kind: Kind
    step: int
    payload: bytes


class Trace:
    """Records frames in memory; `Trace` is an `Observer` of links, which is called with each frame.

    Args:
        kinds: kinds of frames to store; usual values are `TRAINING` and `EVALUATION`.
        parties: parties whose frames are stored; None stores the frames of all parties.
        limit_bytes: limit of the recorded bytes, so that the trace cannot fill the memory.
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
        """Store a frame if its kind and its party were selected.

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
    """A frame with its exchange, which is buffered until the frame is written to a file."""

    exchange: Exchange
    party: str
    kind: Kind
    up: bool
    payload: bytes


@dataclass(frozen=True, slots=True)
class Replayed(Recorded):
    """A frame that was read from a trace.

    Attributes:
        phase: phase of the frame's exchange: train, validation or test.
        epoch: number of the epoch, from 1.
        rows: positions of the exchange's rows in the aligned rows, int64, in the order in which the
            frame's cut or gradient contains them.
    """

    phase: str
    epoch: int
    rows: np.ndarray = field(compare=False)


def pack(frames: Sequence[SentFrame]) -> tuple[bytes, list[bytes]]:
    """Make the contents of two files: the frames' metadata, and their payloads in pieces."""
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
    """Yield the frames that were given to `pack`; an error names `folder` as the location.

    Raises:
        RunFolderError: `pack` cannot have produced these contents; contents with pickled objects
            are refused, too.
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
    """Return the header of a .npy file that contains `count` bytes."""
    header = io.BytesIO()
    described = {"descr": "|u1", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


class Entry(Settings):
    """One entry of the index: a group of frames, or a snapshot of weights.

    Attributes:
        files: SHA-256 of the content of each file, by file name.
        step: for frames, the exchange of the last checkpoint that was saved before them; for a
            snapshot, the number of the exchange that follows it.
        epoch: for a snapshot, the number of epochs trained before it; None for frames.
    """

    files: dict[_File, _Digest]
    step: int = Field(ge=0)
    epoch: int | None = None

    def line(self, owner: str) -> str:
        """Format the entry as a line of the index, with a SHA-256 that also depends on `owner`.

        See `TraceHeader.owner`.
        """
        text = self.model_dump_json()
        return f"{text}\t{_sealed(text, owner)}\n"

    @classmethod
    def of_line(cls, line: str, owner: str) -> Entry:
        """Parse one line of the index.

        Raises:
            ValueError: the line is damaged, or was written for another owner.
        """
        text, _, digest = line.partition("\t")
        if not hmac.compare_digest(_sealed(text, owner).encode(), digest.encode()):
            raise ValueError("the digest of the line does not match")
        return cls.model_validate_json(text)

    def known_at(self, step: int) -> bool:
        """Return whether the entry was written before checkpoint `step`.

        Step 0 is before the training.
        """
        if self.epoch is None:
            return self.step < step
        return step > 0 and self.step <= step


class TraceHeader(Settings):
    """Header of a trace, stored in `trace.json`.

    Attributes:
        format: version of the trace's file format; see `vfl.core.storage`.
        vfl: version of vfl that wrote the files.
        party: party that recorded the trace.
        settings: settings with which the party recorded the trace.
        terms: agreed terms of the training.
        digest: digest of the agreed terms.
    """

    format: int = FORMAT
    vfl: str = VERSION
    party: str
    settings: TraceSettings
    terms: Terms
    digest: str

    @classmethod
    def of(cls, party: str, settings: TraceSettings, terms: Terms) -> TraceHeader:
        """Make the header of a trace of a training with these terms."""
        return cls(party=party, settings=settings, terms=terms, digest=terms.digest())

    @property
    def seal(self) -> Seal:
        """Seal of the header's file; see `vfl.core.storage`."""
        return Seal("trace", self.party, self.terms.run)

    @property
    def owner(self) -> str:
        """Text that names the trace; the digest of every index line depends on this text."""
        return f"{self.party}|{self.terms.run}|{self.digest}"


class Store:
    """Reads and writes the files of one party's trace of one training.

    Args:
        folder: folder of the trace's files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, party: str, settings: TraceSettings, terms: Terms, step: int) -> None:
        """Prepare the folder for recording from exchange `step` on.

        Remove records of this and later exchanges.

        Raises:
            RunFolderError: the folder contains a trace with other terms or settings.
        """
        about = TraceHeader.of(party, settings, terms)
        kept: list[Entry] = []
        if (self.folder / _ABOUT).exists():
            if self.about() != about:
                raise RunFolderError(
                    "this trace was begun with other settings or terms",
                    where=str(self.folder / _ABOUT),
                    fix="resume with the settings with which the trace was begun, or move the "
                    "folder away",
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
        """Write the files of an entry piece by piece, and then the index line that lists the files.

        If the process is killed before the line is written, the files are not part of the trace.
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
            RunFolderError: there is no trace, or its header is damaged or has another format
                version.
        """
        path = self.folder / _ABOUT
        if not path.exists():
            raise RunFolderError(
                "this folder contains no trace",
                where=str(self.folder),
                fix="give the folder RUN/parties/PARTY/trace of a training with [trace] phases",
            )
        # A user may copy a trace to any folder, so the header itself contains the names for its
        # seal.
        record = read_sealed_json(path, Seal("trace", None, None))
        try:
            about = TraceHeader.model_validate(record["about"])
        except (KeyError, ValidationError):
            raise damaged(path) from None
        if about.terms.digest() != about.digest or about.seal.party != record["party"]:
            raise damaged(path)
        return about

    def entries(self) -> list[Entry]:
        """Return the entries of the index, in the order in which they were written.

        Raises:
            RunFolderError: the index is missing or damaged.
        """
        path, owner = self.folder / _INDEX, self.about().owner
        try:
            *whole, _ = path.read_text().split("\n")  # an incomplete last line is ignored
            return [Entry.of_line(line, owner) for line in whole]
        except (FileNotFoundError, ValueError):
            raise damaged(path) from None

    def contents(self, entry: Entry) -> list[bytes]:
        """Read the contents of an entry's files, as `pack` made them.

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
    """Return whether the settings select this exchange; `epochs` excludes no test exchange."""
    chosen = exchange.phase == "test" or not settings.epochs or exchange.epoch in settings.epochs
    return chosen and exchange.phase in settings.phases


def links_of(terms: Terms, party: str) -> list[str]:
    """Return the feature parties with which a party exchanges frames."""
    return terms.feature_parties if party == terms.label_party else [party]


def expected_bytes(
    settings: TraceSettings,
    terms: Terms,
    party: str,
    split: Split,
    weights: Mapping[str, Tensor],
    start: int = 0,
) -> int:
    """Return the largest possible size in bytes of one party's trace of a training.

    Args:
        settings: settings of the party's trace.
        terms: the agreed terms.
        party: party that owns the trace.
        split: split of the aligned rows.
        weights: the party's own weights, from which the size of a snapshot is computed.
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
    # Snapshots are taken before the first step, after every `snapshots` epochs, and at the end.
    every = settings.snapshots
    snapshots = 1 + -(-terms.train.epochs // every) if every else 0
    snapshots_bytes = snapshots * (
        len(pack_weights(weights, Seal("snapshot", party, terms.run, 10**6))) + ENTRY_BYTES
    )
    return about_bytes + frames_bytes + files_bytes + snapshots_bytes


def check_room(folder: Path, needed_bytes: int) -> None:
    """Refuse to record a trace that does not fit on the disk.

    Raises:
        ConfigError: the disk has too little free space for the trace; the error states both sizes.
    """
    existing = existing_folder(folder.resolve())
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            "the disk has too little free space for the trace",
            where=str(existing),
            got=f"{size(free_bytes)} free",
            want=f"up to {size(needed_bytes)} of free space",
            fix="record fewer 'phases' or 'epochs', or less frequent 'snapshots' in [trace], or "
            "use a larger disk",
        )
