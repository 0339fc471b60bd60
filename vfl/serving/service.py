"""What stands between HTTP and a session: requests wait here, and are asked for in batches.

All of it runs on the event loop of HTTP, which the parties' streams wake as clients do: a request
passes from no thread to another. The thread that plays the session waits until it is over. Nothing
here keeps an id or a cell longer than its request, but for the cache where one is asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from torch import Tensor

from vfl.core.errors import MissingPartyError, PeerError, VFLError
from vfl.session.drift import Drift
from vfl.session.label.asking import Answer, RefusedRequest, ServingParty
from vfl.session.schedule import QUERY_ROWS
from vfl.session.serving import Refused

#: How often every party is asked whether it is there while nobody asks for anything.
_CHECK_EVERY_S = 5.0
#: How often the loop looks for the end of the service and for streams that were replaced.
_TICK_S = 0.1
#: What is said of a party that is missing, and of the label party until it has aligned new tables.
_AWAY, _UNALIGNED = "it is not here", "its tables are newer than their alignment: vfl align"
#: Before a session that was lost begins anew.
_PAUSE_S = 0.5
_NOTHING: Mapping[str, Tensor] = {}
#: Upper ends of the latency histogram, in seconds.
_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

#: What is counted.
_HELP = {
    "asked_rows": "rows that parties were asked for",
    "batches": "batches that were answered",
    "cached_rows": "rows that were answered from the cache",
    "expired_requests": "requests with a token that has expired, by client",
    "missing_cuts": "answers for which a learned vector stood in place of a party's cut",
    "refusals": "requests that a party refused",
    "responses": "responses by HTTP status",
    "rows": "rows that were answered",
    "sessions_lost": "sessions that were lost and begun again",
    "timeouts": "requests that took too long",
}


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
        future: what comes of it.
        alone: whether it was refused together with others.
    """

    rows: list[int]
    inputs: Tensor | None
    explain: bool
    model: Served
    future: asyncio.Future[Result | Unavailable]
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """Every row's answer as JSON, and each party's contribution to the outputs of the first."""

    rows: list[str]
    contributions: Mapping[str, Tensor] = field(default_factory=dict)


class Figures:
    """Counts for `/metrics`; names of parties and clients, never an id or a value.

    A request only adds to numbers; what Prometheus wants is made when it asks.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._buckets = [0] * (len(_BUCKETS) + 1)
        self._seconds = 0.0

    def add(self, name: str, by: int = 1, **labels: str) -> None:
        """Count something."""
        self._counts[name, tuple(labels.items())] += by

    def took(self, seconds: float) -> None:
        """Count a request that was answered."""
        self._seconds += seconds
        self._buckets[bisect_left(_BUCKETS, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        families = dict[str, CounterMetricFamily]()
        for (name, labels), count in sorted(self._counts.items()):
            keys, values = [key for key, _ in labels], [value for _, value in labels]
            if name not in families:
                families[name] = CounterMetricFamily(f"vfl_{name}", _HELP[name], labels=keys)
            families[name].add_metric(values, count)
        yield from families.values()
        ends = (*map(str, _BUCKETS), "+Inf")
        counts = list(zip(ends, accumulate(self._buckets), strict=True))
        about = "of requests that were answered"
        yield HistogramMetricFamily("vfl_request_seconds", about, counts, self._seconds)


class Served(Protocol):
    """What is served, as far as this file knows it."""

    def as_json(self, outputs: Tensor) -> list[str | None]:
        """Each row of outputs, axes (rows, outputs), as JSON; None where it is no number."""


@dataclass(slots=True)
class _Batch:
    """What is asked for at once.

    Attributes:
        requests: who asked; nobody where the service itself asks.
        rows: positions that are asked for; none at all asks who is there.
        known: answers that were in the cache.
        refers: whether it is about the reference rows of contributions.
        began: when it was sent.
    """

    requests: list[Request]
    rows: np.ndarray
    known: dict[int, str | None]
    refers: bool = False
    began: float = field(default_factory=time.monotonic)


class Service:
    """Takes requests from HTTP and has them answered; all of it on the event loop of HTTP.

    Args:
        owner: the label party.
        wait_ms: how long a batch waits for more requests; 0 takes what came together.
        batch_rows: most rows of a batch.
        timeout_s: most time for a request.
        cache_rows: answers that are kept, the one unused for longest leaving first; 0 keeps none.
        ended: asked now and then whether to stop.
        figures: counts of what happened; those of the service before it go on.
        waits: whether its first session waits for parties that have not come.
        opened: told on the loop when rows can be asked for; whoever asks from then on asks here.

    Attributes:
        figures: the same.
        parties: the feature parties of the model that is served.
        model: what is served; answers are of no other, however a switch falls.
        missing: who is waited for; None while rows can be answered.
        was_ready: whether rows of this run could be answered once.
        remark_bytes: most bytes of what the model says of a row beside its outputs.
        loop: where all of this runs; set once it does.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        owner: str,
        *,
        wait_ms: float = 0.0,
        batch_rows: int = QUERY_ROWS,
        timeout_s: float = 5.0,
        cache_rows: int = 0,
        ended: Callable[[], bool] = lambda: False,
        figures: Figures | None = None,
        waits: bool = True,
        opened: Callable[[Service], object] = lambda service: None,
    ) -> None:
        self.owner, self.figures, self._opened = owner, figures or Figures(), opened
        self._waits, self._retired = waits, False
        self.parties: list[str] = []
        self.model: Served | None = None
        self.missing: str | None = owner
        self._why = _AWAY
        self.timeout_s = timeout_s
        self._wait_s, self._batch_rows = wait_ms / 1000, min(batch_rows, QUERY_ROWS)
        self.remark_bytes = 0
        self._ended, self._closed, self.was_ready = ended, False, False
        self._waiting: deque[Request] = deque()
        self._asked: _Batch | None = None
        self._begins = self._ends = self._names_lost = False
        self._drift = Drift(None, None)
        self._cache: OrderedDict[int, str | None] = OrderedDict()
        self._cache_rows = cache_rows
        self._serving: ServingParty | None = None
        self._over: Future[None] = Future()
        self._watched: dict[int, int] = {}
        self._checked = 0.0

    def show(self, model: Served, parties: list[str], drift: Drift | None = None) -> None:
        """Serve this model from the next session on; between two sessions.

        Once rows could be answered it is the same run's, with other rows, and who was lost is
        still waited for.
        """
        self._drift = drift or Drift(None, None)
        self.model, self.parties = model, parties
        if not self.was_ready:
            self.missing = ", ".join(parties)

    async def predict(
        self, model: Served, rows: list[int], inputs: Tensor | None = None, explain: bool = False
    ) -> Result:
        """Answers for some rows of a model, in their order.

        Raises:
            Unavailable: a party is missing, refuses or does not answer in time.
        """
        started = time.monotonic()
        self._check_here(started)
        future: asyncio.Future[Result | Unavailable] = self.loop.create_future()
        self._waiting.append(Request(rows, inputs, explain, model, future))
        self._begin_soon()
        timer = self.loop.call_later(self.timeout_s, self._late, future)
        try:
            result = await future
        finally:
            timer.cancel()
        if isinstance(result, Unavailable):
            raise result
        self.figures.add("rows", len(rows))
        self.figures.took(time.monotonic() - started)
        return result

    def play(self, serving: ServingParty) -> None:
        """Have requests answered until the end is ordered; the session's own thread waits here.

        Raises:
            VFLError: what ended the session; everybody who waits is told who is missing.
        """
        self._over = Future()
        self.loop.call_soon_threadsafe(self._open, serving)
        self._over.result()

    def waits_for(self, parties: Sequence[str]) -> None:
        """Name these to whoever asks before the session begins.

        After a loss everybody comes anew; whoever was lost is named until one has not come in time.
        """
        if self._serving is None and parties and not self._names_lost:
            named = [party for party in (self.missing or "").split(", ") if party in parties]
            self.missing, self._why = ", ".join(named or parties), _AWAY

    def waits_for_alignment(self) -> None:
        """Name the label party, whose rows of a new table no alignment has found yet."""
        self.missing, self._why = self.owner, _UNALIGNED

    def lost(self, error: VFLError) -> bool:
        """Whether the session is to be begun again; not before everybody was here once."""
        refused = getattr(error, "peer_code", None) in ("V402", "V403")
        if self._stops() or self._retired or refused:
            return False
        if not self.was_ready and not (self._waits and isinstance(error, _ABSENT)):
            return False
        self.figures.add("sessions_lost")
        if isinstance(error, _ABSENT):
            self._names_lost = False
        time.sleep(_PAUSE_S)
        return True

    def stop(self) -> None:
        """Have `play` return."""
        self._closed = True

    def retire(self) -> None:
        """Have `play` return once nobody waits: another service takes what is asked now."""
        self._retired = True

    def collect(self) -> Iterator[Metric]:
        """What is counted and how things stand; see `prometheus_client.registry.Collector`."""
        missing = {*(self.missing or "").split(", "), *self.absent}
        up = GaugeMetricFamily("vfl_party_up", "whether a party answers", labels=["party"])
        for party in self.parties:
            up.add_metric([party], party not in missing)
        yield up
        waiting = len(self._waiting)
        yield GaugeMetricFamily("vfl_waiting_requests", "that wait for a batch", waiting)
        yield from self.figures.collect()
        index = GaugeMetricFamily(
            "vfl_population_stability_index",
            "of served rows beside training rows",
            labels=["column"],
        )
        rows = CounterMetricFamily(
            "vfl_served_rows", "by bin of the training", labels=["column", "bin"]
        )
        for column, about in self._drift.summary().items():
            index.add_metric([column], about["population_stability_index"])
            for number, count in enumerate(about["rows"]):
                if count:
                    rows.add_metric([column, str(number)], count)
        yield from (index, rows)

    @property
    def absent(self) -> list[str]:
        """Parties without which rows are answered now."""
        return sorted(self._serving.absent) if self._serving else []

    def _check_here(self, now: float) -> None:
        if self.missing is not None:
            raise Unavailable(self.missing, self._why)
        if self._asked is not None and now - self._asked.began > self.timeout_s:
            raise Unavailable(self._slowest(), "it does not answer")

    def _slowest(self) -> str:
        serving = self._serving
        return (serving and serving.waits_for) or self.missing or self.owner

    def _late(self, future: asyncio.Future[Result | Unavailable]) -> None:
        if not future.done():
            self.figures.add("timeouts")
            future.set_result(Unavailable(self._slowest(), "it did not answer in time"))

    def _stops(self) -> bool:
        return self._closed or self._ended()

    # What follows runs on the loop while a session is open; `_run` ends it where that fails.

    def _open(self, serving: ServingParty) -> None:
        self._cache.clear()
        self._serving, self.missing, self.was_ready = serving, None, True
        self.remark_bytes = serving.label.remark_bytes
        self._begins = self._ends = False
        self._checked = time.monotonic()
        if not self._retired:
            self._opened(self)
        self._tick()

    def _tick(self) -> None:
        """What no request and no stream asks for: the end, who is there, streams that are new."""
        if self._serving is None:
            return
        self._run(self._look_after)
        self.loop.call_later(_TICK_S, self._tick)

    def _look_after(self, serving: ServingParty) -> None:
        self._watch(serving)
        self._take_answer(serving)
        self._ends = self._stops()
        if self._asked is not None:
            return
        if self._retired:
            self._waiting = deque(one for one in self._waiting if not one.future.done())
        if self._ends or (self._retired and not self._waiting):
            self._close(None)
        elif self._waiting:  # a stream was cut, and may be mended
            self._begin_soon()
        elif time.monotonic() - self._checked > _CHECK_EVERY_S:
            self._ask(serving, _Batch([], np.empty(0, dtype=np.int64), {}))

    def _run(self, work: Callable[[ServingParty], None]) -> None:
        if self._serving is not None:
            try:
                work(self._serving)
            except BaseException as error:
                self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """The session is over: tell everybody who waits, and the thread that plays it."""
        serving, self._serving = self._serving, None
        assert serving is not None, "it is open"
        for watched in self._watched.values():
            self._forget(watched)
        self._watched.clear()
        party = serving.waits_for or ", ".join(self.parties) if error else self.owner
        asked, self._asked = self._asked, None
        left, self._waiting = [*(asked.requests if asked else ()), *self._waiting], deque()
        self.missing, self._why, self._names_lost = party, _AWAY, error is not None
        for request in left:
            _settle(request, Unavailable(party, "it went away"))
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _watch(self, serving: ServingParty) -> None:
        """Have every stream wake the loop.

        Each is watched by a number of our own: a stream is closed by another thread, and its
        number may be another's a moment later.
        """
        streams = dict[int, int]()
        for number in serving.streams():
            with suppress(OSError):  # it was closed a moment ago
                streams[os.fstat(number).st_ino] = number
        for gone in self._watched.keys() - streams.keys():
            self._forget(self._watched.pop(gone))
        for new in streams.keys() - self._watched.keys():
            with suppress(OSError):
                self._watched[new] = watched = os.dup(streams[new])
                self.loop.add_reader(watched, self._run, self._arrived)

    def _forget(self, watched: int) -> None:
        self.loop.remove_reader(watched)
        os.close(watched)

    def _arrived(self, serving: ServingParty) -> None:
        self._take_answer(serving)
        if -1 in serving.streams():  # or it would wake us for ever
            self._watch(serving)

    def _begin_soon(self) -> None:
        """Ask once everybody who came at the same time has said what for."""
        if self._asked is None and not self._begins and self._serving is not None:
            self._begins = True
            if self._wait_s:
                self.loop.call_later(self._wait_s, self._run, self._begin)
            else:
                self.loop.call_soon(self._run, self._begin)

    def _begin(self, serving: ServingParty) -> None:
        self._begins = False
        while self._may_ask(serving):
            if self._waiting[0].explain and len(rows := serving.reference_rows()):
                self._ask(serving, _Batch([], rows, {}, refers=True))
            elif batch := self._take():
                self._ask(serving, self._batch(batch))

    def _may_ask(self, serving: ServingParty) -> bool:
        idle = self._asked is None and not self._ends
        return idle and bool(self._waiting) and -1 not in serving.streams()

    def _take(self) -> list[Request]:
        """What waits, as many rows as fit; who brings inputs or asks for reasons goes alone."""
        taken, rows = list[Request](), 0
        while self._waiting:
            first = self._waiting[0]
            alone = first.alone or first.explain or first.inputs is not None
            if taken and (alone or rows + len(first.rows) > self._batch_rows):
                break
            self._waiting.popleft()
            if first.model is not self.model:
                _settle(first, Unavailable(self.owner, "another model has taken over"))
            elif not first.future.done():
                taken.append(first)
                rows += len(first.rows)
                if alone:
                    break
        return taken

    def _batch(self, requests: list[Request]) -> _Batch:
        rows = sorted({row for request in requests for row in request.rows})
        plain = all(request.inputs is None and not request.explain for request in requests)
        known = self._cached(rows) if plain and self._cache else {}
        asked = [row for row in rows if row not in known] if known else rows
        return _Batch(requests, np.array(asked, dtype=np.int64), known)

    def _ask(self, serving: ServingParty, batch: _Batch) -> None:
        if batch.requests and not len(batch.rows):
            self._settle(batch, {})
            return
        self._asked = batch
        serving.begin(batch.rows)
        if not serving.streams():  # parties in this process have answered
            self._take_answer(serving)

    def _take_answer(self, serving: ServingParty) -> None:
        if not serving.arrived() or self._asked is None:
            return
        batch, self._asked = self._asked, None
        self._checked = time.monotonic()
        inputs = batch.requests[0].inputs if batch.requests else None
        if inputs is not None:  # of distinct rows in the request's order
            inputs = inputs[torch.from_numpy(np.argsort(batch.requests[0].rows))]
        try:
            answer = serving.answer(inputs)
        except RefusedRequest as refusal:
            self._refused(batch, refusal)
        except BaseException:
            self._asked = batch  # whose requests are told
            raise
        else:
            if batch.refers and answer is not None:
                serving.refer_to(answer)
            elif answer is not None:
                self._answered(serving, batch, answer, inputs)
        self._begin_soon()

    def _refused(self, batch: _Batch, refusal: RefusedRequest) -> None:
        """Ask for every request alone, so that none pays for another."""
        requests = [self._waiting.popleft()] if batch.refers else batch.requests
        if len(requests) > 1:
            for request in requests:
                request.alone = True
            self._waiting.extendleft(reversed(requests))
            return
        busy, name = refusal.reason is Refused.BUSY, refusal.reason.name.lower()
        self.figures.add("refusals", party=refusal.party, reason=name)
        why = "it takes no more rows now" if busy else "it does not consent to this request"
        for request in requests:
            _settle(request, Unavailable(refusal.party, why, 429 if busy else 403))

    def _answered(
        self, serving: ServingParty, batch: _Batch, answer: Answer, inputs: Tensor | None
    ) -> None:
        self.figures.add("batches")
        self.figures.add("asked_rows", len(batch.rows))
        if inputs is None:
            self._drift.add(serving.label.data.inputs, answer.outputs, batch.rows)
        else:
            self._drift.add(inputs, answer.outputs)
        rows = batch.requests[0].model.as_json(answer.outputs)
        if answer.remarks:
            rows = [_with_remark(*pair) for pair in zip(rows, answer.remarks, strict=True)]
        if answer.missing is not None:
            rows = [_marked(*pair) for pair in zip(rows, answer.missing, strict=True)]
            for party in (party for row in answer.missing for party in row):
                self.figures.add("missing_cuts", party=party)
        fresh = dict(zip(batch.rows.tolist(), rows, strict=True))
        # A party that is back is asked again.
        if inputs is None and self._cache_rows and not serving.absent:
            self._cache.update(fresh)
            while len(self._cache) > self._cache_rows:
                self._cache.popitem(last=False)
        shares: Mapping[str, Tensor] = {}
        if batch.requests[0].explain:
            at = int(np.searchsorted(batch.rows, batch.requests[0].rows[0]))
            whole = answer.missing is None or not answer.missing[at]
            shares = _NOTHING if not whole else serving.contributions(answer.cuts, at)
        self._settle(batch, fresh, shares)

    def _settle(
        self, batch: _Batch, fresh: dict[int, str | None], shares: Mapping[str, Tensor] = _NOTHING
    ) -> None:
        known = batch.known | fresh if batch.known else fresh
        for request in batch.requests:
            rows = [row for each in request.rows if (row := known[each]) is not None]
            whole = len(rows) == len(request.rows)
            no_number = Unavailable(self.owner, "its network gives no finite number")
            _settle(request, Result(rows, shares) if whole else no_number)

    def _cached(self, rows: list[int]) -> dict[int, str | None]:
        found = {row: self._cache[row] for row in rows if row in self._cache}
        for row in found:
            self._cache.move_to_end(row)
        if found:
            self.figures.add("cached_rows", len(found))
        return found


def _with_remark(row: str | None, remark: Mapping[str, Any]) -> str | None:
    """A row's answer with what its model says beside."""
    return None if row is None else f"{row[:-1]},{json.dumps(remark)[1:]}"


def _marked(row: str | None, missing: Sequence[str]) -> str | None:
    """A row's answer with the parties whose cut it lacked."""
    return None if row is None else f'{row[:-1]},"missing":{json.dumps(list(missing))}}}'


def _settle(request: Request, result: Result | Unavailable) -> None:
    if not request.future.done():
        request.future.set_result(result)


_ABSENT: tuple[type[PeerError], ...] = (MissingPartyError,)
