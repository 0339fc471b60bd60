"""The rows of a session: those that all parties have, or also those that some party lacks.

If a session also has rows that some party lacks, the label party runs the protocol separately with
each other party. Then the label party orders the results, by these messages:

    label party, each other   the protocol of two parties, which finds their common ids
    label party -> each       number of rows of the session, and of those that all parties have
    each -> label party       whether it accepts this number of rows that all parties have
    label party -> each       positions of its rows, once all parties have accepted

The label party thus learns which of its rows each other party has. Each other party learns which of
its rows the label party has, which of these rows all parties have, and the two counts. Each other
party learns nothing more about the rows of a third party.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from vfl.core.errors import BadOptionError, ProtocolError
from vfl.datasets.alignment import protocols
from vfl.datasets.alignment.protocols import (
    NO,
    YES,
    Message,
    Own,
    Protocol,
    Receive,
    Send,
)

#: Treatment of rows that a feature party lacks: leave them out, or keep them with a placeholder.
MissingRows = Literal["intersection", "token"]
_COUNTS = struct.Struct("<II")
_SLOT = np.dtype("<u4")


@dataclass(frozen=True, eq=False)
class Found:
    """A party's result of the protocol: the rows of the session.

    Attributes:
        positions: for each row of the session, its position in the party's table, int64, axes
            (rows,); -1 if the party lacks the row.
        complete: number of rows that all parties have, which come first; None for an intersection,
            in which all parties have all rows.
        held: for the label party, the rows of the session that each other party has; for another
            party, its own rows; bool, axes (rows,).
    """

    positions: np.ndarray = field(repr=False)
    complete: int | None = None
    held: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)


FoundRole = Generator[Send | Receive, Message, Found]


def role_of(
    protocol: Protocol, own: Own, parties: Sequence[str], label_party: str, rows: MissingRows
) -> FoundRole:
    """Run the role of a party with ids, and return the session's rows.

    Raises:
        BadOptionError: the protocol has a helper, although `rows` is "token".
        ConsentError, ProtocolError: see `vfl.datasets.alignment.protocols`.
    """
    if rows == "intersection":
        return Found((yield from protocol.role(own, parties, label_party)))
    if protocol.helper:
        raise BadOptionError(
            "rows that some party lacks need a protocol between pairs of parties, without a helper",
            where="align.protocol",
            want="ecdh",
        )
    lead = own.party == label_party
    return (yield from (_lead if lead else _follow)(protocol, own, parties, label_party))


def _follow(protocol: Protocol, own: Own, parties: Sequence[str], label_party: str) -> FoundRole:
    mine = yield from protocol.role(own, (own.party, label_party), label_party)
    counts = bytes((yield Receive(label_party, _COUNTS.size)))
    if len(counts) != _COUNTS.size:
        raise protocols.other_size(label_party)
    rows, complete = _COUNTS.unpack(counts)
    accepted = complete >= own.bounds.min_common
    yield Send(label_party, YES if accepted else NO)
    if not accepted:
        raise protocols.too_few_common(own, complete)
    answer = bytes((yield Receive(label_party, 1 + _SLOT.itemsize * len(mine))))
    if answer == NO:
        raise protocols.refused_by_others()
    if answer[:1] != YES or len(answer) != 1 + _SLOT.itemsize * len(mine):
        raise protocols.other_size(label_party)
    slots = np.frombuffer(answer, _SLOT, offset=1).astype(np.int64)
    fits = rows <= own.bounds.max_ids and len(np.unique(slots)) == len(slots)
    if not fits or slots.max(initial=-1) >= rows or int((slots < complete).sum()) != complete:
        raise ProtocolError(f"'{label_party}' sent positions that no session can have")
    positions = np.full(rows, -1, dtype=np.int64)
    positions[slots] = mine
    return Found(positions, complete, {own.party: positions >= 0})


def _lead(protocol: Protocol, own: Own, parties: Sequence[str], label_party: str) -> FoundRole:
    others = [party for party in parties if party != label_party]
    shared: dict[str, np.ndarray] = {}
    for each in others:
        shared[each] = yield from protocol.role(own, (each, label_party), label_party)
    has = np.zeros((len(others), len(own.ids)), dtype=bool)
    for index, each in enumerate(others):
        has[index, shared[each]] = True
    having = has.sum(axis=0)
    everybody = having == len(others)
    order = np.concatenate([_shuffled(everybody), _shuffled((having > 0) & ~everybody)])
    complete = int(everybody.sum())
    for each in others:
        yield Send(each, _COUNTS.pack(len(order), complete))
    accepted = complete >= own.bounds.min_common
    for each in others:
        vote = yield Receive(each, 1)
        accepted = accepted and vote == YES
    slots = np.empty(len(own.ids), dtype=_SLOT)
    slots[order] = np.arange(len(order), dtype=_SLOT)
    for each in others:
        yield Send(each, YES + slots[shared[each]].tobytes() if accepted else NO)
    if complete < own.bounds.min_common:
        raise protocols.too_few_common(own, complete)
    if not accepted:
        raise protocols.refused_by_others()
    held = {each: has[index][order] for index, each in enumerate(others)}
    return Found(order, complete, held)


def _shuffled(chosen: np.ndarray) -> np.ndarray:
    """Return positions of the chosen rows in a random order, which other parties cannot predict."""
    found = np.flatnonzero(chosen)
    return found[np.argsort(np.frombuffer(os.urandom(8 * len(found)), "<u8"), kind="stable")]
