"""Measure times, bytes and errors of thesis chapters 5 and 6, PEA and PySyft, on their networks.

    python examples/published/runs.py

Each line of docs/results/published_runs.jsonl is one result, with the command that measured it. A
command whose lines the file contains is not run again, so a later run continues; remove a command's
lines to repeat it. A network link of 80 Mbit/s and 40 ms needs the right to make network
namespaces (`--network tun`). The private choice of a token's score, as in the thesis, needs
``vfl[he]``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

OUT = Path("docs/results/published_runs.jsonl")
LINE = "80mbps,40ms"
WORKLOADS = [
    f"{model}-b{rows}-{kind}"
    for model in ("lr100", "lr1000", "dnn1", "dnn2")
    for rows in (64, 128)
    for kind in ("inference", "training")
]
_BYTES = ("bytes_online", "bytes_offline")


def commands() -> Iterator[tuple[str, str]]:
    """Yield each network link and benchmark command, the quickest command first."""
    yield "model", f"benchmarks.mpc --workload relu-100k --wan {LINE} --network model"
    yield "loopback", "benchmarks.tensors"
    every = ",".join(WORKLOADS)
    computed = f"benchmarks.mpc --workload {every} --mode thesis --wan {LINE} --network model"
    yield "model", computed
    for name in WORKLOADS:
        yield LINE, f"benchmarks.mpc --workload {name} --wan {LINE} --network tun"
    for count in (1, 32, 64, 128):
        roots = f"benchmarks.mpc --workload rsqrt-{count} --mode fast,holders"
        yield "loopback", roots
        yield LINE, f"{roots} --wan {LINE} --network tun"
    for line in ("100mbps,20ms", "1000mbps,10ms"):
        terms = f"--prompts 0 --wan {line}"
        forms = "--form thesis --form fast"
        yield line, f"benchmarks.decoder --elements 1000,100000 --widths 64 {terms} {forms}"
        # Each form of the decoder is measured in a separate command, because a layer of width 4096
        # takes 8 GB.
        for form in ("thesis", "fast"):
            yield line, f"benchmarks.decoder --elements 32 --widths 768,4096 {terms} --form {form}"


def records(line: str, command: str, output: str) -> Iterator[dict[str, object]]:
    """Yield the result rows that a command printed, as records."""
    bench, day = command.split()[0].removeprefix("benchmarks."), datetime.now(UTC).date()
    for row in json.loads(output):
        sent = [row.get(name) for name in _BYTES]
        total = {} if None in sent else {"bytes": sum(sent)}
        yield {
            "bench": bench,
            "line": line,
            **row,
            **total,
            "command": command,
            "day": day.isoformat(),
        }


def main() -> None:
    """Run the commands whose lines the file does not contain yet."""
    done = set()
    if OUT.exists():
        done = {json.loads(text)["command"] for text in OUT.read_text().splitlines()}
    for line, command in commands():
        if command in done:
            continue
        print(command, file=sys.stderr, flush=True)
        found = subprocess.run(
            [sys.executable, "-m", *command.split(), "--json"],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        )
        with OUT.open("a", encoding="utf-8") as file:
            for record in records(line, command, found.stdout):
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
