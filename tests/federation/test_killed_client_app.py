"""A ClientApp killed with -9: the run goes back to its last checkpoint, and nothing is lost."""

from real_deployment import finish


def test_a_client_app_that_is_killed(commands, undisturbed, measured):
    training = commands.train()
    training.wait_for("epoch  20")
    commands.kill("flwr-clientapp", "right")
    measured()
    told = training.wait_for(
        "party 'right' went away and did not come back; restart 1 of 3, from exchange"
    )
    training.wait_for("epoch ", after=told)
    measured("a ClientApp was killed; the next epoch ended after")
    assert finish(commands, training) == undisturbed
