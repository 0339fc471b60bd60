"""Flower's programs as vfl starts them: behind guards, and with code from accepted bundles only.

Flower starts its helper programs by their names, without a path. vfl therefore puts a folder of
small scripts with the same names first in the PATH of a service. Each script calls a function of
this module, which changes one behaviour of Flower and then runs the Flower program of that name:

- `superlink`, `supernode`: a guard of `vfl.federation.guard` listens in place of Flower's server
- `superexec`: requests carry the local secret, and sessions are forks of a standing worker
- `serverapp`, `clientapp`, `simulation`: requests carry the secret, and only accepted bundles are
  unpacked
- `refuse`: refuses every other program by which Flower runs code

A service and the programs that it starts communicate through the service's local API; see
`LocalApi`.

`vfl.federation.upstream` lists all names inside Flower that vfl uses.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from vfl.config import read_party_file
from vfl.core.address import parse_address
from vfl.core.errors import ConfigError, ConsentError, LostPeerError, UserError, VFLError
from vfl.core.processes import DEVNULL, Process, end_with, looks
from vfl.core.storage import (
    close_to_others,
    private_folder,
    read_json,
    write_bytes,
    write_text,
)
from vfl.federation import upstream
from vfl.federation.bundle import check_bundle
from vfl.federation.guard import (
    CONTROL_ROUTES,
    RUNTIME_ROUTES,
    SECRET_HEADER,
    Bell,
    local_guard,
    network_guard,
)
from vfl.federation.upstream import Internal
from vfl.federation.workers import (
    SHARED_VARIABLE,
    StandingWorker,
    WorkerClient,
    answers,
    run_among_parties,
)
from vfl.transport import StreamRouter, session_certificate
from vfl.transport.proxies import local_is_direct
from vfl.transport.router import ROUTER_VARIABLE, OtherConnections
from vfl.transport.stream import listen

#: Environment variables that a service passes to all its child processes.
PARTY_FILE_VARIABLE = "VFL_PARTY_FILE"
LOCAL_API_VARIABLE = "VFL_LOCAL_API"
#: host:port at which SuperNodes reach the SuperLink; empty for a simulation, which has no such
#: port.
NETWORK_VARIABLE = "VFL_NETWORK_ADDRESS"
#: host:port at which the label party accepts the TCP streams of all sessions; empty for a
#: simulation.
STREAM_VARIABLE = "VFL_STREAM_ADDRESS"
#: Name of the Flower program that the standing worker of a service runs (a process that imports vfl
#: in advance). If the variable is not set, the service has no standing worker of its own; a shared
#: worker may run the programs of every party.
WORKER_VARIABLE = "VFL_STANDING_WORKER"
#: Process id of the command that started a service; the service and its sessions end when this
#: command ends.
STARTER_VARIABLE = "VFL_SERVICE_STARTER"
#: Command line that starts a standing worker.
WORKER_COMMAND = (sys.executable, "-P", "-m", "vfl", "party-worker")
#: Name of the file that contains the digests of keys that a SuperLink no longer accepts.
RETIRED = "retired.json"
#: Line that a service prints when all its ports are open.
READY = "vfl: all ports are open"

#: Largest number of sessions that a SuperNode runs at the same time; messages that would start more
#: sessions wait at the SuperLink.
SESSIONS_AT_ONCE = 16
#: Seconds between two requests of a program for work, and between two checks of a SuperNode for a
#: reply.
POLL_S = 0.1
QUIET = {
    **upstream.SILENT,
    # Ray, the engine of a Flower simulation, sends no usage reports and listens only on the
    # loopback.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Each process uses one thread: several parties share a small machine, and weights are equal bit
    # for bit only if sums are added in the same order.
    "OMP_NUM_THREADS": "1",
    # The guard delays its response to a request for work until there is work, so a program may send
    # its next request at once.
    upstream.POLL: str(POLL_S),
}
_AGAIN_S = 1.0
_LISTENS_WITHIN_S = 120.0
#: Longest time in seconds that a ServerApp waits at its end until the last lines of its log are
#: sent to the SuperLink.
_LAST_LINES_S = 0.5
HOST = "127.0.0.1"
_SECRET_BYTES = 32
#: Lifetime in days of the certificate of a local API; a service restarts long before the
#: certificate expires.
_DAYS = 3650.0
_PROGRAMS = {
    "flower-superexec": "superexec",
    "flower-superlink": "superlink",
    "flower-supernode": "supernode",
    "flwr-clientapp": "clientapp",
    "flwr-serverapp": "serverapp",
    "flwr-simulation": "simulation",
    "flwr-agentapp": "refuse",
    "flwr-connector": "refuse",
    "flwr-model": "refuse",
}
#: Names of the programs that run a bundle's code: one program at a label party, one at a feature
#: party; `refuse` replaces all other programs of this kind.
_OF_SUPERLINK = ("flwr-serverapp", "flwr-simulation")
_OF_SUPERNODE = ("flwr-clientapp",)
#: Text of a script that both a shell and Python can run, because a `#!` line cannot contain a long
#: path or a path with spaces.
_SCRIPT = """\
#!/bin/sh
'''exec' "{python}" -P "$0" "$@"
'''
from vfl.federation.programs import {function}

{function}()
"""


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment of every Flower process.

    Args:
        home: folder for Flower's own files.
    """
    # Flower starts its helper programs by name, so the folder with this installation's scripts
    # comes first in PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    unguarded = upstream.UNGUARDED
    inherited = {name: value for name, value in os.environ.items() if name not in unguarded}
    return {**inherited, **local_is_direct(), **QUIET, upstream.HOME: str(home), "PATH": path}


def superlink_environment(
    state: Path, party_file: Path, network_address: str, stream_address: str
) -> dict[str, str]:
    """Return the environment of a SuperLink.

    Args:
        state: folder in which Flower keeps its files at the label party.
        party_file: the label party's own file, which lists the bundles that it accepts.
        network_address: host:port at which SuperNodes connect; empty for a simulation.
        stream_address: host:port for the TCP streams of sessions; empty for a simulation.
    """
    own = {PARTY_FILE_VARIABLE: str(party_file.resolve()), NETWORK_VARIABLE: network_address}
    own |= {STREAM_VARIABLE: stream_address, ROUTER_VARIABLE: str((state / "streams").resolve())}
    own[WORKER_VARIABLE] = _worker_program("flwr-serverapp") if network_address else ""
    _write_programs(state, _OF_SUPERLINK)
    return _service_environment(state) | own


def supernode_environment(state: Path, party_file: Path) -> dict[str, str]:
    """Return the environment of a SuperNode; see `superlink_environment`."""
    _write_programs(state, _OF_SUPERNODE)
    own = {PARTY_FILE_VARIABLE: str(party_file.resolve())}
    own[WORKER_VARIABLE] = _worker_program("flwr-clientapp")
    return _service_environment(state) | own


def _worker_program(program: str) -> str:
    return program if sys.platform == "linux" else ""


def _service_environment(state: Path) -> dict[str, str]:
    """Return a service's environment: vfl's scripts come first in PATH, and it has a local API."""
    environment = flower_environment(state)
    return environment | {
        "PATH": f"{(state / 'bin').resolve()}{os.pathsep}{environment['PATH']}",
        LOCAL_API_VARIABLE: str(local_api(state).folder.resolve()),
        STARTER_VARIABLE: str(os.getpid()),
    }


def _write_programs(state: Path, runs_code: Sequence[str]) -> None:
    bundled = {*_OF_SUPERLINK, *_OF_SUPERNODE}
    for program, function in _PROGRAMS.items():
        if program in bundled and program not in runs_code:
            function = "refuse"
        script = _SCRIPT.format(python=sys.executable, function=function)
        write_text(state / "bin" / program, script, mode=0o700)


# --- the local API ------------------------------------------------------------------------------


class LocalApi:
    """Address and credentials of a service's local API.

    The service is a SuperLink or a SuperNode, and its helper programs use the local API. Each start
    of the service makes a new secret and a new certificate, so that a program never sends the
    secret to another process that listens on the same port. The folder `folder` contains all files
    of the local API, and only the owner can read this folder:

        address     host and port on the loopback, written when the service begins to listen
        secret      secret that each request must contain
        superexec   key that signs the requests of Flower's SuperExec for work
        ca.pem      certificate of the authority that signed server.pem; its key is deleted
        server.pem  certificate of the service
        server.key  key of this certificate
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.superexec_secret = folder / "superexec"
        self.ca = folder / "ca.pem"
        self.certificate = folder / "server.pem"
        self.key = folder / "server.key"

    @classmethod
    def begin(cls, folder: Path) -> LocalApi:
        """Make new secrets when a service starts; the secrets of earlier starts become invalid."""
        api = cls(folder)
        private_folder(folder)
        close_to_others(folder)
        (folder / "address").unlink(missing_ok=True)
        certificate = session_certificate([HOST], _DAYS)
        write_text(folder / "secret", secrets.token_urlsafe(_SECRET_BYTES))
        write_bytes(api.superexec_secret, secrets.token_bytes(_SECRET_BYTES))
        write_bytes(api.ca, certificate.ca_pem)
        write_bytes(api.certificate, certificate.cert_pem)
        write_bytes(api.key, certificate.key_pem)
        return api

    def listens_on(self, port: int) -> None:
        """Write the address at which the service's own programs reach its local API."""
        write_text(self.folder / "address", f"{HOST}:{port}")

    @property
    def listens(self) -> bool:
        """Return whether the service has written the address of its local API."""
        return (self.folder / "address").exists()

    @property
    def address(self) -> str:
        """Host and port of the local API.

        Raises:
            LostPeerError: the service does not run, or does not listen yet.
        """
        try:
            return (self.folder / "address").read_text()
        except FileNotFoundError:
            raise LostPeerError(
                "this service of Flower is not running here",
                where=str(self.folder),
                fix="start it with: vfl up PROJECT, or vfl up party.toml",
            ) from None

    @property
    def secret(self) -> str:
        """Secret that every request to the local API must contain."""
        return (self.folder / "secret").read_text()


def local_api(state: Path) -> LocalApi:
    """Return the local API of the service whose files are in this folder."""
    return LocalApi(state / "local")


# --- services -----------------------------------------------------------------------------------


def superlink() -> None:
    """Run Flower's SuperLink with a guard on each port; all command-line arguments are Flower's."""
    _end_with_starter()
    with _printed_errors():
        command = upstream.SUPERLINK.load()
        upstream.REGISTERED.load()
        network = os.environ[NETWORK_VARIABLE]
        # The ports are opened first: if a port is in use, a SuperLink is running, and its secret
        # must not be replaced.
        router, streams = None, os.environ[STREAM_VARIABLE]
        others = OtherConnections() if network and network == streams else None
        listeners: list[Any] = []
        if network:
            listeners.append(others or listen(*parse_address(network)))
        if streams:
            folder = Path(os.environ[ROUTER_VARIABLE])
            router = StreamRouter(*parse_address(streams), folder, others=others)
        api = LocalApi.begin(Path(os.environ[LOCAL_API_VARIABLE]))
        listeners.append(listen(HOST, 0))
    sys.argv += ["--isolation", "process"]
    sys.argv += ["--superexec-auth-secret-file", str(api.superexec_secret)]

    def run(app: Any, **options: Any) -> None:
        asyncio.run(_serve_superlink(app, options, api, listeners))
        if router is not None:
            router.close()

    command.uvicorn = SimpleNamespace(run=run)
    command.flower_superlink()


async def _serve_superlink(
    app: Any, options: Mapping[str, Any], api: LocalApi, listeners: Sequence[Any]
) -> None:
    """Serve Flower's application at the network port and the local port until a signal arrives."""
    routes, bell = CONTROL_ROUTES | RUNTIME_ROUTES, Bell()
    local = local_guard(app, routes, api.secret, _registers_by_name, bell)
    servers = [_server(local, options, api.certificate, api.key)]
    if len(listeners) > 1:
        keys = _registered(app), _names_its_sender, bell, _arrives(app)
        network = network_guard(app, *keys, _taken_back(api.folder.parent))
        files = Path(options["ssl_certfile"]), Path(options["ssl_keyfile"])
        servers.append(_server(network, options, *files, lifespan="off"))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, servers, bell)
    tasks = []
    for server, listener in zip(servers, reversed(listeners), strict=True):
        tasks.append(asyncio.create_task(server.serve(sockets=[listener])))
        while not server.started:
            if tasks[-1].done():  # the server ended during its start, perhaps because of an error
                _stop(servers, bell)
                await tasks[-1]
                sys.exit(1)
            await asyncio.sleep(0.01)
    api.listens_on(listeners[-1].getsockname()[1])
    _start_superexec(api, api.address)
    print(READY, flush=True)
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    _stop(servers, bell)  # each server is useless without the other one
    await asyncio.gather(*tasks)


def _server(
    guard: Any,
    options: Mapping[str, Any],
    certificate: Path,
    key: Path,
    lifespan: Literal["on", "off"] = "on",
) -> Any:
    from vfl.transport.http import HttpServer, http_config

    log = {"log_config": options["log_config"], "log_level": None}
    config = http_config(guard, certificate, key, lifespan=lifespan, **log)
    return HttpServer(config, signals=False)  # `_serve_superlink` handles signals


def _stop(servers: Sequence[Any], bell: Bell) -> None:
    for server in servers:
        server.should_exit = True
    bell.ring()  # a server ends only after it has answered all waiting polls


def _registered(app: Any) -> Callable[[bytes], Any]:
    """Make a function that checks, in another thread, whether Flower has registered a key."""

    async def is_registered(key: bytes) -> bool:
        state = app.state.linkstate_factory.state()
        return await asyncio.to_thread(state.get_node_id_by_public_key, key) is not None

    return is_registered


def digest_of(content: bytes) -> str:
    """Return the SHA-256 digest of a key or a bundle, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def retired_keys(state: Path) -> set[str]:
    """Return the digests of keys that a SuperLink no longer accepts.

    Args:
        state: folder in which Flower keeps its files at the label party.
    """
    file = state / RETIRED
    return set(read_json(file)["keys"]) if file.exists() else set()


def _taken_back(state: Path) -> Callable[[bytes], Any]:
    """Make a function that checks whether a key was withdrawn; see `retired_keys`."""

    async def was_registered(key: bytes) -> bool:
        return digest_of(key) in retired_keys(state)

    return was_registered


def _arrives(app: Any) -> Callable[[bytes], Awaitable[None]]:
    """Make a function that marks a killed SuperNode as offline when it returns.

    Flower itself marks such a SuperNode only after a minute.
    """

    def forget(key: bytes) -> None:
        state = app.state.linkstate_factory.state()
        if (node := state.get_node_id_by_public_key(key)) is not None:
            state.deactivate_node(node)

    async def arrives(key: bytes) -> None:
        await asyncio.to_thread(forget, key)

    return arrives


def _names_its_sender(path: str, body: bytes) -> bool:
    """Check that a reply gives its caller's node id as sender; Flower checks only the key."""
    if path != "/v1/fleet/push-messages":
        return True
    from google.protobuf.message import DecodeError

    try:
        request = upstream.FLEET_MESSAGES.load().PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    caller = request.node.node_id
    return all(message.metadata.src_node_id == caller for message in request.messages_list)


def _registers_by_name(path: str, body: bytes) -> bool:
    """Check that a request to register a key also contains the name of the key's party."""
    if path != "/v1/control/register-node":
        return True
    from google.protobuf.message import DecodeError

    try:
        return bool(upstream.CONTROL_MESSAGES.load().RegisterNodeRequest.FromString(body).name)
    except DecodeError:
        return True  # Flower itself refuses malformed messages


def supernode() -> None:
    """Run Flower's SuperNode with a guard on its local API; all arguments are Flower's."""
    _end_with_starter()
    with _printed_errors():
        port = int(sys.argv[sys.argv.index("--port") + 1])
        try:  # without this check, Flower would run without a local API and hide the reason
            listen(HOST, port).close()
        except UserError as refused:
            refused.what = "cannot listen for this SuperNode's own programs"
            refused.fix = "choose another node.api_port in party.toml, one for each SuperNode here"
            raise
        api = LocalApi.begin(Path(os.environ[LOCAL_API_VARIABLE]))
        # the SuperExec starts first, because its worker takes longest to import its packages
        _start_superexec(api, f"{HOST}:{port}")
        command, internal = upstream.SUPERNODE.load(), upstream.SUPERNODE_LOOP.load()
    sys.argv += ["--isolation", "process"]
    sys.argv += ["--superexec-auth-secret-file", str(api.superexec_secret)]
    sys.argv += ["--ssl-ca-certfile", str(api.ca)]
    sys.argv += ["--ssl-certfile", str(api.certificate), "--ssl-keyfile", str(api.key)]
    from uvicorn.config import LOGGING_CONFIG

    from vfl.transport.http import HttpServer, http_config

    bell = Bell()
    sessions = SessionsAtOnce(internal._push_messages, bell)

    def configure(app: Any, **options: Any) -> Any:
        guard = local_guard(app, RUNTIME_ROUTES, api.secret, bell=bell)
        api.listens_on(options["port"])
        files = options.pop("ssl_certfile"), options.pop("ssl_keyfile")
        return http_config(
            guard, *files, lifespan="auto", log_config=LOGGING_CONFIG, log_level=None, **options
        )

    command.uvicorn = SimpleNamespace(Config=configure, Server=HttpServer)
    internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, POLL_S)))
    internal._push_messages = sessions.message_came
    why = ""
    try:
        command.flower_supernode()
    except Exception as problem:
        why = f" ({type(problem).__name__})"
    # Flower's loop ends only after an error, for example when a certificate expires between two
    # messages; for some of these errors, Flower writes a log line and returns. The thread of the
    # local API would keep this process alive after such an error, so `vfl up` would not restart the
    # SuperNode.
    print(f"vfl: the SuperNode ended{why}", flush=True)
    os._exit(1)


class SessionsAtOnce:
    """Lets a SuperNode run several sessions at once; Flower's loop runs one session after another.

    Args:
        push: Flower's function that waits for a reply to a message, and sends the reply.
        bell: object that wakes the programs that wait for work when a message has arrived.
    """

    def __init__(self, push: Callable[..., None], bell: Bell) -> None:
        self._push, self._bell = push, bell
        self._places = threading.Semaphore(SESSIONS_AT_ONCE - 1)
        self._replying: threading.Thread | None = None

    def message_came(self, *, send: Callable[..., Any], **callbacks: Any) -> None:
        """Start a session and return.

        Another thread waits for the session's reply and sends the reply.
        """

        def send_and_free(*arguments: Any) -> Any:
            self._places.release()
            return send(*arguments)

        self._bell.ring()
        if self._replying is None:
            replies = partial(self._reply, send=send_and_free, **callbacks)
            self._replying = threading.Thread(target=replies, name="vfl-replies", daemon=True)
            self._replying.start()
        # the SuperLink keeps the next message until another session may start
        self._places.acquire()

    def _reply(self, **callbacks: Any) -> None:
        while True:
            try:
                self._push(**callbacks)
            except Exception as problem:  # if one reply fails, the other replies must still be sent
                print(f"vfl: a reply was lost ({type(problem).__name__})", flush=True)


def _end_with_starter() -> None:
    """When the command that started this service has ended, end this process as SIGTERM would.

    A command that was killed could not end its service. Without this function, the service would
    occupy its ports, and its session would run at the same time as the session of the next command.
    """
    if starter := os.environ.get(STARTER_VARIABLE):
        end_with(int(starter))


def _start_superexec(api: LocalApi, address: str) -> None:
    """Start SuperExec, which fetches and runs a service's work; SuperExec ends with the service.

    SuperExec may start before the service listens at this address.

    The program runs in a separate process session, as in Flower, so that a terminal's Ctrl+C
    reaches only the service. Linux also shares a busy machine between process sessions: in the
    caller's session, Ray's low-priority workers would get almost no time beside other programs. If
    the program dies, the function starts it again.
    """
    command = ["flower-superexec", "--runtime-api-address", address]
    command += ["--root-certificates", str(api.ca), "--parent-pid", str(os.getpid())]
    command += ["--superexec-auth-secret-file", str(api.superexec_secret)]

    def keep() -> None:
        while True:
            shared = os.environ.get(SHARED_VARIABLE)
            code = WorkerClient(Path(shared), command[0]).run(command) if shared else None
            if code is None:
                started = Process("SuperExec", command, os.environ, start_new_session=True)
                code = started.wait()
            time.sleep(_AGAIN_S)  # a service that is ending has stopped this thread by then
            print(f"vfl: SuperExec ended (exit {code}); starting it again", flush=True)

    threading.Thread(target=keep, daemon=True).start()


# --- programs that call a service ---------------------------------------------------------------


def superexec() -> None:
    """Run Flower's SuperExec with the secret of its service and with a standing worker.

    The worker is started first, because its imports take longest.
    """
    _end_with_starter()
    api = LocalApi(Path(os.environ[LOCAL_API_VARIABLE]))
    if program := os.environ.get(WORKER_VARIABLE):
        shared = os.environ.get(SHARED_VARIABLE)
        worker = (
            WorkerClient(Path(shared), program)
            if shared
            else StandingWorker(api.folder, program, WORKER_COMMAND)
        )
        executor = upstream.EXECUTOR.load()
        executor.subprocess = SimpleNamespace(Popen=worker.popen, DEVNULL=DEVNULL)
        executor.SubprocessExecutor.reconcile = lambda executor: worker.supervise()
    _show_secret()
    command = upstream.SUPEREXEC.load()
    _wait_for(api)
    command.flower_superexec()


def _wait_for(api: LocalApi) -> None:
    """Wait until the service listens at its local API; stop waiting if the service has ended."""
    service = os.getppid()
    for _ in looks(_LISTENS_WITHIN_S):
        if api.listens or os.getppid() != service:
            return


@contextmanager
def kept_worker(environment: Mapping[str, str], log: Path) -> Iterator[Callable[[], None]]:
    """Run the standing worker of a service; the worker starts before the service and ends after it.

    The worker's imports take longest, so it starts first, and a restarted service finds the worker
    ready.

    Args:
        environment: environment of the service.
        log: log file of the service, to which the worker's output is written too.

    Returns:
        A function that restarts the worker if the worker has died; the caller has to call this
        function regularly.
    """
    folder = Path(environment[LOCAL_API_VARIABLE])
    program = environment[WORKER_VARIABLE]
    # Another command of this party already runs the worker; `vfl up` will therefore refuse this
    # command.
    if not program or SHARED_VARIABLE in os.environ or answers(folder):
        yield lambda: None
        return
    private_folder(log.parent)
    with log.open("ab") as output:
        worker = StandingWorker(
            folder, program, WORKER_COMMAND, environment, stdout=output, start_new_session=True
        )
        os.environ[SHARED_VARIABLE] = str(folder)
        try:
            yield worker.supervise
        finally:
            del os.environ[SHARED_VARIABLE]
            worker.close()


def shared_worker(arguments: Sequence[str]) -> int | None:
    """Run a `vfl` command in a worker that several parties share; see `run_among_parties`."""
    environment = {**os.environ, **QUIET, WORKER_VARIABLE: ""}
    return run_among_parties(WORKER_COMMAND, environment, arguments)


def serverapp() -> None:
    """Run Flower's ServerApp process for an app bundle that the label party accepts."""
    with _printed_errors():
        runtime = upstream.SERVERAPP_RUN.load()
    runtime.flush_logs = partial(runtime.flush_logs, timeout=_LAST_LINES_S)
    _run_bundle(upstream.SERVERAPP_RUN, upstream.SERVERAPP, "flwr_serverapp")


def clientapp() -> None:
    """Run Flower's ClientApp process for an app bundle that the feature party accepts."""
    _run_bundle(upstream.CLIENTAPP_RUN, upstream.CLIENTAPP, "flwr_clientapp")


def simulation() -> None:
    """Run Flower's simulation process for an app bundle that the user accepts."""
    _run_bundle(upstream.SIMULATION, upstream.SIMULATION, "flwr_simulation")


def refuse() -> None:
    """Refuse to run; vfl puts this function in place of other Flower programs that run app code."""
    program = Path(sys.argv[0]).name
    print(ConsentError(f"a party of vfl does not run {program}"), flush=True)
    sys.exit(ConsentError.exit_code)


def _show_secret() -> None:
    """Add the service's secret to requests to the service's local API, and to no other request."""
    client = upstream.HTTP_CLIENT.load().ProtobufClient
    api = LocalApi(Path(os.environ[LOCAL_API_VARIABLE]))
    make = client.__init__

    def make_with_secret(self: Any, base_url: str, **options: Any) -> None:
        make(self, base_url, **options)
        if base_url == f"https://{api.address}":
            _carry_secret(self, api)

    client.__init__ = make_with_secret


def _carry_secret(client: Any, api: LocalApi) -> None:
    client._client.headers[SECRET_HEADER] = api.secret
    client._client.follow_redirects = False


def control_client(state: Path) -> Any:
    """Return a client of a SuperLink's Control API that sends the service's secret.

    The caller must close the client.

    Args:
        state: folder in which Flower keeps its files at the label party.
    """
    api = local_api(state)
    os.environ |= local_is_direct()  # Flower's client reads this process's environment
    client = upstream.CONTROL.load().ControlHttpClient
    made = client.from_server_address(api.address, False, api.ca.read_bytes(), ())
    _carry_secret(made, api)
    return made


def _run_bundle(runtime: Internal, command: Internal, function: str) -> None:
    """Run a Flower program that unpacks app bundles; check each bundle before it is unpacked."""
    _end_with_starter()
    with _printed_errors():
        module, program = runtime.load(), command.load()
    _show_secret()
    install = module.install_from_fab

    def install_accepted(content: bytes, *arguments: Any, **options: Any) -> Any:
        # Flower reports an error of this function to the label party, but not an error before it.
        try:
            check_bundle(content, _accepted())
        except VFLError as refusal:
            print(refusal, flush=True)
            raise _for_label_party(refusal) from None
        return install(content, *arguments, **options)

    module.install_from_fab = install_accepted
    getattr(program, function)()


def _for_label_party(error: VFLError) -> VFLError:
    """Return an error that the label party may see."""
    from vfl.session import for_others  # it imports torch

    return for_others(error, "of this node")


def _accepted() -> Sequence[str]:
    file = os.environ.get(PARTY_FILE_VARIABLE)
    if not file:
        raise ConfigError(
            "the path of the party's own file is missing",
            want=f"the path in the environment variable {PARTY_FILE_VARIABLE}",
        )
    return read_party_file(Path(file)).consent.bundles


@contextmanager
def _printed_errors() -> Iterator[None]:
    """If a `VFLError` occurs before Flower starts, print it, and end the program."""
    try:
        yield
    except VFLError as problem:
        print(problem, flush=True)
        sys.exit(problem.exit_code)
