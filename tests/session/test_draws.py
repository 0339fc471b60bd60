"""A model without a layer that may draw runs without a generator, and computes the same."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from vfl import compression, defenses, models
from vfl.core.seeds import Secret
from vfl.session.exchange import CutTerms, LabelEnd, Own
from vfl.session.passes import Draws
from vfl.transport import local_pair

SECRET = Secret.of_simulation(0, "bank")


class Noisy(nn.Linear):
    """A layer that looks plain and draws."""

    def forward(self, rows):
        return super().forward(rows) + torch.rand(())


@pytest.mark.parametrize(
    ("model", "needed"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3)), False),
        (nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)), True),
        (nn.Sequential(Noisy(2, 3)), True),
        (models.make_bottom("mlp:hidden=8").build((4,), 2), False),
        (models.make_bottom("mlp:hidden=8,dropout=0.1").build((4,), 2), True),
        (models.make_bottom("cnn").build((1, 8, 4), 2), False),
    ],
)
def test_only_models_that_may_draw_get_a_generator(model, needed):
    assert isinstance(Draws(SECRET, "rng", model).at(0), nullcontext) is not needed


def test_a_defense_beside_a_plain_model_gets_one():
    with Draws(SECRET, "rng", nn.Linear(2, 2), always=True).at(3):
        first = torch.rand(4)
    with Draws(SECRET, "rng", Noisy(2, 2)).at(3):
        assert torch.equal(torch.rand(4), first)
    with Draws(SECRET, "rng", Noisy(2, 2)).at(4):
        assert not torch.equal(torch.rand(4), first)


def test_noise_on_equal_gradients_of_two_parties_differs():
    """Two parties that compare what they received would cancel equal noise out."""
    sent = []
    for party in ("bank", "shop"):
        there, here = local_pair()
        noise = defenses.make("gradient_noise:norm=inf,sigma=1")
        end = LabelEnd(CutTerms(party, 4, compression.make("none"), noise), Own(SECRET), here)
        cut = torch.zeros(3, 4, requires_grad=True)
        end.await_gradient(cut, step=0)
        cut.grad = torch.ones(3, 4)
        end.send_gradient(torch.zeros(3).long())
        sent.append(np.frombuffer(there.receive().payload, np.float32))
    assert (sent[0] != sent[1]).all()
