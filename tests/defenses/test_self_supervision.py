"""What bottoms learn without labels: losses by hand, views of pictures, and what it is good for."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from vfl.core.seeds import generator, scoped
from vfl.datasets import Dealing, load_bundled
from vfl.defenses.self_supervision import augmented, contrast, corrupted, learn, vicreg_loss


def draws(name="views"):
    return generator(0, name)


def two_views(rows=5, width=3):
    return torch.randn(2, rows, width, generator=draws()).double()


def test_views_are_told_apart_as_by_a_loop():
    """Chen et al. 2020, equation 1: 2 rows of views, each beside its partner and all others."""
    one, other = two_views()
    views = torch.cat([one, other]).numpy()
    views /= np.linalg.norm(views, axis=1, keepdims=True)
    losses = []
    for place in range(len(views)):
        partner = (place + 5) % 10
        weights = [math.exp(views[place] @ view / 0.5) for view in views]
        losses.append(-math.log(weights[partner] / (sum(weights) - weights[place])))
    assert float(contrast(one, other)) == pytest.approx(np.mean(losses))


def test_invariance_variance_and_covariance_are_numpys():
    """Bardes et al. 2022, equations 1 to 6 with weights of 25, 25 and 1."""
    one, other = two_views()
    expected = 25 * ((one - other) ** 2).mean().item()
    for view in (one.numpy(), other.numpy()):
        covariance = np.cov(view, rowvar=False)
        expected += 25 * np.maximum(0, 1 - np.sqrt(np.diag(covariance) + 1e-4)).mean()
        expected += (covariance[~np.eye(3, dtype=bool)] ** 2).sum() / 3
    assert float(vicreg_loss(one, other)) == pytest.approx(expected)


def test_corrupted_values_are_other_rows_of_the_same_column():
    inputs = torch.arange(4000.0).reshape(1000, 4)
    seen = corrupted(inputs[:500], inputs, draws(), 0.25)
    assert torch.equal(seen % 4, inputs[:500] % 4)  # which is the column
    assert float((seen != inputs[:500]).double().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.equal(corrupted(inputs, inputs, draws(), 0), inputs)


def test_a_view_is_of_its_picture_and_as_dark():
    pictures = torch.rand(64, 3, 12, 12, generator=draws("pictures")) - 5
    seen = augmented(pictures, draws(), 0.3)
    assert seen.shape == pictures.shape
    darkest = pictures.amin((1, 2, 3))
    torch.testing.assert_close(seen.amin((1, 2, 3)).maximum(darkest), seen.amin((1, 2, 3)))
    same = augmented(pictures, draws(), 0.3)
    assert torch.equal(seen, same)
    assert not torch.equal(seen, augmented(pictures, draws("others"), 0.3))


@pytest.fixture(scope="module")
def digits():
    """Pictures of eight by eight pixels, with labels that only the readers below get."""
    data = load_bundled("digits", ["client"], "label", Dealing(0, limit=1500))
    return data["client"].inputs.reshape(-1, 1, 8, 8), data["label"].labels.numpy()


def read(bottom, pictures, labels, known=300):
    """Accuracy of a logistic regression on the cuts, on rows it has not seen."""
    with torch.no_grad():
        cuts = bottom.eval()(pictures).numpy()
    reader = LogisticRegression(max_iter=2000).fit(cuts[:known], labels[:known])
    return reader.score(cuts[known:], labels[known:])


@pytest.mark.parametrize("kind", ["simclr", "vicreg"])
def test_narrow_cuts_of_pictures_tell_more_than_random_ones(digits, kind):
    pictures, labels = digits
    found = []
    for epochs in (0, 15):
        with scoped(3):
            bottom = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
            if epochs:
                learn(kind, bottom, pictures, draws(), epochs, 0.1)
        found.append(read(bottom, pictures, labels))
    assert found[1] > found[0] + 0.05


def test_vime_learns_what_hangs_together():
    """Of columns that three numbers explain, the cut comes to explain more."""
    hidden = torch.randn(800, 3, generator=draws("hidden"))
    inputs = hidden @ torch.randn(3, 12, generator=draws("mixing"))
    inputs = inputs + 0.05 * torch.randn(800, 12, generator=draws("noise"))
    inputs = torch.cat([inputs, torch.randn(800, 12, generator=draws("nothing"))], 1)
    unexplained = []
    for epochs in (0, 30):
        with scoped(3):
            bottom = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 3))
            if epochs:
                learn("vime", bottom, inputs, draws(), epochs, 0.3)
        with torch.no_grad():
            cut = bottom(inputs).double().numpy()
        cut = np.c_[cut, np.ones(len(cut))]
        fitted = cut @ np.linalg.lstsq(cut, hidden.double().numpy(), rcond=None)[0]
        unexplained.append(((fitted - hidden.numpy()) ** 2).mean())
    assert unexplained[1] < 0.6 * unexplained[0]
