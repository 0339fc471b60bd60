"""Processes that die: their cells are tried again, on this machine and on a cluster.

Ray itself is not asked: what stands for it here runs actors in this process, or lets them die.
"""

import os
import sys
from types import SimpleNamespace

import pytest

from vfl.core.errors import ConfigError, UserError
from vfl.core.processes import Worker
from vfl.core.storage import read_json
from vfl.experiments import is_done, scheduler
from vfl.experiments.on_ray import CellResources, RayCluster, RayWorker
from vfl.experiments.scheduler import ProcessWorker, run_cells


class RayError(Exception):
    pass


class OutOfMemoryError(RayError):
    pass


class RayTaskError(RayError):
    cause = OSError("a cell's value")


class GetTimeoutError(RayError, TimeoutError):
    pass


class Ray:
    """Stands for the package."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        OutOfMemoryError=OutOfMemoryError,
        RayTaskError=RayTaskError,
        GetTimeoutError=GetTimeoutError,
    )

    def __init__(self):
        self.deaths = []
        self.options = []
        self.killed = 0
        self.machines = [{"CPU": 2.0, "memory": 8e9}]

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "Resources": one} for one in self.machines]

    def put(self, data):
        return data

    def remote(self, **options):
        self.options.append(options)
        return lambda kind: SimpleNamespace(remote=lambda *own: self.actor(kind(*own)))

    def actor(self, made):
        run = SimpleNamespace(remote=lambda *asked: lambda: made.run(*asked))
        return SimpleNamespace(run=run)

    def get(self, asked, timeout):
        if self.deaths:
            raise self.deaths.pop(0)
        return asked()

    def kill(self, actor):
        self.killed += 1


@pytest.fixture
def ray(monkeypatch):
    stands_for = Ray()
    monkeypatch.setitem(sys.modules, "ray", stands_for)
    return stands_for


def test_a_token_of_a_cluster_ends_with_it(ray, monkeypatch):
    ray.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with RayCluster("local"):
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_AUTH_TOKEN" not in os.environ


def one_cell(written, tiny, tmp_path):
    folder, (cell, *_) = written(tmp_path / "grid", tiny(seeds=[0]))
    return folder, cell


@pytest.mark.parametrize(
    ("death", "cause"),
    [
        (OutOfMemoryError("used 3 GB"), "its machine had no free memory"),
        (RayTaskError("a cell's value"), "OSError outside the training"),
        (RayError("a cell's value"), "Ray's RayError"),
    ],
)
def test_a_cell_whose_actors_all_die_fails_with_the_cause(
    death, cause, ray, written, tiny, tmp_path
):
    folder, cell = one_cell(written, tiny, tmp_path)
    ray.deaths = [death] * scheduler.TRIES
    (failed,) = run_cells(folder, [cell], cluster=RayCluster("auto"))
    assert failed.failure["got"] == f"{scheduler.TRIES} tries: {cause}"
    assert len(ray.options) == ray.killed == scheduler.TRIES


def test_a_cell_whose_actor_dies_is_tried_again(ray, written, tiny, tmp_path):
    folder, cell = one_cell(written, tiny, tmp_path)
    ray.deaths = [OutOfMemoryError()] * (scheduler.TRIES - 1)
    assert run_cells(folder, [cell], cluster=RayCluster("auto")) == []
    assert is_done(folder.cells_path / cell.name)


def test_the_first_cell_runs_alone_and_its_memory_packs_the_others(ray, written, tiny, tmp_path):
    folder, cells = written(tmp_path / "grid", tiny())
    cluster = RayCluster.of("auto,cpus=0.5,memory=auto")
    assert cluster.places == 4
    assert run_cells(folder, cells, cluster=cluster) == []
    taken = cluster.resources.memory_bytes
    assert [one["memory"] for one in ray.options[:2]] == [0, taken]
    assert cluster.places == min(4, 8e9 // taken)


@pytest.mark.parametrize(
    ("asked", "places"), [("cpus=0.5", 4), ("memory=3GB", 2), ("cpus=0.5,memory=3GB", 2)]
)
def test_cells_at_a_time_fit_a_machine(asked, places, ray):
    assert RayCluster.of(f"auto,{asked}").places == places


def test_a_cell_that_fits_no_machine_is_refused(ray, written, tiny, tmp_path):
    folder, cell = one_cell(written, tiny, tmp_path)
    with pytest.raises(ConfigError, match="no machine of the cluster") as caught:
        run_cells(folder, [cell], cluster=RayCluster.of("auto,memory=9GB"))
    assert "9000 MB of memory a cell" in caught.value.got


def test_a_cell_waits_no_longer_when_its_machine_is_gone_for_good(ray, written, tiny, tmp_path):
    folder, cell = one_cell(written, tiny, tmp_path)
    cluster = RayCluster("auto")
    worker = RayWorker(folder, "cpu", cluster)
    ray.deaths, ray.machines = [GetTimeoutError()], []
    with pytest.raises(ConfigError, match="no machine of the cluster"):
        worker.run(cell)


def test_another_version_in_the_cluster_ends_the_grid(ray, written, tiny, tmp_path, monkeypatch):
    folder, cells = written(tmp_path / "grid", tiny(seeds=[0]))
    monkeypatch.setattr(ray, "get", lambda asked, timeout: ("0.0.1", 0, {}))
    with pytest.raises(UserError, match="another version"):
        run_cells(folder, cells, jobs=2, cluster=RayCluster("auto"))


def test_a_process_that_always_dies_fails_its_cell(written, tiny, tmp_path, monkeypatch):
    folder, cell = one_cell(written, tiny, tmp_path)
    program = [sys.executable, "-S", "-c", "import os; input(); os._exit(7)"]
    monkeypatch.setattr(ProcessWorker, "_start", lambda self: Worker("the grid", program, {}))
    worker = ProcessWorker(folder, "cpu")
    worker.run(cell)
    failure = read_json(folder.cells_path / cell.name / "failure.json")
    assert failure["got"] == f"{scheduler.TRIES} tries: exit status 7"


def test_a_worker_that_was_stopped_tries_no_further(ray, written, tiny, tmp_path):
    folder, cell = one_cell(written, tiny, tmp_path)
    worker = RayWorker(folder, "cpu", RayCluster("auto"))
    worker.stop()
    worker.run(cell)
    assert ray.options == []


@pytest.mark.parametrize("asked", ["memory=2", "memory=none", "memory=1MB"])
def test_a_memory_that_is_no_size_is_refused(asked):
    with pytest.raises(ConfigError, match="unknown resource"):
        CellResources.of([asked])
