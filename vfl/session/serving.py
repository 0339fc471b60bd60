"""A session that stays open (a service): the label party queries rows for its clients.

    label party     ASK: positions of some rows, in ascending order
    feature party   QUERY: cut of these rows, after defense and codec as in a prediction; or REFUSAL
    label party     the next ASK, which confirms these messages; DONE ends the session

An ASK without rows checks which parties are present; a feature party answers such an ASK with a
REFUSAL that contains no reason. A feature party counts how often each of its rows is queried, and
its configuration file may limit this number; a refusal does not end the session.

If there is a middle party, the label party queries the middle party, which queries the feature
parties over encrypted links. The middle party sends the same requests to feature parties as a label
party, and only the middle party answers the label party; in training, cuts also go to the middle
party.
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
#: Record of a `RowRate` on disk: the number of rows that the party may answer now, and the time of
#: this record.
_BUCKET = struct.Struct("<dd")
#: Numbers of rows and passes that the party writes to the session ledger in advance, before it
#: answers them.
_BLOCK_ROWS, _BLOCK_PASSES = 1 << 16, 1 << 10


class Refused(IntEnum):
    """A feature party's reason why it does not send a cut of the queried rows."""

    BUSY = 1  # the party would answer more rows per second than its file allows
    OFTEN = 2  # one of the rows has been queried as often as the party's file allows
    SPENT = 3  # the party's limit of bytes or of epsilon is reached


def require_servable(terms: Terms, partial: bool = False) -> None:
    """Refuse terms with which a service cannot answer queries of single rows.

    Args:
        terms: terms of the run.
        partial: whether the service must answer requests even while a party is absent.

    Raises:
        ExposedCutError: the secure mode secret-shares weights between parties.
        ConfigError: the service must answer while a party is absent, but the model is not a forest,
            and was trained without missing rows.
    """
    mode = secure_mode.make(terms.secure)
    if (mode.shares_weights or mode.whole_network) and not mode.serves_rows:
        raise ExposedCutError(
            "a network with shared layers cannot be served row by row",
            got=f"secure = '{terms.secure}'",
            want="secure = 'none' or 'sum'; vfl predict RUN answers a whole table",
        )
    if partial and not mode.answers_without and terms.missing_rows != "token":
        raise ConfigError(
            "this model cannot answer without an absent party",
            where="serve.partial",
            want="a run of trees, or a run that was trained with data.missing_rows = 'token'",
            fix="leave serve.partial out: requests then get the HTTP status 503 until all parties "
            "are back",
        )


def request(step: int, rows: np.ndarray) -> Frame:
    """Make the ASK frame that queries these rows.

    >>> len(request(0, np.array([3, 7])).payload)
    8
    """
    return Frame(Kind.ASK, step, rows.astype(_ROW).tobytes())


class Peeked:
    """A link whose next frame the caller can inspect before it receives the frame.

    Args:
        name: name of the party at the other end of the link.
        link: link to that party; on a link between threads of one process, receiving never blocks.
    """

    def __init__(self, name: str, link: Link) -> None:
        self._name, self._link = name, link
        self._polled = link if isinstance(link, ObservedPoll | Carried) else None
        self._next: Frame | None = None

    @property
    def looked(self) -> bool:
        """Whether `look` has already found the next frame."""
        return self._next is not None

    def look(self) -> Frame | None:
        """Return the next frame without removing it; None if it has not arrived."""
        if self._next is None:
            self._next = self._link.receive() if self._polled is None else self._polled.poll()
        return self._next

    def filenos(self) -> list[int]:
        """Return the file descriptors that become readable when a frame arrives.

        The list contains -1 for a broken connection; the list is empty if a frame is always
        available at once.
        """
        return [] if self._polled is None else self._polled.filenos()

    @property
    def waits_for(self) -> str:
        """Name of the party that has to send the next frame."""
        return self._name if self._polled is None else self._polled.waits_for

    @property
    def patience_s(self) -> float:
        """Longest accepted time without a frame from the other party, in seconds."""
        return math.inf if self._polled is None else self._polled.patience_s

    def receive(self) -> Frame:
        """Receive the next frame, even if `look` has already returned this frame."""
        frame, self._next = self._next, None
        return self._link.receive() if frame is None else frame

    def send(self, frame: Frame) -> None:
        """Send a frame."""
        self._link.send(frame)

    def close(self) -> None:
        """Close the link."""
        self._link.close()


def refusals(
    links: Mapping[str, Peeked], step: int, empty: Collection[str], behind: Collection[str] = ()
) -> dict[str, Refused]:
    """Return the parties that refuse a request, with their reasons.

    Call this function after all queried parties have answered. Other answers remain on their links,
    from which the exchange receives them.

    Args:
        links: links to the queried parties, by name.
        step: step number of the request.
        empty: parties whose query contained no rows.
        behind: feature parties behind a middle party, which forwards their refusals to the label
            party.

    Raises:
        ProtocolError: a refusal has an unknown form, or a party answered an empty query with a cut.
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
    """Limits how many rows per second a party answers in all its serving sessions (a token bucket).

    Args:
        most: limit of rows per second; the bucket holds as many rows, but at least as many as one
            request may contain.
        file: file in which all processes of the party count rows together; None counts only the
            rows of this process.
        clock: monotonic clock in seconds, which is the same in every process.

    >>> rate = RowRate(2000.0, clock=iter([0.0, 0.0, 0.0, 0.5]).__next__)
    >>> rate.take(1500), rate.take(1500), rate.take(1500)
    (True, False, True)
    """

    def __init__(
        self, most: float, file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._burst, self._clock = most, float(max(most, QUERY_ROWS)), clock
        self._file, self._own = file, (self._burst, clock())
        self._handle: int | None = None

    def take(self, rows: int) -> bool:
        """Return whether the party may answer this many rows now; if so, count the rows."""
        if self._file is None:
            self._own, taken = self._after(self._own, rows)
            return taken
        with writing(self._file):
            if self._handle is None:
                self._handle = os.open(
                    self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE
                )
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            try:
                kept = os.pread(self._handle, _BUCKET.size, 0)
                state = _BUCKET.unpack(kept) if len(kept) == _BUCKET.size else self._own
                state, taken = self._after(state, rows)
                os.pwrite(self._handle, _BUCKET.pack(*state), 0)
            finally:
                fcntl.flock(self._handle, fcntl.LOCK_UN)
        return taken

    def close(self) -> None:
        """Close the file; the next call of `take` opens it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _after(self, state: tuple[float, float], rows: int) -> tuple[tuple[float, float], bool]:
        """Return the bucket's state after a request, and whether the request is allowed.

        The clock may have gone back to 0, because the machine restarted.
        """
        left, at = state
        now = self._clock()
        refilled = left + max(0.0, now - at) * self._most
        # the comparison is false for NaN
        left = min(self._burst, refilled if refilled >= 0 else self._burst)
        taken = left >= rows
        return (left - rows if taken else left, now), taken


def own_rate(party: PartyFile) -> RowRate:
    """Make the rate limiter that a party's own file sets; all processes of the party share it."""
    return RowRate(party.consent.max_rows_per_second, party.store_path / "row-rate")


class Requests:
    """Counts the requests to a feature party of a service, and checks the party's limits.

    Args:
        allowed: positions of the rows that the label party may query, ascending.
        consent: the limits in the party's own configuration file.
        meter: meter of the session; through the meter, the session ledger records rows before their
            cuts are sent.
        rate: rate limiter that all sessions of the party share.

    Attributes:
        rows, different, most: number of answered rows, number of different rows among them, and
            number of answers for the row that was answered most often.
        refused: number of refused requests, by reason.
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
        """Return the positions to answer, or a reason to refuse.

        Return None for a query without rows.

        Raises:
            ProtocolError: the payload is not an ascending list of rows of this session.
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

    def close(self) -> None:
        """Close the rate limiter's file."""
        self._rate.close()

    def summary(self) -> str:
        """Return the numbers of answered rows and refused requests as text."""
        refused = sum(self.refused.values())
        return (
            f"answered {self.rows} rows, {self.different} different ones, each at most "
            f"{self.most} times; refused {refused} requests"
        )

    def _positions(self, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
        """Return the queried positions, and for each position the number of earlier queries."""
        if len(frame.payload) % ROW_BYTES == 0:
            rows = np.frombuffer(frame.payload, _ROW).astype(np.int64)
            ascending = len(rows) == 1 or bool((rows[1:] > rows[:-1]).all())
            if ascending and len(rows) <= QUERY_ROWS and rows[-1] < len(self._counts):
                counts = self._counts[rows]
                if counts.min() >= 0:
                    return rows, counts
        raise ProtocolError(
            "the label party queries rows that this session does not have",
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
        """Record the next cuts in the session ledger; return False if a limit forbids them."""
        if self.rows + rows <= self._written_rows and passes <= self._written_passes:
            return True
        # With a limit on epsilon, each pass over the rows is recorded separately; if several passes
        # were recorded in advance, the party could not use the last passes of its budget.
        more = passes - self.most if self._consent.max_epsilon is not None else _BLOCK_PASSES
        self._meter.most = Spent(rows=_BLOCK_ROWS, passes=more)
        try:
            self._meter.reserve()
        except ConsentError:
            self._meter.passes = self.most
            return False
        self._written_rows, self._written_passes = self.rows + _BLOCK_ROWS, self.most + more
        return True
