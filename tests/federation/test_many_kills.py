"""10,000 training steps with a ClientApp killed every 500 or so: takes 25 minutes."""

import pytest
from real_deployment import SIDES, Deployment, results

from vfl.training.demo import run_in_process

pytestmark = [pytest.mark.net, pytest.mark.slow]

EPOCHS, EPOCH_STEPS, BETWEEN = 96, 105, 5
SETTINGS = (
    f"train.epochs={EPOCHS}",
    "train.batch_size=12",
    "train.checkpoint_every=250",
    "federation.max_restarts=100",
)


def test_every_500_steps_a_client_app_is_killed(tmp_path, measured):
    deployment = Deployment(tmp_path / "project", *SETTINGS)
    try:
        deployment.start()
        training, at = deployment.train(), 0
        for kill, epoch in enumerate(range(BETWEEN, EPOCHS, BETWEEN)):
            at = training.wait_for(f"epoch {epoch:>3}  ", after=at)
            victim = SIDES[kill % len(SIDES)]
            deployment.kill("flwr-clientapp", victim)
            measured()
            at = training.wait_for(f"'{victim}' went away and did not come back", after=at)
            training.wait_for("epoch ", after=at)
            measured(f"kill {kill + 1}, at step {epoch * EPOCH_STEPS}; the next epoch ended after")
        assert training.wait(300) == 0, training.said()
        assert "restart 19 of 100" in training.said()
        same = run_in_process(deployment.folder, deployment.label, lambda record: None)
        assert results(deployment.run(training)) == results(same)
    finally:
        deployment.close()
