import itertools

import pytest
import torch

from vfl.attacks.permuted import Victim, drawn_weights, on_grid
from vfl.mpc import Layer, Rules


def drawn(*shape, seed=1, scale=1.0):
    source = torch.Generator().manual_seed(seed)
    return on_grid(scale * torch.randn(*shape, generator=source, dtype=torch.float64))


@pytest.fixture(scope="session")
def normal():
    return drawn


@pytest.fixture
def victim():
    """Makes private networks of some widths, and ends them."""
    made = []

    def make(mode, *widths, inner="relu", **more):
        pairs = list(itertools.pairwise(widths))
        names = [inner] * (len(pairs) - 1) + ["sigmoid"]
        layers = [Layer(*pair, name) for pair, name in zip(pairs, names, strict=True)]
        weights = drawn_weights(layers, torch.Generator().manual_seed(0))
        made.append(Victim(layers, weights, Rules(mode, **more)))
        return made[-1]

    yield make
    for each in made:
        each.__exit__()
