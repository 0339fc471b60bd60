"""Algorithms 5.3 and 5.4 against the same network in plaintext, with torch's own gradients."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from vfl.core.errors import RingRangeError
from vfl.mpc.three_party.network import fixed_point_rate

MODES = ["thesis", "fast"]
ERROR = 2e-5


def normal(rows, columns, seed=7):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).double()


def labels(rows, columns=1):
    source = torch.Generator().manual_seed(9)
    return torch.randint(0, 2, (rows, columns), generator=source).double()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("widths", "function", "last"),
    [
        ((30, 1), "", "sigmoid"),
        ((30, 12, 1), "relu", "sigmoid"),
        ((30, 12, 5), "tanh", ""),
        ((30, 16, 8, 3), "sigmoid", "tanh"),
        ((9, 1), "", ""),
    ],
)
def test_outputs_are_those_in_clear(setting, chain, mode, widths, function, last):
    inputs = normal(40, widths[0])
    private = setting(mode, chain(*widths, function=function, last=last), inputs)
    assert float((private.infer() - private.plain(inputs)).abs().max()) < ERROR


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_few_rows_are_hidden_among_dummies(setting, chain, mode, rows):
    inputs = normal(rows, 8)
    private = setting(mode, chain(8, 3, 1), inputs)
    assert float((private.infer() - private.plain(inputs)).abs().max()) < ERROR
    seen = {leak.where: leak for leak in private.trio.leaks() if leak.observer == "P2"}
    assert (seen["layer 0"].elements, seen["layer 0"].of) == (3 * rows, max(32, 3 * rows))
    assert (seen["layer 1"].elements, seen["layer 1"].of) == (rows, max(32, rows))


@pytest.mark.parametrize(("function", "told"), [("", {"layer 0"}), ("relu", set())])
def test_fast_mode_divides_forward_where_no_function_stands_between(setting, chain, function, told):
    inputs = normal(40, 8)
    private = setting("fast", chain(8, 5, 3, 1, function=function), inputs)
    assert float((private.infer() - private.plain(inputs)).abs().max()) < ERROR
    found = {leak.where for leak in private.trio.leaks() if leak.observer == "P1"}
    assert found == (told and {"layer 0", "layer 1"})


def plain_step(private, inputs, targets, loss, rate):
    times, shift = fixed_point_rate(rate / len(inputs) * (2 if loss == "squared" else 1))
    rate = times / 2**shift * len(inputs)
    for value in private.values.values():
        value.requires_grad_()
    if loss == "cross_entropy":
        logits = private.plain(inputs, last=False)
        total = binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    else:
        total = ((private.plain(inputs) - targets) ** 2).sum() / 2
    (total / len(inputs)).backward()
    return {name: (value - rate * value.grad).detach() for name, value in private.values.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("widths", "function", "last", "loss", "bias"),
    [
        ((20, 1), "", "sigmoid", "cross_entropy", True),
        ((20, 10, 1), "relu", "sigmoid", "cross_entropy", False),
        ((20, 10, 4), "tanh", "sigmoid", "cross_entropy", True),
        ((20, 10, 6, 4), "relu", "sigmoid", "squared", True),
        ((20, 10, 2), "sigmoid", "", "squared", True),
        ((20, 10, 2), "", "", "squared", True),
    ],
)
def test_a_step_is_gradient_descent(setting, chain, mode, widths, function, last, loss, bias):
    inputs, targets = normal(24, widths[0]), labels(24, widths[-1])
    layers = chain(*widths, function=function, last=last, bias=bias)
    private = setting(mode, layers, inputs, targets)
    wanted = plain_step(private, inputs, targets, loss, 0.5)
    private.train_step(loss, 0.5)
    found = private.weights()
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert float((found[name] - value).abs().max()) < 1e-5, name


@pytest.mark.parametrize("mode", MODES)
def test_an_activation_that_would_overflow_is_named_by_its_layer(setting, chain, mode):
    inputs = torch.full((40, 4), 8000.0, dtype=torch.float64)
    private = setting(mode, chain(4, 4, 4, last="", function="relu"), inputs, bits=25)
    with pytest.raises(RingRangeError) as caught:
        private.infer()
    assert caught.value.where == "layer 0"
    assert "bits before the point" in caught.value.got


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_hidden_layers_above_one_do_not_wrap(setting, chain, mode):
    """Weights of 100 make them 100; sums over rows of columns near 200 are large."""
    inputs = normal(128, 40).abs() + 200
    targets = torch.zeros(128, 1, dtype=torch.float64)
    values = {
        "0.weight": torch.full((40, 60), 4e-6, dtype=torch.float64),
        "0.bias": torch.zeros(60, dtype=torch.float64),
        "1.weight": torch.full((60, 1), 100.0, dtype=torch.float64),
    }
    private = setting(mode, chain(40, 60, 1), inputs, targets, values)
    wanted = plain_step(private, inputs, targets, "cross_entropy", 1e-5)
    private.train_step("cross_entropy", 1e-5)
    found = private.weights()
    moved = float((wanted["0.weight"] - values["0.weight"]).detach().abs().max())
    assert moved > 0.1
    for name, value in wanted.items():
        assert float((found[name] - value).abs().max()) < 1e-3 * moved, name
