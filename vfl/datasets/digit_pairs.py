"""A hundred classes without a file: two of scikit-learn's digits side by side, with noise."""

from __future__ import annotations

import numpy as np

from vfl import seeds

PART_ROWS = (12_000, 3_000, 3_000)
PART_DIGITS = (1_200, 300, 297)
NOISE = 0.25


def read_digit_pairs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of two digits, their training, validation and test rows one after another.

    Every part draws from digits of its own, so that no digit is in two parts.

    Args:
        seed: the run's public seed.

    Returns:
        pictures, float32, axes (rows, 1, 8, 16), black 0 and white 1 with normal noise of 0.25;
        labels, int64, axes (rows,): ten times the left digit plus the right one.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    order = seeds.permutation(seed, len(found.target), "digit_pairs")
    draw = np.random.default_rng(seeds.derive(seed, "digit_pairs", "draw"))
    pairs = [
        draw.choice(digits, (rows, 2))
        for rows, digits in zip(PART_ROWS, np.split(order, np.cumsum(PART_DIGITS)), strict=False)
    ]
    left, right = np.concatenate(pairs).T
    pictures = np.concatenate([found.images[left], found.images[right]], axis=2) / 16
    pictures += NOISE * draw.standard_normal(pictures.shape)
    labels = 10 * found.target[left] + found.target[right]
    return pictures[:, None].astype(np.float32), labels.astype(np.int64)
