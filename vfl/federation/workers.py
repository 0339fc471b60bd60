"""A party's standing worker: a fork server that has imported everything, and forks once a session.

Most of the time before a session's first exchange is the start of processes: Python, torch, Flower.
So each service has one process that has done this once. Whoever wants a program to run connects to
its socket, and gets a fork of it that runs the program:

- Flower's SuperExec, for the ClientApp or ServerApp of a session, and its service for SuperExec
  itself: `vfl up` keeps the worker, which begins before them (`StandingWorker`)
- a command of the label party, for itself (`hand_over`)
- a command that starts every party on this machine, for itself and for their SuperExecs: they share
  one worker, so that torch is imported once and not once a process (`run_among_parties`)

The socket lies in the folder of the local API (0700), and a caller of another user is not answered.
Which programs there are is decided by who started the worker; each checks what it always checks, so
a bundle is looked at before it is unpacked. A fork of a process with several threads may find a
lock that nobody will release, so a worker that has more than one ends: programs start the long way
then, as they do while it is not there. It runs under Linux alone, whose list of threads and whose
credentials of a socket's peer it needs.

A caller sends the length of its request, its three standard files, and the request; one byte tells
it whether the worker accepts it, and a second one the exit code. What it sends meanwhile are
signals.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from vfl.core.errors import LostPeerError
from vfl.core.processes import PIPE, Process, return_memory
from vfl.core.version import VERSION
from vfl.federation import upstream
from vfl.transport.local_socket import connected_to, is_ours, listen_in

Program = Callable[[], object]

#: What a worker is called where processes are listed; its children are called as their programs.
NAME = "vfl-worker"
_SOCKET = "worker"
_ACCEPTED, _REFUSED = b"+", b"-"
_LENGTH_BYTES = 4
_MAX_REQUEST_BYTES = 1 << 20
#: A worker that has just begun answers when it has imported everything.
_ANSWER_TIMEOUT_S = 30.0
#: A worker that dies at once must not keep a core busy with its starts.
_RESTART_S = 5.0
#: Other packages' modules that a session needs, so that no child imports them; the rest is small.
_APPS = (
    "pyarrow.dataset",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "safetensors.torch",
    "httpcore",
)
PRELOADED = {
    "flower-superexec": (
        upstream.SUPEREXEC.module,
        upstream.EXECUTOR.module,
    ),
    "flwr-clientapp": (upstream.CLIENTAPP_RUN.module, upstream.CLIENTAPP.module, *_APPS),
    "flwr-serverapp": (
        upstream.SERVERAPP_RUN.module,
        upstream.SERVERAPP.module,
        upstream.BUNDLE.module,
        upstream.CONTROL.module,
        *_APPS,
    ),
}
#: Folder of a worker that the services started by one command share; without it each SuperExec has
#: one of its own.
SHARED_VARIABLE = "VFL_SHARED_WORKER"
#: Arrow's second allocator, which nobody uses, would have a thread.
_ENVIRONMENT = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
_forked = False


# --- whoever wants a program to run --------------------------------------------------------------


class WorkerClient:
    """Starts programs through a worker that somebody else keeps.

    Args:
        folder: where the worker answers.
        program: the only one of Flower's that it is asked for here.
    """

    def __init__(self, folder: Path, program: str) -> None:
        self._folder = folder
        self._program = program
        self._subprocesses: list[Process] = []

    @property
    def reachable(self) -> bool:
        """Whether to ask the worker; who does not keep it learns only from its answer."""
        return True

    def supervise(self) -> None:
        """Nothing here: a worker is restarted by who keeps it, see `StandingWorker`."""

    def popen(self, command: Sequence[str], **options: Any) -> None:
        """Start a program and do not wait for it; in the place of `subprocess.Popen`."""
        if command[0] == self._program and self.reachable:
            with (
                open(os.devnull, "r+b") as nothing,
                connected_to(self._folder, _SOCKET, _ANSWER_TIMEOUT_S) as connection,
            ):
                files = (0, nothing.fileno(), nothing.fileno()) if options else (0, 1, 2)
                if connection and _request(connection, command, files, follows=False):
                    return
        self._subprocesses = [one for one in self._subprocesses if one.alive]
        self._subprocesses.append(Process(command[0], command, os.environ, **options))

    def run(self, command: Sequence[str]) -> int | None:
        """Run a program to its end, which comes with this process's at the latest.

        Returns:
            The exit code, 1 if it died; None if the worker does not accept it.
        """
        with connected_to(self._folder, _SOCKET, _ANSWER_TIMEOUT_S) as connection:
            if not connection or not _request(connection, command, (0, 1, 2), follows=True):
                return None
            connection.settimeout(None)
            return (connection.recv(1) or b"\x01")[0]


class StandingWorker(WorkerClient):
    """Keeps the worker of a service, and starts programs through it.

    Args:
        folder: of the service's local API.
        program: the only one of Flower's that the worker runs.
        command: starts the worker; its standard input is the socket it answers.
        environment: of the worker; this process's if not given.
        options: how else it is started; see `subprocess.Popen`.
    """

    def __init__(
        self,
        folder: Path,
        program: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(folder, program)
        self._command, self._options = command, options
        self._environment = os.environ if environment is None else environment
        self._listener = listen_in(folder, _SOCKET)
        self._process: Process | None = None
        self._lifeline: int | None = None
        self._start()

    @property
    def reachable(self) -> bool:
        """Whether the worker runs."""
        return self._process is not None and self._process.alive

    def supervise(self) -> None:
        """Start the worker again if it has died. One that ended by itself cannot run here."""
        if self._process is None or (code := self._process.exit_code) is None:
            return
        if code == 0:
            self._process = None
            self._listener.close()  # nobody waits for an answer in vain
        elif monotonic() > self._started + _RESTART_S:
            print(f"vfl: the standing worker ended (exit {code}); starting it again", flush=True)
            self._start()

    @property
    def pid(self) -> int | None:
        """The worker's process id; None if none can run here."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """End the worker, and wait for what was started without it; its children go on."""
        self._listener.close()
        if self._lifeline is not None:
            os.close(self._lifeline)
        for process in filter(None, [self._process, *self._subprocesses]):
            process.ends_within(_ANSWER_TIMEOUT_S)

    def _start(self) -> None:
        self._started = monotonic()
        self._process, lifeline = _start_worker(
            self._command, self._listener, self._environment, **self._options
        )
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._lifeline = lifeline


def hand_over(path: Path, arguments: Sequence[str]) -> int | None:
    """Let the label party's standing worker run a `vfl` command in this process's place.

    Args:
        path: a project, its label folder, or a run in its store.
        arguments: of the command.

    Returns:
        The exit code; None if no worker accepts it, and the caller has to run it itself.

    Raises:
        LostPeerError: the process that ran it died.
    """
    folder = _api_folder(path)
    return None if folder is None else _run_in_worker(folder, arguments)


def run_among_parties(
    command: Sequence[str], environment: Mapping[str, str], arguments: Sequence[str]
) -> int | None:
    """Let a new worker run a `vfl` command that starts parties, and the parties' sessions too.

    Args:
        command: starts the worker; see `StandingWorker`.
        environment: of the worker.
        arguments: of the `vfl` command.

    Returns:
        The exit code; None if no worker can run here, and the caller has to run it itself.

    Raises:
        LostPeerError: the process that ran it died.
    """
    if _forked or sys.platform != "linux":
        return None
    with TemporaryDirectory() as name:
        with listen_in(Path(name), _SOCKET) as listener:
            worker, lifeline = _start_worker(command, listener, environment, stdout=PIPE)
        os.environ[SHARED_VARIABLE] = name
        try:
            with suppress(LostPeerError):
                worker.receive()  # that it is ready, or why it ends
            return _run_in_worker(Path(name), arguments)
        finally:
            del os.environ[SHARED_VARIABLE]
            os.close(lifeline)
            worker.stop()  # a busy machine may take long to tell it that the pipe is closed


def _run_in_worker(folder: Path, arguments: Sequence[str]) -> int | None:
    """The exit code of a `vfl` command that the worker ran; None if it did not accept it."""
    if _forked:
        return None
    with connected_to(folder, _SOCKET, _ANSWER_TIMEOUT_S) as connection:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        if not connection or not _request(connection, ["vfl", *arguments], (0, 1, 2), follows=True):
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return None
        connection.settimeout(None)
        while True:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what came meanwhile is passed on
                code = connection.recv(1)
                break
            except (KeyboardInterrupt, SystemExit) as ended:
                interrupted = isinstance(ended, KeyboardInterrupt)
                with suppress(OSError):
                    number = signal.SIGINT if interrupted else signal.SIGTERM
                    connection.sendall(bytes([number]))
    if not code:
        raise LostPeerError(
            "the process that ran this command ended",
            where=str(folder / _SOCKET),
            fix="run it again: a standing worker that died is started again",
        )
    return code[0]


def answers(folder: Path) -> bool:
    """Whether a worker answers in a folder."""
    with connected_to(folder, _SOCKET, 0.0) as connection:
        return connection is not None


def _start_worker(
    command: Sequence[str], listener: socket.socket, environment: Mapping[str, str], **options: Any
) -> tuple[Process, int]:
    """A worker, and what it ends with: a pipe that closes with this process at the latest."""
    read_end, lifeline = os.pipe()
    os.set_inheritable(read_end, True)
    worker = Process(
        NAME,
        [*command, str(read_end)],
        {**environment, **_ENVIRONMENT},
        stdin=listener.fileno(),
        pass_fds=[read_end],
        **options,
    )
    os.close(read_end)
    return worker, lifeline


def _api_folder(path: Path) -> Path | None:
    for folder in (path, path / "label", *path.resolve().parents):
        if (folder / "app" / "experiment.toml").exists():
            return folder / "flower" / "local"
    return None


def _request(
    connection: socket.socket, arguments: Sequence[str], files: Sequence[int], *, follows: bool
) -> bool:
    """Ask for a program with these standard files; whether the worker runs it."""
    umask = os.umask(0o077)
    os.umask(umask)
    try:
        request = {
            "of": _identity(),
            "arguments": list(arguments),
            "directory": os.getcwd(),
            "environment": dict(os.environ),
            "umask": umask,
            "follows": follows,
        }
        text = json.dumps(request).encode()
        socket.send_fds(connection, [len(text).to_bytes(_LENGTH_BYTES, "little")], list(files))
        connection.sendall(text)
        return connection.recv(1) == _ACCEPTED
    except OSError:
        return False


def _identity() -> list[str]:
    """What two processes share that run the same vfl."""
    return [VERSION, sys.executable, __file__]


# --- the worker ----------------------------------------------------------------------------------


def preload(program: str) -> None:
    """Import the modules of other packages that a program needs."""
    for module in PRELOADED[program]:
        import_module(module)


def serve(
    programs: Mapping[str, Program], preloads: Iterable[Callable[[], object]], lifeline: int
) -> None:
    """Run as a standing worker: import, then fork a child for each request until `lifeline` closes.

    Args:
        programs: by name, what a caller may ask for.
        preloads: import what the programs need; whoever waits after one of them is served.
        lifeline: a pipe that closes with the process that keeps the worker.
    """
    listener = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    _set_process_name(NAME)
    connection = None
    for prepare in (*preloads, _warm_up, _settle):
        prepare()
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            print(f"vfl: no worker stands here: it would have {threads} threads", flush=True)
            return
        # SuperExec needs little, and a session that serves no warm-up: neither waits for the rest.
        if connection := _asked(listener, lifeline, wait=False):
            break
    else:
        print("vfl: a worker stands by", flush=True)
        connection = _asked(listener, lifeline, wait=True)
    if connection is not None:
        with connection:
            _reset_child(listener, lifeline)
            _run_requested(connection, programs)


def _settle() -> None:
    """Make all that was imported cheap to share."""
    gc.collect()
    gc.freeze()  # a collection in a child would copy what it only looks at
    return_memory()


def _asked(listener: socket.socket, lifeline: int, *, wait: bool) -> socket.socket | None:
    """In a new child the connection of whoever asked; None once nobody asks.

    With `wait` whoever asks next is waited for, until `lifeline` closes.
    """
    while True:
        ready = select.select([listener.fileno(), lifeline], [], [], None if wait else 0)[0]
        if not ready or lifeline in ready:
            return None
        if connection := _accept_and_fork(listener):
            return connection


def _accept_and_fork(listener: socket.socket) -> socket.socket | None:
    """In a new child the connection of whoever asked; None in the worker itself."""
    with suppress(OSError):  # no more files or processes: the caller gets no answer
        connection, _ = listener.accept()
        try:
            if is_ours(connection) and os.fork() == 0:
                return connection.dup()
        finally:
            connection.close()
    return None


def _warm_up() -> None:
    """What a training's first step sets up, and what counts its model before it is built.

    The optimiser is our own: torch's imports its compiler. So does counting on torch's meta device.
    """
    import torch

    from vfl.config import TrainSettings
    from vfl.models import make_bottom
    from vfl.models.footprint import footprint
    from vfl.models.optimizers import Optimization

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    Optimization(TrainSettings()).build([parameter]).step()
    footprint(make_bottom("mlp:hidden=none"), (1,), 1)


def _reset_child(listener: socket.socket, lifeline: int) -> None:
    global _forked
    _forked = True
    listener.close()
    os.close(lifeline)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import numpy as np

    np.random.seed()  # Python does this for `random` alone


def _run_requested(connection: socket.socket, programs: Mapping[str, Program]) -> None:
    connection.settimeout(_ANSWER_TIMEOUT_S)
    head, files, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 3)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    if not head:  # whoever asked is gone
        return
    request = _read(connection, int.from_bytes(head, "little"))
    if request["of"] != _identity() or request["arguments"][0] not in programs:
        connection.sendall(_REFUSED)
        return
    os.chdir(request["directory"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    _set_process_name(sys.argv[0])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    connection.sendall(_ACCEPTED)  # whoever has given up meanwhile is gone, and nothing runs
    if not request["follows"]:
        connection.close()
        programs[sys.argv[0]]()
        return
    connection.settimeout(None)
    done = threading.Event()
    threading.Thread(target=_pass_signals_on, args=(connection, done), daemon=True).start()
    code = 1
    try:
        programs[sys.argv[0]]()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        done.set()
        sys.stdout.flush()
        with suppress(OSError):
            connection.sendall(bytes([code & 0xFF]))


def _read(connection: socket.socket, length: int) -> Any:
    if length > _MAX_REQUEST_BYTES:
        raise LostPeerError("a request to the standing worker is too long")
    text = bytearray()
    while len(text) < length:
        piece = connection.recv(length - len(text))
        if not piece:
            raise LostPeerError("whoever asked the standing worker is gone")
        text += piece
    return json.loads(text)


def _pass_signals_on(connection: socket.socket, done: threading.Event) -> None:
    """Raise here what the caller's terminal sent it; SIGTERM once the caller is gone."""
    number = signal.SIGINT
    while number == signal.SIGINT:
        number = signal.SIGTERM
        with suppress(OSError, ValueError):
            number = signal.Signals((connection.recv(1) or bytes([number]))[0])
        if not done.is_set():
            os.kill(os.getpid(), number)


def _set_process_name(name: str) -> None:
    """Set the name that `ps` and `top` show."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)
