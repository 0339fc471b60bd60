"""Principal directions with noise, beside numpy's."""

import numpy as np
import pytest
import torch

from vfl.core.errors import BadOptionError
from vfl.core.seeds import Secret
from vfl.privacy.projection import private_projection

ROWS = torch.randn(4000, 12, generator=torch.Generator().manual_seed(1)) * torch.linspace(
    4, 0.2, 12
)


def directions(noise=0.0, secret=b"1", rows=ROWS):
    return private_projection(rows, 3, noise=noise, secret=Secret(secret * 32)).double()


def test_without_noise_they_are_those_of_numpy():
    unit = (ROWS / ROWS.norm(dim=1, keepdim=True)).double().numpy()
    _, _, theirs = np.linalg.svd(unit, full_matrices=False)
    found = directions().numpy()
    np.testing.assert_allclose(np.abs(theirs[:3] @ found), np.eye(3), atol=1e-5)


def test_noise_is_of_the_secret_and_of_the_deviation_asked_for():
    """Of rows that are all but none, noise is what is left: its eigenvectors are anybody's."""
    again = directions(noise=5.0)
    assert torch.equal(again, directions(noise=5.0))
    assert not torch.allclose(again, directions(noise=5.0, secret=b"2"))
    kept = [float((directions().T @ directions(noise=s)).norm()) for s in (1.0, 100.0, 1e5)]
    assert kept[0] > 1.7 > kept[1] > kept[2]


@pytest.mark.parametrize("wrong", [{"width": 0}, {"width": 13}, {"noise": -1.0}], ids=str)
def test_what_cannot_be_asked(wrong):
    asked = {"width": 3, "noise": 1.0} | wrong
    with pytest.raises(BadOptionError):
        private_projection(ROWS, asked["width"], noise=asked["noise"], secret=Secret(bytes(32)))
