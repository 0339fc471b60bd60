"""Means of recorded cuts against counting."""

import pytest
import torch

from vfl.attacks import Grant, Heard, make
from vfl.attacks.averaging import mean_cuts
from vfl.errors import UserError


def heard():
    """Row r of epoch e has the cut (r, e); row 2 is missing in epoch 3."""
    found = []
    for epoch, order in enumerate(([2, 0, 1], [0, 1, 2], [1, 0]), start=1):
        rows = torch.tensor(order)
        cuts = torch.stack([rows.float(), torch.full((len(rows),), float(epoch))], 1)
        found.append(Heard(epoch, epoch, rows, cuts, torch.zeros_like(cuts)))
    return found


def test_each_row_has_the_mean_of_its_own_cuts():
    assert mean_cuts(heard(), 3).tolist() == [[0.0, 2.0], [1.0, 2.0], [2.0, 1.5]]
    assert mean_cuts(heard(), 3, last=2).tolist() == [[0.0, 2.5], [1.0, 2.5], [2.0, 2.0]]


def test_a_row_without_a_cut_is_told():
    with pytest.raises(UserError, match="no recorded cut") as problem:
        mean_cuts(heard(), 3, last=1)
    assert problem.value.got == "1 of 3 rows without one"
    with pytest.raises(UserError):
        mean_cuts([], 3)


def test_it_needs_what_the_other_attack_needs_and_the_recording():
    assert make("averaging:of=logistic").needs == make("logistic").needs | {Grant.GRADIENTS}
    assert make("averaging:of=gaussian_mixture").goal == "clusters"
