"""Rows of `benchmarks.mpc`: exact on computed lines, of scripted peers, and between processes."""

import re
from pathlib import Path

import pytest

from benchmarks import mpc
from benchmarks.emulation import Wan, open_network
from benchmarks.mpc import RunningSystem, bench_mpc
from benchmarks.mpc_party import products
from benchmarks.mpc_workloads import workload_named
from benchmarks.peers import talk
from vfl.core.errors import (
    BadOptionError,
    ConfigError,
    UnknownNameError,
)

LINE = Wan(mbps=80, round_trip_ms=40)
HEADERS = 24 * 16
DIGESTS = 3 * (32 + 16)  # of what each two agreed on, the other way


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


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError):
        bench_mpc(["gelu-1k"], peer=["spu=/python"], wan=LINE, network="model")
    with pytest.raises(UnknownNameError):
        bench_mpc(["gelu-2k"])
    with pytest.raises(BadOptionError):
        bench_mpc(["gelu-1k"], ["quick"])


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
