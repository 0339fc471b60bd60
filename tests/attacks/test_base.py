"""Layers an attack reads, and training that leaves statistics alone."""

import numpy as np
import torch
from torch import nn

from vfl.attacks.base import before_last, fit, scale_by
from vfl.core.seeds import generator
from vfl.defenses.components import principal


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


def rows():
    draw = torch.randn(200, 5, generator=generator(0, "rows"))
    return draw @ torch.randn(5, 5, generator=generator(1, "rows")) + 3


def test_standard_features_have_mean_zero_and_variance_one():
    found = scale_by("standard", rows())(rows()).numpy()
    assert np.allclose(found.mean(0), 0, atol=1e-5)
    assert np.allclose(found.std(0, ddof=1), 1)


def test_white_features_are_uncorrelated_with_variance_one():
    found = scale_by("whiten", rows())(rows()).double().numpy()
    assert np.allclose(np.cov(found.T), np.eye(5), atol=1e-4)


def test_whitening_leaves_out_what_never_varies():
    flat = torch.cat([rows(), rows()[:, :1]], 1)  # a column twice: one direction is empty
    assert scale_by("whiten", flat)(flat).shape == (200, 5)


def test_few_rows_of_many_columns_have_the_components_of_their_covariance():
    wide = torch.randn(20, 50, generator=generator(2, "rows")).double() * torch.linspace(1, 3, 50)
    centred, variance, directions = principal(wide)
    assert directions.shape == (50, 20)
    covariance = np.cov(wide.numpy().T, bias=True)
    assert np.allclose(np.linalg.eigvalsh(covariance)[::-1][:20], variance, atol=1e-9)
    assert torch.allclose((directions * variance) @ directions.T, torch.from_numpy(covariance))
    assert torch.allclose(centred @ directions @ directions.T, centred)
    white = scale_by("whiten", wide.float())(wide.float()).double().numpy()
    assert white.shape == (20, 19)  # about their mean, twenty rows span nineteen directions
    assert np.allclose(np.cov(white.T), np.eye(19), atol=1e-4)


def test_cosine_rows_lie_on_the_sphere():
    assert torch.allclose(scale_by("cosine", rows())(rows()).norm(dim=1), torch.ones(200))


def test_before_the_last_layer_is_what_it_is_given():
    bottom = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)
    )
    expected = bottom[1](bottom[0](rows())).detach()
    assert torch.equal(before_last(bottom, rows()), expected)
