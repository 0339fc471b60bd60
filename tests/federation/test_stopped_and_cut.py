"""A party that stands still for a while, and a network that is cut: the run goes on by itself."""

import os
import signal
import time

import pytest
from real_deployment import finish

from benchmarks.emulation import TcpProxy

pytestmark = pytest.mark.net

STANDS_STILL_S = 12
WITHIN_S = 4  # of the rejoin window, 8 s


def test_a_party_that_is_stopped_for_12_seconds(commands, undisturbed, measured):
    training = commands.train()
    training.wait_for("epoch  20")
    stopped = commands.kill("flwr-clientapp", "right", signal.SIGSTOP)
    time.sleep(1)
    told = len(training.said())
    time.sleep(STANDS_STILL_S - 1)
    assert len(training.said()) == told
    os.kill(stopped, signal.SIGCONT)
    measured()
    training.wait_for("epoch ", after=told)
    measured("a party stood still for 12 s; after it went on the next epoch ended after")
    assert finish(commands, training) == undisturbed
    assert "restart" not in training.said()


@pytest.fixture(scope="module")
def gate(commands):
    """A proxy where the parties look for the stream, which itself listens elsewhere.

    Not at the SuperLink's address for streams, so that the sessions have a port of their own.
    """
    port = commands.label.experiment().federation.stream_port + 1
    with TcpProxy(("127.0.0.2", port), listen=("127.0.0.1", port)) as made:
        yield made


def train_through_the_gate(commands):
    port = commands.label.experiment().federation.stream_port + 1
    return commands.train("federation.bind_host=127.0.0.2", f"federation.stream_port={port}")


def test_a_network_that_is_back_within_the_rejoin_window(gate, commands, undisturbed, measured):
    training = train_through_the_gate(commands)
    training.wait_for("epoch  20")
    gate.shut()
    time.sleep(WITHIN_S)
    told = len(training.said())
    gate.restore()
    measured()
    training.wait_for("epoch ", after=told)
    measured(f"the network was cut for {WITHIN_S} s; the next epoch ended after")
    assert finish(commands, training) == undisturbed
    assert "restart" not in training.said()


def test_a_network_that_is_back_long_after_it(gate, commands, undisturbed, measured):
    """The parties are told of the session again, cannot reach it, and are told once more."""
    training = train_through_the_gate(commands)
    training.wait_for("epoch  20")
    gate.shut()
    measured()
    told = training.wait_for("disconnected and did not reconnect; restart 1 of 3, from exchange")
    told = training.wait_for("is absent (the label party cannot be reached)", after=told)
    measured("the network is cut for")
    gate.restore()
    training.wait_for("epoch ", after=told)
    measured("it was back; the next epoch ended after")
    assert finish(commands, training) == undisturbed
    assert "restart 2" not in training.said()
