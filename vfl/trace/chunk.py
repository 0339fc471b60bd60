"""Some frames of a trace as two files that numpy reads without pickle.

The bytes of all frames are one ``.npy``: they are most of a trace, and written as they are held.
A ``.npz`` beside it says where they belong.
Of every exchange that has a frame here: `exchange_step`, `exchange_epoch`, `exchange_phase`, and
`exchange_end`, where its rows end in `rows`, int64 positions into the aligned rows.
Of every frame, in the order in which they crossed: `frame_exchange` (which of the exchanges),
`frame_party` (which of `parties`), `frame_kind`, `frame_up` (towards the label party), and
`frame_end`, where its bytes end.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vfl.errors import RunFolderError
from vfl.frame import Kind
from vfl.session import Exchange
from vfl.trace.memory import Recorded

#: Bytes a frame, an exchange, a row, a file and a name in it take beside the payload, at most.
FRAME_BYTES = 8 + 1 + 1 + 1 + 8
EXCHANGE_BYTES = 8 + 8 + 4 * len("validation") + 8
ROW_BYTES = 8
FILE_BYTES = 3584
PARTY_BYTES = 4 * 32  # 32 characters at most


@dataclass(frozen=True, slots=True)
class Crossed:
    """A frame that crossed in an exchange, on its way into a file."""

    exchange: Exchange
    party: str
    kind: Kind
    up: bool
    payload: bytes


@dataclass(frozen=True, slots=True)
class Replayed(Recorded):
    """A frame of a trace that was read back.

    Attributes:
        phase: train, validation or test.
        epoch: from 1.
        rows: positions into the aligned rows, int64, in the order of the cut's rows.
    """

    phase: str
    epoch: int
    rows: np.ndarray = field(compare=False)


def pack(frames: Sequence[Crossed]) -> tuple[bytes, list[bytes]]:
    """The content of the two files: what is known of the frames, and their bytes in pieces."""
    exchanges = list({crossed.exchange.step: crossed.exchange for crossed in frames}.values())
    place = {exchange.step: index for index, exchange in enumerate(exchanges)}
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
        frame_exchange=np.array([place[one.exchange.step] for one in frames], np.int64),
        frame_party=np.array([parties.index(one.party) for one in frames], np.uint8),
        frame_kind=np.array([one.kind for one in frames], np.uint8),
        frame_up=np.array([one.up for one in frames], np.bool_),
        frame_end=ends,
    )
    return content.getvalue(), [_npy_header(int(ends[-1])), *(one.payload for one in frames)]


def unpack(known: bytes, payload: bytes, folder: Path) -> Iterator[Replayed]:
    """The frames `pack` was given; `folder` is for the message.

    Raises:
        RunFolderError: the contents are not what `pack` gives, objects to unpickle included.
    """
    try:
        with np.load(io.BytesIO(known), allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        columns["payload"] = np.load(io.BytesIO(payload), allow_pickle=False)
    except (AttributeError, EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile):
        raise RunFolderError("there are no frames to read", where=str(folder)) from None
    yield from _frames(columns)


def _npy_header(count: int) -> bytes:
    """What stands before `count` bytes in a .npy file."""
    header = io.BytesIO()
    described = {"descr": "|u1", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def _frames(columns: Mapping[str, np.ndarray]) -> Iterator[Replayed]:
    rows = np.split(columns["rows"], columns["exchange_end"][:-1])
    payload = columns["payload"].data
    start = 0
    for index, end in enumerate(columns["frame_end"].tolist()):
        exchange = columns["frame_exchange"][index]
        yield Replayed(
            party=str(columns["parties"][columns["frame_party"][index]]),
            direction="up" if columns["frame_up"][index] else "down",
            kind=Kind(int(columns["frame_kind"][index])),
            step=int(columns["exchange_step"][exchange]),
            payload=bytes(payload[start:end]),
            phase=str(columns["exchange_phase"][exchange]),
            epoch=int(columns["exchange_epoch"][exchange]),
            rows=rows[exchange],
        )
        start = end
