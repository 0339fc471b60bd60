"""The trace: frames as they crossed the link, for attacks and for looking at a run later.

It is off unless asked for. Frames are kept as the bytes that travelled, compressed and perturbed.
The file is a plain ``.npz`` that is read without pickle.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vfl.errors import OversizedFrameError, RunFolderError
from vfl.frame import Frame, Kind

FORMAT = 1
TRAINING = (Kind.CUT, Kind.GRAD)
EVALUATION = (Kind.QUERY,)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One frame of a trace: who it belongs to, which way it went, and its bytes."""

    party: str
    direction: str
    kind: Kind
    step: int
    payload: bytes


class Trace:
    """Records frames of chosen kinds; an `Observer`.

    Args:
        kinds: which frames to keep; `TRAINING` and `EVALUATION` name the usual choices.
        parties: whose frames to keep; None keeps everybody's.
        limit_bytes: recording more than this is refused rather than filling the memory.
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
        """Keep a frame if its kind and party were asked for.

        Raises:
            OversizedFrameError: the trace would grow past its limit.
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

    def save(self, path: Path) -> None:
        """Write the trace as ``.npz``."""
        ends = np.cumsum([len(frame.payload) for frame in self._frames], dtype=np.int64)
        np.savez(
            path,
            format=np.int64(FORMAT),
            party=np.array([frame.party for frame in self._frames], dtype=np.str_),
            direction=np.array([frame.direction for frame in self._frames], dtype=np.str_),
            kind=np.array([frame.kind for frame in self._frames], dtype=np.uint8),
            step=np.array([frame.step for frame in self._frames], dtype=np.int64),
            end=ends,
            payload=np.frombuffer(b"".join(f.payload for f in self._frames), dtype=np.uint8),
        )

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what `save` wrote.

        Raises:
            RunFolderError: the file is missing, is no trace or one of another format.
        """
        trace = cls()
        columns = _columns(path)
        start = 0
        raw = columns["payload"].tobytes()
        for index, end in enumerate(columns["end"].tolist()):
            trace._frames.append(
                Recorded(
                    str(columns["party"][index]),
                    str(columns["direction"][index]),
                    Kind(int(columns["kind"][index])),
                    int(columns["step"][index]),
                    raw[start:end],
                )
            )
            start = end
        trace.payload_bytes = start
        return trace


def _columns(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile):
        raise RunFolderError("there is no trace to read", where=str(path)) from None
    found = columns.get("format")
    if found is None or found != FORMAT:
        raise RunFolderError(
            "this trace was written in another format",
            where=str(path),
            got=f"format {found}",
            want=f"format {FORMAT}",
        )
    return columns
