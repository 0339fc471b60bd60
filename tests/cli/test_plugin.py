"""`--plugin FILE`: a member of one's own in one file, without a package."""

import json
import os
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from vfl.attacks import ATTACKS
from vfl.config import Experiment
from vfl.core.registry import PLUGINS
from vfl.experiments.cells import GridFolder
from vfl.experiments.folders import grid_status

EXAMPLE = Path(__file__).parents[2] / "examples" / "outside_attack.py"
TINY = """
name = "tiny"
data.rows = 400
label = { top = "linear" }
train = { epochs = 1 }
parties.client = { width = 8, bottom = "mlp:hidden=none" }
[grid]
attacks = ["mahalanobis"]
baselines = ["scratch"]
leaks = [2]
draws = 1
seeds = [0]
pictures = 0
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(ATTACKS, "_members", dict(ATTACKS._members))
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("outside_attack", "broken", "json"):
            del sys.modules[name]


@pytest.mark.parametrize("words", [("--plugin", EXAMPLE), (f"--plugin={EXAMPLE}",)])
def test_its_members_are_listed_wherever_the_option_stands(vfl, words):
    assert "mahalanobis" not in vfl("list", "attacks").out
    assert "mahalanobis:shrink=0.01" in vfl("list", *words, "attacks").out


def test_a_process_that_such_a_command_started_has_them_too(vfl, well, monkeypatch):
    well("list", "--plugin", EXAMPLE, "codecs")
    assert os.environ[PLUGINS] == str(EXAMPLE)  # what it starts is given its environment
    monkeypatch.setattr(ATTACKS, "_members", {"kmeans": ATTACKS._members["kmeans"]})
    sys.modules.pop("outside_attack")
    assert "mahalanobis" in vfl("list", "attacks").out


@pytest.mark.slow
def test_processes_of_a_grid_have_them_too(well, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    done = well("grid", "tiny.toml", "--plugin", EXAMPLE, "--jobs", "2", "--json")
    assert {row["subject"] for row in json.loads(done.out)["rows"]} == {"mahalanobis"}
    command = json.loads((tmp_path / "runs/tiny/grid.json").read_text())["command"]
    assert command.endswith(f"--plugin {EXAMPLE}")


def test_the_status_of_a_grid_that_ended_names_them_too(tmp_path):
    experiment = Experiment.model_validate(tomllib.loads(TINY.replace("mahalanobis", "kmeans")))
    again = shlex.join(["vfl", "grid", "tiny.toml", "--plugin", "my attack.py"])
    GridFolder(tmp_path).write(experiment, [], again)
    assert grid_status(tmp_path).then == (f"vfl report {tmp_path} --plugin 'my attack.py'",)


def test_what_cannot_be_loaded(vfl, refused, tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "json.py").write_text("")
    broken = refused("list", "attacks", "--plugin", "broken.py")
    assert "a plug-in does not run" in broken.err
    assert "broken.py:1" in broken.err
    assert "ModuleNotFoundError" in broken.err
    assert "no plug-in can be loaded" in vfl("list", "--plugin", "json.py", "attacks").err
    assert "no plug-in can be loaded" in vfl("list", "--plugin", "nowhere.py", "attacks").err
    assert "--plugin needs a file" in vfl("list", "attacks", "--plugin").err
