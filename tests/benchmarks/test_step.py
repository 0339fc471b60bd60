import shutil
import sys

import pytest

from benchmarks import step
from benchmarks.emulation import Wan
from benchmarks.step import bench_step
from benchmarks.training_step import (
    PATHS,
    WORKLOADS,
    Measurement,
    Setup,
    StepJob,
    in_process,
    modelled,
)
from vfl.core.errors import LostPeerError

STEPS = 8  # and the warm-up
LINE = Wan(mbps=80, round_trip_ms=40)
#: A cut of 64 x 128 float32 with its header, then as many gradients as there are feature parties.
LINE_MS = 40 + 3 * (16 + 4 * 64 * 128) / 1e4


QUICK = {"mlp_small": WORKLOADS["mlp_small"]}


@pytest.fixture(scope="module")
def quick():
    return bench_step(list(QUICK), steps=STEPS, repeats=1)


def test_every_workload_takes_every_path(quick):
    asked = [(w.model, w.batch_size, w.width, path) for w in QUICK.values() for path in PATHS]
    assert [(row.model, row.batch_size, row.width, row.path) for row in quick] == asked


def test_every_path_trains_the_same_network(quick):
    for start in range(0, len(quick), len(PATHS)):
        turn = quick[start : start + len(PATHS)]
        monolith, module, split, inprocess, tcp, tls = (row.final_loss for row in turn)
        assert module == split == monolith
        assert inprocess == pytest.approx(monolith, rel=1e-5)
        assert inprocess == tcp == tls


def test_ratios_are_to_the_monolith_of_the_same_turn(quick):
    for start in range(0, len(quick), len(PATHS)):
        monolith = quick[start]
        assert (monolith.cpu_ratio, monolith.wall_ratio) == (1, 1)
        for row in quick[start : start + len(PATHS)]:  # with one turn, the median is that turn
            assert row.cpu_ratio == pytest.approx(row.cpu_ms / monolith.cpu_ms)
            assert row.wall_ratio == pytest.approx(row.wall_ms / monolith.wall_ms)


@pytest.mark.net
def test_over_a_line_a_step_takes_what_the_line_takes_at_least():
    rows = bench_step(["mlp_small"], steps=5, repeats=1, wan=LINE, network="proxy")
    monolith, *_, tcp, tls = rows
    assert {row.network for row in rows} == {"proxy"}
    assert monolith.limit_ms is None
    for row in (tcp, tls):
        assert row.limit_ms == pytest.approx(LINE_MS)
        assert row.limit_ms <= row.wall_ms


def test_a_computed_line_takes_exactly_its_bytes_and_its_delay():
    job = StepJob(
        path="model", workload="mlp_small", seed=0, warmup_steps=2, steps=3, wan=str(LINE)
    )
    found = modelled(job)
    assert found.wall_ms == pytest.approx(LINE_MS)
    assert found.final_loss == in_process(Setup(job)).final_loss


class ScriptedParties:
    """Three turns: the monolith takes 1, 3 and 4 ms, every other path 2, 9 and 4 ms."""

    def __init__(self):
        self.calls = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def measure(self, path, workload, seed, warmup_steps, steps):
        turn = len(self.calls) // len(PATHS)
        self.calls.append(path)
        cpu_ms = ([1, 3, 4] if path == "monolith" else [2, 9, 4])[turn]
        return Measurement(cpu_ms=cpu_ms, wall_ms=2 * cpu_ms, final_loss=0.5)


def test_medians_are_of_ratios_and_paths_take_turns(monkeypatch):
    parties = ScriptedParties()
    monkeypatch.setattr(step, "Parties", lambda network: parties)
    tls = bench_step(["cnn"], repeats=3)[-1]
    assert parties.calls == list(PATHS) * 3
    assert (tls.cpu_ms, tls.wall_ms) == (4, 8)
    assert (tls.cpu_ratio, tls.wall_ratio) == (2, 2)  # of 2, 3 and 1; of the medians it is 4 / 3


def test_a_process_that_ends_early_ends_the_benchmark(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(LostPeerError, match="exit status 1"):
        bench_step(["mlp_small"], steps=1, repeats=1)
