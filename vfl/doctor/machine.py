"""The machine: versions of what vfl stands on, cores, room on the disk. Nothing is imported."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement  # flwr requires it
from packaging.specifiers import SpecifierSet

from vfl.doctor.check import Check
from vfl.version import VERSION

_LITTLE_ROOM_BYTES = 1_000_000_000
_NO_ROOM_BYTES = 50_000_000


def versions() -> Iterator[Check]:
    """vfl, Python and every required package against what vfl was made for."""
    try:
        about = metadata.metadata("vfl")
    except metadata.PackageNotFoundError:
        found = f"{VERSION}, run from a folder: what it needs is not recorded"
        yield Check("vfl", "WARN", found, "pip install it")
        return
    yield Check("vfl", "OK", VERSION)
    python = platform.python_version()
    wanted = about["Requires-Python"] or ""
    fits = SpecifierSet(wanted).contains(python, prereleases=True)
    yield Check("python", "OK", python) if fits else _wrong("python", python, wanted)
    for line in metadata.requires("vfl") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _package(requirement)


def _package(requirement: Requirement) -> Check:
    name, wanted = requirement.name, str(requirement.specifier)
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return _wrong(name, "not installed", wanted)
    if requirement.specifier.contains(installed, prereleases=True):
        return Check(name, "OK", installed)
    return _wrong(name, installed, wanted)


def _wrong(name: str, found: str, wanted: str) -> Check:
    cure = "use such a Python" if name == "python" else f"pip install '{name}{wanted}'"
    return Check(name, "FAIL", f"{found}, but vfl needs {wanted or 'it'}", cure)


def cores() -> Check:
    """How many cores there are, and how many threads torch will take."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"{count} cores, OMP_NUM_THREADS {threads or 'not set (vfl uses one thread)'}"
    if threads and threads.isdigit() and int(threads) > (count or 1):
        return Check("cores", "WARN", found, "more threads than cores slow each other down")
    return Check("cores", "OK", found)


def room(folder: Path) -> Check:
    """Room on the disk of a folder, or of the nearest one above it that exists."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free
    found = f"{free / 1e9:.1f} GB free at {folder}"
    if free < _NO_ROOM_BYTES:
        return Check("disk", "FAIL", found, "make room: checkpoints could not be written")
    if free < _LITTLE_ROOM_BYTES:
        return Check("disk", "WARN", found, "checkpoints and run folders may need more")
    return Check("disk", "OK", found)
