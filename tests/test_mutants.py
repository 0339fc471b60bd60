"""`scripts/mutants`: every fault can be planted, and a fault that no test notices is told."""

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def loaded():
    loader = SourceFileLoader("mutants", str(ROOT / "scripts" / "mutants"))
    module = sys.modules["mutants"] = module_from_spec(spec_from_loader("mutants", loader))
    loader.exec_module(module)
    return module


mutants = loaded()
KNOWN = mutants.known()


@pytest.mark.parametrize("mutant", KNOWN, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted(mutant):
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.find) == 1
    assert mutant.replace != mutant.find
    compile(text.replace(mutant.find, mutant.replace), mutant.file, "exec")
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


def test_names_are_told_apart():
    assert len({one.name for one in KNOWN}) == len(KNOWN) > 0


#: In a process of its own: the script forks one that has imported nothing of vfl.
TRY = """
import runpy, sys
script = runpy.run_path("scripts/mutants")
tests = ["tests/core/test_traffic.py"]
fault = script["Mutant"]("frames", "vfl/core/traffic.py", *sys.argv[1:], tests)
print(*((told, by) for _, told, by in script["try_each"]([fault], seconds=600)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "replace", "outcome"),
    [
        ("row.frames += 1", "row.frames += 2", "('noticed', 'tests/core/test_traffic.py::"),
        ("row.frames += 1", "row.frames += 1  # one", "('survived', '')"),
        ("no such line", "row.frames += 2", "('broken', 'frames: the text occurs 0 times"),
    ],
)
def test_what_becomes_of_a_fault_is_told(find, replace, outcome):
    command = [sys.executable, "-c", TRY, find, replace]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(outcome)
