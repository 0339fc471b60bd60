"""The ClientApp that every SuperNode runs."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

SEND = "import ray, vfl.clients.app as app; ray.cloudpickle.dumps(app.client_app())"


@pytest.mark.slow  # importing ray takes ten seconds; tests/federation/test_simulation.py sends it
@pytest.mark.skipif(not find_spec("ray"), reason="the simulation extra is not installed")
def test_a_simulation_can_send_it_to_its_workers():
    """A function inside a function goes with what it names: torch's own `classes` would not."""
    done = subprocess.run([sys.executable, "-c", SEND], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
