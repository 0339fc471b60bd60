"""What is recorded is what reached P2: every value, and no order."""

import pytest
import torch

from vfl.attacks.permuted import matched_indices, plain_sums

MODES = ["thesis", "fast"]


@pytest.mark.parametrize("mode", MODES)
def test_p2_sees_all_values_of_every_function_in_another_order(victim, normal, mode):
    private, inputs = victim(mode, 6, 5, 3), normal(40, 6)
    outputs, seen = private.infer(inputs)
    sums = plain_sums(private.layers, private.weights(), inputs)
    assert [len(each) for each in seen] == [200, 120]
    for values, true, signed in zip(seen, sums, (True, mode == "thesis"), strict=True):
        flat = true.flatten()
        if not signed:
            assert not torch.allclose(values.sort().values, flat.sort().values, atol=1e-3)
            values, flat = values.abs(), flat.abs()
        assert torch.allclose(values.sort().values, flat.sort().values, atol=2e-5)
        assert not torch.allclose(values, flat, atol=1e-2)
    assert torch.allclose(outputs, torch.sigmoid(sums[1]), atol=2e-5)


@pytest.mark.parametrize(("mode", "questions"), [("thesis", 3), ("fast", 2)])
def test_a_training_step_asks_for_slopes_anew_in_thesis_mode_only(victim, normal, mode, questions):
    private, inputs = victim(mode, 6, 8, 1), normal(32, 6)
    before = plain_sums(private.layers, private.weights(), inputs)[0].flatten()
    seen = private.train_step(inputs, torch.ones(32, 1).double(), "cross_entropy", 0.5)
    assert [len(each) for each in seen] == [256, 32, 256][:questions]
    assert torch.allclose(seen[0].sort().values, before.sort().values, atol=2e-5)
    if questions == 3:
        assert torch.allclose(seen[2].sort().values, before.sort().values, atol=2e-5)


def test_places_are_those_of_the_order_and_dummies_have_none():
    seen = torch.tensor([2.0, -0.5, 7.0, 1.0])
    assert matched_indices(seen, torch.tensor([0.5, 1.0, 2.0])).tolist() == [2, 0, -1, 1]
