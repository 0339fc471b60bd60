"""A party's trace on disk: files that are whole, and an index that says which of them count.

trace.json              whose it is, what was recorded, the terms of the session
index.jsonl             one line for frames or a snapshot: files, CRC-32s, place in the training
frames-N.npz            some frames, in the order in which they crossed (`vfl.trace.chunk`)
payload-N.npy           the bytes of those frames
snapshot-N.safetensors  the party's own weights after epoch N
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from vfl.config import TraceSettings
from vfl.config.toml import Settings
from vfl.errors import RunFolderError
from vfl.session import Terms
from vfl.storage import (
    FORMAT,
    append_line,
    check_format,
    read_json,
    read_lines,
    write_pieces,
    write_text,
)
from vfl.version import VERSION

#: Bytes of a line of the index, at most.
ENTRY_BYTES = 192

_ABOUT = "trace.json"
_INDEX = "index.jsonl"
_NAME = r"(frames-\d+\.npz|payload-\d+\.npy|snapshot-\d+\.safetensors)"
_OURS = re.compile(rf"^\.?{_NAME}")
_File = Annotated[str, StringConstraints(pattern=rf"^{_NAME}$")]


class Entry(Settings):
    """Some frames, or a snapshot.

    Attributes:
        files: CRC-32 of each file's content, by name.
        step: of frames, the last checkpoint that was saved before they crossed; of a snapshot,
            the first exchange after it.
        epoch: of a snapshot, the epochs trained by then; None for frames.
    """

    files: dict[_File, int]
    step: int = Field(ge=0)
    epoch: int | None = None

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
        write_text(self.folder / _ABOUT, about.model_dump_json())
        write_text(self.folder / _INDEX, "".join(entry.model_dump_json() + "\n" for entry in kept))
        names = {name for entry in kept for name in entry.files}
        for path in self.folder.iterdir():
            if _OURS.match(path.name) and path.name not in names:
                path.unlink()

    def add(
        self, files: Mapping[str, Sequence[bytes]], step: int, epoch: int | None = None
    ) -> None:
        """Write files, each given in pieces, then their line; a crash before it leaves them out."""
        checksums = {}
        for name, pieces in files.items():
            write_pieces(self.folder / name, pieces, mode=0o600)
            checksums[name] = reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)
        entry = Entry(files=checksums, step=step, epoch=epoch)
        append_line(self.folder / _INDEX, entry.model_dump())

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
        content: Any = read_json(path)
        try:
            check_format(content, path)
            about = About.model_validate(content)
        except (AttributeError, ValidationError):
            raise damaged(path) from None
        if about.terms.digest() != about.digest:
            raise damaged(path)
        return about

    def entries(self) -> list[Entry]:
        """The files that count, in the order in which they were written.

        Raises:
            RunFolderError: the index is missing or damaged.
        """
        path = self.folder / _INDEX
        try:
            return [Entry.model_validate(line) for line in read_lines(path)]
        except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError, ValidationError):
            raise damaged(path) from None

    def contents(self, entry: Entry) -> list[bytes]:
        """The bytes of an entry's files, as they were written.

        Raises:
            RunFolderError: one is missing or damaged.
        """
        found = []
        for name, crc in entry.files.items():
            path = self.folder / name
            if not path.exists() or zlib.crc32(content := path.read_bytes()) != crc:
                raise damaged(path)
            found.append(content)
        return found


def damaged(path: Path) -> RunFolderError:
    """What is raised about a file that is not as it was written."""
    return RunFolderError("a file of this trace is missing or damaged", where=str(path))
