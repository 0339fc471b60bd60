"""Measures of pictures against independent loops."""

import math

import numpy as np
import pytest
import torch

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View
from vfl.attacks.base import Attack
from vfl.attacks.case import Case, attempt_all
from vfl.attacks.matching import total_variation
from vfl.attacks.pictures import peak_ratio, structural_similarity
from vfl.attacks.score import rate_at
from vfl.seeds import generator


def pictures(*shape):
    draw = generator(0, "pictures")
    true = torch.randn(shape, generator=draw)
    return true + 0.5 * torch.randn(shape, generator=draw), true


def ssim_by_loops(one, other, spread, side):
    """Wang et al. 2004, eq 13, one window after the other."""
    line = [math.exp(-((i - (side - 1) / 2) ** 2) / (2 * 1.5**2)) for i in range(side)]
    weights = np.outer(line, line) / sum(line) ** 2
    c1, c2 = (0.01 * spread) ** 2, (0.03 * spread) ** 2
    found = []
    for top in range(one.shape[0] - side + 1):
        for left in range(one.shape[1] - side + 1):
            x, y = (each[top : top + side, left : left + side] for each in (one, other))
            mean_x, mean_y = (weights * x).sum(), (weights * y).sum()
            var_x = (weights * (x - mean_x) ** 2).sum()
            var_y = (weights * (y - mean_y) ** 2).sum()
            cov = (weights * (x - mean_x) * (y - mean_y)).sum()
            found.append(
                (2 * mean_x * mean_y + c1) * (2 * cov + c2)
                / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
            )  # fmt: skip
    return np.mean(found)


@pytest.mark.parametrize(("height", "side"), [(13, 11), (8, 8)])
def test_similarity_is_that_of_all_windows(height, side):
    guess, true = pictures(2, 3, height, 14)
    spread = float(true.max() - true.min())
    expected = np.mean(
        [
            ssim_by_loops(guess[row, channel].double().numpy(), true[row, channel].double().numpy(),
                          spread, side)
            for row in range(2)
            for channel in range(3)
        ]
    )  # fmt: skip
    assert structural_similarity(guess, true) == pytest.approx(expected, rel=1e-9)
    assert structural_similarity(true, true) == pytest.approx(1)


def test_the_peak_ratio_is_a_mean_over_pictures():
    guess, true = pictures(3, 1, 4, 5)
    spread = float(true.max() - true.min())
    expected = [
        10 * math.log10(spread**2 / np.mean((one.numpy() - other.numpy()) ** 2))
        for one, other in zip(guess.double(), true.double(), strict=True)
    ]
    assert peak_ratio(guess, true) == pytest.approx(np.mean(expected))
    assert peak_ratio(true, true) == 100


def test_total_variation_is_the_sum_over_neighbours():
    picture = pictures(1, 2, 3, 4)[1]
    expected = sum(
        abs(float(picture[0, c, i, j] - picture[0, c, i + di, j + dj]))
        for c in range(2)
        for i in range(3)
        for j in range(4)
        for di, dj in ((0, 1), (1, 0))
        if i + di < 3 and j + dj < 4
    )
    assert float(total_variation(picture)) == pytest.approx(expected, rel=1e-5)
    assert total_variation(torch.ones(2, 7)).tolist() == [0, 0]


def test_the_rate_at_one_percent_is_found_by_counting():
    draw = generator(0, "rate")
    scores, positive = torch.rand(500, generator=draw), torch.rand(500, generator=draw) < 0.3
    scores[positive] += 0.4
    best = max(
        float((scores[positive] > threshold).double().mean())
        for threshold in [*scores.tolist(), -1.0]
        if float((scores[~positive] > threshold).double().mean()) <= 0.01
    )
    assert rate_at(scores, positive) == best


class MeanRow(Attack):
    goal = "inputs"
    needs = frozenset({Grant.CUTS})

    def __init__(self, guess):
        self.guess = guess

    def run(self, view, draw):
        return self.guess


@pytest.mark.parametrize(
    ("shape", "measures"), [((6, 1, 4, 4), ["mse", "psnr", "ssim"]), ((6, 3), ["mse"])]
)
def test_the_mean_row_is_worth_the_guess(shape, measures):
    _, true = pictures(*shape)
    view = View(
        ThreatModel("label party", "inference", frozenset({Grant.CUTS})), 2,
        Holdings(Evidence(cuts=torch.zeros(6, 2))),
    )  # fmt: skip
    mean = true.mean(0, keepdim=True).expand_as(true)
    found = attempt_all(Case(view, inputs=true), MeanRow(mean), generator(0))
    assert [score.measure for score in found] == measures
    assert all(score.value == score.guess for score in found)
