"""The same apps on Flower's simulation engine."""

import pytest

from vfl import demo, deployment, federated
from vfl.storage import read_json

pytest.importorskip("ray", reason="the simulation extra is not installed")


SETTINGS = ["train.epochs=2", "label.class_weight=balanced"]


@pytest.mark.parametrize(
    "codec", [pytest.param("none", marks=pytest.mark.slow), "randtopk:k=8,alpha=0.2"]
)
def test_a_simulation_gives_the_weights_of_one_process(tmp_path, codec):
    folder = tmp_path / "project"
    label = demo.write_demo(folder, [*SETTINGS, f"codec={codec}"])
    superlink = deployment.start_superlink(label, simulation=True)
    try:
        path = federated.run_session(
            label,
            "train",
            "simulated",
            extra={"label-file": str(label.party_file), "party-files": str(folder)},
            federation="num-supernodes=2 client-resources-num-cpus=1",
        )
    finally:
        superlink.stop()
    alone = demo.run_in_process(folder, label, lambda record: None)
    simulated, same = (read_json(run / "summary.json") for run in (path, alone))
    assert simulated["weights_sha256"] == same["weights_sha256"]
    assert simulated["test_loss"] == same["test_loss"]
