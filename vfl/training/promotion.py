"""Promotion of runs: all services of a folder of runs answer with the promoted run, now and later.

The file `promoted.json` in the folder of runs lists the promoted runs in order of promotion. A
service writes its address and the run with which it currently answers to `serving.json`, in the
folder of the run with which the service started. The file `serving.next` in the same folder
requests a switch to another run, without interruption (`vfl.session.label.front.serve_in_turn`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vfl.config.run_folder import RunFolder
from vfl.core.errors import LostPeerError, UserError, VFLError, read_record
from vfl.core.processes import looks
from vfl.core.storage import (
    Seal,
    locked,
    prepared,
    read_json,
    read_sealed_json,
    sealed_text,
    write_text,
)
from vfl.core.text import printable
from vfl.federation.project import LabelFolder

#: Files of a service, in the folder of the run with which the service started.
STATE_FILE, NEXT_FILE, STOP_FILE = "serving.json", "serving.next", "serving.stop"
_PROMOTED_FILE, _KIND = "promoted.json", "promoted runs"


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service whose process is running.

    Attributes:
        began: folder of the run with which the service started.
        address: address at which the service listens.
        run: name of the run with which the service answers; None before the service can answer.
        refused: the last run to which the service could not switch, with the reason; empty if every
            switch succeeded.
    """

    began: Path
    address: str
    run: str | None
    refused: dict[str, Any]


def running_service(began: Path) -> RunningService | None:
    """Return the service that started with a run; None if the service's process has ended."""
    try:
        told = read_json(began / STATE_FILE)
        lives = _lives(int(told["process"]))
        run, refused = told.get("run"), told.get("refused") or {}
        service = RunningService(
            began, printable(str(told["address"])), None if run is None else str(run), dict(refused)
        )
    except (VFLError, OSError, KeyError, TypeError, ValueError):
        return None
    return service if lives else None


def services_of(runs: Path) -> list[RunningService]:
    """Return all services that started with a run in this folder of runs."""
    found = [running_service(state.parent) for state in sorted(runs.glob(f"*/{STATE_FILE}"))]
    return [service for service in found if service is not None]


def service_of(run: Path) -> RunningService | None:
    """Return the service that answers with a run, or is about to; None if no such service runs."""
    run = run.resolve()
    for service in services_of(run.parent):
        if service.run == run.name or (service.run is None and service.began == run):
            return service
    return None


def promoted_runs(runs: Path) -> list[str]:
    """Return the names of promoted runs in a folder of runs, in order; the current run is last.

    Raises:
        RunFolderError: the record of the promoted runs is damaged.
    """
    path = runs / _PROMOTED_FILE
    if not path.exists():
        return []
    return [str(one["run"]) for one in read_sealed_json(path, Seal(_KIND, None, None))["promoted"]]


def promote(run: Path, wait_s: float = 300.0) -> list[RunningService]:
    """Make all services of a folder of runs answer with one run, now and later; return them.

    Args:
        run: folder of a training that ended well.
        wait_s: seconds within which each service must switch.

    Raises:
        RunFolderError: the run did not end well, or its record is damaged.
        UserError: a service cannot open the run; all services continue with the earlier run.
        LostPeerError: a service does not report within `wait_s` whether it can open the run.
        StorageError: the disk is full; no service has switched.
    """
    folder = RunFolder.open(run.resolve())
    folder.summary()
    runs = folder.path.parent
    with locked(runs):
        before = promoted_runs(runs)
        if before[-1:] == [folder.path.name]:
            return _go_on_with(folder.path, wait_s)
        with _kept(folder, [*before, folder.path.name]):
            return _go_on_with(folder.path, wait_s)


def roll_back(runs: Path, wait_s: float = 300.0) -> tuple[Path, list[RunningService]]:
    """Switch back to the previously promoted run; return this run's folder and the services.

    Args:
        runs: folder that contains the runs.
        wait_s: seconds within which each service must switch.

    Raises:
        UserError: no run was promoted before, or a service cannot open the earlier run.
        RunFolderError: the earlier run's folder does not exist, or the record is damaged.
        LostPeerError: a service does not report within `wait_s` whether it can open the run.
        StorageError: the disk is full; no service has switched.
    """
    with locked(runs):
        promoted = promoted_runs(runs)
        if len(promoted) < 2:
            raise UserError(
                "no run was promoted before this one",
                where=str(runs),
                got=promoted[0] if promoted else "no promoted run",
                fix="vfl promote RUN promotes any run that ended well",
            )
        folder = RunFolder.open(runs / promoted[-2])
        with _kept(folder, promoted[:-1]):
            return folder.path, _go_on_with(folder.path, wait_s)


def runs_of(path: Path) -> Path:
    """Return the folder of runs: the given one, or `runs` in the store of a project's label party.

    Raises:
        RunFolderError: the path is neither a folder of runs nor a project.
    """
    if any(path.glob("*/run.json")):
        return path.resolve()
    return LabelFolder.find(path).runs_path


@contextmanager
def _kept(folder: RunFolder, promoted: Sequence[str]) -> Iterator[None]:
    """Store a list of promoted runs, if the block, in which services switch, succeeds."""
    path, now = folder.path.parent / _PROMOTED_FILE, datetime.now(UTC).isoformat(timespec="seconds")
    known = {}
    if path.exists():
        known = {
            one["run"]: one["at"]
            for one in read_sealed_json(path, Seal(_KIND, None, None))["promoted"]
        }
    listed = [{"run": name, "at": known.get(name, now)} for name in promoted]
    seal = Seal(_KIND, folder.about()["party"], "all")
    with prepared(path, [sealed_text({"promoted": listed}, seal).encode()]):
        yield


def _go_on_with(run: Path, wait_s: float) -> list[RunningService]:
    """Switch all services of the folder to a run; if one service fails, switch all of them back."""
    changed = list[RunningService]()
    for service in services_of(run.parent):
        if service.run == run.name:
            continue
        try:
            _ask(service, run, wait_s)
        except VFLError:
            for other in changed:
                if other.run is not None:
                    write_text(other.began / NEXT_FILE, f"{run.parent / other.run}\n")
            raise
        changed.append(service)
    return services_of(run.parent)


def _ask(service: RunningService, run: Path, wait_s: float) -> None:
    """Request one service to switch to a run; wait until the service has switched or failed."""
    write_text(service.began / NEXT_FILE, f"{run}\n")
    for _ in looks(wait_s):
        now = running_service(service.began)
        if now is None or now.run == run.name:
            return  # a service whose process has ended sends no answers
        if now.refused.get("run") == run.name and now.refused != service.refused:
            told = read_record(now.refused, str(service.began / STATE_FILE))
            raise UserError(
                f"the service at {now.address} cannot go on with this run, and goes on with "
                f"{now.run}",
                where=str(run),
                got=f"{told['code']}: {told['what']}",
                fix=told.get("fix"),
            )
    raise LostPeerError(
        f"the service at {service.address} has not said within {wait_s:g} s whether it goes on "
        "with this run",
        where=str(service.began),
        fix="vfl status RUN says which run answers; notes.txt there says why",
    )


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:  # the service's process exists, and belongs to another user
        return True
    except ProcessLookupError:
        return False
    return True
