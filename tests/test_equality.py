"""Split training without compression is the training of one ordinary network.

The network that is compared with takes only the first weights from the split model. Its forward
pass, its loss, its optimiser and its batches are written here in plain torch.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from vfl.config import Experiment
from vfl.core.seeds import Secret, permutation
from vfl.datasets import load_bundled
from vfl.session import rules
from vfl.training.local import LocalSession

SEED, EPOCHS, BATCH_ROWS = 3, 2, 32
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.003, weight_decay=1e-4),
}
RATES = {"sgd": 0.05, "adam": 0.003}


def experiment_of(parties, merge="concat", optimizer="sgd", codec="none", bottom="mlp:hidden=16"):
    return Experiment.model_validate(
        {
            "seed": SEED,
            "codec": codec,
            "merge": merge,
            "parties": {name: {"width": 6, "bottom": bottom} for name in parties},
            "label": {"party": "lender", "top": "mlp:hidden=12"},
            "train": {
                "epochs": EPOCHS,
                "batch_size": BATCH_ROWS,
                "optimizer": optimizer,
                "learning_rate": RATES[optimizer],
                "weight_decay": 1e-4,
            },
        }
    )


def digits_of(parties, flatten=True):
    return load_bundled("digits", parties, SEED, "lender", flatten=flatten, limit=400)


class Monolith(nn.Module):
    """All bottoms and the top as one module."""

    def __init__(self, bottoms, top, merge):
        super().__init__()
        self.bottoms = nn.ModuleDict(bottoms)
        self.top = top
        self.merge = merge

    def forward(self, inputs):
        cuts = [bottom(inputs[name]) for name, bottom in self.bottoms.items()]
        return self.top(torch.cat(cuts, 1) if self.merge == "concat" else torch.stack(cuts).sum(0))


@dataclass
class Trained:
    """What one training left behind: the loss of every step, and the weights."""

    losses: list
    weights: dict


def monolith_of(session):
    """An untrained copy of what the parties of a session hold together."""
    bottoms = {client.name: client.end.model["bottom"] for client in session.clients}
    if "bottom" in session.label.model:
        bottoms["lender"] = session.label.model["bottom"]
    bottoms = {name: bottoms[name] for name in session.terms.parties}
    return copy.deepcopy(Monolith(bottoms, session.label.model["top"], session.terms.merge))


def train_monolith(model, data, optimizer):
    """Plain torch over the batches that the seed names."""
    steps = OPTIMIZERS[optimizer](model.parameters())
    labels, train = data["lender"].labels, data["lender"].split.train
    losses = []
    for epoch in range(1, EPOCHS + 1):
        order = torch.from_numpy(train[permutation(SEED, len(train), "order", epoch)])
        for rows in order.split(BATCH_ROWS):
            steps.zero_grad()
            logits = model({name: data[name].inputs[rows] for name in model.bottoms})
            loss = nn.functional.cross_entropy(logits, labels[rows])
            loss.backward()
            steps.step()
            losses.append(float(loss.detach()))
    return Trained(losses, model.state_dict())


def train_split(session, data):
    """Run a session; its losses are computed here from the logits of its top."""
    logits = []
    session.label.model["top"].register_forward_hook(
        lambda top, given, result: logits.append(result.detach()) if top.training else None
    )
    session.run()
    exchanges = rules.schedule(session.terms, data["lender"].split)
    batches = [data["lender"].labels[exchange.rows] for exchange in exchanges if exchange.trains]
    pairs = zip(logits, batches, strict=True)
    losses = [float(nn.functional.cross_entropy(*pair)) for pair in pairs]
    return Trained(losses, monolith_of(session).state_dict())


def both(parties, flatten=True, **settings):
    data = digits_of(parties, flatten)
    experiment = experiment_of(parties, **settings)
    session = LocalSession(experiment, data, outputs=10)
    whole = train_monolith(monolith_of(session), data, experiment.train.optimizer)
    return train_split(session, data), whole


def largest_difference(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def assert_equal(split, whole):
    assert len(whole.losses) > 10
    assert whole.losses[-1] < whole.losses[0]
    torch.testing.assert_close(split.losses, whole.losses, rtol=1e-5, atol=0)
    assert split.weights.keys() == whole.weights.keys()
    for name, weights in whole.weights.items():
        torch.testing.assert_close(split.weights[name], weights, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("merge", ["concat", "sum"])
@pytest.mark.parametrize(
    "parties",
    [
        ["p1"],
        ["p1", "p2"],
        ["p1", "p2", "p3", "p4", "p5"],
        ["p1", "lender"],
        ["p1", "lender", "p2"],
    ],
    ids=lambda parties: "-".join(parties),
)
def test_split_training_is_the_training_of_one_network(parties, merge, optimizer):
    split, whole = both(parties, merge=merge, optimizer=optimizer)
    assert_equal(split, whole)


def test_pictures_and_convolutions_too():
    parties = ["p1", "p2"]
    split, whole = both(parties, flatten=False, bottom="cnn:channels=4-8", optimizer="adam")
    assert_equal(split, whole)


def test_batch_statistics_too():
    split, whole = both(["p1", "p2"], bottom="mlp:hidden=16,batch_norm=yes")
    assert_equal(split, whole)
    moved = [name for name in whole.weights if name.endswith("num_batches_tracked")]
    assert [int(split.weights[name]) for name in moved] == [len(whole.losses)] * 2


def test_compression_is_told_apart():
    split, whole = both(["p1", "p2"], codec="topk:k=5")
    assert abs(split.losses[0] - whole.losses[0]) > 1e-4
    assert largest_difference(split.weights, whole.weights) > 1e-3


def digest_after(codec="none", secrets=None, seed=SEED):
    parties = ["p1", "p2"]
    experiment = experiment_of(parties, codec=codec).model_copy(update={"seed": seed})
    session = LocalSession(experiment, digits_of(parties), outputs=10, secrets=secrets)
    return session.run().weights_digest()


@pytest.mark.parametrize("codec", ["none", "randtopk:k=3,values=8"])
def test_the_same_secrets_give_the_same_bits(codec):
    assert digest_after(codec) == digest_after(codec)


@pytest.mark.parametrize("party", ["p1", "lender"])
def test_every_partys_secret_counts(party):
    fresh = {party: Secret(bytes(range(32)))}
    assert digest_after(secrets=fresh) == digest_after(secrets=fresh) != digest_after()


def test_the_seed_counts():
    given = {name: Secret.of_simulation(0, name) for name in ("p1", "p2", "lender")}
    assert digest_after(secrets=given) != digest_after(secrets=given, seed=SEED + 1)
