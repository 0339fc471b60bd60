"""`python -m benchmarks.NAME`: options and output; measurements have tests of their own."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest

from benchmarks import harness, memory
from benchmarks.emulation import Wan
from benchmarks.harness import OrZero, Whole

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    file.stem
    for file in (ROOT / "benchmarks").glob("*.py")
    if re.search(r"harness\.(run|command)\(", file.read_text())
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


def test_every_program_is_known():
    assert {"frontier", "leaderboard", "step", "wan", "verdicts"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_explains_itself(bench, name):
    done = bench(name, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: python -m benchmarks.{name} ")
    options = re.findall(r"^  (--[a-z-]+)(?: \S.*?)?(?:  +(\S.*))?$", done.out, re.MULTILINE)
    assert "--json" in dict(options)


@dataclass(frozen=True)
class Row:
    asked: dict


def bench_all(
    runs: Sequence[Path],
    *,
    sizes: Sequence[OrZero] = (0, 1),
    codec: Sequence[Whole] = ("none",),
    names: Sequence[str] = (),
    kind: Literal["fast", "slow"] = "fast",
    turns: int = 5,
    prompts: OrZero = 200,
    rate: float = 0.1,
    shares: bool = True,
    wan: Wan | None = None,
    network: str = "auto",
) -> list[Row]:
    """Says what it was asked.

    Args:
        runs: folders.
        sizes: of something,
            in two lines.
    """
    asked = {"sizes": list(sizes), "codec": list(codec), "names": list(names), "kind": kind}
    asked |= {"turns": turns, "prompts": prompts, "rate": rate, "shares": shares}
    return [Row(asked | {"runs": [str(one) for one in runs], "wan": str(wan), "network": network})]


TABLE = harness.table(("turns", ">6", lambda row: row.asked["turns"]), ("none", ">6", str.title))


@pytest.fixture
def ask(monkeypatch, capsys):
    def run(*words):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["all", "folder", *words, "--json"])
        code = 0
        try:
            harness.run(bench_all, TABLE)
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return json.loads(said.out)[0]["asked"] if code == 0 and said.out[:1] == "[" else code

    return run


def test_options_are_the_arguments_of_the_function(ask):
    found = ask()
    assert (found["runs"], found["sizes"], found["turns"], found["shares"]) == (
        ["folder"], [0, 1], 5, True,
    )  # fmt: skip
    many = ("--sizes", "3,0", "7", "--sizes", "9", "--names", "a,b", "--prompts", "0")
    found = ask(*many, "--codec", "topk:k=3,values=8", "relu", "--kind", "slow", "--no-shares")
    assert (found["sizes"], found["names"], found["prompts"]) == ([3, 0, 7, 9], ["a", "b"], 0)
    assert (found["codec"], found["kind"]) == (["topk:k=3,values=8", "relu"], "slow")
    assert found["shares"] is False
    found = ask("--wan", "80mbps,40ms", "--network", "proxy")
    assert (found["wan"], found["network"]) == ("80mbps,40ms", "proxy")
    assert ask("--wan", "")["wan"] == "None"


@pytest.mark.parametrize(
    "words",
    ["--turns 0", "--turns few", "--sizes 1,-1", "--kind odd", "--wan 80", "--network proxy"],
)
def test_what_cannot_be_measured_is_refused(ask, words):
    assert ask(*words.split()) == 2


def test_a_benchmark_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.network", "--network", "model", "--json"],
        capture_output=True,
        check=True,
        cwd=ROOT,
        timeout=600,
    )
    rows = json.loads(done.stdout)
    assert {row["network"] for row in rows} == {"model"}
    assert {"network", "pattern", "model_ms", "limit_ms", "bytes_sent"} <= set(rows[0])


def test_a_party_over_its_limit_is_marked_and_the_exit_status_says_so(bench, monkeypatch):
    rows = [memory.MemoryRow("feature", "text", 100.0, 184.0, 5.0)]
    main = harness.command(lambda: rows, memory.TABLE, lambda row: row.kept)
    monkeypatch.setattr(memory, "main", main)
    done = bench("memory", "--json")
    assert done.code == 0
    assert [row["peak_mb"] for row in json.loads(done.out)] == [100.0]
    rows.append(memory.MemoryRow("label", "text", 190.0, 184.0, 5.0))
    done = bench("memory")
    assert done.code == 1
    assert [line.endswith("over the limit") for line in done.out.splitlines()] == [0, 0, 1]


def test_a_block_is_measured_by_both_clocks_and_its_memory():
    ticks = iter([2.0, 5.0])
    with harness.measured(lambda: next(ticks)) as cost:
        assert cost == harness.Cost()
        held = bytearray(1 << 25)
        held[:] = b"x" * len(held)
    assert cost.cpu_s == 3.0
    assert 0 < cost.wall_s < 60
    assert cost.peak_bytes >= 0
