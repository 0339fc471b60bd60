"""A model without a layer that may draw runs without a generator, and computes the same."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from vfl import models
from vfl.core.seeds import Secret
from vfl.session.exchange import Draws

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
