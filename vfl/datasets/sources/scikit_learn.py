"""Data sets that come with scikit-learn, and a data set of digit pairs made from its digits."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vfl.core import seeds
from vfl.datasets.sources.base import Bundled, DataSource, Request, first_rows

#: Digit pairs: number of pairs in each part of the split, number of single-digit pictures from
#: which a part draws, and the standard deviation of the noise.
PART_ROWS = (12_000, 3_000, 3_000)
PART_DIGITS = (1_200, 300, 297)
NOISE = 0.25


class Digits(DataSource):
    """Handwritten digits: 1,797 pictures of 8 x 8 pixels, which come with scikit-learn."""

    def read(self, asked: Request) -> Bundled:
        pictures, digits = read_digits()
        return Bundled(
            cells=pictures[: asked.limit, None],
            labels=digits[: asked.limit],
            classes=tuple(range(10)),
            scale=(16.0,),
        )


class BreastCancer(DataSource):
    """Tumours: 569 rows with 30 measurements of cells, which come with scikit-learn."""

    def read(self, asked: Request) -> Bundled:
        from sklearn.datasets import load_breast_cancer

        found = load_breast_cancer(as_frame=True)
        return Bundled(
            cells=found.data[: asked.limit],
            labels=found.target[: asked.limit].to_numpy(dtype=np.int64, copy=True),
            classes=tuple(map(str, found.target_names)),
        )


class DigitPairs(DataSource):
    """Pairs of digits: 18,000 noisy pictures of 8 x 16, which the seed draws from `digits`."""

    own_parts = ("validation", "test")

    def read(self, asked: Request) -> Bundled:
        pictures, labels = read_digit_pairs(asked.seed)
        kept, counts = first_rows(PART_ROWS, asked.limit)
        return Bundled(
            cells=pictures[kept],
            labels=labels[kept],
            classes=tuple(range(100)),
            train_rows=counts[0],
            validation_rows=counts[1],
        )


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read scikit-learn's handwritten digits from its file, without importing scikit-learn.

    Returns:
        Pictures, float64 from 0 to 16, axes (1797, 8, 8); digits, int64, axes (1797,).
    """
    table = _digits_table()
    return table[:, :-1].reshape(-1, 8, 8).copy(), table[:, -1].astype(np.int64)


@cache  # the cells of a grid read this table again for each seed
def _digits_table() -> np.ndarray:
    package = find_spec("sklearn")
    assert package is not None, "vfl depends on scikit-learn"
    assert package.origin is not None, "it is installed as files"
    return np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")


def read_digit_pairs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw pictures of pairs of digits; training rows come first, then validation, then test rows.

    Each part draws from single-digit pictures of its own, so no such picture occurs in two parts.

    Args:
        seed: the run's public seed.

    Returns:
        Pictures, float32, axes (rows, 1, 8, 16), where black is 0 and white is 1, plus normal noise
        with standard deviation 0.25; and labels, int64, axes (rows,): ten times the left digit plus
        the right digit.
    """
    images, values = read_digits()
    order = seeds.permutation(seed, len(values), "digit_pairs")
    draw = np.random.default_rng(seeds.derive(seed, "digit_pairs", "draw"))
    pairs = [
        draw.choice(digits, (rows, 2))
        for rows, digits in zip(PART_ROWS, np.split(order, np.cumsum(PART_DIGITS)), strict=False)
    ]
    left, right = np.concatenate(pairs).T
    pictures = np.concatenate([images[left], images[right]], axis=2) / 16
    pictures += NOISE * draw.standard_normal(pictures.shape)
    labels = 10 * values[left] + values[right]
    return pictures[:, None].astype(np.float32), labels.astype(np.int64)
