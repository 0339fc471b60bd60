"""A ClientApp killed with -9: the run goes back to its last checkpoint, and nothing is lost.

Several cuts are in flight, so the checkpoint holds those too; the other faults are tried with one.
"""

import pytest
from real_deployment import finish, results

from vfl.training import demo

pytestmark = pytest.mark.net

DEEP = ("train.in_flight=5", "train.epochs=80", "train.checkpoint_every=100")


def test_a_client_app_that_is_killed(commands, measured):
    training = commands.train(*DEEP)
    training.wait_for("epoch   8")
    commands.kill("flwr-clientapp", "right")
    measured()
    told = training.wait_for(
        "party 'right' disconnected and did not reconnect; restart 1 of 3, from exchange"
    )
    training.wait_for("epoch ", after=told)
    measured("a ClientApp was killed; the next epoch ended after")
    alone = demo.run_in_process(
        commands.folder, commands.label, lambda record: None, overrides=list(DEEP)
    )
    assert finish(commands, training) == results(alone)
