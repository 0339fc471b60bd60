"""SplitModule: one torch module whose cut is real frames."""

import numpy as np
import pytest
import torch
from torch import nn

from vfl import SplitModule
from vfl.core.errors import ConfigError, DataError, NonFiniteError, SpecError, WidthError
from vfl.defenses import DEFENSES, Defense


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
