"""Evidence from recorded messages: the exchanges and the last cuts of a feature party."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vfl.attacks.transcript import RecordedExchange, SentCuts
from vfl.attacks.view import Evidence
from vfl.core.errors import DataError
from vfl.core.frame import Kind
from vfl.datasets import Split
from vfl.session import Terms, rules
from vfl.session.trace import Recorded, Replayed
from vfl.session.trace.replay import Decoder

Frames = Iterable[tuple[Replayed, Tensor]]


def decoded(
    trace: Iterable[Recorded], terms: Terms, split: Split
) -> Iterator[tuple[Replayed, Tensor]]:
    """Yield each frame of an in-memory trace, with its rows and the values that were decoded.

    Args:
        trace: all cuts, gradients and queries of a session, in the order of sending.
        terms: terms that the parties of the session agreed on.
        split: the session's aligned rows.

    Raises:
        FrameError: the codec could not have made the bytes of a frame.
    """
    exchanges = {exchange.step: exchange for exchange in rules.schedule(terms, split)}
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


def recorded_exchanges(frames: Frames, party: str, rows: Tensor) -> list[RecordedExchange]:
    """Return, in order, the training exchanges on the connection of one feature party.

    Args:
        frames: frames of a session; the function ignores phases other than training.
        party: the feature party.
        rows: positions of the rows to keep among the aligned rows, int64. `RecordedExchange.rows`
            contains indices into this tensor. Exchanges leave out all rows that are not in it.
    """
    found: list[RecordedExchange] = []
    up: dict[int, SentCuts] = {}
    for frame, one in messages_of(frames, party, rows):
        if frame.phase == "train" and frame.kind is Kind.CUT:
            up[one.step] = one
        elif frame.phase == "train":
            found.append(RecordedExchange.of(up.pop(one.step), one.cuts))
    return found


def last_cuts(frames: Frames, party: str, rows: Tensor) -> Tensor:
    """Return the last cut that a feature party sent for each row, axes (rows, width).

    Args:
        frames: frames in which to search, of any phases.
        party: the feature party.
        rows: positions among the aligned rows, int64.

    Raises:
        DataError: one of these rows has no recorded cut.
    """
    messages = messages_of(frames, party, rows)
    found, missing = _latest((one for of, one in messages if of.direction == "up"), len(rows))
    if missing.any():
        raise DataError(
            f"not every row has a recorded cut of party '{party}'",
            got=f"no cut of {int(missing.sum())} of {len(rows)} rows",
            fix="set trace.phases to record the phase with these rows",
        )
    return found


def messages_of(frames: Frames, party: str, rows: Tensor) -> Iterator[tuple[Replayed, SentCuts]]:
    """Yield the frames on a party's connection, each with its values for the selected rows."""
    index = torch.full((int(rows.max()) + 1,), -1)
    index[rows] = torch.arange(len(rows))
    for frame, values in frames:
        if frame.party == party:
            asked = torch.from_numpy(frame.rows)
            found = torch.where(
                asked < len(index), index[asked.clamp(max=len(index) - 1)], torch.tensor(-1)
            )
            kept = found >= 0
            yield frame, SentCuts(frame.step, frame.epoch, found[kept], values[kept])


def _latest(messages: Iterable[SentCuts], rows: int) -> tuple[Tensor, Tensor]:
    """Return each row's last cut, axes (rows, width), and a mask of rows without a cut."""
    found, missing = torch.empty(0), torch.ones(rows, dtype=torch.bool)
    for one in messages:
        if not len(found):
            found = torch.zeros(rows, one.cuts.shape[1])
        found[one.rows] = one.cuts
        missing[one.rows] = False
    return found, missing


def in_two(messages: Sequence[SentCuts], first: int, second: int) -> tuple[Evidence, Evidence]:
    """Split messages into evidence about `first` and `second` rows, each with the last cuts.

    A schedule leaves out the last batch of an epoch if it has only one row. If a row has no cut for
    this reason, the evidence has messages but no last cuts.
    """
    cuts, missing = _latest(messages, first + second)

    def seen(start: int, stop: int) -> Evidence:
        def sent() -> list[SentCuts]:
            found = []
            for one in messages:
                kept = (one.rows >= start) & (one.rows < stop)
                found.append(SentCuts(one.step, one.epoch, one.rows[kept] - start, one.cuts[kept]))
            return found

        return Evidence(cuts=None if missing.any() else cuts[start:stop], sent=sent)

    return seen(0, first), seen(first, first + second)
