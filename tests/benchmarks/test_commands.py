"""`python -m benchmarks.NAME`: options and output; measurements have tests of their own."""

import inspect
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import codecs, memory, secure, step, wan
from benchmarks.codecs import CodecRow
from benchmarks.emulation import Wan
from benchmarks.training_step import PATHS
from benchmarks.wan import WanRow

ROOT = Path(__file__).parents[2]
NAMES = (
    "alignment",
    "block_shuffle",
    "step",
    "step_peers",
    "secure",
    "codecs",
    "wan",
    "network",
    "memory",
    "mpc",
    "psi",
    "lengths",
    "ranks",
    "secure_dpsgd",
    "serving",
    "start",
    "tensors",
    "train_on_disk",
)


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs a benchmark's command line in this process."""

    def run(name, *arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            import_module(f"benchmarks.{name}").main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return Done(code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_explains_itself(bench, name):
    done = bench(name, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: python -m benchmarks.{name} ")
    assert "--json" in done.out


def test_a_benchmark_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.network", "--network", "model", "--json"],
        capture_output=True,
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    assert {row["network"] for row in json.loads(done.stdout)} == {"model"}


@pytest.fixture
def asked(monkeypatch):
    """What the command asked the benchmark for; nothing is measured."""
    calls = []
    signature = inspect.signature(step.bench_step)

    def measured(*arguments, **options):
        given = signature.bind(*arguments, **options).arguments
        calls.append(given)
        given["say"]("measuring")
        costs = {"cpu_ms": 2.0, "wall_ms": 1.0, "cpu_ratio": 1.5, "wall_ratio": 1.25}
        return [step.StepRow("mlp", 64, 128, path, **costs, final_loss=0.5) for path in PATHS]

    monkeypatch.setattr(step, "bench_step", measured)
    return calls


def test_rows_for_machines(bench, asked):
    done = bench("step", "--json")
    rows = json.loads(done.out)
    assert [row["path"] for row in rows] == ["monolith", "inprocess", "tcp", "tls"]
    assert {"model", "path", "cpu_ratio", "wall_ratio"} <= set(rows[0])
    assert done.err == "measuring\n"
    assert asked[0].get("steps") is None


def test_a_table_for_people(bench, asked):
    done = bench("step", "--quick")
    assert done.code == 0
    assert len(done.out.splitlines()) == 5
    assert "tls" in done.out
    assert asked[0]["steps"] == step.QUICK_STEPS
    assert asked[0]["repeats"] == 1


def test_a_step_over_a_line(bench, asked):
    assert bench("step", "--wan", "80mbps,40ms", "--network", "proxy").code == 0
    assert (asked[0]["wan"], asked[0]["network"]) == (Wan(80, 40), "proxy")


def test_secure_modes_over_a_line(bench, monkeypatch):
    calls = []

    def measured(**options):
        calls.append(options)
        costs = {"cpu_ms": 4.0, "wall_ms": 120.0, "cpu_ratio": 1.0, "wall_ratio": 1.0}
        line = {"network": "proxy", "limit_ms": 116.8}
        return [secure.SecureRow("tls", "sum", **costs, **line, final_loss=0.5)]

    monkeypatch.setattr(secure, "bench_secure", measured)
    done = bench("secure", "--wan", "80mbps,40ms", "--network", "proxy")
    assert "116.80 (1.027x)" in done.out
    assert (calls[0]["wan"], calls[0]["network"]) == (Wan(80, 40), "proxy")
    assert not {"steps", "repeats"} & set(calls[0])
    assert bench("secure", "--network", "proxy").code == 2


@pytest.mark.parametrize(
    "options", [["--wan", "80"], ["--network", "proxy"], ["--wan", "8mbps", "--network", "tunn"]]
)
def test_a_line_that_cannot_be_is_refused(bench, options):
    done = bench("step", *options)
    assert done.code == 2
    assert options[-1] in done.err or "--wan 80mbps,40ms" in done.err


def test_lines_that_are_computed_as_a_table_and_for_machines(bench):
    done = bench("network", "--network", "model")
    assert done.code == 0
    assert "one way, 8 MB" in done.out
    done = bench("network", "--network", "model", "--wan", "8mbps,2ms", "--json")
    rows = json.loads(done.out)
    assert rows[0]["milliseconds"] == pytest.approx(2.002)
    assert {"network", "pattern", "model_ms", "limit_ms", "bytes_sent"} <= set(rows[0])


def test_training_over_a_line(bench, monkeypatch):
    calls = []

    def measured(experiment, in_flight, *, wan, until, network, say):
        calls.append((in_flight, wan, network))
        return [WanRow(1, 22.0, None, None, 0.5, 0.5, None, (0.5,))]

    monkeypatch.setattr(wan, "bench_wan", measured)
    assert bench("wan", "--wan", "10mbps,100ms", "--in-flight", "1").code == 0
    assert calls == [([1], Wan(10, 100), "auto")]


def test_a_party_over_its_limit_is_marked_and_the_exit_status_says_so(bench, monkeypatch):
    rows = [memory.MemoryRow("feature", "text", 100.0, 184.0, 5.0)]
    monkeypatch.setattr(memory, "bench_memory", lambda *arguments, **options: rows)
    done = bench("memory", "--json")
    assert done.code == 0
    assert [row["peak_mb"] for row in json.loads(done.out)] == [100.0]
    rows.append(memory.MemoryRow("label", "text", 190.0, 184.0, 5.0))
    done = bench("memory")
    assert done.code == 1
    assert [line.endswith("over the limit") for line in done.out.splitlines()] == [0, 0, 1]


def test_what_cannot_be_measured_is_told(bench):
    done = bench("memory", "--format", "xlsx")
    assert done.code == 2
    assert "csv or parquet" in done.err


@pytest.fixture
def codecs_asked(monkeypatch):
    calls = []

    def measured(pairs, *, rounds, seed, say):
        assert seed == 0
        calls.append((list(pairs), rounds))
        numbers = dict.fromkeys(CodecRow.model_fields, 1.0)
        return [CodecRow(**numbers | {"width": 8, "k": 2, "name": "topk", "compiled": True})]

    monkeypatch.setattr(codecs, "bench_codecs", measured)
    return calls


@pytest.mark.parametrize(
    ("options", "pairs", "rounds"),
    [
        ([], list(codecs.PAIRS), 96),
        (["--width", "300"], [(300, 2), (300, 4), (300, 9)], 96),
        (["--width", "64", "--rounds", "5"], [(64, 2)], 5),
        (["--width", "64", "--k", "1,7"], [(64, 1), (64, 7)], 96),
    ],
)
def test_widths_and_values_kept_can_be_chosen(bench, codecs_asked, options, pairs, rounds):
    done = bench("codecs", "--json", *options)
    assert codecs_asked == [(pairs, rounds)]
    assert [row["name"] for row in json.loads(done.out)] == ["topk"]
    assert "topk" in bench("codecs", *options).out


@pytest.mark.parametrize("options", [["--k", "3"], ["--width", "64", "--k", "few"]])
def test_a_choice_that_makes_no_sense_is_refused(bench, codecs_asked, options):
    assert bench("codecs", *options).code == 2
    assert codecs_asked == []


def test_private_workloads_on_computed_lines(bench):
    asked = ("mpc", "--workload", "gelu-1k,relu-1k", "--mode", "fast")
    done = bench(*asked, "--wan", "80mbps,40ms", "--network", "model", "--json")
    rows = json.loads(done.out)
    assert [row["workload"] for row in rows] == ["gelu-1k", "relu-1k"]
    wanted = "workload system network milliseconds bytes_online bytes_offline bytes_setup max_error"
    assert set(wanted.split()) <= set(rows[0])
    assert rows[0]["bytes_online"] == 18 * 1000 + 3 * 16


def test_computed_private_workloads_need_a_line(bench):
    assert bench("mpc", "--network", "model").code != 0
