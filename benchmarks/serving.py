"""`vfl serve` compared with one process that has all columns: latency, throughput, killed parties.

Both services answer the same requests with the same network over HTTP on the loopback interface,
with FastAPI and uvicorn, and one torch thread in each process. The split service has a process for
the label party and for each of two feature parties, with TLS streams between them, as in a
federation; a pipe replaces Flower's single message of a session. The monolith has all three models
in one FastAPI process, and runs one forward pass for each request.

Loads of the two services alternate in one run, so that ratios compare measurements that are close
in time. The floor is the least time of any service with this structure: a client, a process that
listens, and two processes that echo. The floor has as many sequential messages as the split
service, with the same TLS, but only blocking sockets.

With ``--kill-s``, one feature party after the other is killed and started again while clients send
requests. With ``--stop-s``, this party is stopped (SIGSTOP) instead of killed, and continued after
that many seconds. Every answer is compared with the known prediction for its row, and every failure
must be a 503 that names a party. The memory of the label party is measured at the beginning and at
the end.

With ``--drift``, two split services take turns, of which one does not count drift. With
``--middle``, the two services are a network of two parties, and the same network with a third party
between the bottom models and the head (U-shape).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from benchmarks import harness
from vfl import models
from vfl.config import Experiment, ServeSettings, read_party_file
from vfl.core.errors import VFLError
from vfl.core.frame import HEADER_BYTES
from vfl.core.processes import Process, Worker, end_with, looks
from vfl.core.seeds import use_one_thread
from vfl.datasets import Dealing, OwnTable, load_own
from vfl.serving.front import Asked, LeadSettings, settings_file
from vfl.session.schedule import ROW_BYTES
from vfl.session.store.identity import Identity
from vfl.transport.certificates import session_certificate
from vfl.transport.stream import client_context

_FLOOR_BYTES = 128  # number of bytes of an answer
PARTIES, ROWS, COLUMNS = ("bank", "shop"), 2000, 10
CLIENTS, SECONDS, ROUNDS = (1, 8, 64), 5.0, 3
FAULT_CLIENTS = 4
QUICK_SECONDS = 0.5
_START_S = 300.0
#: Environment variable with the id of the process that started this one, and with which it ends.
_STARTER = "VFL_BENCHMARK_STARTER"
RUN = "run"
CONTENT = {
    "name": "serving",
    "parties": {name: {"width": 16, "bottom": "mlp:hidden=64"} for name in PARTIES},
    "label": {"party": "lender", "top": "mlp:hidden=32"},
    "train": {"epochs": 1, "batch_size": 256},
    "federation": {"rejoin_window_s": 8.0, "step_timeout_s": 30.0, "join_timeout_s": 180.0},
}


MIDDLE = "compute"
#: The network of CONTENT with a party in the middle, which has the hidden layer; the label party
#: has the linear output layer.
MIDDLED = CONTENT | {
    "label": {"party": "lender", "top": "linear"},
    "middle": {"party": MIDDLE, "width": 32, "model": "mlp:hidden=none,last=relu"},
}

#: The same parties with boosted trees: a hundred trees of depth 4.
TREES = CONTENT | {
    "model": "trees:max_depth=4",
    "parties": {name: {} for name in PARTIES},
    "label": {"party": "lender"},
    "train": {"epochs": 100},
}


@dataclass(frozen=True, slots=True)
class ServingRow:
    """Results of one load on one server.

    Attributes:
        server: "split", "monolith" or "floor"; with ``--drift``, "counted" or "uncounted"; with
            ``--middle``, "plain" or "middle"; with ``--trees``, "network" or "trees".
        clients: number of simultaneous clients, each of which requests one row at a time.
        requests_per_second: number of answered requests per second over all rounds.
        p50_ms, p99_ms: percentiles of a request's latency, measured at the client.
        throughput_ratio, p99_ratio: ratio to the first server with as many clients; 1 for the first
            server itself.
        cpu_us: CPU time per request of the process that listens, in microseconds.
        party_cpu_us: CPU time per request of each other party, in microseconds; 0 if there is no
            other party.
        failed: number of requests with a status other than 200.
    """

    server: str
    clients: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    throughput_ratio: float
    p99_ratio: float
    cpu_us: float
    party_cpu_us: float
    failed: int


@dataclass(frozen=True, slots=True)
class FaultRow:
    """Results of clients while parties were killed or stopped.

    Attributes:
        seconds: duration of the load in seconds.
        kills: number of times that a party was killed or stopped.
        answered, unavailable: number of requests with a right answer, and with a 503 that names a
            feature party.
        wrong: number of answers of status 200 that differ from the known prediction of their row.
        other: number of all other results.
        longest_outage_s: longest time from the first failure of an outage to the next answer.
        rss_first_mb, rss_last_mb: resident memory of the label party after the warm-up and at the
            end, in MB.
    """

    seconds: float
    kills: int
    answered: int
    unavailable: int
    wrong: int
    other: int
    longest_outage_s: float
    rss_first_mb: float
    rss_last_mb: float


@dataclass(frozen=True)
class _Envelope:
    """A message like Flower's, for which Flower need not run."""

    content: Any
    dst_node_id: int
    message_type: str
    ttl: float


class Pipes:
    """Replacement of Flower at the label party: a message starts the process of its party.

    Args:
        folder: folder with the files of every party.
        parties: names of the parties that have a node.
    """

    def __init__(self, folder: Path, parties: Sequence[str]) -> None:
        self.folder, self._parties = folder, parties
        self.processes: dict[str, Process] = {}

    def get_nodes(self) -> list[Any]:
        """Return a node for each party; all nodes are always online."""
        named = enumerate(self._parties, start=1)
        return [SimpleNamespace(node_id=i, name=name) for i, name in named]

    def push_messages(self, messages: Sequence[Any]) -> list[str]:
        """Start each party's process with its message; its former process ends by itself."""
        (message,) = messages
        name = self._parties[message.dst_node_id - 1]
        party = Worker(name, _command("party", self.folder, name), _environment())
        party.send(str(message.content["session"]["message"]))
        self.processes[name] = party
        (self.folder / f"{name}.pid").write_text(str(party.pid))
        threading.Thread(target=party.wait, daemon=True).start()
        return [name]

    def pull_messages(self, identifiers: Sequence[str]) -> list[Any]:
        """Return no reply, because no reply arrives before the session ends."""
        return []

    def close(self) -> None:
        """Wait until every party has ended, and end those that have not."""
        for party in self.processes.values():
            party.stop(10)


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks.serving", *map(str, words)]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", _STARTER: str(os.getpid())}


def _start(*words: object) -> Process:
    output = subprocess.DEVNULL  # standard output carries the measurement's messages
    return Process(str(words[0]), _command(*words), _environment(), stdout=output)


def play_party(folder: Path, name: str) -> None:
    """Run one feature party; its message arrives on standard input."""
    from vfl.clients.session import take_part
    from vfl.session import SessionMessage

    use_one_thread()
    message = SessionMessage.parse(sys.stdin.readline())
    try:
        take_part(message, read_party_file(folder / name / "party.toml"))
    except VFLError as error:  # another party has ended, so the session begins again
        print(str(error).splitlines()[0], file=sys.stderr)


def play_label(folder: Path, *modes: str) -> None:
    """Run the label party in several modes; the last mode serves until the process is ended."""
    from vfl.server import federation, session
    from vfl.session import Terms

    use_one_thread()
    session._COLLECT_S = 0.0  # no replies arrive
    vars(federation)["Message"] = _Envelope
    experiment = Experiment.model_validate(json.loads((folder / "experiment.json").read_text()))
    party = read_party_file(folder / "lender" / "party.toml")
    pipes = Pipes(folder, PARTIES if experiment.middle is None else (*PARTIES, MIDDLE))
    settings_file_of = party.run_path(RUN)
    for mode in modes:
        if mode == "uncounted":
            for bins in folder.glob(f"*/store/runs/{RUN}/parties/*/bins.json"):
                bins.unlink()
            continue
        if mode == "serve":
            settings_file(
                settings_file_of,
                LeadSettings(port=0, max_requests_per_second=1e9, max_rows_per_day="off"),
            )
        terms = Terms.of(experiment, mode, RUN)  # type: ignore[arg-type]
        session.run_session(pipes, experiment, party, terms)  # type: ignore[arg-type]
        pipes.close()


def scores(outputs: torch.Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Convert outputs, axes (rows, outputs), to answers: the likeliest class, and probabilities."""
    shares = torch.softmax(outputs, dim=1)
    best = shares.argmax(dim=1).tolist()
    return [
        {"prediction": classes[index], "probabilities": row}
        for index, row in zip(best, shares.tolist(), strict=True)
    ]


def play_monolith(folder: Path) -> None:
    """Run all columns, all models and FastAPI in one process; a request is one forward pass."""
    use_one_thread()
    data = {
        name: load_own(name, OwnTable(folder / name / "data.csv", "id", ("*",)), None, Dealing(0))
        for name in PARTIES
    }
    bottoms = {name: models.make_bottom("mlp:hidden=64").build((COLUMNS,), 16) for name in PARTIES}
    top = models.make_top("mlp:hidden=32").build(32, 2)
    ids = data["bank"].ids
    assert ids is not None, "tables have ids"
    at = {str(each): row for row, each in enumerate(ids.tolist())}
    inputs = {name: each.inputs for name, each in data.items()}
    for module in (*bottoms.values(), top):
        module.eval()
    app = FastAPI()

    @app.post("/predict")
    async def predict(asked: Asked) -> JSONResponse:
        rows = torch.tensor([at[str(each)] for each in asked.ids])
        with torch.no_grad():
            cuts = [bottoms[name](inputs[name].index_select(0, rows)) for name in PARTIES]  # type: ignore[union-attr]
            outputs = top(torch.cat(cuts, dim=1))
        return JSONResponse({"predictions": scores(outputs, ("0", "1"))})

    @app.get("/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    config = uvicorn.Config(app, port=0, log_level="critical", access_log=False, ws="none")
    server = uvicorn.Server(config)

    def tell() -> None:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        (folder / "monolith.json").write_text(json.dumps({"address": f"http://127.0.0.1:{port}"}))

    threading.Thread(target=tell, daemon=True).start()
    server.run()


def play_floor(folder: Path) -> None:
    """Run only the messages of a request: a process that listens, and two that echo behind TLS."""
    certificate = session_certificate(["127.0.0.1"])
    (folder / "ca.pem").write_bytes(certificate.ca_pem)
    inside, outside = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    port = inside.getsockname()[1]
    echoes = [_start("echo", folder, port) for _ in PARTIES]
    context = certificate.context()
    streams = [context.wrap_socket(inside.accept()[0], server_side=True) for _ in echoes]
    address = f"http://127.0.0.1:{outside.getsockname()[1]}"
    for name, echo in zip(PARTIES, echoes, strict=True):
        (folder / f"{name}-echo.pid").write_text(str(echo.pid))
    (folder / "floor.json").write_text(json.dumps({"address": address}))
    for stream in streams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer = f"HTTP/1.1 200 OK\r\ncontent-length: {_FLOOR_BYTES}\r\n\r\n{'x' * _FLOOR_BYTES}"
    while True:
        client, _ = outside.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while client.recv(1 << 16):
            for stream in streams:
                stream.send(b"x" * (HEADER_BYTES + ROW_BYTES))
            for stream in streams:
                stream.recv(1 << 16)
            client.send(answer.encode())


def play_echo(folder: Path, port: str) -> None:
    """Run an echo of a feature party's messages, without a model."""
    context = client_context((folder / "ca.pem").read_bytes())
    with socket.create_connection(("127.0.0.1", int(port))) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = context.wrap_socket(plain, server_hostname="127.0.0.1")
        while stream.recv(1 << 16):
            stream.send(b"x" * (HEADER_BYTES + _FLOOR_BYTES))


def write_tables(folder: Path) -> list[str]:
    """Write the folder of every party; return the ids."""
    draw, ids = np.random.default_rng(0), [f"r{row:05}" for row in range(ROWS)]
    signal_of = np.zeros(ROWS)
    for name in PARTIES:
        cells = draw.normal(size=(ROWS, COLUMNS))
        signal_of += cells[:, 0]
        _party(folder / name, name, ids, {f"c{i}": cells[:, i] for i in range(COLUMNS)})
    _party(
        folder / "lender", "lender", ids, {"paid": (signal_of > 0).astype(int)}, 'label = "paid"\n'
    )
    return ids


def write_middle(folder: Path) -> None:
    """Write the folder of the middle party, and the settings that the other parties need for it."""
    names = (*PARTIES, MIDDLE)
    (folder / MIDDLE).mkdir()
    limits = '[consent]\nmodes = ["train", "predict", "serve"]\nmax_rows_per_second = 1e9\n'
    limits += "max_bytes = 1000000000000\n"
    (folder / MIDDLE / "party.toml").write_text(f'party = "{MIDDLE}"\nrole = "middle"\n{limits}')
    for name in PARTIES:
        with (folder / name / "party.toml").open("a") as file:
            file.write(f'middle = ["{MIDDLE}"]\n')
    for name in names:
        identity = Identity.fresh()
        identity.keep_at(folder / name / "identity.key")
        for other in set(names) - {name}:
            identity.public.keep_at(folder / other / "peers" / f"{name}.pub")


def _party(
    folder: Path, name: str, ids: list[str], columns: dict[str, Any], more: str = ""
) -> None:
    folder.mkdir(parents=True)
    pd.DataFrame({"id": ids, **columns}).to_csv(folder / "data.csv", index=False)
    text = f'party = "{name}"\n[data]\nsource = "data.csv"\nid = "id"\n{more}'
    limits = '[consent]\nmodes = ["train", "predict", "serve"]\nmodels = ["network", "trees:*"]\n'
    limits += "max_rows_per_second = 1e9\nmax_bytes = 1000000000000\n"
    (folder / "party.toml").write_text(text + limits)


@dataclass
class Load:
    """Clients' results.

    Attributes:
        processes: processes whose CPU time counts: the process that listens first, then the feature
            parties.
        seconds: latency of each answered request.
        statuses: number of answers with each status.
        cpu_s: CPU time of each of the processes.
        over: set it to True to end a load early.
        checked: function that is called with id, status and body of every answer; status 0 means a
            lost connection.
    """

    address: str
    token: str
    ids: list[str]
    processes: list[int] = field(default_factory=list)
    checked: Callable[[str, int, bytes], None] = lambda each, status, body: None
    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    cpu_s: list[float] = field(default_factory=list)
    lasted_s: float = 0.0
    over: bool = False

    def run(self, clients: int, seconds: float) -> None:
        """Send requests from several clients at once; each client requests one row at a time."""
        before = [harness.cpu_s(pid) for pid in self.processes]
        asyncio.run(self._all(clients, seconds))
        took = [
            harness.cpu_s(pid) - since for pid, since in zip(self.processes, before, strict=True)
        ]
        self.cpu_s = [sum(pair) for pair in zip(self.cpu_s or [0.0] * len(took), took, strict=True)]

    def forget(self) -> None:
        """Discard all results so far, after a warm-up."""
        self.seconds.clear()
        self.statuses.clear()
        self.cpu_s, self.lasted_s = [], 0.0

    async def _all(self, clients: int, seconds: float) -> None:
        began = time.perf_counter()
        until = began + seconds
        await asyncio.gather(*(self._client(number, until) for number in range(clients)))
        self.lasted_s += time.perf_counter() - began

    async def _client(self, number: int, until: float) -> None:
        host, port = self.address.removeprefix("http://").split(":")
        at = number * 31
        while self._goes_on(until):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                while self._goes_on(until):
                    each = self.ids[at % len(self.ids)]
                    at += 1
                    status, answer = await self._ask(host, each, reader, writer)
                    self.checked(each, status, answer)
                    if status != 200:
                        # Clients must not overload a service that is unavailable.
                        await asyncio.sleep(0.05)
            except (OSError, asyncio.IncompleteReadError):
                self.statuses[0] += 1
                self.checked(each, 0, b"")
                await asyncio.sleep(0.05)
            finally:
                writer.close()

    def _goes_on(self, until: float) -> bool:
        return not self.over and time.perf_counter() < until

    async def _ask(
        self, host: str, each: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[int, bytes]:
        """Send a request; return the status and the body of its answer."""
        body = json.dumps({"ids": [each]}).encode()
        head = (
            f"POST /predict HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {self.token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        asked = time.perf_counter()
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        size = next(int(one.split(b":")[1]) for one in lines if one.startswith(b"content-len"))
        answer = await reader.readexactly(size)
        status = int(lines[0].split()[1])
        self.statuses[status] += 1
        if status == 200:
            self.seconds.append(time.perf_counter() - asked)
        return status, answer


class Servers:
    """Servers on the same tables; the context manager ends every process.

    Args:
        modes: modes that the label party runs before it serves.
        beside: other roles to run, each in a separate process.
        content: settings of the experiment; if they name a middle party, it runs too.
    """

    def __init__(
        self,
        *modes: str,
        beside: Sequence[str] = (),
        content: Mapping[str, Any] = CONTENT,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vfl-serving-")
        self.folder = Path(self._folder.name)
        self.ids = write_tables(self.folder)
        self._others = (*PARTIES, MIDDLE) if "middle" in content else PARTIES
        if "middle" in content:
            write_middle(self.folder)
        (self.folder / "experiment.json").write_text(json.dumps(content))
        self.run = self.folder / "lender" / "store" / "runs" / RUN
        label = _start("label", self.folder, "train", *modes, "serve")
        self._processes = [label, *(_start(role, self.folder) for role in beside)]
        self._beside = beside

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        (self.run / "serving.stop").touch()
        self._processes[0].ends_within(60)
        for process in self._processes:
            process.stop()
        self._folder.cleanup()

    def load(self, server: str) -> Load:
        """Return a load on one of the servers, once the server is ready."""
        if server in self._beside:
            address = _address(self.folder / f"{server}.json")
            pids = [self._processes[1 + list(self._beside).index(server)].pid]
            echoes = self.folder.glob("*-echo.pid") if server == "floor" else ()
            return Load(address, "", self.ids, [*pids, *(int(each.read_text()) for each in echoes)])
        address = _address(self.run / "serving.json")
        wait_ready(address)
        pids = [int((self.folder / f"{name}.pid").read_text()) for name in self._others]
        token = (self.run / "serve.token").read_text().strip()
        return Load(address, token, self.ids, [self.label_pid, *pids])

    @property
    def label_pid(self) -> int:
        """Return the process id of the label party."""
        return self._processes[0].pid


def _wait(condition: Callable[[], bool]) -> None:
    if not any(condition() for _ in looks(_START_S, 0.05)):
        raise VFLError(f"a server did not start within {_START_S:g} s")


def _address(path: Path) -> str:
    _wait(path.exists)
    time.sleep(0.1)
    return str(json.loads(path.read_text())["address"])


def wait_ready(address: str) -> None:
    """Wait until a service answers."""
    _wait(lambda: _ready(address))


def _ready(address: str) -> bool:
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(address + "/ready", timeout=5):
            return True
    except (URLError, OSError):
        return False


def bench_serving(
    clients: Sequence[int] | None = None,
    seconds: float | None = None,
    rounds: int = ROUNDS,
    *,
    drift: bool = False,
    middle: bool = False,
    trees: bool = False,
    kill_s: float | None = None,
    stop_s: float | None = None,
    quick: bool = False,
) -> Sequence[ServingRow | FaultRow]:
    """Measure `vfl serve` and one process with all columns; with one client, also the floor.

    Args:
        clients: numbers of simultaneous clients; if parties are killed, the largest number.
        seconds: duration of a turn in seconds, or of the whole load if parties are killed.
        rounds: number of turns of each server.
        drift: whether to measure the cost of counting drift, instead of comparing with one process.
        middle: whether to measure the cost of a middle party, instead of comparing with one
            process.
        trees: whether to compare a hundred trees with a network, instead of comparing with one
            process.
        kill_s: seconds between two kills of a feature party; with it, the benchmark measures faults
            instead.
        stop_s: seconds for which the party is stopped instead of killed.
        quick: whether to only check that the benchmark runs.
    """
    if kill_s is not None:
        return bench_faults(seconds or 600.0, kill_s, stop_s, max(clients or [FAULT_CLIENTS]))
    seconds = seconds or (QUICK_SECONDS if quick else SECONDS)
    rows: list[ServingRow] = []
    with ExitStack() as stack:
        servers = _servers(drift, middle, trees)
        for each in set(servers.values()):
            stack.enter_context(each)
        for count in clients or CLIENTS:
            loads = {
                name: servers[name].load(name if name in ("monolith", "floor") else "split")
                for name in servers
                if name != "floor" or count == 1
            }
            rows += _in_turns(loads, count, seconds, 1 if quick else rounds)
            harness.say(f"{count} clients: {len(next(iter(loads.values())).seconds)} requests")
    return rows


def _servers(drift: bool, middle: bool, trees: bool) -> dict[str, Servers]:
    """Return the servers by their names in the result rows; the first one is the reference."""
    if drift:
        return {"uncounted": Servers("uncounted"), "counted": Servers()}
    if middle:
        return {"plain": Servers(), "middle": Servers(content=MIDDLED)}
    if trees:
        return {"network": Servers(), "trees": Servers(content=TREES)}
    return dict.fromkeys(("monolith", "split", "floor"), Servers(beside=("monolith", "floor")))


def _in_turns(
    loads: dict[str, Load], clients: int, seconds: float, rounds: int
) -> list[ServingRow]:
    for load in loads.values():
        load.run(clients, min(1.0, seconds))  # warm-up
        load.forget()
    for _ in range(rounds):
        for load in loads.values():
            load.run(clients, seconds)
    base = next(iter(loads.values()))
    return [_row(server, clients, load, base) for server, load in loads.items()]


def _row(server: str, clients: int, load: Load, base: Load) -> ServingRow:
    def rate(one: Load) -> float:
        return len(one.seconds) / one.lasted_s

    p50, p99 = np.percentile(load.seconds, [50, 99])
    return ServingRow(
        server=server,
        clients=clients,
        requests_per_second=rate(load),
        p50_ms=1000 * float(p50),
        p99_ms=1000 * float(p99),
        throughput_ratio=rate(load) / rate(base),
        p99_ratio=float(p99 / np.percentile(base.seconds, 99)),
        cpu_us=1e6 * load.cpu_s[0] / len(load.seconds),
        party_cpu_us=1e6 * sum(load.cpu_s[1:]) / max(1, len(load.cpu_s[1:])) / len(load.seconds),
        failed=sum(load.statuses.values()) - load.statuses[200],
    )


def bench_faults(
    seconds: float,
    every_s: float,
    stop_s: float | None = None,
    clients: int = FAULT_CLIENTS,
) -> list[FaultRow]:
    """Send requests while feature parties are killed or stopped one after another.

    Args:
        seconds: duration of the load in seconds.
        every_s: seconds between two kills.
        stop_s: stop a party for this many seconds instead of killing it.
        clients: number of simultaneous clients.
    """
    counts: Counter[str] = Counter()
    outage = [0.0, 0.0]  # start of the present outage, and the longest outage so far
    with Servers("predict") as servers:
        load = servers.load("split")
        table = pd.read_csv(servers.run / "predictions.csv", dtype=str).set_index("id")
        told = table.filter(like="probability_")
        decimals = ServeSettings.model_fields["probability_decimals"].default
        expected = {
            str(each): [np.float32(round(float(np.float32(cell)), decimals)) for cell in row]
            for each, row in zip(told.index, told.to_numpy(), strict=True)
        }

        def checked(each: str, status: int, body: bytes) -> None:
            told, now = json.loads(body), time.monotonic()
            if status == 200:
                got = [np.float32(p) for p in told["predictions"][0]["probabilities"]]
                counts["answered" if got == expected[each] else "wrong"] += 1
                if outage[0]:
                    outage[:] = [0.0, max(outage[1], now - outage[0])]
                return
            named = status == 503 and set(str(told.get("party")).split(", ")) <= set(PARTIES)
            counts["unavailable" if named else "other"] += 1
            outage[0] = outage[0] or now

        load.checked = checked
        load.run(clients, min(5.0, seconds))
        first = harness.resident_bytes("VmRSS", servers.label_pid) / 2**20
        stop, kills = threading.Event(), 0

        def kill() -> None:
            nonlocal kills
            while not stop.wait(every_s):
                name = PARTIES[kills % len(PARTIES)]
                pid = int((servers.folder / f"{name}.pid").read_text())
                try:
                    os.kill(pid, signal.SIGKILL if stop_s is None else signal.SIGSTOP)
                except ProcessLookupError:
                    continue  # the party is starting again
                kills += 1
                harness.say(f"{'killed' if stop_s is None else 'stopped'} {name}")
                if stop_s is not None:
                    time.sleep(stop_s)
                    os.kill(pid, signal.SIGCONT)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            load.run(clients, seconds)
        finally:
            stop.set()
            killer.join()
        wait_ready(load.address)
        load.run(clients, min(5.0, seconds))
        last = harness.resident_bytes("VmRSS", servers.label_pid) / 2**20
    return [
        FaultRow(
            seconds=seconds,
            kills=kills,
            answered=counts["answered"],
            unavailable=counts["unavailable"],
            wrong=counts["wrong"],
            other=counts["other"],
            longest_outage_s=outage[1],
            rss_first_mb=first,
            rss_last_mb=last,
        )
    ]


SERVED = harness.table(
    ("server", "<10", "server"),
    ("clients", ">8", "clients"),
    ("req/s", ">10.1f", "requests_per_second"),
    ("p50 ms", ">9.2f", "p50_ms"),
    ("p99 ms", ">9.2f", "p99_ms"),
    ("x req/s", ">9.2f", "throughput_ratio"),
    ("x p99", ">8.2f", "p99_ratio"),
    ("cpu us", ">8.0f", "cpu_us"),
    ("party us", ">10.0f", "party_cpu_us"),
    ("failed", ">8", "failed"),
)
FAULTS = harness.table(
    ("faults", ">6", "kills"),
    ("in s", ">8g", "seconds"),
    ("as predicted", ">14", "answered"),
    ("wrong", ">7", "wrong"),
    ("503 by name", ">13", "unavailable"),
    ("others", ">8", "other"),
    ("longest outage s", ">18.1f", "longest_outage_s"),
    ("MB at first", ">13.0f", "rss_first_mb"),
    ("at last", ">9.0f", "rss_last_mb"),
)


def shown(rows: Sequence[ServingRow | FaultRow]) -> str:
    """Format the rows of either measurement for people."""
    return (FAULTS if isinstance(rows[0], FaultRow) else SERVED)(rows)


def main() -> None:
    """Run a measurement, or one process of a measurement."""
    roles = {
        "party": play_party,
        "label": play_label,
        "monolith": play_monolith,
        "floor": play_floor,
        "echo": play_echo,
    }
    if len(sys.argv) > 2 and sys.argv[1] in roles:
        end_with(int(os.environ[_STARTER]))
        roles[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])  # type: ignore[operator]
        return
    harness.run(bench_serving, shown)


if __name__ == "__main__":
    main()
