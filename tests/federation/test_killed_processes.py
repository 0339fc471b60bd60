"""Processes killed with -9, one after another: every party says what happened, nothing is lost."""

import pytest
from real_deployment import finish

pytestmark = pytest.mark.net


def test_a_client_app_and_the_run_gives_up(commands, undisturbed, measured):
    training = commands.train("federation.max_restarts=0")
    training.wait_for("epoch  20")
    commands.kill("flwr-clientapp", "left")
    measured()
    assert training.wait() == 3
    measured("a ClientApp was killed; a run without restarts ended after")
    assert "error[V405]: party 'left' disconnected and did not reconnect" in training.last_words()
    assert f"--resume {commands.run(training)}" in training.last_words()
    commands.nodes["right"].wait_for("error[V406]: the label party stopped with V405: party 'left'")
    resume(commands, training, undisturbed, measured)


def test_a_supernode(commands, undisturbed, measured):
    training = commands.train()
    training.wait_for("epoch  20")
    right = commands.nodes["right"]
    before = len(right.said())
    commands.kill("flower-supernode", "right")
    measured()
    right.wait_for("the SuperNode of right ended (exit -9); starting it again in 1 s", after=before)
    told = training.wait_for("party 'right' disconnected and did not reconnect; restart 1 of 3")
    training.wait_for("epoch ", after=told)
    measured("a SuperNode was killed; the next epoch ended after")
    assert "party right is connected to" in right.said()[before:]
    assert finish(commands, training) == undisturbed


def test_a_server_app(commands, undisturbed, measured):
    training = commands.train()
    training.wait_for("epoch  20")
    commands.kill("flwr-serverapp", "label")
    measured()
    assert training.wait(120) == 3
    measured("a ServerApp was killed; vfl train ended after")
    run = commands.run(training)
    words = training.last_words()
    assert "error[V405]: the run ended without a result" in words
    assert f"vfl train PROJECT --resume {run}" in words
    for node in commands.nodes.values():
        node.wait_for("error[V405]: the label party cannot be reached")
    resume(commands, training, undisturbed, measured)


def test_a_superlink(commands, undisturbed, measured):
    training = commands.train()
    training.wait_for("epoch  20")
    commands.kill("flower-superlink", "label")
    measured()
    assert commands.superlink.wait() == 3
    words = commands.superlink.last_words()
    assert "error[V405]: the SuperLink ended" in words
    assert "exit -9" in words
    assert training.wait() == 3
    measured("a SuperLink was killed; vfl train ended after")
    words = training.last_words()
    assert "error[V405]: the SuperLink cannot be reached" in words
    assert f"vfl train PROJECT --resume {commands.run(training)}" in words
    commands.start_superlink()
    resume(commands, training, undisturbed, measured)


def resume(commands, training, undisturbed, measured):
    resumed = commands.train(resume=training)
    resumed.wait_for("epoch ")
    measured("resumed; the next epoch ended after")
    assert finish(commands, resumed) == undisturbed
