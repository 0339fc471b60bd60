"""Each attack wins where it must, and stays at its guess where nothing leaks."""

import pytest
import torch

from vfl.attacks.permuted import (
    by_rank,
    drawn_weights,
    found_shares,
    labels_by_place,
    labels_from_sums,
    like_multisets,
    matched_indices,
    plain_sums,
    recognised,
    solve_shuffled,
)
from vfl.attacks.scoring import auc

MODES = ["thesis", "fast"]
ROWS = 96


def logits_of(private, inputs):
    return plain_sums(private.layers, private.weights(), inputs)[0][:, 0]


def orders(seed, count):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randperm(ROWS, generator=draw) for _ in range(count)]


def test_labels_by_place_need_the_order(victim, normal):
    private, inputs = victim("thesis", 8, 1), normal(1024, 8)
    true = logits_of(private, inputs)
    labels = true > 0
    (seen,) = private.infer(inputs)[1]
    at_place = (labels_by_place(seen) == labels).double().mean()
    assert abs(float(at_place) - 0.5) < 5 * 0.5 / 1024**0.5
    assert bool((labels_by_place(true) == labels).all())  # nothing permuted


@pytest.mark.parametrize(("mode", "flips"), [("thesis", False), ("thesis", True), ("fast", True)])
def test_labels_from_sums_over_batches_of_public_rows(victim, normal, mode, flips):
    """No order hides a sum; random signs do."""
    private, inputs = victim(mode, 8, 1, flips=flips), normal(ROWS, 8, scale=4.0)
    labels = logits_of(private, inputs) > 0
    batches = [part for order in orders(3, 40) for part in order.split(32)]
    seen = [private.infer(inputs[batch])[1][0] for batch in batches]
    found = labels_from_sums(batches, seen, ROWS) > 0.5
    share = float((found == labels).double().mean())
    if not flips:
        assert share > 0.95
    else:
        assert abs(share - 0.5) < 5 * 0.5 / ROWS**0.5


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_equal_weights_are_linked_by_rank(victim, normal, mode):
    private, inputs = victim(mode, 8, 1), normal(64, 8)
    true = logits_of(private, inputs)
    first, second = (private.infer(inputs)[1][0] for _ in range(2))
    rows = matched_indices(first, true), matched_indices(second, true)
    assert not torch.equal(*rows)
    linked = rows[0] == rows[1][by_rank(first, second, signed=mode == "thesis")]
    assert float(linked.double().mean()) > 0.95


def test_rows_that_have_nothing_in_common_are_not_linked(normal):
    linked = by_rank(normal(1000, seed=1), normal(1000, seed=2)) == torch.arange(1000)
    assert int(linked.sum()) < 10  # one is expected


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_is_recognised_after_a_training_step(victim, normal, mode):
    private, groups = victim(mode, 8, 1), normal(128, 8).split(32)
    before = [private.infer(group)[1][0] for group in groups]
    private.train_step(groups[0], torch.ones(32, 1).double(), "cross_entropy", 0.1)
    after = [private.infer(groups[at])[1][0] for at in (2, 0, 3, 1)]
    assert recognised(before, after, signed=mode == "thesis").tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("mode", MODES)
def test_known_weights_find_candidates_whatever_the_order(victim, normal, mode):
    private, candidates = victim(mode, 8, 64, 1), normal(200, 8)
    inside = torch.randperm(200, generator=torch.Generator().manual_seed(5)) < 20
    seen = private.infer(candidates[inside])[1][0]
    alone = private.infer(candidates[7:8])[1][0]
    sums = plain_sums(private.layers, private.weights(), candidates)[0]
    assert auc(found_shares(seen, sums), inside) == 1.0
    assert int(like_multisets(alone, sums).argmin()) == 7
    other = drawn_weights(private.layers, torch.Generator().manual_seed(9))
    guessed = plain_sums(private.layers, other, candidates)[0]
    assert abs(auc(found_shares(seen, guessed), inside) - 0.5) < 0.35  # deviation about 0.07


def test_known_weights_without_candidates_undo_few_columns_only(victim, normal):
    """Two columns are found from their 64 values; twenty are not even from the true start's law."""
    for columns, undone in ((2, True), (20, False)):
        private, row = victim("thesis", columns, 64, 1), normal(1, columns)
        weights = private.weights()
        starts = normal(100, columns, seed=7)
        seen = private.infer(row)[1][0]
        found = solve_shuffled(seen, weights["0.weight"], weights["0.bias"], starts)
        error = float((found - row).square().mean() / row.square().mean())
        assert error < 1e-6 if undone else error > 0.1
