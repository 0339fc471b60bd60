"""A value that products cannot divide is refused before it is shared: which, and its bits."""

import pytest
import torch
from torch import nn

from vfl.errors import RingRangeError
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
        hidden.fit(inputs, targets, loss="squared", learning_rate=0.01, batch_rows=2, epochs=3)
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
def test_targets_within_the_bits_are_learned(mode):
    found = fit(torch.tensor([1.0, -387.25]), Rules(mode, magnitude_bits=10)).requires_grad_(False)
    plain = linear().double()
    inputs = torch.tensor([[1.0, -1.0], [0.5, 2.0]], dtype=torch.float64)
    wanted = torch.tensor([1.0, -387.25], dtype=torch.float64)
    for _ in range(3):
        loss = ((plain(inputs)[:, 0] - wanted) ** 2).mean()
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        with torch.no_grad():
            for value, gradient in zip(plain.parameters(), gradients, strict=True):
                value -= 0.01 * gradient
    wanted = plain[0].weight.detach()
    assert float((found[0].weight - wanted).abs().max()) < 0.01 * float(wanted.abs().max())


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
def test_an_output_that_no_function_shows_is_checked_by_who_receives_it(mode):
    module = nn.Sequential(nn.Linear(20, 1))
    nn.init.constant_(module[0].weight, 255.0)
    with private(module, mode) as hidden, pytest.raises(RingRangeError) as caught:
        hidden(torch.full((4, 20), 255.0))
    assert caught.value.where == "outputs of layer 0"
