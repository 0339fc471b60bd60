"""OpenTelemetry spans of a party's sessions, made from the party's own session log.

`vfl up` sends the spans if the party's own file sets `monitor.spans`. A span contains facts of a
line of the session log: counts, names, and how the session ended. A span contains no row, id, table
value or secret. All parties of a session compute the same trace id from the agreed terms, so a
collector that receives spans of several parties shows one session as one trace. Sessions with equal
terms, such as a training and its resumption, share one trace.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from vfl.config import PartyFile
from vfl.core.errors import MissingPackageError
from vfl.core.version import VERSION
from vfl.session.store.party_folder import own_ledger
from vfl.session.store.session_log import Line, lines_after

_POLL_S = 2.0
_TIMEOUT_S = 5.0
_DOMAIN = b"vfl trace\n"


class SessionSpans:
    """Turns lines of the session log into spans, one for each ended or refused session.

    Args:
        log: file of the session log; no spans are sent for lines that were in the log before this
            object was made.
        exporter: an exporter of `opentelemetry.sdk.trace`, which receives each span.

    Raises:
        MissingPackageError: OpenTelemetry's SDK is not installed.
    """

    def __init__(self, log: Path, exporter: Any) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import SimpleSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        except ImportError:
            raise _not_installed() from None

        class Ids(RandomIdGenerator):
            trace = 0

            def generate_trace_id(self) -> int:
                return self.trace

        self._ids = Ids()
        about = Resource({"service.name": "vfl", "service.version": VERSION})
        self._provider = TracerProvider(
            resource=about, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("vfl", VERSION)
        self._log, self._begun = log, dict[tuple[str, str, str], str]()
        self._place = lines_after(log, 0)[1]

    def send(self) -> int:
        """Send a span for each session that has ended or was refused since the last call.

        Returns:
            The number of spans that were sent.
        """
        lines, self._place = lines_after(self._log, self._place)
        sent = 0
        for line in lines:
            session = line.run, line.mode, line.terms
            if line.event == "begun":
                self._begun[session] = line.at
            elif line.event in ("ended", "refused"):
                begun = self._begun.pop(session, line.at) if line.event == "ended" else line.at
                self._span(line, begun)
                sent += 1
        return sent

    def close(self) -> None:
        """Send the remaining spans, and stop the exporter."""
        self.send()
        self._provider.shutdown()

    def _span(self, line: Line, begun: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        terms = hashlib.sha256(_DOMAIN + line.terms.encode()).digest()
        self._ids.trace = int.from_bytes(terms[:16], "big")
        start, end = (int(datetime.fromisoformat(at).timestamp() * 1e9) for at in (begun, line.at))
        span = self._tracer.start_span(
            f"vfl {line.mode}", kind=SpanKind.INTERNAL, attributes=_facts(line), start_time=start
        )
        well = line.outcome == "well"
        code = StatusCode.OK if well else StatusCode.ERROR
        span.set_status(Status(code, None if well else line.outcome))
        span.end(end)


def _facts(line: Line) -> dict[str, Any]:
    """Return the attributes of the span that is made from a line of the session log."""
    facts = {
        "party": line.party,
        "run": line.run,
        "asked_by": line.asked_by,
        "parties": line.parties,
        "purpose": line.purpose,
        "event": line.event,
        "rows": line.rows,
        "passes": line.passes,
        "bytes_up": line.bytes_up,
        "bytes_down": line.bytes_down,
    }
    if line.epsilon is not None:
        facts["epsilon"] = line.epsilon
    return {f"vfl.{name}": value for name, value in facts.items()}


@contextmanager
def traced(party: PartyFile, collector: str) -> Iterator[None]:
    """Send spans of a party's sessions to a collector until the `with` block ends.

    Args:
        party: the party's own file.
        collector: URL of the collector.

    Raises:
        MissingPackageError: the extra ``otel`` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise _not_installed() from None
    exporter = OTLPSpanExporter(endpoint=collector, timeout=_TIMEOUT_S)
    spans, ends = SessionSpans(own_ledger(party).log.path, exporter), threading.Event()

    def watch() -> None:
        while not ends.wait(_POLL_S):
            spans.send()

    watcher = threading.Thread(target=watch, name="vfl-spans", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ends.set()
        watcher.join()
        spans.close()


def _not_installed() -> MissingPackageError:
    return MissingPackageError(
        "spans need OpenTelemetry, which is not installed",
        where="monitor.spans",
        fix="pip install 'vfl[otel]', or remove monitor.spans from party.toml",
    )
