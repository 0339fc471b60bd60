"""The service between HTTP and a session: it collects requests into batches of rows.

All requests are handled on the HTTP server's event loop, which wakes up for messages from parties
and from clients; one thread therefore handles a request from start to end. The thread that runs the
session only starts it, and waits until it is over. The service keeps ids and table values of a
request only as long as the request lasts; the optional cache keeps positions of rows and answers.
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
from functools import partial
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

#: Seconds between two checks whether all parties are present, if no requests arrive.
_CHECK_EVERY_S = 5.0
#: Seconds between two checks whether the service must end, and whether a party has a new stream.
_TICK_S = 0.1
#: Reasons why rows cannot be answered: a party is absent, or the label party's new tables are not
#: aligned yet.
_AWAY, _UNALIGNED = "it is absent", "its tables are newer than their alignment; run vfl align"
#: Seconds before a lost session restarts.
_PAUSE_S = 0.5
_NOTHING: Mapping[str, Tensor] = {}
#: Upper bounds of the latency histogram's bins, in seconds.
_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

#: Help texts of the Prometheus counters, by counter.
_HELP = {
    "asked_rows": "queried rows",
    "batches": "batches that were answered",
    "cached_rows": "rows that were answered from the cache",
    "expired_requests": "requests with an expired token, by client",
    "missing_cuts": "answers in which a learned vector replaced the cut of a missing party",
    "refusals": "requests that a party refused",
    "responses": "responses by HTTP status",
    "rows": "rows that were answered",
    "sessions_lost": "lost and restarted sessions",
    "timeouts": "requests that exceeded the time limit",
}


class Unavailable(Exception):
    """Error: the service cannot answer rows now.

    The error has the attributes `party` (the missing party), `status` (an HTTP status), and `why`
    (the reason).
    """

    def __init__(self, party: str, why: str, status: int = 503) -> None:
        super().__init__(why)
        self.party, self.why, self.status = party, why, status


@dataclass(slots=True)
class Request:
    """A client's request for rows, which waits in the queue.

    Attributes:
        rows: positions of the requested rows, in the order of the request.
        inputs: the label party's inputs for these rows, which replace the inputs from its table,
            axes (rows, ...).
        explain: whether the client requests each party's contribution to the answer for the first
            row.
        model: the model that must answer the request.
        future: future that receives the answer or the error.
        alone: whether the request must be sent without other requests, because a party refused a
            batch that contained the request.
    """

    rows: list[int]
    inputs: Tensor | None
    explain: bool
    model: Served
    future: asyncio.Future[Result | Unavailable]
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """The answer for each row as JSON, and each party's contribution to the first row's outputs."""

    rows: list[str]
    contributions: Mapping[str, Tensor] = field(default_factory=dict)


class Figures:
    """Counters for `/metrics`, with labels for parties and clients.

    The counters contain no ids and no table values. A request only increments numbers; Prometheus
    metrics are built from these numbers when Prometheus collects them.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._buckets = [0] * (len(_BUCKETS) + 1)
        self._seconds = 0.0

    def add(self, name: str, by: int = 1, **labels: str) -> None:
        """Increment a counter; keyword arguments are Prometheus labels."""
        self._counts[name, tuple(labels.items())] += by

    def took(self, seconds: float) -> None:
        """Count an answered request, and add its latency to the histogram."""
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
        about = "latency of answered requests in seconds"
        yield HistogramMetricFamily("vfl_request_seconds", about, counts, self._seconds)


class Served(Protocol):
    """Methods of a served model that this module calls."""

    def as_json(self, outputs: Tensor) -> list[str | None]:
        """Encode each row of outputs, axes (rows, outputs), as JSON.

        An entry is None if the row's outputs contain a number that is not finite.
        """


@dataclass(slots=True)
class _Batch:
    """A batch of rows that the service sends to the parties as one query.

    Attributes:
        requests: client requests in the batch; empty if the service itself sends the query.
        rows: positions of the rows to query; a query without rows checks which parties are present.
        known: answers from the cache, by row; None for an answer that is not finite.
        refers: whether the batch queries the reference rows with which contributions are computed.
        began: time at which the query was sent.
    """

    requests: list[Request]
    rows: np.ndarray
    known: dict[int, str | None]
    refers: bool = False
    began: float = field(default_factory=time.monotonic)


class Service:
    """Queues HTTP requests and answers them on the HTTP server's event loop.

    The thread that runs the session calls `show`, `play`, `waits_for`, `waits_for_alignment` and
    `lost`. A batch has at most `QUERY_ROWS` rows.

    Args:
        owner: name of the label party.
        wait_ms: milliseconds that a batch waits for further requests; 0 combines only requests that
            arrive together.
        timeout_s: time limit of a client's request in seconds.
        cache_rows: number of cached answers, of which the least recently used is removed first; 0
            turns the cache off.
        ended: function that the service calls repeatedly; it returns whether the service must stop.
        figures: counters of an earlier service, which this service continues.
        waits: whether the service's first session waits until parties connect.
        opened: callback on the event loop that is called when rows can be queried; new requests
            then go to this service.

    Attributes:
        figures: the argument.
        parties: the feature parties of the served model.
        model: the served model; this service answers with this model only, even while clients are
            switched to another run.
        missing: names of the missing parties; None if rows can be answered.
        was_ready: whether the service could answer rows of this run at least once.
        remark_bytes: largest size in bytes of the model's remark on a row.
        loop: event loop of the service; the HTTP server sets it at its start.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        owner: str,
        *,
        wait_ms: float = 0.0,
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
        self._wait_s = wait_ms / 1000
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
        """Serve this model from the next session on; the caller calls this between two sessions.

        If the service could answer rows before, `model` is the same run with other rows, and the
        service still waits for lost parties.
        """
        self._drift = drift or Drift(None, None)
        self.model, self.parties = model, parties
        if not self.was_ready:
            self.missing = ", ".join(parties)

    async def predict(
        self, model: Served, rows: list[int], inputs: Tensor | None = None, explain: bool = False
    ) -> Result:
        """Return the answers of a model for rows, in the order of `rows`.

        Raises:
            Unavailable: a party is missing, refuses, or does not answer in time; another model has
                replaced this one; or an output is not finite.
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
        """Answer requests until the service ends.

        The thread that runs the session waits in this method.

        Raises:
            VFLError: the error that ended the session; waiting clients receive the name of the
                missing party.
        """
        self._over = Future()
        self.loop.call_soon_threadsafe(self._open, serving)
        self._over.result()

    def waits_for(self, parties: Sequence[str]) -> None:
        """Name these parties as missing in HTTP answers, until the session begins.

        After a session was lost, all parties connect again. HTTP answers name the lost party until
        a different party fails to connect in time.
        """
        if self._serving is None and parties and not self._names_lost:
            named = [party for party in (self.missing or "").split(", ") if party in parties]
            self.missing, self._why = ", ".join(named or parties), _AWAY

    def waits_for_alignment(self) -> None:
        """Name the label party as missing: its new table is not aligned yet."""
        self.missing, self._why = self.owner, _UNALIGNED

    def lost(self, error: VFLError) -> bool:
        """Return whether the caller should restart a session that was lost by this error."""
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
        """Let `play` return and close the session."""
        self._closed = True

    def retire(self) -> None:
        """Let `play` return when no request waits any more; new requests go to another service."""
        self._retired = True

    def collect(self) -> Iterator[Metric]:
        """Yield the counters and the present state of the service.

        See `prometheus_client.registry.Collector`.
        """
        missing = {*(self.missing or "").split(", "), *self.absent}
        up = GaugeMetricFamily("vfl_party_up", "whether a party answers", labels=["party"])
        for party in self.parties:
            up.add_metric([party], party not in missing)
        yield up
        waiting = len(self._waiting)
        yield GaugeMetricFamily(
            "vfl_waiting_requests", "requests that wait to be sent in a batch", waiting
        )
        yield from self.figures.collect()
        index = GaugeMetricFamily(
            "vfl_population_stability_index",
            "population stability index of served rows against training rows",
            labels=["column"],
        )
        rows = CounterMetricFamily(
            "vfl_served_rows",
            "served rows, by column and by bin of the training rows' values",
            labels=["column", "bin"],
        )
        for column, about in self._drift.summary().items():
            index.add_metric([column], about["population_stability_index"])
            for number, count in enumerate(about["rows"]):
                if count:
                    rows.add_metric([column, str(number)], count)
        yield from (index, rows)

    @property
    def absent(self) -> list[str]:
        """Absent parties; the service answers rows without the cuts of these parties."""
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
            future.set_result(Unavailable(self._slowest(), "the party did not answer in time"))

    def _stops(self) -> bool:
        return self._closed or self._ended()

    # The following methods run on the event loop while a session is open; if one of them raises an
    # error, `_run` ends the session.

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
        """Check whether to end, whether all parties are present, and for new streams."""
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
        elif self._waiting:  # the party may have repaired a broken stream
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
        """End the session; send the reason to all waiting clients and to the session's thread."""
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
        """Register every party's stream with the event loop; messages then wake the loop.

        The loop watches a duplicate of each stream's file descriptor, because another thread may
        close the stream, and the operating system may then reuse the descriptor's number.
        """
        streams = dict[int, tuple[int, str | None]]()
        for number, name in serving.streams():
            with suppress(OSError):  # another thread has closed the stream meanwhile
                node = os.fstat(number).st_ino
                # several links may share one stream
                streams[node] = number, None if node in streams else name
        for gone in self._watched.keys() - streams.keys():
            self._forget(self._watched.pop(gone))
        for new in streams.keys() - self._watched.keys():
            number, at = streams[new]
            with suppress(OSError):
                self._watched[new] = watched = os.dup(number)
                self.loop.add_reader(watched, self._run, partial(self._arrived, at))

    def _forget(self, watched: int) -> None:
        self.loop.remove_reader(watched)
        os.close(watched)

    def _arrived(self, at: str | None, serving: ServingParty) -> None:
        self._take_answer(serving, at)
        if serving.broken():  # a broken stream would wake the event loop again and again
            self._watch(serving)

    def _begin_soon(self) -> None:
        """Send a query as soon as all requests that arrived together are in the queue."""
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
        return idle and bool(self._waiting) and not serving.broken()

    def _take(self) -> list[Request]:
        """Return the requests of the next batch.

        A request with inputs or explanations gets its own batch.
        """
        taken, rows = list[Request](), 0
        while self._waiting:
            first = self._waiting[0]
            alone = first.alone or first.explain or first.inputs is not None
            if taken and (alone or rows + len(first.rows) > QUERY_ROWS):
                break
            self._waiting.popleft()
            if first.model is not self.model:
                _settle(first, Unavailable(self.owner, "another model has replaced this one"))
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
        if not serving.streams():  # parties that run in this process have already answered
            self._take_answer(serving)

    def _take_answer(self, serving: ServingParty, at: str | None = None) -> None:
        if not serving.arrived(at) or self._asked is None:
            return
        batch, self._asked = self._asked, None
        self._checked = time.monotonic()
        inputs = batch.requests[0].inputs if batch.requests else None
        # the rows of a batch are distinct and sorted, so the inputs are sorted in the same way
        if inputs is not None:
            inputs = inputs[torch.from_numpy(np.argsort(batch.requests[0].rows))]
        try:
            answer = serving.answer(inputs)
        except RefusedRequest as refusal:
            self._refused(batch, refusal)
        except BaseException:
            # the batch is stored again, so that `_close` sends the error to its clients
            self._asked = batch
            raise
        else:
            if batch.refers and answer is not None:
                serving.refer_to(answer)
            elif answer is not None:
                self._answered(serving, batch, answer, inputs)
        self._begin_soon()

    def _refused(self, batch: _Batch, refusal: RefusedRequest) -> None:
        """After a refusal, query each request separately, so that one bad request fails alone."""
        requests = [self._waiting.popleft()] if batch.refers else batch.requests
        if len(requests) > 1:
            for request in requests:
                request.alone = True
            self._waiting.extendleft(reversed(requests))
            return
        busy, name = refusal.reason is Refused.BUSY, refusal.reason.name.lower()
        self.figures.add("refusals", party=refusal.party, reason=name)
        why = (
            "the party accepts no more rows now"
            if busy
            else "the party does not consent to this request"
        )
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
        # The cache stores no answer that lacks an absent party's cut, because the party may return.
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
            no_number = Unavailable(self.owner, "the output of its model is not finite")
            _settle(request, Result(rows, shares) if whole else no_number)

    def _cached(self, rows: list[int]) -> dict[int, str | None]:
        found = {row: self._cache[row] for row in rows if row in self._cache}
        for row in found:
            self._cache.move_to_end(row)
        if found:
            self.figures.add("cached_rows", len(found))
        return found


def _with_remark(row: str | None, remark: Mapping[str, Any]) -> str | None:
    """Return a row's answer as JSON, with the model's remark added."""
    return None if row is None else f"{row[:-1]},{json.dumps(remark)[1:]}"


def _marked(row: str | None, missing: Sequence[str]) -> str | None:
    """Return a row's answer as JSON, with the names of the parties whose cuts were missing."""
    return None if row is None else f'{row[:-1]},"missing":{json.dumps(list(missing))}}}'


def _settle(request: Request, result: Result | Unavailable) -> None:
    if not request.future.done():
        request.future.set_result(result)


_ABSENT: tuple[type[PeerError], ...] = (MissingPartyError,)
