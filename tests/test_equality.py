"""Split training without compression is the training of one ordinary network.

The network that is compared with takes only the first weights from the split model. Its forward
pass, its loss, its optimiser and its batches are written here in plain torch.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from vfl.config import Experiment
from vfl.core.registry import parse
from vfl.core.seeds import Secret, permutation
from vfl.datasets import Dealing, load_bundled
from vfl.models.optimizers import OPTIMIZERS as MEMBERS
from vfl.session import rules
from vfl.training.local import LocalSession

SEED, EPOCHS, BATCH_ROWS = 3, 2, 32
DECAY = {"weight_decay": 1e-4}
#: By spec: the class of torch, its learning rate and its options.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, 0.05, {"momentum": 0.9, **DECAY}),
    "adam": (torch.optim.Adam, 0.003, DECAY),
    "sgd:nesterov=yes": (torch.optim.SGD, 0.05, {"momentum": 0.9, "nesterov": True, **DECAY}),
    "AdamW:betas=0.8/0.99": (torch.optim.AdamW, 0.003, {"betas": (0.8, 0.99), **DECAY}),
    "adadelta": (torch.optim.Adadelta, 1.0, DECAY),
    "adafactor": (torch.optim.Adafactor, 0.01, DECAY),
    "adagrad": (torch.optim.Adagrad, 0.02, DECAY),
    "adamax": (torch.optim.Adamax, 0.005, DECAY),
    "asgd": (torch.optim.ASGD, 0.1, DECAY),
    "nadam": (torch.optim.NAdam, 0.003, DECAY),
    "radam": (torch.optim.RAdam, 0.01, DECAY),
    "rmsprop:alpha=0.9": (torch.optim.RMSprop, 0.002, {"alpha": 0.9, **DECAY}),
    "rprop": (torch.optim.Rprop, 0.001, {}),
}
SCHEDULES = {
    "none": lambda optimizer: None,
    "step:step_size=1,gamma=0.5": lambda one: lr_scheduler.StepLR(one, 1, 0.5),
    "one_cycle:max_lr=0.1,total_steps=4": lambda one: lr_scheduler.OneCycleLR(one, 0.1, 4),
}
MERGERS = {
    "concat": lambda cuts: torch.cat(cuts, 1),
    "sum": lambda cuts: torch.stack(cuts).sum(0),
    "mean": lambda cuts: sum(cuts) / len(cuts),
    "max": lambda cuts: torch.stack(cuts).max(0).values,
}


def experiment_of(
    parties,
    merge="concat",
    optimizer="sgd",
    codec="none",
    bottom="mlp:hidden=16",
    schedule="none",
):
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
                "schedule": schedule,
                "learning_rate": OPTIMIZERS[optimizer][1],
                "weight_decay": OPTIMIZERS[optimizer][2].get("weight_decay", 0),
            },
        }
    )


def digits_of(parties, flatten=True):
    return load_bundled("digits", parties, "lender", Dealing(SEED, limit=400), flatten=flatten)


class Monolith(nn.Module):
    """All bottoms and the top as one module."""

    def __init__(self, bottoms, top, merge):
        super().__init__()
        self.bottoms = nn.ModuleDict(bottoms)
        self.top = top
        self.merge = merge

    def forward(self, inputs):
        cuts = [bottom(inputs[name]) for name, bottom in self.bottoms.items()]
        return self.top(MERGERS[self.merge](cuts))


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


def train_monolith(model, data, train_settings):
    """Plain torch over the batches that the seed names."""
    kind, rate, options = OPTIMIZERS[train_settings.optimizer]
    steps = kind(model.parameters(), lr=rate, **options)
    schedule = SCHEDULES[train_settings.schedule](steps)
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
        if schedule is not None:
            schedule.step()
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
    whole = train_monolith(monolith_of(session), data, experiment.train)
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


@pytest.mark.parametrize(
    ("merge", "parties", "optimizer"),
    [
        ("concat", ["p1"], "adam"),
        ("concat", ["p1", "lender", "p2"], "sgd"),
        ("sum", ["p1", "p2", "p3", "p4", "p5"], "sgd"),
        ("mean", ["p1", "lender", "p2"], "adam"),
        ("max", ["p1", "p2", "p3"], "sgd"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_split_training_is_the_training_of_one_network(parties, merge, optimizer):
    split, whole = both(parties, merge=merge, optimizer=optimizer)
    assert_equal(split, whole)


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [(one, "none") for one in OPTIMIZERS] + [("sgd", one) for one in SCHEDULES if one != "none"],
)
def test_every_optimizer_and_schedule_moves_all_parties_as_one_network(optimizer, schedule):
    split, whole = both(["p1", "lender"], optimizer=optimizer, schedule=schedule)
    assert_equal(split, whole)


def test_every_optimizer_of_torch_is_compared():
    names = {parse(spec)[0] for spec in OPTIMIZERS}
    assert {MEMBERS.aliases.get(name, name) for name in names} == set(MEMBERS.names())


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
