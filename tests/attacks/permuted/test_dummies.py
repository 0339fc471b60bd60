"""Few values: how many there are is hidden, and what shows all the same."""

import pytest
import torch

from vfl.attacks.permuted import (
    labels_by_place,
    matched_indices,
    plain_sums,
    seen_twice,
    stands_out,
)

MODES = ["thesis", "fast"]
ROWS = 40


def one_by_one(private, inputs):
    """What P2 sees of each row alone, and the true logit."""
    true = plain_sums(private.layers, private.weights(), inputs)[0][:, 0]
    return [private.infer(row)[1][0] for row in inputs.split(1)], true


@pytest.mark.parametrize("mode", MODES)
def test_the_ledger_counts_one_value_among_32(victim, normal, mode):
    private = victim(mode, 6, 1)
    (seen,) = private.infer(normal(1, 6))[1]
    (leak,) = [leak for leak in private.leaks() if leak.observer == "P2"]
    assert (leak.where, leak.elements, leak.of) == ("layer 0", 1, 32)
    assert len(seen) == 32


@pytest.mark.parametrize("mode", MODES)
def test_without_dummies_the_ledger_and_p2_see_the_logit(victim, normal, mode):
    private, inputs = victim(mode, 6, 1, least_permuted=1, flips=False), normal(ROWS, 6)
    seen, true = one_by_one(private, inputs)
    (leak,) = [leak for leak in private.leaks() if leak.observer == "P2"]
    assert leak.elements == leak.of == ROWS
    assert torch.allclose(torch.cat(seen), true, atol=1e-5)
    assert bool((labels_by_place(torch.cat(seen)) == (true > 0)).all())


def test_a_usual_logit_is_hidden_among_dummies_and_a_sure_one_is_not(victim, normal):
    for scale, hidden in ((0.5, True), (30.0, False)):
        private, inputs = victim("thesis", 6, 1), normal(ROWS, 6, scale=scale)
        seen, true = one_by_one(private, inputs)
        rows = zip(seen, true.split(1), strict=True)
        hits = [int(matched_indices(values, row)[stands_out(values)]) == 0 for values, row in rows]
        assert sum(hits) <= 8 if hidden else sum(hits) >= 20  # 40 / 32 are a guess's


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_asked_about_twice_shows_among_new_dummies(victim, normal, mode):
    private, rows = victim(mode, 6, 1), normal(10, 6)
    first, true = one_by_one(private, rows)
    second, _ = one_by_one(private, rows)
    found = [seen_twice(*pair) for pair in zip(first, second, strict=True)]
    at = zip(found, first, true.split(1), strict=True)
    assert (
        sum(
            len(each) == 1 and int(matched_indices(values[each], row)) == 0
            for each, values, row in at
        )
        > 7
    )
    strangers = [seen_twice(*pair) for pair in zip(first, second[1:], strict=False)]
    assert sum(len(each) for each in strangers) <= 2


def test_a_slope_that_is_asked_for_later_shows_the_real_values(victim, normal):
    """In thesis mode within one step; fast mode asks once."""
    private, row = victim("thesis", 6, 3, 1), normal(1, 6)
    true = plain_sums(private.layers, private.weights(), row)[0].flatten()
    first, _, again = private.train_step(row, torch.ones(1, 1).double(), "cross_entropy", 0.1)
    found = seen_twice(first, again)
    assert set(range(3)) <= set(matched_indices(first[found], true).tolist())
    assert len(found) <= 4
