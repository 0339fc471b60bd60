"""What stands between HTTP and a session: requests wait here, and are asked for in batches.

HTTP handlers run on one event loop and submit; one other thread plays the session, takes what
waits, and answers. Nothing here keeps an id or a cell longer than its request, but for the cache
where one is asked for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import MissingPartyError, PeerError, VFLError
from vfl.server.serving import RefusedRequest, ServingParty
from vfl.session.drift import Drift
from vfl.session.schedule import QUERY_ROWS
from vfl.session.serving import Refused

#: How often every party is asked whether it is there while nobody asks for anything.
_CHECK_EVERY_S = 5.0
_TICK_S = 0.5
#: Upper ends of the latency histogram, in seconds.
_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Unavailable(Exception):
    """No answer now; `party` is who it waits for, `status` the HTTP status, `why` in our words."""

    def __init__(self, party: str, why: str, status: int = 503) -> None:
        super().__init__(why)
        self.party, self.why, self.status = party, why, status


@dataclass(slots=True)
class Request:
    """Rows that somebody wants to know of.

    Attributes:
        rows: positions, as they were asked for.
        inputs: the label party's own inputs in place of its table's, axes (rows, ...).
        explain: whether contributions of the first row are wanted.
        model: what positions and answers are of.
        future: what comes of it, on the event loop.
    """

    rows: np.ndarray
    inputs: Tensor | None
    explain: bool
    model: object
    future: asyncio.Future[Result | Unavailable]
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs of axes (rows, outputs), and each party's contribution to those of the first row."""

    outputs: Tensor
    contributions: Mapping[str, Tensor] = field(default_factory=dict)


class Figures:
    """Counts for `/metrics`; names of parties, never an id or a value."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.buckets = [0] * (len(_BUCKETS) + 1)
        self.seconds = 0.0

    def add(self, name: str, labels: str = "", by: int = 1) -> None:
        """Count something."""
        self.counts[name, labels] += by

    def took(self, seconds: float) -> None:
        """Count a request that was answered."""
        self.seconds += seconds
        at = next((i for i, most in enumerate(_BUCKETS) if seconds <= most), len(_BUCKETS))
        self.buckets[at] += 1

    def lines(self) -> Iterator[str]:
        """Prometheus' text format, version 0.0.4."""
        for name in sorted({name for name, _ in self.counts}):
            yield f"# TYPE vfl_{name} counter"
            for (each, labels), count in sorted(self.counts.items()):
                if each == name:
                    yield f"vfl_{name}{{{labels}}} {count}" if labels else f"vfl_{name} {count}"
        yield "# TYPE vfl_request_seconds histogram"
        total = 0
        for most, count in zip((*map(str, _BUCKETS), "+Inf"), self.buckets, strict=True):
            total += count
            yield f'vfl_request_seconds_bucket{{le="{most}"}} {total}'
        yield f"vfl_request_seconds_sum {self.seconds:.6f}"
        yield f"vfl_request_seconds_count {total}"


class Service:
    """Takes requests from HTTP, and has them answered by whoever plays a session.

    Args:
        owner: the label party.
        wait_ms: how long a batch waits for more requests; 0 takes what is there.
        batch_rows: most rows of a batch.
        timeout_s: most time for a request.
        cache_rows: answers that are kept, the one unused for longest leaving first; 0 keeps none.
        ended: asked now and then whether to stop.

    Attributes:
        figures: counts of what happened.
        parties: the feature parties of the model that is served.
        model: what is served; answers are of no other, however a switch falls.
        missing: who is waited for; None while rows can be answered.
        was_ready: whether rows of this model could be answered once.
    """

    def __init__(
        self,
        owner: str,
        *,
        wait_ms: float = 0.0,
        batch_rows: int = QUERY_ROWS,
        timeout_s: float = 5.0,
        cache_rows: int = 0,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.owner, self.figures = owner, Figures()
        self.parties: list[str] = []
        self.model: object = None
        self.missing: str | None = owner
        self.timeout_s = timeout_s
        self._wait_s, self._batch_rows = wait_ms / 1000, min(batch_rows, QUERY_ROWS)
        self._ended, self._closed, self.was_ready = ended, False, False
        self._waiting: deque[Request] = deque()
        self._changed = threading.Condition()
        self._drift, self._counting = Drift(None, None), threading.Lock()
        self._cache: OrderedDict[int, Tensor] = OrderedDict()
        self._cache_rows = cache_rows
        self._serving: ServingParty | None = None
        self._asked_at: float | None = None

    def show(self, model: object, parties: list[str], drift: Drift | None = None) -> None:
        """Serve this model from the next session on; between two sessions."""
        self._drift = drift or Drift(None, None)
        self.model, self.parties, self.was_ready = model, parties, False
        self.missing = ", ".join(parties)

    async def predict(
        self, model: object, rows: np.ndarray, inputs: Tensor | None = None, explain: bool = False
    ) -> Result:
        """Answers for some rows of a model, in their order; called on the event loop.

        Raises:
            Unavailable: a party is missing, refuses or does not answer in time.
        """
        loop, started = asyncio.get_running_loop(), time.monotonic()
        self._check_here(started)
        future: asyncio.Future[Result | Unavailable] = loop.create_future()
        request = Request(rows, inputs, explain, model, future)
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()
        try:
            async with asyncio.timeout(self.timeout_s):
                result = await future
        except TimeoutError:
            self.figures.add("timeouts_total")
            raise Unavailable(self._slowest(), "it did not answer in time") from None
        finally:
            request.dropped = True
        if isinstance(result, Unavailable):
            raise result
        self.figures.add("rows_total", by=len(rows))
        self.figures.took(time.monotonic() - started)
        return result

    def play(self, serving: ServingParty) -> None:
        """Answer what is asked until the end is ordered; the session's own thread does this.

        Raises:
            VFLError: what ended the session; everybody who waits is told who is missing.
        """
        self._cache.clear()
        self._serving, self.missing, self.was_ready = serving, None, True
        checked = time.monotonic()
        try:
            while not self._stops():
                batch = self._take()
                self._asked_at = time.monotonic()
                if batch:
                    self._answer(serving, batch)
                elif self._asked_at - checked > _CHECK_EVERY_S:
                    serving.check()
                    checked = self._asked_at
                self._asked_at = None
        except BaseException:
            self._give_up(serving.waits_for or ", ".join(self.parties))
            raise
        finally:
            self._asked_at = self._serving = None
            if self.missing is None:
                self._give_up(self.owner)

    def lost(self, error: VFLError) -> bool:
        """Whether the session is to be begun again; not before everybody was here once."""
        refused = getattr(error, "peer_code", None) in ("V402", "V403")
        if self._stops() or refused or not (self.was_ready or isinstance(error, _ABSENT)):
            return False
        self.figures.add("sessions_lost_total")
        time.sleep(_TICK_S)
        return True

    def stop(self) -> None:
        """Have `play` return."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def metrics(self) -> str:
        """The text of `/metrics`."""
        missing = self.missing or ""
        gauges = ["# TYPE vfl_party_up gauge"]
        gauges += [
            f'vfl_party_up{{party="{party}"}} {int(party not in missing.split(", "))}'
            for party in self.parties
        ]
        gauges += ["# TYPE vfl_waiting_requests gauge", f"vfl_waiting_requests {self.waiting}"]
        with self._counting:
            drift = list(self._drift.metrics())
        return "\n".join([*gauges, *self.figures.lines(), *drift, ""])

    @property
    def waiting(self) -> int:
        """Requests that wait to be asked for."""
        return len(self._waiting)

    def _check_here(self, now: float) -> None:
        if self.missing is not None:
            raise Unavailable(self.missing, "it is not here")
        asked_at = self._asked_at
        if asked_at is not None and now - asked_at > self.timeout_s:
            raise Unavailable(self._slowest(), "it does not answer")

    def _slowest(self) -> str:
        serving = self._serving
        return (serving and serving.waits_for) or self.missing or self.owner

    def _stops(self) -> bool:
        return self._closed or self._ended()

    def _take(self) -> list[Request]:
        """What waits, as many rows as fit; own inputs go alone, for others may be asked too."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(_TICK_S)
        if self._wait_s and self._waiting:
            time.sleep(self._wait_s)
        taken, rows = list[Request](), 0
        with self._changed:
            while self._waiting:
                first = self._waiting[0]
                alone = first.inputs is not None
                if taken and (alone or rows + len(first.rows) > self._batch_rows):
                    break
                self._waiting.popleft()
                if first.model is not self.model:
                    _settle([(first, Unavailable(self.owner, "another model has taken over"))])
                elif not first.dropped:
                    taken.append(first)
                    rows += len(first.rows)
                    if alone:
                        break
        return taken

    def _answer(self, serving: ServingParty, batch: list[Request]) -> None:
        """Ask for a batch; where it is refused, every request alone, so that none pays for it."""
        try:
            self._ask(serving, batch)
        except RefusedRequest as refusal:
            if len(batch) > 1:
                for request in batch:
                    self._answer(serving, [request])
                return
            busy = refusal.reason is Refused.BUSY
            name = refusal.reason.name.lower()
            self.figures.add("refusals_total", f'party="{refusal.party}",reason="{name}"')
            why = "it takes no more rows now" if busy else "it does not consent to this request"
            _settle([(batch[0], Unavailable(refusal.party, why, 429 if busy else 403))])
        except BaseException:
            gone = Unavailable(serving.waits_for or ", ".join(self.parties), "it went away")
            _settle([(request, gone) for request in batch])
            raise

    def _ask(self, serving: ServingParty, batch: list[Request]) -> None:
        inputs = batch[0].inputs
        rows = np.unique(np.concatenate([request.rows for request in batch]))
        explains = any(request.explain for request in batch)
        known = {} if inputs is not None or explains else self._cached(rows)
        asked = np.array([row for row in rows.tolist() if row not in known], dtype=np.int64)
        if len(asked):
            if inputs is not None:  # of distinct rows in the request's order
                inputs = inputs[torch.from_numpy(np.argsort(batch[0].rows))]
            answer = serving.ask(asked, inputs)
            self.figures.add("batches_total")
            self.figures.add("asked_rows_total", by=len(asked))
            own = serving.label.data.inputs if inputs is None else inputs
            if own is not None and inputs is None:
                own = own.index_select(0, torch.from_numpy(asked))
            with self._counting:  # /metrics counts what waits, in another thread
                self._drift.add(own, answer.outputs)
            fresh = dict(zip(asked.tolist(), answer.outputs, strict=True))
            if inputs is None:
                self._keep(fresh)
            known |= fresh
        results = list[tuple[Request, Result | Unavailable]]()
        for request in batch:
            outputs = torch.stack([known[row] for row in request.rows.tolist()])
            shares: Mapping[str, Tensor] = {}
            if request.explain:
                at = int(np.searchsorted(asked, request.rows[0]))
                shares = serving.contributions(answer.cuts, at)
            results.append((request, Result(outputs, shares)))
        _settle(results)

    def _cached(self, rows: np.ndarray) -> dict[int, Tensor]:
        found = {row: self._cache[row] for row in rows.tolist() if row in self._cache}
        for row in found:
            self._cache.move_to_end(row)
        if found:
            self.figures.add("cached_rows_total", by=len(found))
        return found

    def _keep(self, fresh: Mapping[int, Tensor]) -> None:
        if self._cache_rows:
            self._cache.update(fresh)
            while len(self._cache) > self._cache_rows:
                self._cache.popitem(last=False)

    def _give_up(self, party: str) -> None:
        with self._changed:
            self.missing = party
            left, self._waiting = self._waiting, deque()
        gone = Unavailable(party, "it went away")
        _settle([(request, gone) for request in left])


def _settle(results: Sequence[tuple[Request, Result | Unavailable]]) -> None:
    """Hand over what came of requests, in one call to their event loop."""

    def on_loop() -> None:
        for request, result in results:
            if not request.future.done():
                request.future.set_result(result)

    if results:
        results[0][0].future.get_loop().call_soon_threadsafe(on_loop)


_ABSENT: tuple[type[PeerError], ...] = (MissingPartyError,)
