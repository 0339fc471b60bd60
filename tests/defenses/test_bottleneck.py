"""The bottleneck against torch's own divergence, in training and at inference."""

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import softplus

from vfl import SplitModule
from vfl.compression import StepContext
from vfl.core.seeds import generator, scoped
from vfl.defenses import make

CUT = torch.randn(30, 5, generator=generator(0, "bottleneck"))


def wrapped(spec="bottleneck:alpha=2"):
    defense = make(spec)
    with scoped(1):
        return defense, defense.wrap_top(nn.Identity(), 5)


def test_what_it_costs_is_the_divergence_from_the_standard_normal():
    defense, top = wrapped()
    with scoped(0):
        top(CUT)
    code = Normal(top.mean(CUT), softplus(top.deviation(CUT) - 0.5) + 1e-6)
    expected = 2 * kl_divergence(code, Normal(0.0, 1.0)).sum(1).mean().item()
    assert defense.loss({}, CUT, CUT, StepContext()).item() == pytest.approx(expected, rel=1e-5)
    assert defense.loss({}, CUT, CUT, StepContext()) is None, "paid twice"


def test_the_code_is_drawn_in_training_and_its_mean_at_inference():
    _, top = wrapped()
    with scoped(0):
        draws = top(CUT.repeat(4000, 1)).detach().view(4000, 30, 5)
    deviation = softplus(top.deviation(CUT) - 0.5).detach()
    torch.testing.assert_close(draws.std(0), deviation, rtol=0.08, atol=0)
    torch.testing.assert_close(draws.mean(0), top.mean(CUT).detach(), rtol=0, atol=0.08)
    assert torch.equal(top.eval()(CUT), top.mean(CUT))
    assert top.information is not None
    top.information = None
    top(CUT)
    assert top.information is None, "a prediction tells nothing"


def test_a_loop_of_ones_own_gets_the_cost_too():
    bottoms = {"bank": nn.Linear(4, 5)}
    model = SplitModule(bottoms, nn.Linear(5, 2), {"bank": 5}, defense="bottleneck:alpha=1")
    with scoped(0):
        model({"bank": torch.ones(6, 4)}, torch.zeros(6, dtype=torch.long))
    assert model.extra_loss().item() > 0
