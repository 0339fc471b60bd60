from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from vfl.datasets.sources.scikit_learn import read_digit_pairs

DIGITS = load_digits()
FLAT = DIGITS.images.reshape(-1, 64) / 16


def nearest_digits(pictures: np.ndarray) -> np.ndarray:
    """The digit each noisy picture of axes (rows, 8, 8) was made of."""
    flat = pictures.reshape(-1, 64)
    distance = (flat**2).sum(1)[:, None] - 2 * flat @ FLAT.T + (FLAT**2).sum(1)
    return distance.argmin(axis=1)


@pytest.fixture(scope="module")
def drawn():
    return read_digit_pairs(seed=0)


def test_rows_are_two_digits_with_noise_and_their_label(drawn):
    pictures, labels = drawn
    assert pictures.shape == (18_000, 1, 8, 16)
    assert (pictures.dtype, labels.dtype) == (np.float32, np.int64)
    halves = [pictures[:3000, 0, :, :8], pictures[:3000, 0, :, 8:]]
    left, right = (nearest_digits(half) for half in halves)
    made = 10 * DIGITS.target[left] + DIGITS.target[right]
    assert (made == labels[:3000]).mean() > 0.97  # noise hides some
    noise = halves[0].reshape(-1, 64) - FLAT[left]
    assert noise.std() == pytest.approx(0.25, rel=0.02)
    assert noise.mean() == pytest.approx(0, abs=0.005)


def test_parts_share_no_digit():
    clean = np.random.default_rng  # the same draw without its noise

    class Quiet:
        def __init__(self, key):
            self.draw = clean(key)
            self.choice = self.draw.choice

        def standard_normal(self, shape):
            return np.zeros(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vfl.datasets.sources.scikit_learn.np.random.default_rng", Quiet)
        pictures, _ = read_digit_pairs(seed=0)
    halves = np.concatenate([pictures[:, 0, :, :8], pictures[:, 0, :, 8:]], axis=1)
    parts = [
        {half.tobytes() for half in part.reshape(-1, 8, 8)}
        for part in np.split(halves, [12_000, 15_000])
    ]
    assert [len(part) for part in parts] == [1200, 300, 297]
    assert len(set.union(*parts)) == 1797


def test_the_seed_decides_and_every_class_occurs(drawn):
    pictures, labels = drawn
    np.testing.assert_array_equal(read_digit_pairs(seed=0)[0], pictures)
    assert not np.array_equal(read_digit_pairs(seed=1)[1], labels)
    for part in np.split(labels, [12_000, 15_000]):
        assert set(part) == set(range(100))
