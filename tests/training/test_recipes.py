"""Recipes of an experiment file: the weights of the same loop in plain torch, bit for bit.

The loop is written here with torch's own classes. It shares with the split training its first
weights and the order of the rows.
"""

import copy
from dataclasses import replace

import pytest
import torch
from killing import Killed, Killer
from torch import nn
from torch.nn.functional import cross_entropy

from vfl.core.errors import ConfigError, DataError
from vfl.core.seeds import permutation
from vfl.datasets import Dealing, load_bundled
from vfl.training.local import LocalSession
from vfl.training.specs import read_checked

EPOCHS, ROWS = 3, 24
FILE = f"""
seed = 5
data.source = "digits"
data.validation = 0.1
[parties.one]
width = 8
bottom = "mlp:hidden=16"
[parties.two]
width = 8
bottom = "mlp:hidden=16"
[label]
top = "mlp:hidden=12"
LABEL
[train]
epochs = {EPOCHS}
batch_size = {ROWS}
TRAIN
"""


#: name: lines of [label] and [train]; the optimiser; its rate by step and epoch; loss; clip norm.
RECIPES = {
    "warm-up of AdamW": (
        "", 'optimizer = "adamw"\nlearning_rate = 0.01\nweight_decay = 0.05\nwarmup_steps = 9',
        lambda weights: torch.optim.AdamW(weights, weight_decay=0.05),
        lambda step, epoch: 0.01 * min(1, (step + 1) / 9), cross_entropy, None,
    ),
    "clipping and smoothing": (
        'loss = "cross_entropy:smoothing=0.1"',
        'optimizer = "sgd:nesterov=yes"\nlearning_rate = 0.1\nclip_norm = 0.05',
        lambda weights: torch.optim.SGD(weights, momentum=0.9, nesterov=True),
        lambda step, epoch: 0.1,
        lambda *pair: cross_entropy(*pair, label_smoothing=0.1), 0.05,
    ),
    "all together": (
        'loss = "cross_entropy:smoothing=0.2"',
        'optimizer = "sgd"\nlearning_rate = 0.2\nwarmup_steps = 20\nclip_norm = 0.3\n'
        'schedule = "exponential:gamma=0.5"',
        lambda weights: torch.optim.SGD(weights, momentum=0.9),
        lambda step, epoch: 0.2 * 0.5 ** (epoch - 1) * min(1, (step + 1) / 20),
        lambda *pair: cross_entropy(*pair, label_smoothing=0.2), 0.3,
    ),
    "focal loss": (
        'loss = "focal:gamma=2"', 'optimizer = "adam"\nlearning_rate = 0.01',
        torch.optim.Adam, lambda step, epoch: 0.01,
        lambda outputs, codes: _focal(cross_entropy(outputs, codes, reduction="none")), None,
    ),
}  # fmt: skip


def _focal(surprise):
    return ((1 - torch.exp(-surprise)) ** 2 * surprise).mean()


def experiment_of(folder, label="", train=""):
    file = folder / "experiment.toml"
    file.write_text(FILE.replace("LABEL", label).replace("TRAIN", train))
    return read_checked(file)[0]


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["one", "two"], "label", Dealing(5, limit=300, validation=0.1))


def session_of(folder, data, label="", train="", **given):
    return LocalSession(experiment_of(folder, label, train), data, outputs=10, **given)


def parts_of(session):
    """The modules of each party that are trained."""
    clients = {one.name: one.end.model["bottom"] for one in session.clients}
    return nn.ModuleDict({**clients, "top": session.label.model["top"]})


def plain_loop(parts, data, recipe):
    """What a researcher writes without vfl."""
    _, _, optimizer, rate, loss_of, clip = recipe
    steps, step = optimizer(parts.parameters()), 0
    labels, rows = data["label"].labels, data["label"].split.train
    for epoch in range(1, EPOCHS + 1):
        order = torch.from_numpy(rows[permutation(5, len(rows), "order", epoch)])
        for batch in order.split(ROWS):
            steps.param_groups[0]["lr"] = rate(step, epoch)
            steps.zero_grad()
            cuts = [parts[name](data[name].inputs[batch]) for name in ("one", "two")]
            loss_of(parts["top"](torch.cat(cuts, 1)), labels[batch]).backward()
            if clip is not None:
                for part in parts.values():  # no party knows the norm of another's gradient
                    nn.utils.clip_grad_norm_(part.parameters(), clip)
            steps.step()
            step += 1
    return parts.state_dict()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_a_file_gives_the_weights_of_the_plain_loop(tmp_path, data, name):
    recipe = RECIPES[name]
    session = session_of(tmp_path, data, *recipe[:2])
    whole = plain_loop(copy.deepcopy(parts_of(session)), data, recipe)
    split = parts_of(session.run()).state_dict()
    assert split.keys() == whole.keys()
    different = [one for one in whole if not torch.equal(split[one], whole[one])]
    assert not different


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_resume_amid_the_warm_up_goes_on_with_its_rate(tmp_path, data, in_flight):
    how = f"warmup_steps = 20\nclip_norm = 0.1\ncheckpoint_every = 4\nin_flight = {in_flight}"
    through = session_of(tmp_path, data, train=how).run()
    store = tmp_path / "store"
    with pytest.raises(Killed):
        session_of(tmp_path, data, train=how, checkpoints=store, observers=[Killer(10)]).run()
    resumed = session_of(tmp_path, data, train=how, checkpoints=store).run()
    assert resumed.weights_digest() == through.weights_digest()


@pytest.mark.parametrize("measure", ["accuracy", "log_loss"])
def test_the_best_weights_follow_the_measure_that_is_named(tmp_path, data, measure):
    how = 'learning_rate = 0.03\noptimizer = "sgd"\n'
    ends = session_of(tmp_path, data, train=how).run().label.history
    values = [record[f"validation_{measure}"] for record in ends]
    best = 1 + (values.index(max(values)) if measure == "accuracy" else values.index(min(values)))
    kept = session_of(tmp_path, data, train=how + f'keep = "best"\nmeasure = "{measure}"').run()
    assert kept.label.history[-1]["best_epoch"] == best


def test_a_measure_that_the_validation_rows_lack_says_so(tmp_path, data):
    few = {name: replace(one, split=_one_class(one, data["label"])) for name, one in data.items()}
    session = session_of(tmp_path, few, train='keep = "best"\nmeasure = "auc"')
    with pytest.raises(DataError, match="metric for model selection") as caught:
        session.run()
    assert caught.value.where == "train.measure = 'auc'"


def _one_class(one, label):
    """A split whose validation rows are all of one class."""
    split = one.split
    return replace(split, validation=split.validation[label.labels[split.validation] == 3])


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("clip_norm = 1.0\n[dp]\nnoise = 1.0", "leave train.clip_norm out"),
        ('measure = "accuracy"', "neither train.patience nor"),
        ('measure = "rmse"\nkeep = "best"', "is no metric of a classification"),
        ("warmup_steps = -1", "warmup_steps"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, more, why):
    with pytest.raises(ConfigError, match=why):
        experiment_of(tmp_path, train=more)
