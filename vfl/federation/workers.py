"""A party's standing worker: a process with all imports made in advance, which forks sessions.

Most of the time before a session's first exchange is needed to start processes and to import torch
and Flower. Each service therefore has one standing worker: a process that has already made these
imports. To run a program, a client connects to the worker's socket, and the worker forks a child
that runs the program. The clients are:

- Flower's SuperExec, which starts the ClientApp or ServerApp of a session.
- The service of a party (a SuperLink or SuperNode), which starts SuperExec. `vfl up` starts the
  worker of the service and of SuperExec before both, and restarts it (`StandingWorker`).
- A command of the label party; the worker runs the command in place of the calling process
  (`hand_over`).
- A command that starts every party on this machine; one worker then runs this command and the
  SuperExecs of all parties. Torch is then imported only once, instead of once in each process
  (`run_among_parties`).

The socket is in the folder of the local API, or in a temporary folder of a worker that all parties
share; both have mode 0700, and the worker accepts no request from another user's process. The
process that starts the worker chooses the programs that the worker may
run. Each program still makes its usual checks, so a bundle is checked before it is unpacked. A fork
of a process with several threads may inherit a lock that is never released, so a worker that has
more than one thread ends: programs then start without a worker, which takes longer. A worker runs
only under Linux, because it needs the list of its threads, and the user id of the process at the
other end of the socket.

A caller sends the length of its request, its three standard file descriptors (input, output,
error), and the request. The first byte of the answer states whether the worker accepts the request,
and the second byte is the program's exit code. After the first byte, each byte that the caller
sends is the number of a signal; the worker passes this signal to the program.
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

#: The worker's process name; its children have the names of their programs.
NAME = "vfl-worker"
_SOCKET = "worker"
_ACCEPTED, _REFUSED = b"+", b"-"
_LENGTH_BYTES = 4
_MAX_REQUEST_BYTES = 1 << 20
#: Longest wait for an answer of the worker, in seconds; a worker that has just started answers only
#: between two of its imports.
_ANSWER_TIMEOUT_S = 30.0
#: Pause between two restarts of the worker in seconds, so that a worker that dies immediately does
#: not keep a core busy.
_RESTART_S = 5.0
#: Modules of other packages that a session needs; the worker imports these modules, so that its
#: forks need not import them.
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
#: Environment variable with the folder of a worker that several services share; if the variable is
#: not set, each SuperExec starts its own worker.
SHARED_VARIABLE = "VFL_SHARED_WORKER"
#: The library Arrow would start a thread for its second memory allocator, which vfl does not use.
_ENVIRONMENT = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
_forked = False


# --- clients of a worker -------------------------------------------------------------------------


class WorkerClient:
    """Starts programs through a worker that another process started and restarts.

    Args:
        folder: folder of the worker's socket.
        program: name of the only program that `popen` asks the worker to run; `popen` starts every
            other program itself.
    """

    def __init__(self, folder: Path, program: str) -> None:
        self._folder = folder
        self._program = program
        self._subprocesses: list[Process] = []

    @property
    def reachable(self) -> bool:
        """Return True; only the answer to a request shows whether the shared worker runs."""
        return True

    def supervise(self) -> None:
        """Do nothing, because the process that started the worker restarts it."""

    def popen(self, command: Sequence[str], **options: Any) -> None:
        """Start a program and return at once; this method replaces `subprocess.Popen`."""
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
        """Run a program until it ends; the program ends at the latest when this process ends.

        Returns:
            The program's exit code, or 1 if the program was killed; None if the worker does not
            accept the request.
        """
        with connected_to(self._folder, _SOCKET, _ANSWER_TIMEOUT_S) as connection:
            if not connection or not _request(connection, command, (0, 1, 2), follows=True):
                return None
            connection.settimeout(None)
            return (connection.recv(1) or b"\x01")[0]


class StandingWorker(WorkerClient):
    """Starts and restarts the worker of a service, and starts programs through it.

    Args:
        folder: folder of the service's local API.
        program: see `WorkerClient`.
        command: command line that starts the worker; the worker's standard input is the listening
            socket.
        environment: environment variables of the worker; None takes those of this process.
        options: further arguments of `subprocess.Popen` for the worker.
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
        """Return whether the worker runs."""
        return self._process is not None and self._process.alive

    def supervise(self) -> None:
        """Restart the worker if it has died.

        Do nothing if the worker ended because no worker can run here.
        """
        if self._process is None or (code := self._process.exit_code) is None:
            return
        if code == 0:
            self._process = None
            self._listener.close()  # callers then start their programs without a worker
        elif monotonic() > self._started + _RESTART_S:
            print(f"vfl: the standing worker ended (exit {code}); starting it again", flush=True)
            self._start()

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None if no worker can run here."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """End the worker, but not its forks; wait for programs that started without the worker."""
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
    """Let the label party's standing worker run a `vfl` command instead of this process.

    Args:
        path: path of a project, of its label folder, or of a run in its store.
        arguments: arguments of the `vfl` command.

    Returns:
        The exit code; None if no worker accepts the command, and the caller must run the command
        itself.

    Raises:
        LostPeerError: the process that ran the command died.
    """
    folder = _api_folder(path)
    return None if folder is None else _run_in_worker(folder, arguments)


def run_among_parties(
    command: Sequence[str], environment: Mapping[str, str], arguments: Sequence[str]
) -> int | None:
    """Start a worker that runs a `vfl` command and the sessions of all parties which it starts.

    Args:
        command: command that starts the worker; see `StandingWorker`.
        environment: environment of the worker.
        arguments: arguments of the `vfl` command.

    Returns:
        The exit code; None if no worker can run here, and the caller must run the command itself.

    Raises:
        LostPeerError: the process that ran the command died.
    """
    if _forked or sys.platform != "linux":
        return None
    with TemporaryDirectory() as name:
        with listen_in(Path(name), _SOCKET) as listener:
            worker, lifeline = _start_worker(command, listener, environment, stdout=PIPE)
        os.environ[SHARED_VARIABLE] = name
        try:
            with suppress(LostPeerError):
                worker.receive()  # the worker writes one line: that it is ready, or why it ended
            return _run_in_worker(Path(name), arguments)
        finally:
            del os.environ[SHARED_VARIABLE]
            os.close(lifeline)
            worker.stop()  # on a busy machine, the worker may end some time after the pipe closes


def _run_in_worker(folder: Path, arguments: Sequence[str]) -> int | None:
    """Run a `vfl` command in the worker; return its exit code, or None if the worker refuses it."""
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
                # signals that were blocked until here are passed on
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                code = connection.recv(1)
                break
            except (KeyboardInterrupt, SystemExit) as ended:
                interrupted = isinstance(ended, KeyboardInterrupt)
                with suppress(OSError):
                    number = signal.SIGINT if interrupted else signal.SIGTERM
                    connection.sendall(bytes([number]))
    if not code:
        raise LostPeerError(
            "the worker's process that ran this command has died",
            where=str(folder / _SOCKET),
            fix="run the command again: a standing worker that has died is restarted",
        )
    return code[0]


def answers(folder: Path) -> bool:
    """Return whether a worker answers at the socket in a folder."""
    with connected_to(folder, _SOCKET, 0.0) as connection:
        return connection is not None


def _start_worker(
    command: Sequence[str], listener: socket.socket, environment: Mapping[str, str], **options: Any
) -> tuple[Process, int]:
    """Start a worker that ends when its pipe closes, at the latest with this process."""
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
    """Ask the worker to run a program with these standard files.

    Return whether the worker accepts the request.
    """
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
    """Return values that identify this vfl installation; worker and clients compare them."""
    return [VERSION, sys.executable, __file__]


# --- the worker ----------------------------------------------------------------------------------


def preload(program: str) -> None:
    """Import those modules of other packages that a Flower program needs."""
    for module in PRELOADED[program]:
        import_module(module)


def serve(
    programs: Mapping[str, Program], preloads: Iterable[Callable[[], object]], lifeline: int
) -> None:
    """Run as a standing worker: import modules, then fork for each request until `lifeline` closes.

    Args:
        programs: programs that a caller may request, by name.
        preloads: functions that import modules; between two of these functions, the worker serves
            waiting callers.
        lifeline: a pipe that closes when the process that started the worker ends.
    """
    listener = socket.socket(fileno=os.dup(0))
    # the operating system then removes ended children itself
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _set_process_name(NAME)
    connection = None
    gc.disable()  # imported modules stay in memory until the worker ends
    for prepare in (*preloads, _warm_up, _settle):
        prepare()
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            print(f"vfl: no worker can run here: it would have {threads} threads", flush=True)
            return
        # SuperExec needs few modules, and a serving session needs no training step, so the worker
        # accepts their requests before all imports are done.
        if connection := _asked(listener, lifeline, wait=False):
            break
    else:
        print("vfl: a worker is ready", flush=True)
        connection = _asked(listener, lifeline, wait=True)
    try:
        if connection is not None:
            gc.enable()
            with connection:
                _reset_child(listener, lifeline)
                _run_requested(connection, programs)
    finally:
        _thaw()


def _settle() -> None:
    """Exclude imported objects from garbage collection, so that forks share their memory."""
    gc.collect()
    # otherwise a garbage collection in a fork would copy the memory pages that it visits
    gc.freeze()
    return_memory()


def _thaw() -> None:
    """When the process ends, return the objects that `_settle` excluded to the garbage collector.

    Otherwise Triton, which torch's CUDA builds import, reports memory leaks on standard error.
    """
    if "triton" in sys.modules:
        gc.enable()
        gc.unfreeze()


def _asked(listener: socket.socket, lifeline: int, *, wait: bool) -> socket.socket | None:
    """Accept callers and fork; return the connection in the fork, and None in the worker.

    With `wait`, the worker waits for callers until `lifeline` closes; otherwise it accepts only
    callers that are waiting now.
    """
    while True:
        ready = select.select([listener.fileno(), lifeline], [], [], None if wait else 0)[0]
        if not ready or lifeline in ready:
            return None
        if connection := _accept_and_fork(listener):
            return connection


def _accept_and_fork(listener: socket.socket) -> socket.socket | None:
    """Accept one caller and fork; return the connection in the fork, and None in the worker."""
    try:
        connection, _ = listener.accept()
        try:
            if is_ours(connection) and os.fork() == 0:
                return connection.dup()
        finally:
            connection.close()
    except OSError as problem:  # if files or processes run out, the caller gets no answer
        print(f"vfl: the worker cannot take a request: {problem.strerror}", flush=True)
    return None


def _warm_up() -> None:
    """Run one optimiser step and count a model's memory, which imports all modules that both need.

    Among these modules is torch's compiler.
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

    np.random.seed()  # after a fork, Python reseeds only the module `random`


def _run_requested(connection: socket.socket, programs: Mapping[str, Program]) -> None:
    connection.settimeout(_ANSWER_TIMEOUT_S)
    head, files, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 3)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    if not head:  # the caller has already disconnected
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
    # if the caller has disconnected, this call fails, and no program starts
    connection.sendall(_ACCEPTED)
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
            raise LostPeerError("the caller of the standing worker has disconnected")
        text += piece
    return json.loads(text)


def _pass_signals_on(connection: socket.socket, done: threading.Event) -> None:
    """Raise the signals that the caller sends, and SIGTERM when the caller has ended."""
    number = signal.SIGINT
    while number == signal.SIGINT:
        number = signal.SIGTERM
        with suppress(OSError, ValueError):
            number = signal.Signals((connection.recv(1) or bytes([number]))[0])
        if not done.is_set():
            os.kill(os.getpid(), number)


def _set_process_name(name: str) -> None:
    """Set the process name that `ps` and `top` print."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)
