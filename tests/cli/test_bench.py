"""`vfl bench step` and `memory` as commands; what they measure is tested with the benchmarks."""

import inspect
import json

import pytest

from vfl.bench import memory, step


@pytest.fixture
def asked(monkeypatch):
    """What the command asked the benchmark for; nothing is measured."""
    calls = []
    signature = inspect.signature(step.bench_step)

    def measured(*arguments, **options):
        given = signature.bind(*arguments, **options).arguments
        calls.append(given)
        given["say"]("measuring")
        return [step.StepRow("mlp", 64, 128, path, 2.0, 1.0, 1.5, 1.25, 0.5) for path in step.PATHS]

    monkeypatch.setattr(step, "bench_step", measured)
    return calls


def test_rows_for_machines(vfl, asked):
    done = vfl("bench", "step", "--json")
    rows = json.loads(done.out)
    assert [row["path"] for row in rows] == ["monolith", "inprocess", "tcp", "tls"]
    assert {"model", "path", "cpu_ratio", "wall_ratio"} <= set(rows[0])
    assert done.err == "measuring\n"
    assert asked[0].get("steps") is None


def test_a_table_for_people(vfl, asked):
    done = vfl("bench", "step", "--quick")
    assert done.code == 0
    assert len(done.out.splitlines()) == 5
    assert "tls" in done.out
    assert asked[0]["steps"] == step.QUICK_STEPS
    assert asked[0]["repeats"] == 1


def test_a_party_over_its_limit_is_marked_and_the_exit_status_says_so(vfl, monkeypatch):
    rows = [memory.MemoryRow("feature", "text", 100.0, 184.0, 5.0)]
    monkeypatch.setattr(memory, "bench_memory", lambda *arguments, say: rows)
    done = vfl("bench", "memory", "--json")
    assert done.code == 0
    assert [row["peak_mb"] for row in json.loads(done.out)] == [100.0]
    rows.append(memory.MemoryRow("label", "text", 190.0, 184.0, 5.0))
    done = vfl("bench", "memory")
    assert done.code == 1
    assert [line.endswith("over the limit") for line in done.out.splitlines()] == [0, 0, 1]


def test_what_cannot_be_measured_is_told(vfl):
    done = vfl("bench", "memory", "--format", "xlsx")
    assert done.code == 2
    assert "csv or parquet" in done.err
