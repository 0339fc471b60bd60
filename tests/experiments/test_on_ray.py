"""A grid on a real Ray cluster of two nodes: the same table, whatever dies meanwhile."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
from attack_grids import content

import vfl
from benchmarks.harness import family
from vfl.config import Experiment
from vfl.core.errors import ConfigError, UserError
from vfl.experiments.on_ray import _PORTS, RayCluster
from vfl.experiments.study import plan_study, run_study
from vfl.transport.probe import free_ports

#: Ray takes seconds to import, which every run of any tests would wait for.
pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here"),
]
ROOT = Path(__file__).parents[2]
#: A cluster of several nodes listens on every network, so it runs where only the loopback exists.
INSIDE = os.environ.get("VFL_TEST_NO_NETWORK") == "1"
inside = pytest.mark.skipif(not INSIDE, reason="runs inside the test that takes its network away")


@pytest.mark.skipif(INSIDE, reason="the others run here")
def test_on_a_machine_without_a_network():
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "net", __file__]
    alone = ["unshare", "--map-root-user", "--net", "sh", "-c"]
    command = [*alone, f"ip link set lo up && exec {shlex.join(words)}"]
    try:
        if subprocess.run([*alone, "true"], capture_output=True).returncode:
            pytest.skip("this machine lets nobody make a namespace")
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    done = subprocess.run(command, env=os.environ | {"VFL_TEST_NO_NETWORK": "1"},
                          capture_output=True, text=True, timeout=560)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "FAILED" not in done.stdout


TINY = """
name = "tiny"
parties.client = { width = 16, bottom = "mlp:hidden=16,last=relu" }
train = { epochs = 2 }
compare = { codecs = ["none", "topk:k=2"], seeds = [0, 1] }
"""


def listening(pids):
    """Addresses at which processes accept TCP connections."""
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout.splitlines()
    own = [line for line in lines if pids & set(map(int, re.findall(r"pid=(\d+)", line)))]
    return {line.split()[3].rpartition(":")[0] for line in own}


@pytest.mark.skipif(INSIDE, reason="the others run here")
@pytest.mark.skipif(shutil.which("ss") is None, reason="there is no ss here")
@pytest.mark.parametrize(
    ("variables", "failure"),
    [
        pytest.param({}, None, id="as it is"),
        pytest.param(
            {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "50"},
            "3 tries: its machine had no free memory",
            id="without memory",
        ),
    ],
)
def test_a_cluster_of_one_machine_listens_on_the_loopback_alone(variables, failure, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    command = [sys.executable, "-m", "vfl", "compare", "tiny.toml", "--ray", "local,memory=auto"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), **variables}
    seen, addresses = set(), set()
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            below = {*family(process.pid)}
            addresses |= listening(below)
            seen |= below
            time.sleep(0.2)
    assert process.returncode == (1 if failure else 0), (tmp_path / "log").read_text()
    assert addresses
    assert addresses <= {"127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"}
    ends_by = time.monotonic() + 30  # Ray's workers end when their raylet has ended
    while left := [pid for pid in seen if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < ends_by, left
        time.sleep(0.2)
    failures = [json.loads(one.read_text()) for one in tmp_path.rglob("failure.json")]
    assert {one["got"] for one in failures} == ({failure} if failure else set())


CONTENT = content(
    {
        "defenses": ["layer_norm"],
        "attacks": ["nearest_mean", "kmeans:starts=1"],
        "baselines": ["scratch", "raw"],
        "leaks": [1, 3],
        "draws": 2,
        "seeds": [0, 1],
    }
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of two nodes on this machine, one CPU each, on the loopback alone."""
    folder = tmp_path_factory.mktemp("ray")
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "120",  # on a busy machine
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    common = ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000",
              "--disable-usage-stats"]  # fmt: skip
    ports = iter(free_ports(2 * len(_PORTS)))  # it waits for those that its agents choose
    nodes, logs = [], []

    def start(*words):
        log = (folder / f"{len(nodes)}.log").open("w+")
        logs.append(log)
        given = [f"--{name}={next(ports)}" for name in _PORTS]
        command = [*program, *common, *given, *words]
        nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment,
                                      start_new_session=True))  # fmt: skip
        return folder / f"{len(nodes) - 1}.log"

    short = f"/tmp/vfl-ray-{os.getpid()}"  # a socket's path has to be short
    head = start("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={short}")
    end = time.monotonic() + 150
    while not (found := re.search(r"--address='([0-9.:]+)'", head.read_text())):
        assert time.monotonic() < end, head.read_text()
        time.sleep(0.2)
    address = found[1]
    start(f"--address={address}")
    with RayCluster(address) as connected:
        while sum(node["Alive"] for node in connected.ray.nodes()) < 2:
            assert time.monotonic() < end
            time.sleep(0.2)
        yield address
    for node, log in zip(reversed(nodes), logs, strict=True):
        os.killpg(node.pid, signal.SIGTERM)
        node.wait(30)
        log.close()
    subprocess.run(["rm", "-r", "-f", short], check=True)


def timeless(results):
    """The table without what depends on time."""
    table = results.table
    table = table[~table.measure.isin(["seconds", "steps_per_second"])]
    return table.drop(columns="seconds").reset_index(drop=True)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return vfl.grid(CONTENT, out=tmp_path_factory.mktemp("here") / "grid", progress=False)


@inside
def test_the_table_is_that_of_this_machine(cluster, here, tmp_path):
    there = vfl.grid(CONTENT, out=tmp_path / "grid", ray=cluster, progress=False)
    assert there.failed == []
    pd.testing.assert_frame_equal(timeless(there), timeless(here))
    weights = [
        [vfl.Run(path.parent).summary["weights_sha256"] for path in
         sorted((one.path / "cells").glob("*/summary.json"))]
        for one in (here, there)
    ]  # fmt: skip
    assert weights[0] == weights[1]


@inside
def test_a_worker_that_dies_loses_its_cell_alone(cluster, here, tmp_path):
    study = plan_study("grid", Experiment.model_validate(CONTENT))
    killed = []

    def kill():
        """The first actor that is seen at work, once."""
        while not killed:
            found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True)
            pids = re.findall(r"^ *(\d+) ray::_Remote\.run", found.stdout, re.MULTILINE)
            if pids:
                os.kill(int(pids[0]), signal.SIGKILL)
                killed.append(pids[0])
            time.sleep(0.05)

    threading.Thread(target=kill, daemon=True).start()
    there = run_study(study, tmp_path / "grid", "vfl grid spread.toml", ray=cluster)
    assert killed
    assert there.failed == []
    pd.testing.assert_frame_equal(timeless(there), timeless(here))


@inside
def test_what_was_begun_here_goes_on_there(cluster, here, tmp_path):
    study = plan_study("grid", Experiment.model_validate(CONTENT))
    begun = run_study(study, tmp_path / "grid", "vfl grid spread.toml", study.cells[:2])
    (head,) = (begun.path / "cells").glob("none-seed0-*/run.json")
    before = head.read_text()
    there = run_study(study, tmp_path / "grid", "vfl grid spread.toml", ray=cluster)
    pd.testing.assert_frame_equal(timeless(there), timeless(here))
    assert head.read_text() == before  # it was whole, and came back as it went


@inside
def test_a_cell_takes_what_is_said_of_a_machine(cluster):
    """Two machines with one CPU each and no GPU."""
    assert RayCluster.of(cluster).places == 2
    assert RayCluster.of(f"{cluster},cpus=0.5").places == 4
    for much in ("cpus=2", "gpus=1"):
        with pytest.raises(ConfigError, match="enough resources for a cell"):
            _ = RayCluster.of(f"{cluster},{much}").places


@inside
def test_no_cluster_is_one_clear_error():
    with pytest.raises(UserError, match="no Ray cluster answers"):
        RayCluster("127.0.0.1:1")
