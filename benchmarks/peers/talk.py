"""Main program of an adapter: ``PYTHON -I talk.py NAME`` runs one party of NAME_peer.py.

This program runs in the environment of the other system, and imports no part of vfl. The program
exchanges the messages of `benchmarks/mpc_party.py` as plain JSON.

It reads lines of JSON from standard input: first the party's role, then the addresses of all
parties, then runs. A run is a task, the time to begin, and a request to reveal the results after
all bytes were counted. It writes lines to standard output: its port, "ready", "ready" before and
after each run, and the costs of the run. The adapter is a class `Peer` with these methods:

    Peer(assignment, port)                 who it is, and a port that is free for it
    connect(endpoints)                    host and port of every party, by rank
    prepare(task, arrays)             share and compile; called once for the runs of one workload
    run()                             what is timed
    result()                          arrays by name at rank 0; called at every rank

The program needs only numpy and the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    """Run the requested runs until the input ends."""
    # A library's printed output must not appear between the lines of the protocol.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**message: object) -> None:
        print(json.dumps(message), file=answers, flush=True)

    lines = iter(sys.stdin)
    assignment = json.loads(next(lines))
    port = _free_port(assignment["host"])
    peer = _adapter(sys.argv[1])(assignment, port)
    tell(port=port)
    peer.connect(json.loads(next(lines))["endpoints"])
    tell()
    workload, wanted = "", dict[str, Any]()
    for line in lines:
        task = json.loads(line)
        if task["workload"] != workload:
            arrays, wanted = _arrays(task["arrays"])
            peer.prepare(task, arrays)
            workload = task["workload"]
        tell()
        begin_at = json.loads(next(lines))["at"]
        time.sleep(max(0.0, begin_at - time.monotonic()))
        tell(**_turn(peer, wanted, partial(_counted, tell, lines)))


def _counted(tell: Callable[[], None], lines: Iterator[str]) -> None:
    """Yield the lines of standard input, and stop counting network traffic at the end of a run."""
    tell()
    next(lines)


def _turn(peer: Any, wanted: dict[str, Any], counted: Callable[[], None]) -> dict[str, Any]:
    began, busy = time.monotonic(), time.process_time()
    peer.run()
    ended, cpu_ms = time.monotonic(), 1000 * (time.process_time() - busy)
    counted()
    found, taken = peer.result(), {"began": began, "ended": ended, "cpu_ms": cpu_ms}
    if found is None:
        return taken
    chosen = wanted.get("token")
    errors = {name: np.abs(found[name] - value) for name, value in wanted.items()}
    if chosen is not None:
        taken["wrong_tokens"] = int((errors.pop("token") > 0).sum())
    return taken | {"max_error": max(float(each.max()) for each in errors.values())}


def _arrays(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs and the expected results of a task."""
    with np.load(path, allow_pickle=False) as kept:
        arrays = {name: kept[name] for name in kept.files}
    wanted = {name[7:]: arrays.pop(name) for name in list(arrays) if name.startswith("wanted.")}
    return arrays, wanted


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as door:
        return int(door.getsockname()[1])


def _adapter(name: str) -> Any:
    """Return the class `Peer` from a file in this folder.

    The file is loaded by its path, because a module `spu.py` would hide the library `spu`.
    """
    path = Path(__file__).with_name(f"{name}_peer.py")
    spec = importlib.util.spec_from_file_location(f"{name}_peer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Peer


if __name__ == "__main__":
    main()
