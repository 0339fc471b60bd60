"""`scripts/mutants`: every fault can be planted, and a fault that no test notices is told."""

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "replace", "outcome"),
    [
        ("row.frames += 1", "row.frames += 2", "noticed"),
        ("row.frames += 1", "row.frames += 1  # one", "survived"),
        ("no such line", "row.frames += 2", "broken"),
    ],
)
def test_what_becomes_of_a_fault_is_told(find, replace, outcome):
    file, tests = "vfl/core/traffic.py", ["tests/core/test_traffic.py"]
    fault = mutants.Mutant("frames", file, find, replace, tests)
    ((_, told, by),) = mutants.try_each([fault], seconds=120)
    assert told == outcome
    assert by.startswith("tests/core/test_traffic.py::") == (outcome == "noticed")
