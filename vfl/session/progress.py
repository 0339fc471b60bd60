"""Progress of a session: counts, rates and times, reported once a second, without data of rows."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vfl.core.frame import Frame
from vfl.datasets import Split
from vfl.session import rules
from vfl.session.dp_plan import PrivacyPlan
from vfl.session.schedule import QUERY_ROWS, Exchange, watched
from vfl.session.terms import Terms

_EVERY_S = 1.0
_WINDOW = 30  # number of recent reports from which a rate is computed


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """Progress of a session at one point in time.

    Attributes:
        mode: train, evaluate, predict, serve or align.
        waits_for: parties that have not connected yet; the other fields are unknown until all
            parties have connected.
        epoch, epochs: number of the current epoch, and number of epochs of the training (fewer than
            `train.epochs` if the privacy budget of [dp] is spent before); 0 in other modes.
        done, total: number of completed exchanges, and number of planned exchanges; in the last
            report, `total` is equal to `done`, also if early stopping left out exchanges. In an
            alignment, `done` is a number of bytes and `total` is unknown, because it would disclose
            how many ids the other parties have.
        per_second: exchanges per second; in an alignment, bytes per second.
        rows_per_second: rows of the label party that the session processes per second.
        left_s: estimated seconds until the end of the session; None if unknown.
    """

    mode: str
    waits_for: tuple[str, ...] = ()
    epoch: int = 0
    epochs: int = 0
    done: int = 0
    total: int = 0
    per_second: float = 0.0
    rows_per_second: float = 0.0
    left_s: float | None = None

    def record(self) -> dict[str, Any]:
        """Return the progress as a record for a file."""
        return asdict(self) | {"waits_for": list(self.waits_for)}

    @property
    def share(self) -> float | None:
        """Completed fraction of the session, from 0 to 1; None if `total` is unknown."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def is_over(self) -> bool:
        """Return whether the session has ended."""
        return self.left_s == 0.0


Tell = Callable[[ProgressReport], None]


def exchanges_of(terms: Terms, split: Split) -> int:
    """Return the largest possible number of exchanges of a session.

    Args:
        terms: the agreed terms.
        split: split of the rows.
    """
    asked = math.ceil(len(split.test) / QUERY_ROWS)
    if terms.mode != "train":
        return asked
    judged, epochs = math.ceil(len(split.validation) / QUERY_ROWS), _epochs(terms, split)
    plan = PrivacyPlan.of(terms, len(split.train))
    steps = epochs * rules.steps_per_epoch(terms, len(split.train)) if plan is None else plan.steps
    return steps + epochs * judged + asked


def _epochs(terms: Terms, split: Split) -> int:
    if terms.mode != "train":
        return 0
    plan = PrivacyPlan.of(terms, len(split.train))
    return terms.train.epochs if plan is None else plan.epochs


class SessionProgress:
    """Measures the progress of a session from its schedule; it reads the clock once per exchange.

    Args:
        terms: the agreed terms.
        split: split of the rows.
        tell: function that is called with a report at the start, about once a second, and at the
            end.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self, terms: Terms, split: Split, tell: Tell, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._terms, self._tell, self._clock = terms, tell, clock
        self._total, self._epochs = exchanges_of(terms, split), _epochs(terms, split)

    def through(self, schedule: Iterable[Exchange]) -> Iterator[Exchange]:
        """Yield the same exchanges; between exchanges, call `tell` with reports."""
        past: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)

        def look(now: float, epoch: int, done: int, rows: int, *, is_over: bool) -> None:
            past.append((now, done, rows))
            self._tell(self._report(past, epoch, done, is_over=is_over))

        return watched(schedule, look, _EVERY_S, self._clock)

    def _report(
        self, past: deque[tuple[float, int, int]], epoch: int, done: int, *, is_over: bool
    ) -> ProgressReport:
        # the first exchange is slow, because libraries are still loaded
        warm = 1 if len(past) > 3 else 0
        (first, steps, rows), (last, steps_now, rows_now) = past[warm], past[-1]
        took = max(last - first, 1e-9)
        rate = (steps_now - steps) / took if len(past) > 1 else 0.0
        left = (self._total - done) / rate if rate else None
        return ProgressReport(
            mode=self._terms.mode,
            epoch=epoch,
            epochs=self._epochs,
            done=done,
            total=done if is_over else self._total,
            per_second=rate,
            rows_per_second=(rows_now - rows) / took if rate else 0.0,
            left_s=0.0 if is_over else left,
        )


class WaitingFor:
    """Reports which parties have not connected yet, once for each change of this set of parties.

    Args:
        mode: mode of the session.
        tell: function that is called with the reports; see `SessionProgress`.
    """

    def __init__(self, mode: str, tell: Tell) -> None:
        self._mode, self._tell, self._reported = mode, tell, tuple[str, ...]()

    def __call__(self, parties: Sequence[str]) -> None:
        if parties and tuple(parties) != self._reported:
            self._tell(ProgressReport(self._mode, waits_for=tuple(parties)))
        self._reported = tuple(parties)


class AlignmentProgress:
    """Counts the bytes that this party sends and receives in an alignment.

    Args:
        tell: function that is called with the reports; see `SessionProgress`.
        clock: monotonic clock in seconds.
    """

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._began, self._due, self._bytes = clock(), -math.inf, 0

    def frame(self, party: str, direction: str, frame: Frame) -> None:
        """Count the bytes of a frame; the links call this method for each frame."""
        self.add(frame.wire_bytes)

    def add(self, count: int) -> None:
        """Count this many bytes."""
        self._bytes += count
        if (now := self._clock()) >= self._due:
            self._due = now + _EVERY_S
            took = max(now - self._began, 1e-9)
            self._tell(ProgressReport("align", done=self._bytes, per_second=self._bytes / took))
