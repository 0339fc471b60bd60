"""Cells of a grid on a Ray cluster (the extra `ray`): a worker is an actor, on whatever machine.

A machine of the cluster shares no disk with this one. So an actor works in a folder of its own: it
gets what a cell's folder holds, so that what was begun goes on, and gives back what the folder
holds afterwards. Rows are put into Ray's object store, which has them once a machine. A worker that
dies loses its cell's progress alone; the cell is begun again elsewhere. Inside the cluster Ray
passes objects in its own form, as pickles: all of its machines have to be one's own.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from vfl.core.errors import ConfigError, LostPeerError, UserError
from vfl.core.storage import write_bytes, write_json
from vfl.core.version import VERSION
from vfl.experiments.cells import FAILURE, Cell, GridFolder
from vfl.experiments.scheduler import rows_of, run_cell
from vfl.experiments.training import DataCache
from vfl.transport.probe import round_trip_s

if TYPE_CHECKING:
    from vfl.datasets import PartyData

#: Ray reports nothing to its makers, and each worker computes on one thread.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns
    "OMP_NUM_THREADS": "1",
}
#: Number of tries of a cell whose worker died.
_TRIES = 3

#: Files below a grid's folder, by their path there.
Files = Mapping[str, bytes]


class RayCluster:
    """A cluster, and the rows that it holds.

    Args:
        address: of its head, or "auto" for the one that this machine belongs to.
        cpus, gpus: what a cell takes of a machine.

    Raises:
        UserError: Ray is not installed, or there is no such cluster.
        ConfigError: no machine has room for one cell.
    """

    def __init__(self, address: str, cpus: float = 1.0, gpus: float = 0.0) -> None:
        os.environ |= _ENVIRONMENT
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError:
            raise UserError("Ray is not installed", fix="pip install 'vfl[ray]'") from None
        self.ray, self._resources = ray, {"num_cpus": cpus, "num_gpus": gpus}
        options = {"runtime_env": {"env_vars": _ENVIRONMENT}, "log_to_driver": False}
        try:
            if address != "auto":
                round_trip_s(address)  # where nothing answers, Ray ends the process that asks
            if not ray.is_initialized():
                ray.init(address, logging_level="ERROR", **options)
        except (LostPeerError, OSError, ValueError, RuntimeError):
            raise UserError(
                "no Ray cluster answers", got=address, fix="ray start --head, and its address"
            ) from None
        self._cache, self._alone = DataCache(), threading.Lock()
        self._kept: tuple[Any, Any] = None, None

    @classmethod
    def of(cls, asked: str) -> RayCluster:
        """Connect to a cluster, with resources of a cell after commas: `auto,cpus=2,gpus=0.5`.

        Raises:
            ConfigError: neither CPUs nor GPUs, or not so many above 0.
            UserError: see the class.
        """
        return cls(*_address_and_room(asked))

    @property
    def places(self) -> int:
        """Number of cells that the cluster can run at a time.

        Raises:
            ConfigError: the cluster has no room for a cell.
        """
        asked = {"CPU": self._resources["num_cpus"], "GPU": self._resources["num_gpus"]}
        room = 0
        for node in self.ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                room += int(min(has.get(name, 0) / much for name, much in asked.items() if much))
        if not room:
            raise ConfigError(
                "no machine of the cluster has room for a cell",
                got=f"{asked['CPU']:g} CPUs and {asked['GPU']:g} GPUs a cell",
                want="what ray status shows",
            )
        return room

    def actor(self, *arguments: Any) -> Any:
        """Start a process in the cluster that runs cells."""
        return self.ray.remote(**self._resources, max_restarts=0)(_Remote).remote(*arguments)

    def rows(self, folder: GridFolder, cell: Cell) -> Any:
        """Return a reference to every party's rows of a cell."""
        with self._alone:  # every worker of the scheduler asks from a thread of its own
            data = self._cache.of(rows_of(folder, cell))
            if self._kept[0] is not data:
                self._kept = data, self.ray.put(data)
            return self._kept[1]


def _address_and_room(asked: str) -> tuple[str, float, float]:
    """Return address, CPUs and GPUs of `ADDRESS,cpus=N,gpus=N`.

    >>> _address_and_room("10.0.0.1:6379,gpus=0.5")
    ('10.0.0.1:6379', 1.0, 0.5)
    """
    address, *words = asked.split(",")
    room = {"cpus": 1.0, "gpus": 0.0}
    for word in words:
        name, _, number = word.partition("=")
        try:
            much = float(number)
        except ValueError:
            much = math.nan
        if name not in room or not 0 <= much < math.inf:
            raise ConfigError("no such resource of a cell", where="--ray", got=word,
                              want="ADDRESS,cpus=NUMBER,gpus=NUMBER")  # fmt: skip
        room[name] = much
    if not any(room.values()):
        raise ConfigError("a cell takes something of a machine", where="--ray", got=asked)
    return address, room["cpus"], room["gpus"]


class RayWorker:
    """Runs cells in an actor of a cluster; another one if it dies.

    Args:
        folder: of the grid.
        device: where models run.
        cluster: where the actor lives.
    """

    def __init__(self, folder: GridFolder, device: str, cluster: RayCluster) -> None:
        self._folder, self._device, self._cluster = folder, device, cluster
        self._actor: Any = None

    def run(self, cell: Cell) -> None:
        """Run a cell; what went wrong is in its folder afterwards."""
        ray = self._cluster.ray
        grid = {name: (self._folder.path / name).read_bytes() for name in GRID_FILES}
        held = _packed(self._folder.path, cell)
        for left in reversed(range(_TRIES)):
            try:
                if self._actor is None:
                    self._actor = self._cluster.actor(grid, self._device)
                named = self._folder.modules is not None  # its functions make its rows
                rows = None if named else self._cluster.rows(self._folder, cell)
                version, files = ray.get(self._actor.run.remote(cell.name, held, rows))
            except ray.exceptions.RayActorError:
                self._actor = None
                if not left:
                    path = self._folder.cells_path / cell.name / FAILURE
                    lost = LostPeerError(
                        "the workers that trained this died", got=f"{_TRIES} tries"
                    )
                    write_json(path, lost.record() | {"exit": lost.exit_code})
                continue
            if version != VERSION:
                raise UserError(
                    "the cluster runs another version of vfl", got=version, want=VERSION
                )
            _unpacked(self._folder.path, cell, files)
            return

    def stop(self) -> None:
        """Stop, whatever is being run."""
        if self._actor is not None:
            self._cluster.ray.kill(self._actor)
            self._actor = None


#: Files that make a folder the folder of a grid.
GRID_FILES = ("grid.json", "config.toml")


class _Remote:
    """Worker in the cluster; it runs cells, each in a temporary folder."""

    def __init__(self, grid: Files, device: str) -> None:
        from vfl.core.seeds import use_one_thread

        use_one_thread()
        self._grid, self._device = grid, device

    def run(
        self, name: str, held: Files, data: Mapping[str, PartyData] | None
    ) -> tuple[str, Files]:
        """Run one cell from its folder's files, and return the files afterwards."""
        with tempfile.TemporaryDirectory(prefix="vfl-grid-") as place:
            root = Path(place)
            for file, content in self._grid.items():
                write_bytes(root / file, content)
            folder = GridFolder(root)
            (cell,) = [one for one in folder.cells() if one.name == name]
            _unpacked(root, cell, held)
            run_cell(cell, folder, data or {}, self._device)
            return VERSION, _packed(root, cell)


def _places(root: Path, cell: Cell) -> list[Path]:
    """Return the parts of a grid's folder that belong to one cell."""
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
    """Make what a folder holds of a cell these files."""
    places = _places(root, cell)
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    for name, content in files.items():
        path = root / PurePosixPath(name)
        if ".." in path.parts or not any(path.is_relative_to(place) for place in places):
            raise UserError("a worker of the cluster gave back a file of another cell")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
