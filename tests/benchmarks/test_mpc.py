"""Rows of `benchmarks.mpc`: exact on computed lines, of scripted peers, and between processes."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import mpc
from benchmarks.emulation import Network, Wan, open_network
from benchmarks.mpc import Run, RunningSystem, System, bench_mpc, peers
from benchmarks.mpc_party import products
from benchmarks.mpc_workloads import workload_named
from benchmarks.peers import talk
from vfl.core.errors import (
    BadOptionError,
    ConfigError,
    LostPeerError,
    UnknownNameError,
    UserError,
)

LINE = Wan(mbps=80, round_trip_ms=40)
HEADERS = 24 * 16
DIGESTS = 3 * (32 + 16)  # of what each two agreed on, the other way

#: Adds up in plaintext, after a while that depends on the rank; rank 1 sends rank 0 so many bytes.
SENT = 1000
ADAPTER = """
import socket
import time
import numpy as np

class Peer:
    def __init__(self, assignment, port):
        self.rank, self.port = assignment["rank"], port
        if self.rank == 0:
            self.door = socket.create_server((assignment["host"], port))

    def connect(self, endpoints):
        assert tuple(endpoints[self.rank]) == ("127.0.0.1", self.port)
        if self.rank == 0:
            self.link = self.door.accept()[0]
        else:
            self.link = socket.create_connection(endpoints[0])
        print("words of a library")

    def prepare(self, task, arrays):
        self.own = arrays

    def run(self):
        time.sleep(0.01 * (1 + self.rank))
        values = self.own["inputs"] @ self.own["0.weight"] + self.own["0.bias"]
        self.found = 1 / (1 + np.exp(-values)) + OFF
        if self.rank == 1:
            self.link.sendall(bytes(SENT))
        else:
            assert len(self.link.recv(SENT, socket.MSG_WAITALL)) == SENT

    def result(self):
        return {"": self.found} if self.rank == 0 else None
"""


def scripted(folder, off, name="spu-semi2k"):
    """A peer of two processes whose adapter is off by so much."""
    shutil.copy(talk.__file__, folder / "talk.py")
    (folder / "fake_peer.py").write_text(
        ADAPTER.replace("OFF", str(off)).replace("SENT", str(SENT))
    )
    return System(name, 2, (sys.executable, "-I", str(folder / "talk.py"), "fake"))


def task_of(name, folder):
    return mpc._task(workload_named(name), False, folder, True)


def test_computed_lines_give_the_bytes_and_hops_of_the_formulas():
    thesis, fast = bench_mpc(["lr100-b64-inference"], wan=LINE, network="model")
    b, d = 64, 100
    assert 0 < fast.bytes_online - (8 * d + 18 * b) < HEADERS
    assert 0 < fast.bytes_offline - 6 * b < HEADERS
    assert 0 < fast.bytes_setup - 8 * b * d < HEADERS + DIGESTS
    both = thesis.bytes_online + thesis.bytes_offline
    assert 0 < both - (16 * (b * d + d) + 8 * b + 24 * b) < HEADERS + 80
    assert (thesis.hops, fast.hops) == (4, 3)
    assert (thesis.network, fast.system, fast.rival_ratio) == ("model", "fast", None)
    # Three hops of 20 ms; no party sends more than half of 2032 bytes at 10 bytes a microsecond.
    assert 60 < fast.limit_ms <= fast.milliseconds < 60.3
    assert max(thesis.max_error, fast.max_error) < 2e-5


def test_fresh_inputs_are_opened_within_the_turn():
    (row,) = bench_mpc(["lr100-b64-inference"], ["fast"], wan=LINE, network="model", fresh=True)
    assert 0 < row.bytes_online - (8 * (64 * 100 + 100) + 18 * 64) < HEADERS
    assert row.bytes_setup < HEADERS + DIGESTS
    assert row.fresh


@pytest.mark.parametrize(("mode", "of_inputs"), [("thesis", 2), ("fast", 1)])
def test_products_of_a_step(mode, of_inputs):
    forward = [(64, 100, 50)] * of_inputs + [(64, 50, 1)] * 2
    assert sorted(products(workload_named("dnn1-b64-inference"), mode)) == sorted(forward)
    step = [*forward, *[(100, 64, 50)] * of_inputs, *[(50, 64, 1), (64, 1, 50)] * 2]
    assert sorted(products(workload_named("dnn1-b64-training"), mode)) == sorted(step)


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_a_scripted_peer_is_timed_and_judged(tmp_path, off):
    with RunningSystem(scripted(tmp_path, off), Network(("P0", "P1", "P2"))) as running:
        first, second = (running.take(task_of("lr100-b64-inference", tmp_path)) for _ in range(2))
    for taken in (first, second):
        assert taken.milliseconds >= 20
        assert taken.cpu_ms > 0
        assert taken.max_error == pytest.approx(off, abs=1e-6)
        assert (taken.bytes_online, taken.bytes_setup) == (None, None)


def test_what_a_peer_sends_through_proxies_is_counted(tmp_path):
    with (
        open_network(("P0", "P1", "P2"), LINE, "proxy") as network,
        RunningSystem(scripted(tmp_path, 0.0), network) as running,
    ):
        for _ in range(2):
            assert running.take(task_of("lr100-b64-inference", tmp_path)).bytes_online == SENT


def test_a_peer_that_cannot_start_says_so(tmp_path):
    broken = System("spu-aby3", 2, (sys.executable, "-I", "-c", "raise SystemExit(3)"))
    with pytest.raises(LostPeerError, match="exit status 3"):
        RunningSystem(broken, Network(("P0", "P1", "P2")))


def test_the_fastest_rival_of_each_turn_is_compared(monkeypatch):
    told = {
        "fast": [9, 8, 2, 9, 10, 4, 9, 11, 5],
        "spu-semi2k": [9, 40] * 3,
        "crypten": [9, 50, 9, 30, 9, 60],
    }

    class Scripted:
        def __init__(self, contender, network):
            self.contender = contender

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def take(self, task):
            of_all = told[task.system]
            assert task.ahead == (task.system == "fast" and len(of_all) % 3 == 1)
            dealt = 6.0 if task.ahead else 0.0
            return Run(of_all.pop(0), 0.5, dealt, 1, 2, 3, 1e-6)

    monkeypatch.setattr(mpc, "RunningSystem", Scripted)
    monkeypatch.setattr(mpc, "_WARM_S", 0.0)
    monkeypatch.setattr(mpc, "PEERS", {"spu": {"spu-semi2k": 2}, "crypten": {"crypten": 2}})
    rivals = ["spu=/python", "crypten=/python"]
    rows = bench_mpc(["gelu-1k"], ["fast"], turns=3, peer=rivals)
    assert [row.milliseconds for row in rows] == [4, 40, 50]
    assert rows[0].online_ratio == pytest.approx(8)  # of 20, 7.5 and 8
    assert [row.end_to_end_ms for row in rows] == [10, 40, 50]
    assert rows[0].rival_ratio == pytest.approx(40 / 11)  # of 40 / 8, 30 / 10 and 40 / 11
    assert [row.cpu_ms for row in rows] == [0.5] * 3
    assert (rows[1].rival_ratio, rows[1].hops, rows[0].hops) == (None, None, 2)
    assert {row.network for row in rows} == {"loopback"}


def test_peers_from_the_command_line():
    assert [each.parties for each in peers("spu=/opt/python")] == [2, 3]
    assert [each.name for each in peers("crypten=/opt/python")] == ["crypten"]
    for bad in ("spv=/opt/python", "spu", "spu="):
        with pytest.raises(BadOptionError):
            peers(bad)


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError):
        bench_mpc(["gelu-1k"], peer=["spu=/python"], wan=LINE, network="model")
    with pytest.raises(UnknownNameError):
        bench_mpc(["gelu-2k"])
    with pytest.raises(BadOptionError):
        bench_mpc(["gelu-1k"], ["quick"])


def test_crypten_is_refused_where_it_would_pass_the_line_by():
    with (
        open_network(("P0", "P1", "P2"), LINE, "proxy") as network,
        pytest.raises(UserError, match="CrypTen"),
    ):
        RunningSystem(System("crypten", 2), network)


def test_adapters_import_nothing_of_vfl():
    for file in Path(talk.__file__).parent.glob("*_peer.py"):
        assert not re.search(r"^\s*(from|import) vfl", file.read_text(), re.MULTILINE)


@pytest.mark.net
@pytest.mark.parametrize("name", ["lr100-b64-training", "dnn1-b64-training"])
@pytest.mark.parametrize("ahead", [True, False])
def test_the_bytes_that_are_told_are_those_of_the_sockets(tmp_path, name, ahead):
    """Setup, dealing and online together; what a connection begins with is before the setup."""
    task = task_of(name, tmp_path).model_copy(update={"system": "fast", "ahead": ahead})
    with (
        open_network(("P0", "P1", "P2"), Wan(mbps=1000), "proxy") as network,
        RunningSystem(mpc.OURS, network) as running,
    ):
        for _ in range(2):
            run = running.take(task)
            told = run.bytes_setup + run.bytes_offline + run.bytes_online
            assert run.bytes_interface == pytest.approx(told, rel=0.01)


@pytest.mark.net
@pytest.mark.parametrize("wan", [None, LINE])
def test_three_real_processes_do_what_the_model_says(wan):
    name = "lr100-b64-training"
    rows = bench_mpc([name], wan=wan, network="proxy", turns=1)
    models = bench_mpc([name], wan=LINE, network="model")
    for row, model in zip(rows, models, strict=True):
        assert row.network == ("proxy" if wan else "loopback")
        assert (row.system, row.hops) == (model.system, model.hops)
        assert (row.bytes_setup, row.bytes_offline) == (model.bytes_setup, model.bytes_offline)
        assert (row.bytes_interface is None) == (wan is None)
        assert abs(row.bytes_online - model.bytes_online) <= 64  # an index of four bytes or a few
        assert row.max_error < 2e-5
        assert row.cpu_ms > 0.1
        assert model.cpu_ms is None
        assert row.milliseconds >= (0.99 * model.limit_ms if wan else 0.1)
        assert (row.limit_ratio is None, row.matmul_ratio is None) == (wan is None, wan is not None)
