"""Each product can be taken away: the rest of vfl does not notice."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

import vfl
from vfl.core.products import products
from vfl.core.registry import named

PACKAGE = Path(vfl.__file__).parent
PRODUCTS = sorted(products())
TESTS = Path(__file__).parent
#: Tests of the kernel that take seconds and enter many of its rooms.
QUICK = ["core", "config", "test_exports.py"]


@pytest.fixture(params=[*PRODUCTS, "all"])
def house(request, tmp_path):
    """A copy of the package without one product, or without all of them, and their names."""
    gone = PRODUCTS if request.param == "all" else [request.param]
    away = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(PACKAGE, tmp_path / "vfl", ignore=away)
    for product in gone:
        shutil.rmtree(copy / product)
    return tmp_path, gone


def run(house, *command):
    """What a command prints that finds the copy before this checkout."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=house,
        env=os.environ | {"PYTHONPATH": str(house)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def paths_in(table):
    """Every path of a product's table, and of the tables in it."""
    if isinstance(table, str):
        return [table] if ":" in table else []
    inside = table.values() if isinstance(table, Mapping) else table
    return [path for one in inside for path in paths_in(one)]


@pytest.mark.parametrize("product", PRODUCTS)
def test_what_a_product_adds_exists(product):
    for path in paths_in(asdict(products()[product])):
        assert path.startswith(f"vfl.{product}."), "of its own room"
        assert callable(named(path))


def test_the_commands_of_a_product_go_with_it(house):
    folder, gone = house
    listed = run(folder, "-m", "vfl", "--help")
    assert "train" in listed
    for product in gone:
        for commands in products()[product].commands.values():
            assert not [name for name in commands if f"│ {name} " in listed]


IMPORT_ALL = """
import importlib, pkgutil, vfl
for module in pkgutil.walk_packages(vfl.__path__, "vfl."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(vfl.__file__)
"""


@pytest.mark.parametrize("house", ["all"], indirect=True)
def test_every_other_module_still_imports(house):
    folder, _ = house
    assert str(folder) in run(folder, "-c", IMPORT_ALL)


@pytest.mark.slow
def test_the_demo_runs_without_it(house):
    folder, _ = house
    assert "test" in run(folder, "-m", "vfl", "demo", "--in-process")


@pytest.mark.slow
@pytest.mark.parametrize("house", ["all"], indirect=True)
def test_the_quick_tests_run_without_them(house):
    folder, _ = house
    tests = [str(TESTS / one) for one in QUICK]
    run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests)
