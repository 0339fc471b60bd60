"""Steps between exchanges: FedBCD in a loop of its own, what crosses, and what is refused."""

import copy

import pytest
import torch
from killing import Killed, Killer
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from vfl.config import Experiment
from vfl.core.errors import SpecError
from vfl.core.seeds import permutation
from vfl.datasets import Dealing, load_bundled
from vfl.training.local import LocalSession

PARTIES = ("one", "two")
TRAIN = {"epochs": 2, "batch_size": 24, "optimizer": "sgd", "learning_rate": 0.1}


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", [*PARTIES, "label"], "label", Dealing(5, limit=200))


def experiment_of(label_columns=False, more=None, **train):
    parties = [*PARTIES, *(["label"] if label_columns else [])]
    return Experiment.model_validate(
        {
            "seed": 5,
            "parties": {name: {"width": 8, "bottom": "mlp:hidden=16"} for name in parties},
            "label": {"top": "mlp:hidden=12"},
            "train": TRAIN | train,
        }
        | (more or {})
    )


def session_of(data, label_columns=False, more=None, folder=None, observers=(), **train):
    experiment = experiment_of(label_columns, more, **train)
    return LocalSession(experiment, data, outputs=10, checkpoints=folder, observers=observers)


def parts_of(session):
    clients = {one.name: one.end.model["bottom"] for one in session.clients}
    own = session.label.model
    return nn.ModuleDict(clients | {name: own[name] for name in ("top", "bottom") if name in own})


def fedbcd(parts, data, steps, angle=0.0):
    """Every party's own loop: stale gradients at feature parties, stale cuts at the label party."""
    optimizers = {n: torch.optim.SGD(p.parameters(), 0.1, momentum=0.9) for n, p in parts.items()}
    labels, train = data["label"].labels, data["label"].split.train
    limit = torch.cos(torch.deg2rad(torch.tensor(angle)))

    def weigh(now, then):
        cosine = (normalize(now.detach(), dim=1) * normalize(then, dim=1)).sum(1)
        return cosine * (cosine >= limit)

    def step(names):
        for name in names:
            optimizers[name].step()
            optimizers[name].zero_grad()

    for epoch in (1, 2):
        order = torch.from_numpy(train[permutation(5, len(train), "order", epoch)])
        for rows in order.split(24):
            if len(rows) == 1:
                continue
            inputs = {name: data[name].inputs[rows] for name in (*PARTIES, "label")}
            sent = {name: parts[name](inputs[name]).detach() for name in PARTIES}
            first = None
            for turn in range(steps):
                here = {name: cut.clone().requires_grad_() for name, cut in sent.items()}
                own = [parts["bottom"](inputs["label"])] if "bottom" in parts else []
                outputs = parts["top"](torch.cat([*here.values(), *own], 1))
                loss = cross_entropy(outputs, labels[rows])
                if turn and angle:
                    now = torch.autograd.grad(loss, [*here.values()], retain_graph=True)
                    weights = weigh(torch.cat(now, 1), torch.cat([*first.values()], 1))
                    each = cross_entropy(outputs, labels[rows], reduction="none")
                    loss = (weights * each).sum() / len(rows)
                loss.backward()
                first = first or {name: cut.grad.clone() for name, cut in here.items()}
                step([name for name in ("top", "bottom") if name in parts])
            for name in PARTIES:
                for turn in range(steps):
                    cut = parts[name](inputs[name])
                    grad = first[name]
                    if turn and angle:
                        grad = grad * weigh(cut, sent[name])[:, None]
                    cut.backward(grad)
                    step([name])
    return parts.state_dict()


@pytest.mark.parametrize(
    ("label_columns", "angle", "steps"),
    [(False, 0.0, 1), (False, 0.0, 4), (True, 0.0, 3), (True, 30.0, 3), (False, 60.0, 3)],
)
def test_parties_do_what_fedbcd_does_in_a_loop(data, label_columns, angle, steps):
    how = {"local_steps": steps} | ({"local_angle": angle} if angle else {})
    session = session_of(data, label_columns, **how)
    whole = fedbcd(copy.deepcopy(parts_of(session)), data, steps, angle)
    split = parts_of(session.run()).state_dict()
    assert split.keys() == whole.keys()
    for name, weights in whole.items():
        torch.testing.assert_close(split[name], weights, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"train": TRAIN | {"local_steps": 2}}, "one gradient of a row in an epoch"),
        ({"label": {"loss": "focal"}}, "the gradient of the cross-entropy"),
    ],
)
def test_the_epsilon_of_tpsl_is_for_one_gradient_of_the_cross_entropy(data, settings, told):
    with pytest.raises(SpecError, match=told):
        session_of(data, more={"defense": "tpsl"} | settings)
    session_of(data, more={"defense": "tpsl"})


def test_nothing_more_crosses(data):
    once, often = session_of(data).run(), session_of(data, local_steps=5).run()
    assert often.ledger.total_bytes("up") == once.ledger.total_bytes("up")
    assert often.ledger.total_bytes("down") == once.ledger.total_bytes("down")
    assert often.weights_digest() != once.weights_digest()


@pytest.mark.parametrize(
    "more", [{"codec": "topk:k=3"}, {"codec": "bottlenet:k=4"}, {"merge": "sum", "secure": "sum"}]
)
def test_a_resume_goes_on_bit_for_bit(data, tmp_path, more):
    how = {"local_steps": 3, "checkpoint_every": 3, "more": more}
    through = session_of(data, **how).run()
    with pytest.raises(Killed):
        session_of(data, folder=tmp_path, observers=[Killer(7)], **how).run()
    assert session_of(data, folder=tmp_path, **how).run().weights_digest() == (
        through.weights_digest()
    )


@pytest.mark.parametrize(
    ("more", "train", "why"),
    [
        ({"dp": {"noise": 1.0}}, {}, "accounts for one step"),
        ({"middle": {"party": "compute"}}, {}, "middle"),
        ({}, {"in_flight": 3}, "in_flight at 1"),
        ({"secure": "permuted", "merge": "sum"}, {}, "no party has a model"),
    ],
)
def test_what_has_no_place_between_exchanges_is_refused(more, train, why):
    with pytest.raises(ValueError, match=why):
        experiment_of(more=more, local_steps=2, **train)
