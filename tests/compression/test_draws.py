"""Draws follow from a party's secret, the step and the row's position, and from nothing else."""

import numpy as np
import pytest
import torch

from vfl.compression import StepContext, make
from vfl.compression.coding.values import GradientCode
from vfl.core.seeds import Secret, generator

WIDTH = 24
SPECS = ["randtopk:k=4,alpha=0.5", "randtopk:k=4,alpha=0.5,law=multinomial"]


def training(step=1, secret=0):
    return StepContext(step, training=True, secret=Secret.of_simulation(secret, "party"))


def normal(rows, seed=0):
    return torch.randn(rows, WIDTH, generator=generator(seed, "draws"))


def replaced(spec, cut, context=None):
    """Which of a row's top k gave way, by their rank; axes (rows, k)."""
    codec = make(spec)
    kept = codec.encode(cut, context or training()).saved
    top = cut.abs().topk(codec.k).indices.sort(dim=1).values
    return ~(top[:, :, None] == kept[:, None, :]).any(dim=2)


@pytest.mark.parametrize("spec", SPECS)
def test_a_row_is_drawn_alike_whatever_stands_in_the_others(spec):
    first, second = normal(60, 1), normal(60, 2)
    whole = replaced(spec, first)
    assert whole.any()
    for row in (0, 17, 59):
        mixed = second.clone()
        mixed[row] = first[row]
        assert torch.equal(replaced(spec, mixed)[row], whole[row])


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_one_step_are_drawn_apart(spec):
    """The same cut in every row: a draw that forgot the row would choose alike."""
    same = normal(1).expand(200, WIDTH)
    assert len(torch.unique(replaced(spec, same), dim=0)) > 8


@pytest.mark.parametrize("spec", SPECS)
def test_threads_make_no_difference(spec):
    cut, threads = normal(2000), torch.get_num_threads()
    payloads = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            payloads.append(make(spec).encode(cut, training()).payload)
    finally:
        torch.set_num_threads(threads)
    assert payloads[0] == payloads[1] == payloads[2]


def rounded(grad, context):
    code = GradientCode("3")
    return code.decode(code.encode(grad, None, context), *grad.shape, None)


def test_gradients_are_rounded_alike_whatever_rows_follow():
    grad = normal(50)
    whole = rounded(grad, training())
    for rows in (1, 7, 49):
        assert np.array_equal(rounded(grad[:rows], training()), whole[:rows])
    assert not np.array_equal(rounded(grad, training(step=2)), whole)
    assert not np.array_equal(rounded(grad, training(secret=1)), whole)


def test_gradients_of_rows_are_rounded_apart():
    same = normal(1).expand(200, WIDTH)
    assert len(np.unique(rounded(same, training()), axis=0)) > 190
