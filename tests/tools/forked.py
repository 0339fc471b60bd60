"""Python programs that run in forks of a prepared process, in place of new interpreters.

A new interpreter imports torch for two seconds of a processor. The forks of a test worker share a
server of `multiprocessing` that has imported it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, reduction
from typing import IO, Any

import pytest

from vfl.core import processes

_PYTHON = sys.executable
_FORKS = multiprocessing.get_context("forkserver")
_IMPORTED = ("pandas", "torch", "vfl.clients.session", "vfl.server.rank", "vfl.training.run")


class Fork:
    """A process with those parts of `subprocess.Popen` that `vfl.core.processes` uses.

    Args:
        words: a module and its arguments; or "-c", code and its arguments.
        environment: all its environment variables.
        streams: standard input, output and error: PIPE, DEVNULL, a file, or None for ours; the last
            may be STDOUT.
        apart: whether Ctrl-C for us does not reach it.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[Any],
        apart: bool = False,
    ) -> None:
        prepare()
        ends = [_ends(number, stream) for number, stream in enumerate(streams)]
        if streams[2] == subprocess.STDOUT:
            ends[2] = (ends[1][0], None)
        theirs = [_Sent(end) for end, _ in ends]
        arguments = (list(map(str, words)), dict(environment), os.getcwd(), theirs, apart)
        self._process = _FORKS.Process(target=_run, args=arguments)
        self._process.start()
        for end in {end for end, _ in ends} - {0, 1, 2} - {_number(one) for one in streams}:
            os.close(end)
        self.stdin, self.stdout, self.stderr = (own for _, own in ends)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return code

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


class ForkingSubprocess:
    """Stands for the module `subprocess`: modules start as forks, other programs as ever.

    Args:
        module: module for `python -m`.
        apart: first arguments of the module that need an interpreter of their own.
    """

    def __init__(self, module: str, apart: Sequence[str] = ()) -> None:
        self._module, self._apart = module, apart

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let `vfl.core.processes` start its processes so."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "subprocess", self)
            yield

    def Popen(self, command: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
        words = list(map(str, command))
        start = words.index(_PYTHON) if _PYTHON in words else len(words)
        variables, words = words[:start], [word for word in words[start + 1 :] if word != "-P"]
        as_ever = not all("=" in word for word in variables[1:]) or words[:1] != ["-m"]
        if as_ever or words[1] != self._module or {*words[2:3]} & {*self._apart}:
            return subprocess.Popen(command, env=env, **options)
        streams = [options.get(one) for one in ("stdin", "stdout", "stderr")]
        return Fork(words[1:], env, streams, options.get("start_new_session", False))


class _Sent:
    """A descriptor that the server receives with the request, so that only the fork keeps it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._descriptor),)


def _received(sent: Any) -> int:
    descriptor: int = sent.detach()
    return descriptor


def prepare() -> None:
    """Start the server of this test worker, unless it runs."""
    _FORKS.set_forkserver_preload(list(_IMPORTED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def _number(stream: Any) -> int | None:
    return stream.fileno() if hasattr(stream, "fileno") else None


def _ends(number: int, stream: Any) -> tuple[int, IO[str] | None]:
    """The child's end of a standard stream, and ours if the stream is a pipe."""
    if stream == subprocess.PIPE:
        read, write = os.pipe()
        if number == 0:
            return read, os.fdopen(write, "w", encoding="utf-8")
        return write, os.fdopen(read, encoding="utf-8", errors="replace")
    if stream == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None
    return stream.fileno() if hasattr(stream, "fileno") else number, None


def _run(
    words: list[str],
    environment: dict[str, str],
    folder: str,
    streams: list[int],
    apart: bool,
) -> None:
    if apart:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    module, *arguments = words
    try:
        if module == "-c":
            sys.argv = ["-c", *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = words
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
