"""Layers an attack reads, and training that leaves statistics alone."""

import torch
from torch import nn

from vfl.attacks.features import before_last
from vfl.attacks.fit import fit
from vfl.seeds import generator


def test_a_bottom_without_weights_is_given_the_inputs():
    pictures = torch.rand(3, 1, 2, 2, generator=generator(0))
    assert torch.equal(before_last(nn.Flatten(), pictures), pictures.flatten(1))


def test_batch_normalisation_keeps_its_statistics_if_asked_to():
    rows, labels = torch.randn(8, 3, generator=generator(0)), torch.arange(8) % 2
    for keep in (True, False):
        network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        fit(network, rows, labels, 5, 0.01, generator(0), keep_norms=keep)
        assert torch.equal(network[0].running_mean, torch.zeros(3)) is keep
        assert not torch.equal(network[0].weight, torch.ones(3))
        assert not network.training
