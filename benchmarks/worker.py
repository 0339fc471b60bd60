"""The processes of all benchmarks, with one thread each, and their messages: lines of JSON.

``python -m benchmarks.worker NAME`` calls `work(parent)` of ``benchmarks.NAME``. The process ends
when its standard input ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from benchmarks.emulation import Network
from vfl.config.toml import Settings
from vfl.core.errors import VFLError
from vfl.core.processes import Worker
from vfl.core.seeds import use_one_thread

Message = TypeVar("Message", bound=Settings)
_ROOT = Path(__file__).parents[1]
#: Environment variables that give each process one thread. The C library (glibc) is set to keep
#: freed memory. Otherwise chance decides whether the library returns the memory of large tensors to
#: the system, and mapping such memory again would cost up to a tenth of a step.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}


class BenchmarkWorker(Worker):
    """A process of a benchmark, as the process that started it sees it; a context manager.

    Args:
        name: module of `benchmarks` whose `work` the process runs.
        at: prefix of the command line, if the process runs in an emulated network.
        command: another program and its arguments, to run instead of Python.
    """

    def __init__(self, name: str, at: Sequence[str] = (), command: Sequence[str] = ()) -> None:
        # -P: the process must not import modules from the working folder.
        ours = [sys.executable, "-P", "-m", "benchmarks.worker", name]
        paths = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": paths}
        super().__init__(f"the benchmark's {name}", [*at, *(command or ours)], environment)

    def put(self, message: Settings) -> None:
        """Send the process a message; if the process has ended, only `get` reports it."""
        self.send(message.model_dump_json())

    def get(self, kind: type[Message]) -> Message:
        """Wait for the next message of the process.

        Raises:
            LostPeerError: the process has ended instead; its standard error says why.
        """
        return kind.model_validate_json(self.receive())


@contextmanager
def processes(
    program: str, network: Network, parties: Sequence[str] = (), command: Sequence[str] = ()
) -> Iterator[dict[str, BenchmarkWorker]]:
    """Start a process for each party of a network, or for some of them.

    Args:
        program: module of `benchmarks` whose `work` the processes run, or the name of the command
            in messages.
        network: network that connects the parties.
        parties: parties that get a process; by default, all parties of the network.
        command: another program and its arguments, to run instead of Python.
    """
    with ExitStack() as stack:
        yield {
            party: stack.enter_context(BenchmarkWorker(program, network.command(party), command))
            for party in parties or network.parties
        }


class Parent:
    """The process that started the present process, as the present process sees it.

    Args:
        lines: lines of standard input, which the starting process writes.
    """

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines

    def put(self, message: Settings) -> None:
        """Send the starting process a message."""
        print(message.model_dump_json(), flush=True)

    def get(self, kind: type[Message]) -> Message:
        """Wait for the next message of the starting process."""
        return kind.model_validate_json(next(self._lines))

    def each(self, kind: type[Message]) -> Iterator[Message]:
        """Yield the messages of the starting process until its end."""
        return map(kind.model_validate_json, self._lines)


class Endpoint(Settings):
    """Address on which a process listens; without a CA, there is no TLS."""

    host: str
    port: int
    ca_pem: str = ""

    def seen(self, network: Network, source: str, target: str) -> Endpoint:
        """Return the same endpoint with the address by which `source` reaches `target`."""
        return self.model_copy(update=network.reach(source, target, self.port)._asdict())


def main() -> None:
    """Run a benchmark's `work` until the input ends."""
    use_one_thread()
    try:
        import_module(f"benchmarks.{sys.argv[1]}").work(Parent(iter(sys.stdin)))
    except VFLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
