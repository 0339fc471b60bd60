"""A party's trace on disk: files that are whole, and an index that says which of them count.

trace.json              whose it is, what was recorded, the terms of the session; sealed
index.jsonl             one line for frames or a snapshot: files and their SHA-256, place in the
                        training, and a SHA-256 of the line, of whose it is and of the run
frames-N.npz            some frames, in the order in which they crossed (`vfl.trace.chunk`)
payload-N.npy           the bytes of those frames
snapshot-N.safetensors  the party's own weights after epoch N
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from vfl.config import TraceSettings
from vfl.config.toml import Settings
from vfl.errors import RunFolderError
from vfl.session import Terms
from vfl.storage import (
    FORMAT,
    Seal,
    append_text,
    damaged,
    read_bytes,
    read_sealed_json,
    write_pieces,
    write_sealed_json,
    write_text,
)
from vfl.version import VERSION

#: Bytes of a line of the index, at most.
ENTRY_BYTES = 384

_ABOUT = "trace.json"
_INDEX = "index.jsonl"
_NAME = r"(frames-\d+\.npz|payload-\d+\.npy|snapshot-\d+\.safetensors)"
_OURS = re.compile(rf"^\.?{_NAME}")
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_File = Annotated[str, StringConstraints(pattern=rf"^{_NAME}$")]


class Entry(Settings):
    """Some frames, or a snapshot.

    Attributes:
        files: SHA-256 of each file's content, by name.
        step: of frames, the last checkpoint that was saved before they crossed; of a snapshot,
            the first exchange after it.
        epoch: of a snapshot, the epochs trained by then; None for frames.
    """

    files: dict[_File, _Digest]
    step: int = Field(ge=0)
    epoch: int | None = None

    def line(self, owner: str) -> str:
        """As a line of the index, sealed for its owner; see `About.owner`."""
        text = self.model_dump_json()
        return f"{text}\t{_sealed(text, owner)}\n"

    @classmethod
    def of_line(cls, line: str, owner: str) -> Entry:
        """The entry in such a line.

        Raises:
            ValueError: it is not as it was written, or another owner's.
        """
        text, _, digest = line.partition("\t")
        if not hmac.compare_digest(_sealed(text, owner), digest):
            raise ValueError("the line's digest is another")
        return cls.model_validate_json(text)

    def known_at(self, step: int) -> bool:
        """Whether the party had it when it saved checkpoint `step`; 0 is before anything."""
        if self.epoch is None:
            return self.step < step
        return step > 0 and self.step <= step


class About(Settings):
    """What a trace says of itself.

    Attributes:
        format: of the files; see `vfl.storage`.
        vfl: version that wrote them.
        party: whose side was recorded.
        settings: what was recorded.
        terms: what the parties had agreed on.
        digest: of the terms.
    """

    format: int = FORMAT
    vfl: str = VERSION
    party: str
    settings: TraceSettings
    terms: Terms
    digest: str

    @classmethod
    def of(cls, party: str, settings: TraceSettings, terms: Terms) -> About:
        """What a trace of these terms says."""
        return cls(party=party, settings=settings, terms=terms, digest=terms.digest())

    @property
    def seal(self) -> Seal:
        """Whose the trace is."""
        return Seal("trace", self.party, self.terms.run)

    @property
    def owner(self) -> str:
        """What every line of the index is sealed for."""
        return f"{self.party}|{self.terms.run}|{self.digest}"


class Store:
    """The files of one party's trace of one training.

    Args:
        folder: where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, party: str, settings: TraceSettings, terms: Terms, step: int) -> None:
        """Make it ready to record from exchange `step` on; what lies beyond is removed.

        Raises:
            RunFolderError: what lies here was recorded on other terms or with other settings.
        """
        about = About.of(party, settings, terms)
        kept: list[Entry] = []
        if (self.folder / _ABOUT).exists():
            if self.about() != about:
                raise RunFolderError(
                    "this trace was begun with other settings",
                    where=str(self.folder / _ABOUT),
                    fix="resume with the settings it was begun with, or move the folder away",
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
        """Write files, each given in pieces, then their line; a crash before it leaves them out."""
        digests = {}
        for name, pieces in files.items():
            write_pieces(self.folder / name, pieces)
            digest = hashlib.sha256()
            for piece in pieces:
                digest.update(piece)
            digests[name] = digest.hexdigest()
        entry = Entry(files=digests, step=step, epoch=epoch)
        append_text(self.folder / _INDEX, entry.line(self.about().owner))

    def about(self) -> About:
        """What the trace says of itself.

        Raises:
            RunFolderError: there is no trace, or it is damaged or of another format.
        """
        path = self.folder / _ABOUT
        if not path.exists():
            raise RunFolderError(
                "there is no trace here",
                where=str(self.folder),
                fix="give the folder RUN/parties/PARTY/trace of a training with [trace] phases",
            )
        # A trace may be read from anywhere, so whose it is follows from the record alone.
        record = read_sealed_json(path, Seal("trace", None, None))
        try:
            about = About.model_validate(record["about"])
        except (KeyError, ValidationError):
            raise damaged(path) from None
        if about.terms.digest() != about.digest or about.seal.party != record["party"]:
            raise damaged(path)
        return about

    def entries(self) -> list[Entry]:
        """The files that count, in the order in which they were written.

        Raises:
            RunFolderError: the index is missing or damaged.
        """
        path, owner = self.folder / _INDEX, self.about().owner
        try:
            *whole, _ = path.read_text().split("\n")  # a torn last line is left out
            return [Entry.of_line(line, owner) for line in whole]
        except (FileNotFoundError, ValueError):
            raise damaged(path) from None

    def contents(self, entry: Entry) -> list[bytes]:
        """The bytes of an entry's files, as they were written.

        Raises:
            RunFolderError: one is missing or damaged.
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
