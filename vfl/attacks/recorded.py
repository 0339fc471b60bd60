"""From a party's recording to what an attacker holds: its links' frames, row by row.

Frames come decoded from a trace on disk (`vfl.trace.read(...).decoded()`) or in memory
(`decoded` below); either way they are the bytes that travelled, compressed and perturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vfl.attacks.evidence import Heard, Sent
from vfl.datasets import Split
from vfl.errors import DataError
from vfl.frame import Kind
from vfl.session import Terms
from vfl.trace import Recorded, Replayed
from vfl.trace.decoder import Decoder

Frames = Iterable[tuple[Replayed, Tensor]]


def decoded(
    trace: Iterable[Recorded], terms: Terms, split: Split
) -> Iterator[tuple[Replayed, Tensor]]:
    """Each frame of a whole trace in memory with its rows, and what its receiver made of it.

    Args:
        trace: every cut, gradient and query of a session, in the order in which they crossed.
        terms: of that session.
        split: its aligned rows.

    Raises:
        FrameError: bytes the codec did not make.
    """
    exchanges = {exchange.step: exchange for exchange in terms.schedule(split)}
    decoders: dict[str, Decoder] = {}
    for one in trace:
        exchange = exchanges[one.step]
        frame = Replayed(
            one.party, one.direction, one.kind, one.step, one.payload,
            phase=exchange.phase, epoch=exchange.epoch, rows=exchange.rows,
        )  # fmt: skip
        if one.party not in decoders:
            decoders[one.party] = Decoder(terms, one.party, Path("the trace in memory"))
        yield frame, decoders[one.party].values(frame)


def heard(frames: Frames, party: str, rows: Tensor) -> list[Heard]:
    """The training exchanges of one feature party's link, in their order.

    Args:
        frames: of a training; others are passed over.
        party: the feature party.
        rows: positions among the aligned rows that are of interest, in the order that
            `Heard.rows` counts in; int64. Other rows are left out of an exchange.
    """
    found: list[Heard] = []
    up: dict[int, Sent] = {}
    place = _places(rows)
    for frame, values in frames:
        if frame.party != party or frame.phase != "train":
            continue
        one = _sent(frame, values, place)
        if frame.kind is Kind.CUT:
            up[one.step] = one
        else:
            found.append(Heard.of(up.pop(one.step), one.cuts))
    return found


def sent(frames: Frames, party: str, rows: Tensor) -> list[Sent]:
    """What one feature party sent while it trained, message by message; see `heard`."""
    place = _places(rows)
    return [
        _sent(frame, values, place)
        for frame, values in frames
        if frame.party == party and frame.phase == "train" and frame.kind is Kind.CUT
    ]


def between(messages: Iterable[Sent], start: int, stop: int) -> list[Sent]:
    """The cuts of rows start..stop-1 alone, counted from 0."""
    found = []
    for one in messages:
        kept = (one.rows >= start) & (one.rows < stop)
        found.append(Sent(one.step, one.epoch, one.rows[kept] - start, one.cuts[kept]))
    return found


def last_cuts(frames: Frames, party: str, rows: Tensor) -> Tensor:
    """What a feature party sent last of each row, axes (rows, width).

    Args:
        frames: of whatever phases should count.
        party: the feature party.
        rows: positions among the aligned rows, int64.

    Raises:
        DataError: no cut of some of these rows is there.
    """
    place = _places(rows)
    missing = torch.ones(len(rows), dtype=torch.bool)
    found = torch.empty(len(rows), 0)
    for frame, values in frames:
        if frame.party != party or frame.direction != "up":
            continue
        if not found.shape[1]:
            found = torch.zeros(len(rows), values.shape[1])
        one = _sent(frame, values, place)
        found[one.rows] = one.cuts
        missing[one.rows] = False
    if missing.any():
        raise DataError(
            f"not every row has a recorded cut of party '{party}'",
            got=f"none of {int(missing.sum())} of {len(rows)} rows",
            fix="record the phase these rows belong to: [trace] phases",
        )
    return found


def last_sent(messages: Iterable[Sent], rows: int) -> Tensor | None:
    """What these messages held last of each row, axes (rows, width); None if a row is in none.

    The schedule leaves a single row out that would be a batch of its own.

    Args:
        messages: in their order; they name rows 0..rows-1.
        rows: how many there are.
    """
    found, missing = torch.empty(0), torch.ones(rows, dtype=torch.bool)
    for one in messages:
        if not len(found):
            found = torch.zeros(rows, one.cuts.shape[1])
        found[one.rows] = one.cuts
        missing[one.rows] = False
    return None if missing.any() else found


def _sent(frame: Replayed, values: Tensor, place: Tensor) -> Sent:
    """The part of a message that is about rows of interest."""
    there = _look_up(place, frame.rows)
    kept = there >= 0
    return Sent(frame.step, frame.epoch, there[kept], values[kept])


def _places(rows: Tensor) -> Tensor:
    """Where each aligned row stands among `rows`; -1 where it does not."""
    place = torch.full((int(rows.max()) + 1,), -1)
    place[rows] = torch.arange(len(rows))
    return place


def _look_up(place: Tensor, rows: np.ndarray) -> Tensor:
    """`place` of these aligned rows; -1 beyond its end too."""
    asked = torch.from_numpy(rows)
    within = asked < len(place)
    found = torch.full((len(asked),), -1)
    found[within] = place[asked[within]]
    return found
