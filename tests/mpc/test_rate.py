"""The division of a step holds whatever columns were accepted, and costs a few indices."""

import pytest
import torch
from torch import nn

from vfl.core.errors import BadOptionError
from vfl.mpc import Rules, private
from vfl.mpc.shares import truncate_first, truncate_second
from vfl.mpc.stream import PadStream
from vfl.mpc.three_party.network import fixed_point_rate, learning_rate_truncations

MODES = pytest.mark.parametrize("mode", ["thesis", "fast"])


def divided(words, truncations):
    first = torch.from_numpy(PadStream(bytes(32)).elements64(len(words), "x").view("int64"))
    second = words - first
    moved = truncate_first(first, truncations)
    truncate_second(second, truncations, moved)
    return first + second, sum(map(len, moved))


@MODES
@pytest.mark.parametrize("rows", [1, 100, 128, 129])
@pytest.mark.parametrize("magnitude_bits", [4, 8, 12])
@pytest.mark.parametrize("gradient_bits", [0, 4])
def test_the_largest_sum_over_a_batch_is_divided_right(mode, rows, magnitude_bits, gradient_bits):
    rules, rate = Rules(mode, magnitude_bits=magnitude_bits, delta_bits=12), 0.1 / rows
    times, shift = fixed_point_rate(rate)
    truncations = learning_rate_truncations(rules, rows, rules.delta_bits, rate, gradient_bits)
    largest = rows << magnitude_bits + gradient_bits
    words = torch.full((100_000,), largest << rules.bits + rules.delta_bits)
    found, moved = divided(words, truncations)
    wanted = times * largest / 2**shift * 2**rules.bits
    assert float((found.double() - wanted).abs().max()) <= times / 2**shift + 2
    assert moved < 0.2 * len(words)


@MODES
@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_large_columns_are_trained_on(mode, loss):
    """2000 sums of 2^21, which a bound of 2^14 would get wrong once in a hundred."""
    linear = nn.Linear(2000, 1)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.bias, -8.0 if loss == "cross_entropy" else 0.0)
    last = [nn.Sigmoid()] if loss == "cross_entropy" else []
    inputs, rate = torch.full((128, 2000), 16_000.0), 2.0**-14
    with private(nn.Sequential(linear, *last), rules=Rules(mode, magnitude_bits=14)) as hidden:
        hidden.fit(inputs, torch.ones(128), loss=loss, learning_rate=rate, batch_size=128)
        weights = hidden.reveal()[0].weight[0].detach()
    wanted = 16_000 * rate * (1 - torch.sigmoid(linear.bias.detach()) if last else 2)
    assert float((weights - wanted).abs().max()) < 1e-4


@MODES
def test_a_target_and_an_output_of_opposite_signs(mode):
    """Each is below 2^8, their difference is not, in 20,000 gradients at once."""
    linear = nn.Linear(1, 200)
    nn.init.constant_(linear.weight, 255.0)
    nn.init.zeros_(linear.bias)
    inputs, targets = torch.ones(100, 1), torch.full((100, 200), -255.0)
    with private(nn.Sequential(linear), mode) as hidden:
        hidden.fit(inputs, targets, loss="squared", learning_rate=0.01, batch_size=100)
        weights = hidden.reveal()[0].weight.detach()
    assert float((weights - (255 - 0.02 * 510)).abs().max()) < 0.01


@MODES
def test_more_rows_than_there_are_bits_for(mode):
    rules = Rules(mode, magnitude_bits=14)
    rows = 2 * 2 ** (61 - rules.bits - rules.delta_bits - 14)
    inputs, targets = torch.zeros(rows, 1), torch.zeros(rows)
    with private(nn.Sequential(nn.Linear(1, 1), nn.Sigmoid()), rules=rules) as hidden:
        with pytest.raises(BadOptionError) as caught:
            hidden.fit(inputs, targets, batch_size=rows)
        assert caught.value.want == f"at most {rows // 2} rows"
    with private(nn.Sequential(nn.Linear(1, 1), nn.Sigmoid()), rules=rules) as hidden:
        hidden.fit(inputs, targets, batch_size=rows // 2)
