"""The same apps on Flower's simulation engine.

Ray gives its start 30 seconds, whatever else the machine does: not for the default tests.
"""

from importlib.util import find_spec

import pytest

from vfl.core.storage import read_json
from vfl.training import demo, federated

# Looked for and not imported: every worker that collects tests would take three seconds for it.
pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(not find_spec("ray"), reason="the simulation extra is not installed"),
]

SETTINGS = ["train.epochs=2", "label.class_weight=balanced"]


def test_a_simulation_gives_the_weights_of_one_process(tmp_path):
    folder = tmp_path / "project"
    label = demo.write_demo(folder, [*SETTINGS, "codec=randtopk:k=8,alpha=0.2"])
    with federated.simulation(label):
        path = federated.run_session(label, "train", "simulated", simulated=True)
    alone = demo.run_in_process(folder, label, lambda record: None)
    found, same = (read_json(run / "summary.json") for run in (path, alone))
    assert found["weights_sha256"] == same["weights_sha256"]
    assert found["test_loss"] == same["test_loss"]
