"""SplitModule: one torch module whose cut is real frames."""

import numpy as np
import pytest
import torch
from torch import nn

from vfl import SplitModule
from vfl.config import Experiment
from vfl.core.errors import ConfigError, DataError, NonFiniteError, SpecError, WidthError
from vfl.datasets import load_bundled
from vfl.defenses import DEFENSES, Defense
from vfl.session import Terms, rules
from vfl.training.local import LocalSession


def parts(seed=0):
    torch.manual_seed(seed)
    bottoms = {name: nn.Linear(width, 6) for name, width in {"bank": 3, "shop": 5}.items()}
    return bottoms, nn.Sequential(nn.ReLU(), nn.Linear(12, 2)), {"bank": 6, "shop": 6}


def batch(rows=8):
    generator = torch.Generator().manual_seed(1)
    return {
        "bank": torch.randn(rows, 3, generator=generator),
        "shop": torch.randn(rows, 5, generator=generator),
    }


def test_without_a_codec_it_is_the_plain_network():
    bottoms, top, widths = parts()
    model = SplitModule(bottoms, top, widths)
    plain = top(torch.cat([bottoms["bank"](batch()["bank"]), bottoms["shop"](batch()["shop"])], 1))
    assert torch.equal(model(batch()), plain)
    weights = list(model.parameters())
    expected = torch.autograd.grad(plain.square().sum(), weights)
    model(batch()).square().sum().backward()
    for weight, gradient in zip(weights, expected, strict=True):
        assert torch.equal(weight.grad, gradient)


@pytest.mark.parametrize("codec", ["none", "topk:k=2,values=8", "randtopk:k=3,alpha=0.5"])
def test_a_loop_around_it_trains_what_a_session_trains(codec):
    experiment = Experiment.model_validate(
        {
            "codec": codec,
            "parties": {"left": {"width": 8}, "right": {"width": 8}},
            "train": {"epochs": 2, "optimizer": "sgd", "learning_rate": 0.05},
            "data": {"validation": 0.0, "test": 0.0},
        }
    )
    data = load_bundled("digits", ["left", "right"], 0, "label", 0.0, 0.0, limit=300)
    session = LocalSession(experiment, data, outputs=10)
    start = session.weights()
    model = SplitModule(
        {name: build(start[name]) for name in ("left", "right")},
        build_top(start["label"]),
        {"left": 8, "right": 8},
        codec=codec,
        seed=experiment.seed,
    )
    session.run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    terms = Terms.of(experiment, "train", "run")
    for exchange in rules.schedule(terms, data["label"].split):
        rows = torch.from_numpy(exchange.rows)
        inputs = {name: data[name].inputs[rows] for name in ("left", "right")}
        loss = nn.functional.cross_entropy(model(inputs), data["label"].labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    for name in ("left", "right"):
        for key, value in session.weights()[name].items():
            same = model.bottoms[name].state_dict()[key.removeprefix("bottom.")]
            torch.testing.assert_close(same, value, rtol=1e-5, atol=1e-6)
    assert model.ledger.total_bytes("up") == session.ledger.total_bytes("up")
    assert model.ledger.total_bytes("down") == session.ledger.total_bytes("down")


def build(weights):
    from vfl import models

    bottom = models.make_bottom("mlp:hidden=64").build((1, 8, 4), 8)
    bottom.load_state_dict({key.removeprefix("bottom."): v.clone() for key, v in weights.items()})
    return bottom


def build_top(weights):
    from vfl import models

    top = models.make_top("mlp:hidden=64").build(16, 10)
    own = {k.removeprefix("top."): v.clone() for k, v in weights.items() if k.startswith("top.")}
    top.load_state_dict(own)
    return top


def test_evaluation_is_not_random_and_leaves_the_step():
    bottoms, top, widths = parts()
    model = SplitModule(bottoms, top, widths, codec="randtopk:k=2,alpha=0.9").eval()
    assert torch.equal(model(batch()), model(batch()))
    assert model.step == 0
    model.train()
    assert not torch.equal(model(batch()), model(batch()))
    assert model.step == 2


class Heavy(Defense):
    """Adds one per row to the loss and doubles gradients."""

    def loss(self, cuts, labels, logits, context):
        return logits.sum() * 0 + len(labels)

    def gradient(self, grad, labels, context):
        return 2 * grad


def test_a_defense_sees_labels_when_it_is_given_them(monkeypatch):
    monkeypatch.setitem(DEFENSES._members, "heavy", Heavy)
    bottoms, top, widths = parts()
    model = SplitModule(bottoms, top, widths, defense="heavy")
    labels = torch.zeros(8, dtype=torch.long)
    outputs, extra = model(batch(), labels), model.extra_loss()
    assert extra.item() == 8.0
    assert model.extra_loss().item() == 0.0
    (outputs.sum() + extra).backward()
    doubled = bottoms["bank"].weight.grad.clone()
    bottoms["bank"].weight.grad = None
    SplitModule(bottoms, top, widths)(batch()).sum().backward()
    torch.testing.assert_close(doubled, 2 * bottoms["bank"].weight.grad)


def test_a_defense_that_needs_the_whole_training_is_refused():
    bottoms, top, widths = parts()
    for spec, acts in (
        ("confusion", "targets"),
        ("layer_norm+label_free", "fit"),
        ("tpsl", "the task's own loss"),
    ):
        with pytest.raises(SpecError, match="loop are the caller's") as caught:
            SplitModule(bottoms, top, widths, defense=spec)
        assert caught.value.got == f"{spec}, which acts on {acts}"
    assert SplitModule(bottoms, top, widths, defense="potential+bottleneck")


def test_the_noise_of_two_parties_does_not_cancel():
    """Two parties of equal models and rows, whose gradients differ by their noise alone."""
    bottoms = {name: nn.Linear(3, 4) for name in ("bank", "shop")}
    bottoms["shop"].load_state_dict(bottoms["bank"].state_dict())
    defense = "gradient_noise:norm=inf,sigma=1"
    model = SplitModule(
        bottoms, nn.Linear(4, 2), {"bank": 4, "shop": 4}, merge="sum", defense=defense
    )
    rows = torch.ones(5, 3)
    model({"bank": rows, "shop": rows}, torch.zeros(5).long()).sum().backward()
    assert not torch.isclose(bottoms["bank"].weight.grad, bottoms["shop"].weight.grad).any()


def test_what_does_not_fit_is_refused():
    bottoms, top, widths = parts()
    with pytest.raises(DataError, match="one bottom and one width"):
        SplitModule(bottoms, top, {"bank": 6})
    with pytest.raises(SpecError, match="equal widths"):
        SplitModule(bottoms, top, {"bank": 6, "shop": 5}, merge="sum")
    with pytest.raises(ConfigError, match="the label party's own columns"):
        SplitModule({"label": nn.Linear(3, 6)}, top, {"label": 6})
    with pytest.raises(WidthError, match="another shape"):
        SplitModule(bottoms, top, {"bank": 5, "shop": 6})(batch())
    broken = batch()
    broken["shop"][0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="party 'shop'"):
        SplitModule(bottoms, top, widths)(broken)
