"""Runs cells of a grid (trainings) on a Ray cluster (the extra `ray`): each worker is a Ray actor.

The cluster's machines share no disk with this machine. Therefore each actor works in a separate
folder: it receives a copy of the cell's folder, continues the cell, and returns the folder. Ray's
object store keeps one copy of the data on each machine. If a worker dies, only the progress of its
current cell is lost, and another worker starts this cell again. Inside the cluster Ray passes
objects in its own format, which uses pickle. Therefore use only machines that you trust.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from vfl.config.experiment import memory_bytes
from vfl.core.address import is_loopback
from vfl.core.errors import ConfigError, PeerError, UserError
from vfl.core.processes import Service, usable_cores
from vfl.core.storage import not_durable, write_bytes
from vfl.core.version import VERSION
from vfl.experiments.cells import CONFIG, GRID, Cell, GridFolder
from vfl.experiments.scheduler import RetryingWorker, rows_of, run_cell
from vfl.experiments.training import DataCache
from vfl.transport.probe import free_ports, round_trip_s

if TYPE_CHECKING:
    from vfl.datasets import PartyData

#: Environment of Ray: it sends no usage reports, and each worker computes with one thread.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without this variable, Ray prints a warning
    "OMP_NUM_THREADS": "1",
    "RAY_raylet_start_wait_time_s": "120",
}
#: Unless this variable is set before the import of `ray`, Ray replaces 127.0.0.1 by the address of
#: another network interface, and listens on all interfaces.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
#: Environment variables with the token by which this process and the cluster that it starts
#: authenticate each other.
_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
_HOST = "127.0.0.1"
#: Word in place of an address: a cluster on this machine only, which starts and ends with the
#: command.
LOCAL = "local"
#: Ports of the agent processes of a Ray node, as options of `ray start`.
_PORTS = (
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
_STARTS_WITHIN_S = 180.0
#: Python code that runs the program `ray` with its arguments, and ends it when this process ends.
_HEAD = """
import sys
from ray.scripts.scripts import main
from vfl.core.processes import end_with

end_with(int(sys.argv.pop(1)))
main()
"""
#: Additional share of memory to reserve, beyond the memory that the first cell used.
_ROOM_ABOVE = 0.25
#: Interval in seconds between checks whether a machine with enough free resources for the cell
#: exists.
_LOOK_S = 5.0

#: Contents of files in a grid's folder, by path relative to the folder.
Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class CellResources:
    """Resources that the cluster reserves for each running cell (one training).

    Attributes:
        cpus, gpus: number of CPUs and of GPUs per cell; with fractions, several cells share a CPU
            or GPU.
        memory_bytes: memory per cell in bytes; 0 sets no limit; None measures the memory of the
            first cell, which then runs alone.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int | None = 0

    @classmethod
    def of(cls, words: list[str]) -> CellResources:
        """Parse options such as `cpus=N`, `gpus=N`, `memory=SIZE` and `memory=auto`.

        >>> CellResources.of(["gpus=0.5", "memory=2GB"])
        CellResources(cpus=1.0, gpus=0.5, memory_bytes=2000000000)

        Raises:
            ConfigError: an option has another form, or the options reserve no resources.
        """
        found = cls()
        for word in words:
            name, _, text = word.partition("=")
            try:
                if name == "memory":
                    found = replace(found, memory_bytes=_memory(text))
                elif name in ("cpus", "gpus") and 0 <= float(text) < math.inf:
                    found = replace(found, **{name: float(text)})  # type: ignore[arg-type]
                else:
                    raise ValueError
            except ValueError:
                raise ConfigError(
                    "this is an unknown resource of a cell",
                    where="--ray",
                    got=word,
                    want="ADDRESS,cpus=NUMBER,gpus=NUMBER,memory=2GB|auto",
                ) from None
        if not (found.cpus or found.gpus):
            raise ConfigError(
                "a cell must reserve some resources of a machine",
                where="--ray",
                got=",".join(words),
            )
        return found

    @property
    def of_ray(self) -> dict[str, float]:
        """Return the resources as options of a Ray actor."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "memory": self.memory_bytes or 0}

    def places(self, has: Mapping[str, float]) -> int:
        """Return how many cells a machine with these Ray resources can run at the same time."""
        asked = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_bytes or 0}
        return int(min(has.get(name, 0) / much for name, much in asked.items() if much))

    def __str__(self) -> str:
        memory = f" and {self.memory_bytes / 1e6:.0f} MB of memory" if self.memory_bytes else ""
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs{memory} a cell"


def _memory(text: str) -> int | None:
    return None if text == "auto" else memory_bytes(text)


class RayCluster(AbstractContextManager["RayCluster"]):
    """Connection to a Ray cluster, with data stored in it; as a context manager, it closes itself.

    Args:
        address: address of the cluster's head node; "auto" uses the cluster that runs on this
            machine; "local" starts a cluster on this machine only, with the loopback address and a
            random token.
        resources: CPUs, GPUs and memory that each cell uses.

    Raises:
        UserError: Ray is not installed, no cluster answers at this address, or a new cluster does
            not start.
    """

    def __init__(self, address: str, resources: CellResources | None = None) -> None:
        self.resources = resources or CellResources()
        self._folder: Path | None = None
        self._head: Service | None = None
        loopback = address == LOCAL or is_loopback(address.rpartition(":")[0])
        os.environ |= _ENVIRONMENT | (_LOOPBACK if loopback else {})
        self._before = {name: os.environ.get(name) for name in _TOKEN}
        if address == LOCAL:
            os.environ |= zip(_TOKEN, ("token", secrets.token_hex(32)), strict=True)
        early = "ray" in sys.modules
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError:
            raise UserError("Ray is not installed", fix="pip install 'vfl[ray]'") from None
        self.ray, self._own = ray, not ray.is_initialized()
        self.measuring = threading.Lock()
        self._cache, self._alone = DataCache(), threading.Lock()
        self._kept: tuple[Any, Any] = None, None
        try:
            self._connect(address)
            if loopback and not is_loopback(ray.util.get_node_ip_address()):
                raise UserError(
                    "Ray of this process listens beyond the loopback address",
                    got=ray.util.get_node_ip_address(),
                    fix="a new Python process that does not import ray" if early else None,
                )
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str) -> None:
        try:
            if address == LOCAL and self._own:
                address = self._start()
            if address not in (LOCAL, "auto"):
                round_trip_s(address)  # if no cluster answers, Ray terminates the calling process
            if self._own:
                environment = {"runtime_env": {"env_vars": _ENVIRONMENT}}
                self.ray.init(address, log_to_driver=False, logging_level="ERROR", **environment)
        except (PeerError, OSError, ValueError, RuntimeError) as error:
            facts = (error.got, error.where) if isinstance(error, PeerError) else ()
            why = "".join(f": {fact}" for fact in facts if fact)
            raise UserError(
                "no Ray cluster answers",
                got=f"{address}{why}",
                fix="ray start --head, and its address; or --ray local",
            ) from None

    def _start(self) -> str:
        """Start a cluster on this machine only, and return its address.

        Raises:
            LostPeerError: the cluster did not start in time.
        """
        # The path is short, because the length of a socket's path is limited; only the user can
        # read the folder.
        short = "/tmp" if os.access("/tmp", os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="vfl-ray-", dir=short))
        # Ray's node process (raylet) waits 15 seconds for the ports that its agents choose, and
        # then ends; agents on a busy machine need more time. The raylet does not wait if options of
        # `ray start` set the ports.
        port, client_port, *others = free_ports(2 + len(_PORTS))
        ports = [f"--{name}={one}" for name, one in zip(_PORTS, others, strict=True)]
        command = [
            *(sys.executable, "-c", _HEAD, str(os.getpid()), "start", "--head", "--block"),
            *(f"--port={port}", f"--node-ip-address={_HOST}", *ports),
            *("--include-dashboard=false", "--disable-usage-stats"),
            f"--ray-client-server-port={client_port}",  # Ray requires this option
            *(f"--num-cpus={usable_cores()}", f"--temp-dir={self._folder}"),
        ]
        self._head = Service("Ray", command, os.environ, self._folder / "start.log")
        self._head.wait_for("Ray runtime started", _STARTS_WITHIN_S)
        return f"{_HOST}:{port}"

    def close(self) -> None:
        """Close the connection if it is open; stop the cluster if this object started it."""
        if self._own:
            self.ray.shutdown()
        if self._head is not None:
            self._head.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for name, value in self._before.items():  # the next cluster has another token, or no token
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}

    def __exit__(self, *error: object) -> None:
        """See `close`."""
        self.close()

    @classmethod
    def of(cls, asked: str) -> RayCluster:
        """Connect to a cluster; a cell's resources follow the address: `auto,cpus=2,memory=2GB`.

        Raises:
            ConfigError: see `CellResources.of`.
            UserError: Ray is not installed, no cluster answers at this address, or a new cluster
                does not start.
        """
        address, *words = asked.split(",")
        return cls(address, CellResources.of(words))

    @property
    def places(self) -> int:
        """Number of cells that the cluster can run at the same time.

        Raises:
            ConfigError: no machine of the cluster has enough resources for a cell.
        """
        alive = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        room = sum(self.resources.places(one) for one in alive)
        if not room:
            raise ConfigError(
                "no machine of the cluster has enough resources for a cell",
                got=str(self.resources),
                want="the resources that ray status shows",
            )
        return room

    def actor(self, *arguments: Any) -> Any:
        """Start an actor in the cluster, which can run cells."""
        made = self.ray.remote(**self.resources.of_ray, max_restarts=0)(_Remote)
        return made.remote(*arguments)

    def answer(self, reference: Any) -> Any:
        """Wait for an actor's result, as long as a machine of the cluster can run the cell.

        Raises:
            ConfigError: no machine of the cluster has enough resources for the cell any more.
        """
        while True:
            try:
                return self.ray.get(reference, timeout=_LOOK_S)
            except self.ray.exceptions.GetTimeoutError:
                _ = self.places

    def measured(self, peak_bytes: int) -> None:
        """Set every cell's memory from the first cell's peak memory, unless the user set a size."""
        if self.resources.memory_bytes is None:
            room = int(peak_bytes * (1 + _ROOM_ABOVE))
            self.resources = replace(self.resources, memory_bytes=room)

    def rows(self, folder: GridFolder, cell: Cell) -> Any:
        """Return a Ray reference to the data of every party for a cell."""
        with self._alone:  # each worker of the scheduler calls this method in a separate thread
            data = self._cache.of(rows_of(folder, cell))
            if self._kept[0] is not data:
                self._kept = data, self.ray.put(data)
            return self._kept[1]


class RayWorker(RetryingWorker):
    """Runs cells in a Ray actor.

    Args:
        folder: folder of the grid.
        device: device on which the models are trained.
        cluster: cluster in which the actor runs.
    """

    def __init__(self, folder: GridFolder, device: str, cluster: RayCluster) -> None:
        super().__init__(folder, device)
        self._cluster = cluster
        self._actor: Any = None

    def run(self, cell: Cell) -> None:
        """Run a cell; if its memory is measured, it runs alone, in an actor that then ends."""
        if self._cluster.resources.memory_bytes is None:
            with self._cluster.measuring:
                if self._cluster.resources.memory_bytes is None:
                    super().run(cell)
                    self._end()
                    return
        super().run(cell)

    def _attempt(self, cell: Cell) -> str | None:
        named = self._folder.modules is not None  # functions that the actor imports load the data
        failures = self._cluster.ray.exceptions
        try:
            rows = None if named else self._cluster.rows(self._folder, cell)
            self._actor = self._actor or self._cluster.actor(self._device)
            files = grid_of(self._folder, cell) | _packed(self._folder.path, cell)
            asked = self._actor.run.remote(cell.name, files, rows)
            version, peak_bytes, made = self._cluster.answer(asked)
        except failures.RayError as error:
            self._end()
            return _cause(error, failures)
        if version != VERSION:
            raise UserError("the cluster runs another version of vfl", got=version, want=VERSION)
        self._cluster.measured(peak_bytes)
        _unpacked(self._folder.path, cell, made)
        return None

    def _end(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            self._cluster.ray.kill(actor)


def _cause(error: Any, failures: Any) -> str:
    """Return why an actor returned no result, without Ray's own text, which may contain data."""
    if isinstance(error, failures.OutOfMemoryError):
        return "its machine had no free memory"
    if isinstance(error, failures.RayTaskError):
        return f"{type(error.cause).__name__} outside the training"
    return f"Ray's {type(error).__name__}"


def grid_of(folder: GridFolder, cell: Cell) -> dict[str, bytes]:
    """Return the files of a grid's folder, with a list of cells that contains only this cell."""
    record = folder.record
    (own,) = (one for one in record["cells"] if one["name"] == cell.name)
    alone = json.dumps({**record, "cells": [own]}).encode()
    return {GRID: alone, CONFIG: (folder.path / CONFIG).read_bytes()}


class _Remote:
    """Ray actor that runs cells, each in a temporary folder."""

    def __init__(self, device: str) -> None:
        from vfl.core.seeds import use_one_thread

        use_one_thread()
        self._device = device

    def run(
        self, name: str, files: Files, data: Mapping[str, PartyData] | None
    ) -> tuple[str, int, Files]:
        """Run one cell, from the files of its grid and its own files.

        Returns:
            The version of vfl, the peak memory of the actor's process in bytes, and the cell's
            files.
        """
        with tempfile.TemporaryDirectory(prefix="vfl-grid-") as place, not_durable():
            root = Path(place)
            for file in (GRID, CONFIG):
                write_bytes(root / file, files[file])
            folder = GridFolder(root)
            (cell,) = [one for one in folder.cells() if one.name == name]
            _unpacked(root, cell, {one: files[one] for one in files if one not in (GRID, CONFIG)})
            run_cell(cell, folder, data or {}, self._device)
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return VERSION, peak_bytes, _packed(root, cell)


def _places(root: Path, cell: Cell) -> list[Path]:
    """Return the files and folders in a grid's folder that belong to one cell."""
    folder = GridFolder(root)
    return [
        folder.cells_path / cell.name,
        folder.aside(cell),
        folder.stale(cell),
        root / "made_of" / f"{cell.name}.json",
    ]


def _packed(root: Path, cell: Cell) -> dict[str, bytes]:
    found = {}
    for place in _places(root, cell):
        for path in [place] if place.is_file() else place.rglob("*"):
            if path.is_file():
                found[path.relative_to(root).as_posix()] = path.read_bytes()
    return found


def _unpacked(root: Path, cell: Cell, files: Files) -> None:
    """Replace all files of a cell in a grid's folder by the given files."""
    places = _places(root, cell)
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    for name, content in files.items():
        path = root / PurePosixPath(name)
        if ".." in path.parts or not any(path.is_relative_to(place) for place in places):
            raise UserError("a worker of the cluster returned a file of another cell")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
