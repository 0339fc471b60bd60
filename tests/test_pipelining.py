"""Several cuts in flight: what is computed then, and that no cut, kill or network changes it.

The reference is written here in plain torch, with whole copies of the bottoms.
"""

import copy
from collections import deque

import pytest
import torch
from killing import Killed, Killer
from torch import nn

from vfl.config import Experiment
from vfl.core.seeds import permutation
from vfl.datasets import Dealing, load_bundled
from vfl.session import rules
from vfl.training.local import LocalSession

PARTIES = ("left", "right")
DEPTHS = (1, 5, 17)
SEED, EPOCHS, BATCH_ROWS, RATE = 4, 2, 10, 0.003


def experiment(in_flight, codec="none", bottom="mlp:hidden=16-12", **train):
    return Experiment.model_validate(
        {
            "seed": SEED,
            "codec": codec,
            "parties": {name: {"width": 6, "bottom": bottom} for name in PARTIES},
            "label": {"top": "mlp:hidden=12"},
            "train": {
                "epochs": EPOCHS,
                "batch_size": BATCH_ROWS,
                "learning_rate": RATE,
                "checkpoint_every": 7,
                "in_flight": in_flight,
                **train,
            },
        }
    )


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, "label", Dealing(SEED, limit=340))


@pytest.fixture(scope="module")
def trained(data):
    """A training by each number of cuts in flight."""
    return {depth: session(data, depth).run() for depth in DEPTHS}


def session(data, *arguments, folder=None, observers=(), **options):
    settings = experiment(*arguments, **options)
    return LocalSession(settings, data, outputs=10, checkpoints=folder, observers=observers)


class DelayedBottom:
    """A bottom whose gradients belong to the copy that made the cut, and move the original."""

    def __init__(self, bottom):
        self.bottom = bottom
        self.optimizer = torch.optim.Adam(bottom.parameters(), lr=RATE)
        self.waiting = deque()

    def forward(self, inputs):
        old = copy.deepcopy(self.bottom)
        made = old(inputs)
        self.waiting.append((old, made))
        return made.detach().requires_grad_()

    def backward(self, grad):
        old, made = self.waiting.popleft()
        made.backward(grad)
        for weight, then in zip(self.bottom.parameters(), old.parameters(), strict=True):
            weight.grad = then.grad
        self.optimizer.step()


def delayed_training(started, data, in_flight):
    """Weights after the training that the contract describes, from a session's first weights."""
    bottoms = {
        client.name: DelayedBottom(copy.deepcopy(client.end.model["bottom"]))
        for client in started.clients
    }
    top = copy.deepcopy(started.label.model["top"])
    optimizer = torch.optim.Adam(top.parameters(), lr=RATE)
    labels, train = data["label"].labels, data["label"].split.train
    for epoch in range(1, EPOCHS + 1):
        batches = train[permutation(SEED, len(train), "order", epoch)]
        grads = deque()
        for rows in torch.from_numpy(batches).split(BATCH_ROWS):
            cuts = {name: own.forward(data[name].inputs[rows]) for name, own in bottoms.items()}
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(top(torch.cat(list(cuts.values()), 1)), labels[rows])
            loss.backward()
            optimizer.step()
            grads.append({name: cut.grad for name, cut in cuts.items()})
            if len(grads) == in_flight:
                oldest = grads.popleft()
                for name, own in bottoms.items():
                    own.backward(oldest[name])
        for oldest in grads:
            for name, own in bottoms.items():
                own.backward(oldest[name])
    return {name: own.bottom.state_dict() for name, own in bottoms.items()} | {
        "label": top.state_dict()
    }


@pytest.mark.parametrize("in_flight", DEPTHS)
def test_every_gradient_belongs_to_the_weights_that_made_its_cut(data, trained, in_flight):
    expected = delayed_training(session(data, in_flight), data, in_flight)
    weights = trained[in_flight].weights()
    for party, reference in expected.items():
        part = "top" if party == "label" else "bottom"
        assert len(reference) == (4 if party == "label" else 6)
        for name, value in reference.items():
            torch.testing.assert_close(
                weights[party][f"{part}.{name}"], value, rtol=1e-5, atol=1e-6, msg=name
            )


@pytest.mark.parametrize("in_flight", DEPTHS)
def test_cuts_leave_exactly_when_the_contract_says(data, in_flight):
    """Cut t leaves once gradient t - m was applied, and an epoch ends with none in flight."""
    pipelined = session(data, in_flight)
    half = pipelined.clients[0].end
    noted = []
    send, take = half.send_cut, half.take_gradient

    def send_cut(inputs, step, rows):
        noted.append(("cut", step))
        send(inputs, step, rows)

    def take_gradient():
        noted.append(("gradient", half._pending[0].context.step))
        take()

    half.send_cut, half.take_gradient = send_cut, take_gradient
    pipelined.run()
    for epoch in range(EPOCHS):
        steps = [e.step for e in rules.schedule(pipelined.terms, data["label"].split)
                 if e.trains and e.epoch == epoch + 1]  # fmt: skip
        wanted = []
        for position, step in enumerate(steps):
            wanted.append(("cut", step))
            if position + 1 >= in_flight:
                wanted.append(("gradient", steps[position + 1 - in_flight]))
        wanted += [("gradient", step) for step in steps[len(steps) + 1 - in_flight :]]
        assert noted[: len(wanted)] == wanted
        del noted[: len(wanted)]
    assert noted == []


RICH = {
    "codec": "randtopk:k=3,alpha=0.2,values=8",
    "bottom": "mlp:hidden=16,dropout=0.3,batch_norm=yes",
}


@pytest.mark.parametrize(
    ("codec", "in_flight"),
    [
        (RICH["codec"], 1),  # of the others, their contract has this
        (RICH["codec"], 17),
        ("error_feedback:k=2", 17),
        ("aqsgd", 17),
        ("splitfc:keep=0.5", 17),
        ("fedlite:pieces=2,clusters=4", 17),
    ],
)
def test_going_back_to_a_checkpoint_changes_nothing(data, tmp_path, in_flight, codec):
    """Kills in the middle of an epoch, with everything in flight, and right after a drain."""
    rich = RICH | {"codec": codec}
    whole = session(data, in_flight, **rich).run()
    for step in (8, 23, 24, 37):
        with pytest.raises(Killed):
            session(data, in_flight, folder=tmp_path, observers=[Killer(step)], **rich).run()
    resumed = session(data, in_flight, folder=tmp_path, **rich).run()
    assert resumed.weights_digest() == whole.weights_digest()
    assert [record["train_loss"] for record in resumed.label.history] == [
        record["train_loss"] for record in whole.label.history
    ]
    assert resumed.ledger.bytes_by_party("down") == whole.ledger.bytes_by_party("down")
    assert resumed.ledger.bytes_by_party("up") == whole.ledger.bytes_by_party("up")
