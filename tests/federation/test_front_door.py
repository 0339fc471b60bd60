"""Attacks that once succeeded, against a real deployment: `scripts/attack_front_door`."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

import vfl

SCRIPT = Path(__file__).parents[2] / "scripts" / "attack_front_door"
MOST_SECONDS = 600
#: One for each finding, so that none is left out in silence.
ATTACKS = 25


@pytest.mark.net
def test_every_attack_is_refused():
    environment = {**os.environ, "PYTHONPATH": str(Path(vfl.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=MOST_SECONDS,
    )
    results = json.loads(done.stdout)
    assert len(results) == ATTACKS
    succeeded = [one for one in results if one["succeeded"]]
    assert succeeded == []
    untried = {one["name"] for one in results if one["succeeded"] is None}
    assert untried <= ({"read_files"} if os.getuid() else set()), results
    assert done.returncode == 0


@pytest.fixture(scope="module")
def script():
    loader = SourceFileLoader("attack_front_door", str(SCRIPT))
    found = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = found  # where its dataclasses look for themselves
    loader.exec_module(found)
    yield found
    del sys.modules[loader.name]


def test_a_frame_that_is_too_large_is_refused(script, tmp_path):
    assert script.announce_a_large_frame(tmp_path / "attack")[0] is False
