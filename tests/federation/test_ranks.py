"""Real commands with `--ranks 2`: the weights of one rank, and a rank killed by its process id."""

import pytest
import torch
from real_deployment import Deployment, finish

from vfl.core.storage import read_json, read_lines
from vfl.session import PartyFolder
from vfl.training import demo

pytestmark = pytest.mark.net
#: A demo that draws nothing while it trains.
PLAIN = tuple(f"parties.{side}.bottom=mlp:hidden=128" for side in ("left", "right"))
LONG = (
    "train.epochs=40",
    "train.batch_size=32",
    "train.checkpoint_every=100",
    "federation.stream_port=0",
)


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "project"
    started = Deployment(folder, *LONG, *PLAIN, "federation.stream_port=0", ranks=2)
    try:
        yield started.start()
    finally:
        started.close()


@pytest.fixture(scope="module")
def in_one_rank(commands):
    return demo.run_in_process(commands.folder, commands.label, lambda record: None)


def losses(run):
    return [record["train_loss"] for record in read_lines(run / "metrics.jsonl")]


def weights(commands, run, party):
    folder = commands.folder / party / "store" / "runs" / run.name / "parties" / party
    return PartyFolder(folder).weights()


def same(commands, training, wanted):
    finish(commands, training)
    run = commands.run(training)
    assert losses(run) == pytest.approx(losses(wanted), abs=1e-4)
    for party in ("left", "right", "label"):
        found = weights(commands, run, party)
        for name, weight in PartyFolder(wanted / "parties" / party).weights().items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-3)
    summary = read_json(run / "summary.json")
    assert summary["test_accuracy"] == read_json(wanted / "summary.json")["test_accuracy"]


def test_two_ranks_train_as_one_does(commands, in_one_rank):
    same(commands, commands.train(), in_one_rank)


def test_a_killed_rank_is_named_and_the_training_resumed(commands, in_one_rank):
    training = commands.train()
    training.wait_for("epoch  10")
    commands.kill("party-rank", "left")
    assert training.wait() == 3
    assert "rank 1 of party 'left' was lost" in training.last_words()
    assert f"--resume {commands.run(training)}" in training.last_words()
    commands.nodes["left"].wait_for("error[V410]: rank 1 of party 'left' was lost")
    same(commands, commands.train(resume=training), in_one_rank)


def test_a_party_that_is_lost_whole_is_waited_for(commands, in_one_rank):
    training = commands.train()
    training.wait_for("epoch  10")
    commands.kill("flwr-clientapp", "right")
    told = training.wait_for("disconnected and did not reconnect")
    training.wait_for("restart 1 of 3", after=told)
    same(commands, training, in_one_rank)
