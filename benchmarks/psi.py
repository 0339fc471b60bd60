"""Private set intersection of two parties that share half of their ids, and other systems.

vfl's protocols run in one separate process, which plays all roles. openmined-psi also runs both
parties in one process; SPU uses two processes over the loopback interface. CPU seconds are the sum
over all roles.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.worker import BenchmarkWorker, Parent
from vfl.config.toml import Settings
from vfl.core.errors import BadOptionError
from vfl.datasets.alignment import ristretto
from vfl.datasets.alignment.protocols import Own, play

#: Numbers of ids of each party, by system.
SIZES: Mapping[str, Sequence[int]] = {
    "server_aided": (10_000, 100_000, 1_000_000, 10_000_000),
    "ecdh": (10_000, 100_000),
    "openmined": (10_000, 100_000),
    "spu-ecdh": (10_000, 100_000),
    "spu-rr22": (10_000, 100_000, 1_000_000),
}
#: Systems of each other library that the command line can name.
PEERS = {"openmined": ("openmined",), "spu": ("spu-ecdh", "spu-rr22")}
_PEER = Path(__file__).parent / "peers" / "psi_peer.py"
_WAIT_S = 900


class PsiJob(Settings):
    """Job of one process: an intersection by a protocol of vfl."""

    spec: str
    ids: int


class PsiRow(Settings):
    """Cost of one private set intersection.

    Attributes:
        system: name of a protocol of vfl, or of another system.
        ids: number of ids of each party.
        seconds: wall clock.
        cpu_s: CPU time of all parties, and of the helper if there is one.
        party_bytes: bytes that the party with the most traffic sends and receives; None if not
            counted.
        peak_mb: memory of all roles together, including the ids, in units of 10^6 bytes; None if
            not measured.
        common: number of common ids that were found; the right number is half of the ids.
        skipped: reason for a missing measurement.
    """

    system: str
    ids: int
    seconds: float | None = None
    cpu_s: float | None = None
    party_bytes: int | None = None
    peak_mb: float | None = None
    common: int | None = None
    skipped: str | None = None


def bench_psi(
    most: int = 1_000_000,
    peer: Sequence[str] = (),
) -> list[PsiRow]:
    """Measure private set intersection of vfl, openmined-psi and SPU.

    Args:
        most: largest number of ids of a party; larger sets are left out.
        peer: openmined or spu, and the Python interpreter that has it, such as spu=PATH.

    Raises:
        BadOptionError: no other system has this name, or there is no set to measure.
    """
    pythons = dict(map(_peer, peer))
    if not any(size <= most for size in SIZES["ecdh"]):
        want = f"at least {SIZES['ecdh'][0]}"
        raise BadOptionError("nothing to measure", got=f"{most} ids", want=want)
    rows = []
    for ids in sorted({size for sizes in SIZES.values() for size in sizes if size <= most}):
        for system in (system for system, sizes in SIZES.items() if ids in sizes):
            harness.say(f"{system}: {ids} ids")
            other = next((name for name, of in PEERS.items() if system in of), None)
            if other is None:
                rows.append(_ours(PsiJob(spec=system, ids=ids)))
            elif other in pythons:
                rows.append(_theirs(system, ids, pythons[other]))
            else:
                rows.append(PsiRow(system=system, ids=ids, skipped=f"no --peer {other}=PYTHON"))
    return rows


def ids_of(rank: int, count: int) -> list[bytes]:
    """Return the ids of one party; two parties have half of their ids in common.

    >>> len(set(ids_of(0, 100)) & set(ids_of(1, 100)))
    50
    """
    first = rank * (count - count // 2)
    return [b"person-%09d" % number for number in range(first, first + count)]


def measure(job: PsiJob) -> PsiRow:
    """Run all roles in this process, and return the costs."""
    if job.spec == "ecdh":
        ristretto.random_points(1)  # the first intersection loads libsodium
    with harness.measured() as whole:
        owns = [Own(name, ids_of(rank, job.ids)) for rank, name in enumerate(("bank", "label"))]
        with harness.measured() as cost:
            found, traffic = play(job.spec, owns, "label")
    return PsiRow(
        system=job.spec,
        ids=job.ids,
        seconds=cost.wall_s,
        cpu_s=cost.cpu_s,
        party_bytes=max(traffic.of(name) for name in found),
        peak_mb=whole.peak_bytes / 1e6,
        common=len(found["bank"]),
    )


def work(parent: Parent) -> None:
    """Measure the requested jobs."""
    for job in parent.each(PsiJob):
        parent.put(measure(job))


def _found(row: PsiRow) -> str:
    if row.skipped:
        return f"  skipped: {row.skipped}"
    right = row.ids // 2
    return f"  {row.common}" if row.common == right else f"  {row.common}, WRONG: {right} are"


TABLE = harness.table(
    ("system", "<14", "system"),
    ("ids", ">10", "ids"),
    ("seconds", ">10.2f", "seconds"),
    ("CPU s", ">10.2f", "cpu_s"),
    ("MiB a party", ">13.2f", lambda row: row.party_bytes and row.party_bytes / 2**20),
    ("peak MB", ">9.0f", "peak_mb"),
    ("  common", "<0", _found),
)


def _ours(job: PsiJob) -> PsiRow:
    if job.spec == "ecdh" and not ristretto.available():
        return PsiRow(system=job.spec, ids=job.ids, skipped="libsodium is not installed")
    with BenchmarkWorker("psi") as worker:
        worker.put(job)
        return worker.get(PsiRow)


def _theirs(system: str, ids: int, python: str) -> PsiRow:
    command = [python, "-I", str(_PEER), system, str(ids)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S)
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as problem:
        return PsiRow(system=system, ids=ids, skipped=f"it failed: {type(problem).__name__}")
    return PsiRow(system=system, ids=ids, **found)


def _peer(spec: str) -> tuple[str, str]:
    name, _, python = spec.partition("=")
    if name not in PEERS or not python:
        want = f"{' or '.join(PEERS)}, '=' and the Python that has it installed"
        raise BadOptionError(
            "no other system has this name", where="option 'peer'", got=f"'{spec}'", want=want
        )
    return name, python


main = harness.command(bench_psi, TABLE)


if __name__ == "__main__":
    main()
