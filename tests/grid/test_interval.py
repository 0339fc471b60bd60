import numpy as np
import pytest
from scipy import stats

from vfl.grid import estimate, paired_difference

SCORES = np.random.default_rng(0).normal(0.8, 0.02, 10)
OTHERS = SCORES - np.random.default_rng(1).normal(0.01, 0.005, 10)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_the_interval_of_student(count):
    found = estimate(SCORES[:count].tolist())
    test = stats.ttest_1samp(SCORES[:count], 0).confidence_interval(0.95)
    assert found.count == count
    assert found.mean - found.half_width == pytest.approx(test.low)
    assert found.mean + found.half_width == pytest.approx(test.high)


def test_the_paired_interval():
    ours, theirs = (
        {f"fold={fold}": value for fold, value in enumerate(values.tolist())}
        for values in (OTHERS, SCORES)
    )
    found = paired_difference(ours, theirs)
    test = stats.ttest_rel(OTHERS, SCORES).confidence_interval(0.95)
    assert found.mean - found.half_width == pytest.approx(test.low)
    assert found.mean + found.half_width == pytest.approx(test.high)
    assert found.half_width < estimate(SCORES.tolist()).half_width


def test_only_repeats_that_both_have_are_paired():
    found = paired_difference({"seed=0": 0.5, "seed=1": 0.9}, {"seed=1": 0.7, "seed=2": 0.1})
    assert found.mean == pytest.approx(0.2)
    assert found.count == 1


def test_one_repeat_has_no_interval_and_none_has_no_mean():
    assert estimate([0.5]).half_width is None
    assert estimate([]) is None
