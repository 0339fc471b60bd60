"""Flower's programs as vfl starts them, each behind or before a guard.

Flower starts its helpers by bare name. Small scripts of these names lie in a folder that comes
first on the PATH of a service; each calls a function of this file, which changes the one thing that
is wanted of Flower and goes on with Flower's own program:

- `superlink`, `supernode`: what listens is a guard of `vfl.federation.guard`
- `superexec`: requests carry the local secret, and sessions are forks of a standing worker
- `serverapp`, `clientapp`, `simulation`: the same, and only an accepted bundle is unpacked
- `refuse`: every other program by which Flower runs code

A service and its own programs meet at its local API, see `LocalApi`.

The names inside Flower that are used stand in `vfl.federation.upstream`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from vfl.config import read_party_file
from vfl.core.address import parse_address
from vfl.core.errors import ConfigError, ConsentError, LostPeerError, UserError, VFLError
from vfl.core.processes import DEVNULL, Process
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

#: Environment of a service and of everything it starts.
PARTY_FILE_VARIABLE = "VFL_PARTY_FILE"
LOCAL_API_VARIABLE = "VFL_LOCAL_API"
#: host:port of the SuperLink's network port; empty for a simulation, which has none.
NETWORK_VARIABLE = "VFL_NETWORK_ADDRESS"
#: host:port that the streams of all its sessions come to, likewise.
STREAM_VARIABLE = "VFL_STREAM_ADDRESS"
#: Which program of Flower a service's standing worker runs; a service without it has no worker, and
#: a worker without it is a shared one, which runs those of every party.
WORKER_VARIABLE = "VFL_STANDING_WORKER"
#: Process id of the command that started a service; the service and its sessions end with it.
STARTER_VARIABLE = "VFL_SERVICE_STARTER"
#: Starts a standing worker.
WORKER_COMMAND = (sys.executable, "-P", "-m", "vfl", "party-worker")
#: A SuperLink's file with digests of the keys that were taken from parties.
RETIRED = "retired.json"
#: A service prints it once all its ports are open.
READY = "vfl: all ports are open"

#: Sessions that a SuperNode plays at once; the message of one more waits at the SuperLink.
SESSIONS_AT_ONCE = 16
#: Between a program's questions for work, and between a SuperNode's looks for a reply.
POLL_S = 0.1
QUIET = {
    **upstream.SILENT,
    # Ray, the engine of a Flower simulation: no usage reports, nothing beyond the loopback.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # One thread a process: two parties and a label party share a small machine, and weights are
    # equal bit for bit only where sums are added in the same order.
    "OMP_NUM_THREADS": "1",
    # The guard holds questions for work until there is some, so they may follow each other.
    upstream.POLL: str(POLL_S),
}
_AGAIN_S = 1.0
#: Between two looks whether who started a service is there, or whether a service listens.
_LOOK_S = 0.1
_LISTENS_WITHIN_S = 120.0
#: How long a ServerApp waits at its end for its last lines to reach the SuperLink.
_LAST_LINES_S = 0.5
HOST = "127.0.0.1"
_SECRET_BYTES = 32
#: The service restarts long before.
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
#: What runs code of a bundle at a label party, and at a feature party; the other's is refused.
_OF_SUPERLINK = ("flwr-serverapp", "flwr-simulation")
_OF_SUPERNODE = ("flwr-clientapp",)
#: Both a shell's and Python's: a first line of `#!` can hold no long path, nor one with a blank.
_SCRIPT = """\
#!/bin/sh
'''exec' "{python}" -P "$0" "$@"
'''
from vfl.federation.programs import {function}

{function}()
"""


def flower_environment(home: Path) -> dict[str, str]:
    """The environment of every Flower process.

    Args:
        home: where Flower keeps its own files.
    """
    # Flower starts its helpers by bare name, so our interpreter's scripts come first.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    unguarded = upstream.UNGUARDED
    inherited = {name: value for name, value in os.environ.items() if name not in unguarded}
    return {**inherited, **local_is_direct(), **QUIET, upstream.HOME: str(home), "PATH": path}


def superlink_environment(
    state: Path, party_file: Path, network_address: str, stream_address: str
) -> dict[str, str]:
    """What a SuperLink runs in.

    Args:
        state: the label party's folder for Flower.
        party_file: the label party's own file; says which bundles it runs.
        network_address: host:port that SuperNodes connect to; empty for a simulation.
        stream_address: host:port that the streams of sessions come to, likewise.
    """
    own = {PARTY_FILE_VARIABLE: str(party_file.resolve()), NETWORK_VARIABLE: network_address}
    own |= {STREAM_VARIABLE: stream_address, ROUTER_VARIABLE: str((state / "streams").resolve())}
    own[WORKER_VARIABLE] = _worker_program("flwr-serverapp") if network_address else ""
    _write_programs(state, _OF_SUPERLINK)
    return _service_environment(state) | own


def supernode_environment(state: Path, party_file: Path) -> dict[str, str]:
    """What a SuperNode runs in; see `superlink_environment`."""
    _write_programs(state, _OF_SUPERNODE)
    own = {PARTY_FILE_VARIABLE: str(party_file.resolve())}
    own[WORKER_VARIABLE] = _worker_program("flwr-clientapp")
    return _service_environment(state) | own


def _worker_program(program: str) -> str:
    return program if sys.platform == "linux" else ""


def _service_environment(state: Path) -> dict[str, str]:
    """Our programs are found first, and they find the local API."""
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
    """The local API of a SuperLink or SuperNode: where it listens, how its own programs get in.

    Made anew at each start: a secret, and a certificate of its own, so that a program never shows
    the secret to another process that took the port. All of it lies in one folder that only the
    owner can read, `folder`:

    address     host and port on the loopback, written once the service listens
    secret      what a request must carry
    superexec   what signs the requests for work of Flower's SuperExec
    ca.pem      the authority that signed server.pem; its key is forgotten
    server.pem  the certificate
    server.key  its key
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.superexec_secret = folder / "superexec"
        self.ca = folder / "ca.pem"
        self.certificate = folder / "server.pem"
        self.key = folder / "server.key"

    @classmethod
    def begin(cls, folder: Path) -> LocalApi:
        """Make the secrets of a new start; those of an earlier one are worth nothing any more."""
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
        """Tell the service's own programs where it is."""
        write_text(self.folder / "address", f"{HOST}:{port}")

    @property
    def listens(self) -> bool:
        """Whether the service listens."""
        return (self.folder / "address").exists()

    @property
    def address(self) -> str:
        """Host and port.

        Raises:
            LostPeerError: the service does not run, or not yet.
        """
        try:
            return (self.folder / "address").read_text()
        except FileNotFoundError:
            raise LostPeerError(
                "this service of Flower does not run here",
                where=str(self.folder),
                fix="start it with: vfl up PROJECT, or vfl up party.toml",
            ) from None

    @property
    def secret(self) -> str:
        """What a request must carry."""
        return (self.folder / "secret").read_text()


def local_api(state: Path) -> LocalApi:
    """The local API of the service that keeps its files in a folder."""
    return LocalApi(state / "local")


# --- services -----------------------------------------------------------------------------------


def superlink() -> None:
    """Flower's SuperLink behind its two guards; its arguments are Flower's."""
    _end_with_starter()
    with _printed_errors():
        command = upstream.SUPERLINK.load()
        upstream.REGISTERED.load()
        network = os.environ[NETWORK_VARIABLE]
        # First of all: a port in use must leave the secret of the SuperLink that has it alone.
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
    """Serve Flower's application at both ports until a signal comes."""
    routes, bell = CONTROL_ROUTES | RUNTIME_ROUTES, Bell()
    local = local_guard(app, routes, api.secret, _registers_by_name, bell)
    servers = [_server(local, options, api.certificate, api.key)]
    if len(listeners) > 1:
        keys = _registered(app), _names_its_sender, bell, _arrives(app)
        network = network_guard(app, *keys, _taken_back(api.folder.parent / RETIRED))
        files = Path(options["ssl_certfile"]), Path(options["ssl_keyfile"])
        servers.append(_server(network, options, *files, lifespan="off"))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, servers, bell)
    tasks = []
    for server, listener in zip(servers, reversed(listeners), strict=True):
        tasks.append(asyncio.create_task(server.serve(sockets=[listener])))
        while not server.started:
            if tasks[-1].done():  # it ended before it began, with the reason if it has one
                _stop(servers, bell)
                await tasks[-1]
                sys.exit(1)
            await asyncio.sleep(0.01)
    api.listens_on(listeners[-1].getsockname()[1])
    _start_superexec(api, api.address)
    print(READY, flush=True)
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    _stop(servers, bell)  # one port alone is of no use
    await asyncio.gather(*tasks)


def _server(
    guard: Any,
    options: Mapping[str, Any],
    certificate: Path,
    key: Path,
    lifespan: Literal["on", "off"] = "on",
) -> Any:
    import uvicorn

    from vfl.transport.http import HttpServer

    config = uvicorn.Config(
        guard,
        lifespan=lifespan,
        access_log=False,  # one line a poll of every SuperNode fills the disk
        proxy_headers=False,  # nobody may tell us who calls
        server_header=False,
        log_config=options["log_config"],
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    return HttpServer(config, signals=False)  # signals are for whoever runs several


def _stop(servers: Sequence[Any], bell: Bell) -> None:
    for server in servers:
        server.should_exit = True
    bell.ring()  # a server ends when it has answered


def _registered(app: Any) -> Callable[[bytes], Any]:
    """Asks Flower's own state whether a key is registered, outside the event loop."""

    async def is_registered(key: bytes) -> bool:
        state = app.state.linkstate_factory.state()
        return await asyncio.to_thread(state.get_node_id_by_public_key, key) is not None

    return is_registered


def _taken_back(retired: Path) -> Callable[[bytes], Any]:
    """Whether a key was taken from a party, by the file of their digests."""

    async def was_registered(key: bytes) -> bool:
        known = read_json(retired)["keys"] if retired.exists() else ()
        return hashlib.sha256(key).hexdigest() in known

    return was_registered


def _arrives(app: Any) -> Callable[[bytes], Awaitable[None]]:
    """Marks a SuperNode that was killed as offline, which Flower notices after a minute alone."""

    def forget(key: bytes) -> None:
        state = app.state.linkstate_factory.state()
        if (node := state.get_node_id_by_public_key(key)) is not None:
            state.deactivate_node(node)

    async def arrives(key: bytes) -> None:
        await asyncio.to_thread(forget, key)

    return arrives


def _names_its_sender(path: str, body: bytes) -> bool:
    """Flower compares the caller with its key, but not with who a reply says it is from."""
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
    """A key without a party's name could not be told from another party's."""
    if path != "/v1/control/register-node":
        return True
    from google.protobuf.message import DecodeError

    try:
        return bool(upstream.CONTROL_MESSAGES.load().RegisterNodeRequest.FromString(body).name)
    except DecodeError:
        return True  # Flower refuses what is no message


def supernode() -> None:
    """Flower's SuperNode, its local API behind a guard; its arguments are Flower's."""
    _end_with_starter()
    with _printed_errors():
        port = int(sys.argv[sys.argv.index("--port") + 1])
        try:  # Flower would go on without its local API, and say nothing of why
            listen(HOST, port).close()
        except UserError as refused:
            refused.what = "cannot listen for this SuperNode's own programs"
            refused.fix = "another node.api_port in party.toml, one a SuperNode of this machine"
            raise
        api = LocalApi.begin(Path(os.environ[LOCAL_API_VARIABLE]))
        _start_superexec(api, f"{HOST}:{port}")  # whose worker imports for longer than this process
        command, internal = upstream.SUPERNODE.load(), upstream.SUPERNODE_LOOP.load()
    sys.argv += ["--isolation", "process"]
    sys.argv += ["--superexec-auth-secret-file", str(api.superexec_secret)]
    sys.argv += ["--ssl-ca-certfile", str(api.ca)]
    sys.argv += ["--ssl-certfile", str(api.certificate), "--ssl-keyfile", str(api.key)]
    from vfl.transport.http import HttpServer

    uvicorn, bell = command.uvicorn, Bell()
    sessions = SessionsAtOnce(internal._push_messages, bell)

    def configure(app: Any, **options: Any) -> Any:
        guard = local_guard(app, RUNTIME_ROUTES, api.secret, bell=bell)
        api.listens_on(options["port"])
        return uvicorn.Config(guard, **options, proxy_headers=False, server_header=False)

    command.uvicorn = SimpleNamespace(Config=configure, Server=HttpServer)
    internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, POLL_S)))
    internal._push_messages = sessions.message_came
    command.flower_supernode()


class SessionsAtOnce:
    """Lets a SuperNode play several sessions; Flower's loop waits for the end of each.

    Args:
        push: Flower's function that waits until a reply is there, and sends it.
        bell: rung when a message is there, where those look who ask for work.
    """

    def __init__(self, push: Callable[..., None], bell: Bell) -> None:
        self._push, self._bell = push, bell
        self._places = threading.Semaphore(SESSIONS_AT_ONCE - 1)
        self._replying: threading.Thread | None = None

    def message_came(self, *, send: Callable[..., Any], **callbacks: Any) -> None:
        """In the place of `push`: a session begins, and its reply leaves when it comes."""

        def send_and_free(*arguments: Any) -> Any:
            self._places.release()
            return send(*arguments)

        self._bell.ring()
        if self._replying is None:
            replies = partial(self._reply, send=send_and_free, **callbacks)
            self._replying = threading.Thread(target=replies, name="vfl-replies", daemon=True)
            self._replying.start()
        self._places.acquire()  # the next message waits at the SuperLink until there is a place

    def _reply(self, **callbacks: Any) -> None:
        while True:
            try:
                self._push(**callbacks)
            except Exception as problem:  # of one reply; those of other sessions leave
                print(f"vfl: a reply was lost ({type(problem).__name__})", flush=True)


def _end_with_starter() -> None:
    """Have this process end, as after SIGTERM, once the command that started its service is gone.

    A command that was killed ends nothing itself. A service that it leaves would keep its ports,
    and a session would go on answering beside the one of the command that is started next.
    """
    if starter := os.environ.get(STARTER_VARIABLE):
        follow = partial(_follow, int(starter))
        threading.Thread(target=follow, name="vfl-starter", daemon=True).start()


def _follow(starter: int) -> None:
    """End this process once another one, which need not be its parent, has ended."""
    with suppress(ProcessLookupError):
        if sys.platform == "linux":  # where a process that ended may keep its number for a while
            ended = select.poll()
            ended.register(os.pidfd_open(starter), select.POLLIN)
            ended.poll()
        else:
            while True:
                os.kill(starter, 0)
                time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _start_superexec(api: LocalApi, address: str) -> None:
    """What takes work from a service and starts a program for it; it ends with the service.

    It may start before the service listens at the address.

    In a session of its own, as Flower starts it: a terminal's Ctrl+C is for the service, and Linux
    shares a busy machine between sessions, where the low priority of Ray's workers would starve
    them beside whatever else the caller runs. One that dies is started again.
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
            time.sleep(_AGAIN_S)  # by then a service that ends has taken this thread along
            print(f"vfl: SuperExec ended (exit {code}); starting it again", flush=True)

    threading.Thread(target=keep, daemon=True).start()


# --- programs that call a service ---------------------------------------------------------------


def superexec() -> None:
    """Flower's SuperExec, with the secret of its service and a standing worker.

    The worker begins first: nothing else takes as long.
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
    """Wait until a service listens, or is gone."""
    service, deadline = os.getppid(), time.monotonic() + _LISTENS_WITHIN_S
    while not api.listens and os.getppid() == service and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


@contextmanager
def kept_worker(environment: Mapping[str, str], log: Path) -> Iterator[Callable[[], None]]:
    """Keep the standing worker of a service, from before it starts until after it has ended.

    It takes longer to get ready than everything else, so it begins first, and a service that is
    started again finds it ready.

    Args:
        environment: of the service.
        log: of the service, for what the worker says.

    Returns:
        Starts the worker again where it has died; to be called now and then.
    """
    folder = Path(environment[LOCAL_API_VARIABLE])
    program = environment[WORKER_VARIABLE]
    # Another command of this party that runs keeps its own; this one is about to be refused.
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
    """Run a `vfl` command that starts several parties beside them; see `run_among_parties`."""
    environment = {**os.environ, **QUIET, WORKER_VARIABLE: ""}
    return run_among_parties(WORKER_COMMAND, environment, arguments)


def serverapp() -> None:
    """Flower's ServerApp process, for a bundle the label party accepts."""
    with _printed_errors():
        runtime = upstream.SERVERAPP_RUN.load()
    runtime.flush_logs = partial(runtime.flush_logs, timeout=_LAST_LINES_S)
    _run_bundle(upstream.SERVERAPP_RUN, upstream.SERVERAPP, "flwr_serverapp")


def clientapp() -> None:
    """Flower's ClientApp process, for a bundle the feature party accepts."""
    _run_bundle(upstream.CLIENTAPP_RUN, upstream.CLIENTAPP, "flwr_clientapp")


def simulation() -> None:
    """Flower's simulation process, for a bundle whoever runs it accepts."""
    _run_bundle(upstream.SIMULATION, upstream.SIMULATION, "flwr_simulation")


def refuse() -> None:
    """Instead of the other programs by which Flower runs code."""
    program = Path(sys.argv[0]).name
    print(ConsentError(f"a party of vfl does not run {program}"), flush=True)
    sys.exit(ConsentError.exit_code)


def _show_secret() -> None:
    """Let every request to the local API of our service carry its secret, and no other request."""
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
    """Flower's client of a SuperLink's Control API, with its secret; to be closed.

    Args:
        state: the label party's folder for Flower.
    """
    api = local_api(state)
    os.environ |= local_is_direct()  # its client reads the variables of this process
    client = upstream.CONTROL.load().ControlHttpClient
    made = client.from_server_address(api.address, False, api.ca.read_bytes(), ())
    _carry_secret(made, api)
    return made


def _run_bundle(runtime: Internal, command: Internal, function: str) -> None:
    """Go on with a program of Flower that unpacks a bundle, once its bundles are checked."""
    _end_with_starter()
    with _printed_errors():
        module, program = runtime.load(), command.load()
        accepted = _accepted()
    _show_secret()
    install = module.install_from_fab

    def install_accepted(content: bytes, *arguments: Any, **options: Any) -> Any:
        try:
            check_bundle(content, accepted)
        except ConsentError as refusal:
            print(refusal, flush=True)
            raise
        return install(content, *arguments, **options)

    module.install_from_fab = install_accepted
    getattr(program, function)()


def _accepted() -> Sequence[str]:
    file = os.environ.get(PARTY_FILE_VARIABLE)
    if not file:
        raise ConfigError("no party's own file", want=f"its path in {PARTY_FILE_VARIABLE}")
    return read_party_file(Path(file)).consent.bundles


@contextmanager
def _printed_errors() -> Iterator[None]:
    """An error before Flower takes over is printed as vfl prints errors, and ends the program."""
    try:
        yield
    except VFLError as problem:
        print(problem, flush=True)
        sys.exit(problem.exit_code)
