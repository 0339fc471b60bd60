"""SDAR and FORA: their terms, and what is lost without the part that gives them their name."""

import math

import pytest
import torch

from vfl.attacks import make
from vfl.attacks.inputs.fora import mk_mmd
from vfl.attacks.inputs.sdar import discriminator, taken_for_real, told_apart
from vfl.attacks.scoring import attempt
from vfl.core.seeds import generator
from vfl.testing import InputAttackContract


def test_mk_mmd_is_that_of_a_loop():
    one, other = (torch.randn(rows, 3, generator=generator(rows)) for rows in (4, 6))
    rows = [row.tolist() for row in torch.cat([one, other])]
    squares = [[sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for y in rows] for x in rows]
    width = sum(map(sum, squares)) / len(rows) ** 2

    def mean(left, right):
        kernel = [
            math.exp(-squares[i][j] / (times * width))
            for i in left
            for j in right
            for times in (0.25, 0.5, 1, 2, 4)
        ]
        return 5 * sum(kernel) / len(kernel)

    first, second = range(4), range(4, 10)
    wanted = mean(first, first) + mean(second, second) - 2 * mean(first, second)
    assert mk_mmd(one, other).item() == pytest.approx(wanted, rel=1e-5)


def test_a_discriminator_learns_the_cross_entropy_of_two_classes():
    judge = discriminator(2)
    real, made = (torch.randn(5, 2, generator=generator(seed)) for seed in (1, 2))
    of_real, of_made = (torch.sigmoid(judge(rows)) for rows in (real, made))
    wanted = -of_real.log().mean() - (1 - of_made).log().mean()
    assert told_apart(judge, real, made).item() == pytest.approx(wanted.item(), rel=1e-5)
    assert taken_for_real(judge, made).item() == pytest.approx(-of_made.log().mean().item())


def test_sdar_reads_more_with_its_discriminator_of_cuts():
    def share(spec):
        attack = make(spec)
        case = InputAttackContract().case(True, attack.needs)
        score = attempt(case, attack, generator(0, "draw"))
        return score.value / score.guess

    without = share("sdar:steps=150,learning_rate=0.01,alike=0")
    assert share("sdar:steps=150,learning_rate=0.01") < 0.6 * without
