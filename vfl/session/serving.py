"""A session that stays open: the label party asks for rows when somebody wants to know of them.

    label party     ASK: positions of some rows, in ascending order
    feature party   QUERY: their cut, through the defense and codec of any prediction; or REFUSAL
    label party     the next ASK, which says that it has all of that; DONE ends the session

An ASK without rows asks who is there, and is answered by a REFUSAL without a reason. A feature
party counts how often each of its rows was asked, and may refuse rows by its own file; a refusal
ends no session.

With a party in the middle the label party asks that one, which asks the feature parties, sealed:
it is a label party to them, and to the label party the only one that answers, as in training.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import time
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from pathlib import Path

import numpy as np

from vfl.config import Consent, PartyFile
from vfl.core.errors import ConfigError, ConsentError, ExposedCutError, ProtocolError
from vfl.core.frame import Frame, Kind, Link
from vfl.core.storage import PRIVATE_FILE, writing
from vfl.session import secure_mode
from vfl.session.relay import Carried
from vfl.session.schedule import QUERY_ROWS, ROW_BYTES
from vfl.session.store.session_ledger import Meter, Spent
from vfl.session.terms import Terms
from vfl.transport import ObservedPoll

_ROW = np.dtype(f"<u{ROW_BYTES}")
#: Of a `RowRate` on disk: rows that may be taken, and when that was.
_BUCKET = struct.Struct("<dd")
#: Rows, passes and bytes that are written to the ledger of sessions before they are sent.
_BLOCK_ROWS, _BLOCK_PASSES = 1 << 16, 1 << 10


class Refused(IntEnum):
    """Why a feature party sends no cut of some rows."""

    BUSY = 1  # more rows a second than it allows
    OFTEN = 2  # one of the rows was asked as often as it may be
    SPENT = 3  # bytes or epsilon are used up


def require_servable(terms: Terms, partial: bool = False) -> None:
    """Refuse secure modes that cannot answer rows as they are asked.

    Args:
        terms: of the run.
        partial: whether rows are to be answered without a party that is away.

    Raises:
        ExposedCutError: the mode shares weights between parties.
        ConfigError: the model is no forest, and was trained on rows that all parties have.
    """
    mode = secure_mode.make(terms.secure)
    if (mode.shares_weights or mode.whole_network) and not mode.serves_rows:
        raise ExposedCutError(
            "a network whose layers are shared cannot be served row by row",
            got=f"secure = '{terms.secure}'",
            want="secure = 'none' or 'sum'; vfl predict RUN answers a whole table",
        )
    if partial and not mode.answers_without and terms.missing_rows != "token":
        raise ConfigError(
            "nothing stands for the answer of a party that is away",
            where="serve.partial",
            want="a run of trees, or one trained with data.missing_rows = 'token'",
            fix="leave it out: requests get a 503 until everybody is back",
        )


def request(step: int, rows: np.ndarray) -> Frame:
    """The frame that asks for rows.

    >>> len(request(0, np.array([3, 7])).payload)
    8
    """
    return Frame(Kind.ASK, step, rows.astype(_ROW).tobytes())


class Peeked:
    """A link whose next frame was looked at.

    Args:
        name: who is at its other end.
        link: to that party; one of the same process never waits.
    """

    def __init__(self, name: str, link: Link) -> None:
        self._name, self._link = name, link
        self._polled = link if isinstance(link, ObservedPoll | Carried) else None
        self._next: Frame | None = None

    def look(self) -> Frame | None:
        """The next frame; None where it would have to be waited for, and the link can say so."""
        if self._next is None:
            self._next = self._link.receive() if self._polled is None else self._polled.poll()
        return self._next

    def filenos(self) -> list[int]:
        """What to wait for; -1 while a stream is cut, none where nothing is waited for."""
        return [] if self._polled is None else self._polled.filenos()

    @property
    def waits_for(self) -> str:
        """Who has to send something next."""
        return self._name if self._polled is None else self._polled.waits_for

    @property
    def patience_s(self) -> float:
        """How long its other end may say nothing."""
        return math.inf if self._polled is None else self._polled.patience_s

    def receive(self) -> Frame:
        """The next frame, looked at or not."""
        frame, self._next = self._next, None
        return self._link.receive() if frame is None else frame

    def send(self, frame: Frame) -> None:
        """Send one."""
        self._link.send(frame)

    def close(self) -> None:
        """End the link."""
        self._link.close()


def refusals(
    links: Mapping[str, Peeked], step: int, empty: Collection[str], behind: Collection[str] = ()
) -> dict[str, Refused]:
    """Who refuses a request and why, where every party has said something to it.

    What the others said to it is left to the round.

    Args:
        links: to who was asked, by party.
        step: of the request.
        empty: those that were asked for no row.
        behind: feature parties whose refusal the party in the middle passes on.

    Raises:
        ProtocolError: a refusal of another form, or a cut of no rows.
    """
    refused = {}
    for name, link in links.items():
        frame = link.look()
        assert frame is not None, "it has arrived"
        if frame.kind is not Kind.REFUSAL and name not in empty:
            continue
        link.receive()
        said = bytes(frame.payload)
        who = {b"": name, **{each.encode(): each for each in behind}}.get(said[1:])
        known = not said if name in empty else who and said[:1] in [bytes([one]) for one in Refused]
        if frame.kind is not Kind.REFUSAL or frame.step != step or not known:
            raise ProtocolError(f"party '{name}' answered a request in an unknown form")
        if said and who:
            refused[who] = Refused(said[0])
    return refused


class RowRate:
    """Rows that a party answers a second, in all of its sessions that serve: a token bucket.

    Args:
        most: rows a second; as many may come at once, and at least those of one request.
        file: where all processes of the party count; None counts here alone.
        clock: seconds that only grow, the same in every process.

    >>> rate = RowRate(2000.0, clock=iter([0.0, 0.0, 0.0, 0.5]).__next__)
    >>> rate.take(1500), rate.take(1500), rate.take(1500)
    (True, False, True)
    """

    def __init__(
        self, most: float, file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._burst, self._clock = most, float(max(most, QUERY_ROWS)), clock
        self._file, self._own = file, (self._burst, clock())

    def take(self, rows: int) -> bool:
        """Whether so many rows may be answered now; they are counted if they may."""
        if self._file is None:
            self._own, taken = self._after(self._own, rows)
            return taken
        with writing(self._file):
            handle = os.open(self._file, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                kept = os.pread(handle, _BUCKET.size, 0)
                state = _BUCKET.unpack(kept) if len(kept) == _BUCKET.size else self._own
                state, taken = self._after(state, rows)
                os.pwrite(handle, _BUCKET.pack(*state), 0)
            finally:
                os.close(handle)  # which lets go of the lock
        return taken

    def _after(self, state: tuple[float, float], rows: int) -> tuple[tuple[float, float], bool]:
        """Rows that are left, and when, after some are taken; a clock began anew at a reboot."""
        left, at = state
        now = self._clock()
        refilled = left + max(0.0, now - at) * self._most
        left = min(self._burst, refilled if refilled >= 0 else self._burst)  # also of NaN
        taken = left >= rows
        return (left - rows if taken else left, now), taken


def own_rate(party: PartyFile) -> RowRate:
    """The rate of a party by its own file, which all of its processes share."""
    return RowRate(party.consent.max_rows_per_second, party.store_path / "row-rate")


class Requests:
    """What a feature party is asked for while it serves, counted and held against its file.

    Args:
        allowed: positions that may be asked, ascending.
        consent: the party's own limits.
        meter: of the session; what is sent is in the ledger of sessions before it is sent.
        rate: of rows, which all sessions of the party share.

    Attributes:
        rows, different, most: rows answered, how many different ones, and how often the one
            that was asked most.
        refused: requests that were refused, by reason.
    """

    def __init__(
        self,
        allowed: np.ndarray,
        consent: Consent,
        meter: Meter,
        rate: RowRate | None = None,
    ) -> None:
        self.refused = dict.fromkeys(Refused, 0)
        self.rows = self.different = self.most = 0
        self._consent, self._meter = consent, meter
        self._rate = rate or RowRate(consent.max_rows_per_second)
        self._counts = np.full(int(allowed.max(initial=-1)) + 1, -1, dtype=np.int64)
        self._counts[allowed] = 0
        self._written_rows = self._written_passes = 0

    def admit(self, frame: Frame) -> np.ndarray | Refused | None:
        """The positions to answer, why they are refused, or None where no row is asked.

        Raises:
            ProtocolError: not rows of this session in ascending order.
        """
        if not frame.payload:
            return None
        rows, counts = self._positions(frame)
        passes = int(counts.max()) + 1
        refusal = self._refusal(len(rows), passes)
        if refusal is not None:
            self.refused[refusal] += 1
            return refusal
        self._counts[rows] = counts + 1
        self.rows += len(rows)
        self.different += len(rows) - int(np.count_nonzero(counts))
        self.most = max(self.most, passes)
        self._meter.rows, self._meter.passes = self.rows, self.most
        return rows

    def summary(self) -> str:
        """What was asked, in counts."""
        refused = sum(self.refused.values())
        return (
            f"answered {self.rows} rows, {self.different} different ones, each at most "
            f"{self.most} times; refused {refused} requests"
        )

    def _positions(self, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
        """Positions, and how often each was asked before."""
        if len(frame.payload) % ROW_BYTES == 0:
            rows = np.frombuffer(frame.payload, _ROW).astype(np.int64)
            ascending = len(rows) == 1 or bool((rows[1:] > rows[:-1]).all())
            if ascending and len(rows) <= QUERY_ROWS and rows[-1] < len(self._counts):
                counts = self._counts[rows]
                if counts.min() >= 0:
                    return rows, counts
        raise ProtocolError(
            "the label party asks for rows that this session does not have",
            where=f"step {frame.step}",
            got=f"{len(frame.payload)} bytes",
            want="positions of rows to predict, in ascending order",
        )

    def _refusal(self, rows: int, passes: int) -> Refused | None:
        limit = self._consent.max_queries
        if limit is not None and passes > limit:
            return Refused.OFTEN
        if sum(self._meter.bytes.values()) > self._consent.max_bytes:
            return Refused.SPENT
        if not self._rate.take(rows):
            return Refused.BUSY
        return None if self._written(rows, max(passes, self.most)) else Refused.SPENT

    def _written(self, rows: int, passes: int) -> bool:
        """Whether the ledger of sessions has what is about to be sent; it may not allow it."""
        if self.rows + rows <= self._written_rows and passes <= self._written_passes:
            return True
        # With a limit on epsilon every pass is asked for, or the last ones could not be used.
        more = passes - self.most if self._consent.max_epsilon is not None else _BLOCK_PASSES
        self._meter.most = Spent(rows=_BLOCK_ROWS, passes=more)
        try:
            self._meter.reserve()
        except ConsentError:
            self._meter.passes = self.most
            return False
        self._written_rows, self._written_passes = self.rows + _BLOCK_ROWS, self.most + more
        return True
