"""A value that products cannot divide is refused before it is shared: which, and its bits."""

import pytest
import torch
from torch import nn

from vfl.core.errors import BadOptionError, RingRangeError
from vfl.mpc import Rules, private

MODES = pytest.mark.parametrize("mode", ["thesis", "fast"])


def linear(weight=0.5, bias=0.0):
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.fill_(weight)
        layer.bias.fill_(bias)
    return nn.Sequential(layer)


def fit(targets, rules):
    inputs = torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    with private(linear(), rules=rules) as hidden:
        hidden.fit(inputs, targets, loss="squared", learning_rate=0.01, batch_size=2, epochs=3)
        return hidden.reveal()


@MODES
def test_a_target_that_is_too_large(mode):
    with pytest.raises(RingRangeError) as caught:
        fit(torch.tensor([1.0, -387.25]), Rules(mode))
    assert caught.value.where == "targets"
    assert caught.value.got == "9 bits before the point"
    assert caught.value.want.startswith("at most 8")
    assert caught.value.fix.startswith("scale the labels")
    assert "387" not in str(caught.value)


@MODES
@pytest.mark.parametrize(
    ("weight", "bias", "where"), [(300.0, 0.0, "0.weight"), (0.5, -300.0, "0.bias")]
)
def test_a_weight_that_is_too_large(mode, weight, bias, where):
    with pytest.raises(RingRangeError) as caught:
        private(linear(weight, bias), mode)
    assert caught.value.where == where
    assert caught.value.fix.startswith("scale the weights")
    assert "300" not in str(caught.value)


@MODES
def test_an_input_that_is_too_large(mode):
    with private(linear(), mode) as hidden, pytest.raises(RingRangeError) as caught:
        hidden(torch.tensor([[0.0, 1234.0]]))
    assert (caught.value.where, caught.value.got) == ("inputs", "11 bits before the point")
    assert caught.value.fix.startswith("scale the columns")
    with private(linear(), rules=Rules(mode, magnitude_bits=11)) as hidden:
        assert float(hidden(torch.tensor([[0.0, 1234.0]]))[0, 0]) == pytest.approx(617, abs=1e-3)


@MODES
@pytest.mark.parametrize("last", [[nn.ReLU()], [nn.Sigmoid()], []])
def test_a_sum_that_has_wrapped_to_some_other_number(mode, last):
    """100 products of 40,000 are 4,000,000, which fast mode's ring holds as -194,304."""
    module = nn.Sequential(nn.Linear(100, 1), *last)
    nn.init.constant_(module[0].weight, 200.0)
    with private(module, mode) as hidden, pytest.raises(RingRangeError) as caught:
        hidden(torch.full((1, 100), 200.0))
    assert caught.value.where == ("layer 0" if last else "outputs of layer 0")


def test_activations_that_are_trained_on_are_bounded_like_columns():
    """They meet gradients in a product that is divided, as columns do."""
    for last, fits in ((nn.ReLU(), False), (nn.Tanh(), True)):
        module = nn.Sequential(nn.Linear(1, 1), last, nn.Linear(1, 1), nn.Sigmoid())
        nn.init.constant_(module[0].weight, 100.0)
        inputs = torch.full((4, 1), 100.0)
        with private(module) as hidden:
            hidden(inputs)
            if fits:
                hidden.fit(inputs, torch.ones(4), batch_size=4)
            else:
                with pytest.raises(RingRangeError) as caught:
                    hidden.fit(inputs, torch.ones(4), batch_size=4)
                assert (caught.value.where, caught.value.want[:9]) == ("layer 0", "at most 8")


@MODES
def test_an_output_that_no_function_shows_is_checked_by_who_receives_it(mode):
    module = nn.Sequential(nn.Linear(20, 1))
    nn.init.constant_(module[0].weight, 255.0)
    with private(module, mode) as hidden, pytest.raises(RingRangeError) as caught:
        hidden(torch.full((4, 20), 255.0))
    assert caught.value.where == "outputs of layer 0"


@MODES
def test_dummies_stay_within_the_least_range_there_is(mode):
    """A row alone, small, among 4000 dummies of deviation 2, behind every kind of function."""
    rules = Rules(mode, magnitude_bits=4, least_permuted=4000)
    for last in (nn.ReLU(), nn.Sigmoid()):
        with private(nn.Sequential(*linear(), last), rules=rules) as hidden:
            found = hidden(torch.tensor([[0.5, -0.25]]))
        assert float(found[0, 0]) == pytest.approx(float(last(torch.tensor(0.125))), abs=1e-4)


@MODES
@pytest.mark.parametrize("bits", [0, 1, 3])
def test_a_range_that_dummies_would_leave_is_refused(mode, bits):
    with pytest.raises(BadOptionError) as caught:
        Rules(mode, magnitude_bits=bits)
    assert (caught.value.where, caught.value.want) == ("option 'magnitude_bits'", "4 to 1e+09")
