"""A party's metrics for Prometheus, read from its store, its certificates and its disk.

`vfl up` serves the metrics only if the party's own file has `[monitor]`, and only at the address in
`[monitor]`. The metrics are counts, sums, and names of parties and runs; they contain no row, id,
table value or secret. A request for the metrics reads files on disk and contacts no other party.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vfl.config import MonitorSettings, PartyFile
from vfl.config.run_folder import PROGRESS
from vfl.core.address import Address, parse_ip
from vfl.core.errors import UserError, VFLError
from vfl.core.storage import existing_folder, read_json, worker_of
from vfl.core.version import VERSION
from vfl.session.store.party_folder import own_ledger
from vfl.session.store.session_ledger import Entry, Spent
from vfl.session.terms import Mode
from vfl.transport.certificates import time_left
from vfl.transport.front import Front, FrontLimits, welcome
from vfl.transport.http import HttpServer, Receive, Scope, Send, http_config
from vfl.transport.stream import listen, require_loopback

#: Seconds for which collected metrics are reused; later requests collect them again.
_FRESH_S = 2.0
_METRICS = "/metrics"
_LIMITS = FrontLimits(per_second=20.0, burst=20.0)


@dataclass(frozen=True, slots=True)
class Epsilon:
    """Epsilon spent on one row's data, summed over all runs in a party's store.

    Attributes:
        spent: epsilon that all runs have spent together, by basic composition (the sum).
        most: value of `consent.max_epsilon`; None without a limit.
    """

    spent: float
    most: float | None

    @classmethod
    def of(cls, party: PartyFile) -> Epsilon:
        """Read the spent epsilon from the ledger of the party's store.

        Raises:
            RunFolderError: the ledger is damaged.
        """
        return cls(own_ledger(party).spent_epsilon(), party.consent.max_epsilon)

    @property
    def left(self) -> float | None:
        """Epsilon that later sessions may spend; None without a limit."""
        return None if self.most is None else max(0.0, self.most - self.spent)


class PartyMetrics:
    """Collects one party's metrics; see `prometheus_client.registry.Collector`.

    Args:
        party: the party's own configuration file.
        certificates: certificates whose expiry dates are reported, by name.
        is_up: function that returns whether the party's SuperLink or SuperNode runs.
    """

    def __init__(
        self, party: PartyFile, certificates: Mapping[str, Path], is_up: Callable[[], bool]
    ) -> None:
        self._party, self._certificates, self._is_up = party, certificates, is_up

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their present values."""
        party = self._party
        about = GaugeMetricFamily(
            "vfl_party_info",
            "name, role and version of this party",
            labels=["party", "role", "version"],
        )
        about.add_metric([party.party, party.role, VERSION], 1)
        yield about
        yield GaugeMetricFamily(
            "vfl_node_up",
            "whether this party's Flower service (SuperLink or SuperNode) runs",
            self._is_up(),
        )
        yield from self._of_files()
        readable = True
        try:
            ledger = own_ledger(party)
            yield from _of_sessions(ledger.entries())
            yield from _of_epsilon(Epsilon(ledger.spent_epsilon(), party.consent.max_epsilon))
            yield from self._of_newest(ledger.entries())
        except VFLError:  # the ledger is damaged; `vfl sessions` reports where
            readable = False
        yield GaugeMetricFamily("vfl_ledger_readable", "whether vfl can read the store", readable)

    def _of_files(self) -> Iterator[Metric]:
        days = GaugeMetricFamily(
            "vfl_certificate_days_left",
            "days until a certificate expires; negative after the expiry",
            labels=["certificate"],
        )
        for name, path in self._certificates.items():
            try:
                days.add_metric([name], time_left(path) / timedelta(days=1))
            except VFLError:  # the certificate is missing; `vfl doctor` reports the missing file
                continue
        yield days
        store = self._party.store_path
        room = shutil.disk_usage(existing_folder(store))
        yield GaugeMetricFamily(
            "vfl_disk_free_bytes", "free bytes on the disk of the store", room.free
        )
        yield GaugeMetricFamily("vfl_disk_bytes", "size of that disk in bytes", room.total)

    def _of_newest(self, entries: list[Entry]) -> Iterator[Metric]:
        """Yield metrics of the most recent run: its session's state, exchanges and progress."""
        if not entries:
            return
        entry = entries[-1]
        run = self._party.run_path(entry.run)
        own = run / "parties" / self._party.party
        active = any(worker_of(folder) is not None for folder in (run, own))
        yield GaugeMetricFamily("vfl_session_active", "whether a session is running", active)
        trips = GaugeMetricFamily(
            "vfl_session_round_trips",
            "exchanges with each peer in the last training, as far as the ledger records them",
            labels=["run", "peer"],
        )
        for peer, count in entry.received.items():
            trips.add_metric([entry.run, peer], count)
        yield trips
        try:
            told = read_json(run / PROGRESS)
            progress = {name: float(told[name]) for name in ("done", "total", "per_second")}
        except (VFLError, OSError, KeyError, TypeError, ValueError):  # no file
            return
        for name, about in _PROGRESS.items():
            metric = GaugeMetricFamily(f"vfl_session_{name}", about, labels=["run"])
            metric.add_metric([entry.run], progress[name.removeprefix("exchanges_")])
            yield metric


_PROGRESS = {
    "exchanges_done": "completed exchanges of the session, at the label party",
    "exchanges_total": "planned exchanges of the session, if early stopping does not end it sooner",
    "exchanges_per_second": "present rate of exchanges",
}


def _of_sessions(entries: list[Entry]) -> Iterator[Metric]:
    """Yield sums over all runs, for each mode of a session (train, evaluate, predict, serve)."""
    runs = GaugeMetricFamily("vfl_runs", "number of run names, by state", labels=["state"])
    for state, count in sorted(Counter(entry.state for entry in entries).items()):
        runs.add_metric([state], count)
    yield runs
    sums = dict[Mode, Spent]()
    for entry in entries:
        for mode, spent in entry.spent.items():
            sums[mode] = sums.get(mode, Spent()).plus(spent)
    sessions = CounterMetricFamily("vfl_sessions", "number of started sessions", labels=["mode"])
    rows = CounterMetricFamily(
        "vfl_session_rows",
        "rows whose cuts were sent; a row counts each time that it is sent",
        labels=["mode"],
    )
    sent = CounterMetricFamily(
        "vfl_session_bytes", "bytes of frames, headers included", labels=["mode", "direction"]
    )
    for mode, whole in sums.items():
        sessions.add_metric([mode], whole.sessions)
        rows.add_metric([mode], whole.rows)
        sent.add_metric([mode, "up"], whole.bytes_up)
        sent.add_metric([mode, "down"], whole.bytes_down)
    yield from (sessions, rows, sent)


def _of_epsilon(epsilon: Epsilon) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "vfl_epsilon_spent", "epsilon spent on one row's data in all runs together", epsilon.spent
    )
    if epsilon.left is not None:
        yield GaugeMetricFamily(
            "vfl_epsilon_left",
            "epsilon that later sessions may spend until consent.max_epsilon is reached",
            epsilon.left,
        )


class Monitor:
    """Serves a party's metrics over HTTP to Prometheus and other authorised readers.

    Args:
        settings: settings of [monitor]: the address of the server, and which readers it admits.
        metrics: object that collects the metrics.
        certificate, key: PEM files for TLS; None without TLS.

    Attributes:
        address: URL of the metrics, as text for users.

    Raises:
        UserError: this process cannot listen at the address, other machines can reach the address
            without TLS, or only one of certificate and key is given.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        metrics: PartyMetrics,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        if (certificate is None) is not (key is None):
            raise UserError("certificate and key must be given together", where="[monitor]")
        if certificate is None:
            require_loopback(settings.host)
        self._allowed = [ip_network(each) for each in settings.allow]
        self._metrics, self._text, self._read = metrics, b"", -_FRESH_S
        self._front = Front(_LIMITS)
        files = [None if path is None else str(path) for path in (certificate, key)]
        listening = listen(settings.host, settings.port)
        self._server = HttpServer(http_config(self, *files), self._front, signals=False)
        self._server.start(listening, "vfl-monitor")
        here = Address(settings.host, int(listening.getsockname()[1]))
        self.address = f"{'http' if certificate is None else 'https'}://{here}{_METRICS}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request; this method is the ASGI entry point."""
        if scope["type"] != "http":
            return
        source = scope["client"][0] if scope.get("client") else ""
        if not self._may_read(source):
            self._front.failed(source)
            status, body = 403, b""
        elif not self._front.allow(source):
            status, body = 429, b""
        elif (scope["method"], scope["path"]) != ("GET", _METRICS):
            status, body = 404, b""
        else:
            welcome(scope)
            status, body = 200, self._now()
        kind = CONTENT_TYPE_PLAIN_0_0_4.encode()
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def close(self) -> None:
        """Stop listening."""
        self._server.stop()

    def _may_read(self, source: str) -> bool:
        address = parse_ip(source)
        return address is not None and any(address in each for each in self._allowed)

    def _now(self) -> bytes:
        if time.monotonic() - self._read > _FRESH_S:
            self._text = generate_latest(self._metrics)
            self._read = time.monotonic()
        return self._text


@contextmanager
def monitored(
    party: PartyFile,
    certificates: Mapping[str, Path],
    is_up: Callable[[], bool],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Serve the metrics until the `with` block ends, at the address in the party's own file.

    Args:
        party: the party's own file, which has `[monitor]`.
        certificates: see `PartyMetrics`.
        is_up: see `PartyMetrics`.
        say: function that is called with one line of text: the address of the metrics.

    Raises:
        UserError: see `Monitor`.
    """
    settings = party.monitor
    assert settings is not None, "its file has one"
    own = (settings.certificate, settings.key)
    files = [None if each is None else party.beside(each) for each in own]
    monitor = Monitor(settings, PartyMetrics(party, certificates, is_up), *files)
    say(f"metrics at {monitor.address}")
    try:
        yield
    finally:
        monitor.close()
