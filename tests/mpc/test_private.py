import itertools

import numpy as np
import pytest
import torch
from torch import nn

from vfl.core.errors import (
    BadOptionError,
    DataError,
    PrivateLayerError,
    WidthError,
)
from vfl.core.seeds import permutation
from vfl.mpc import private
from vfl.mpc.channel import bytes_by_phase
from vfl.mpc.three_party.private_module import weights_of, with_weights


def model(*widths, last=None):
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([last] if last else []))


def error_of(found, wanted):
    return float((found.detach() - wanted.detach()).abs().max())


@pytest.mark.parametrize("mode", ["thesis", "fast"])
def test_any_rows_any_time(mode):
    plain = nn.Sequential(nn.Flatten(), nn.Dropout(), model(12, 7), nn.GELU(), nn.Linear(7, 3))
    plain.eval()
    with private(plain, mode) as hidden:
        for rows in (1, 50, 3):
            inputs = torch.randn(rows, 3, 4, generator=torch.Generator().manual_seed(rows))
            found = hidden(inputs)
            assert found.dtype == torch.float32
            assert error_of(found, plain(inputs)) < 2e-5


def test_weights_are_opened_once_and_then_cost_nothing():
    with private(model(40, 20, 2)) as hidden:
        inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
        setup = bytes_by_phase(hidden.traffic())
        hidden(inputs)
        first = bytes_by_phase(hidden.traffic())
        hidden(inputs)
        second = bytes_by_phase(hidden.traffic())
    assert setup["online"] == 0
    assert setup["setup"] > 2 * 8 * (40 * 20 + 20 * 2)
    assert first["setup"] == second["setup"] == setup["setup"]
    assert second["online"] == 2 * first["online"]
    inputs, hidden_values = 8 * 4 * 40, (5 + 5 + 8) * 80 + 2 * 8 * 80
    assert 0 < first["online"] - inputs - hidden_values - 4 * 2 * 8 < 10 * 16


@pytest.mark.parametrize("mode", ["thesis", "fast"])
def test_training_follows_the_plaintext(mode):
    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(250, 10, generator=source)
    targets = (inputs[:, 0] * inputs[:, 1] + inputs[:, 2] > 0).float()
    plain = model(10, 16, 1, last=nn.Sigmoid())
    with private(plain, mode) as hidden:
        hidden.fit(inputs, targets, learning_rate=1.0, batch_size=64, epochs=5, seed=1)
        trained = hidden.reveal()
    wanted = in_clear(plain, inputs, targets)
    for found, value in zip(trained.parameters(), wanted.parameters(), strict=True):
        assert error_of(found, value) < 2e-4
    both = zip(plain.parameters(), wanted.parameters(), strict=True)
    assert max(error_of(before, after) for before, after in both) > 0.1


def in_clear(plain, inputs, targets):

    trained = with_weights(plain, weights_of(plain)).double()
    for epoch in range(5):
        order = torch.from_numpy(permutation(1, len(inputs), "mpc", epoch))
        for index in order.split(64):
            outputs = trained(inputs[index].double())[:, 0]
            loss = nn.functional.binary_cross_entropy(outputs, targets[index].double())
            gradients = torch.autograd.grad(loss, list(trained.parameters()))
            with torch.no_grad():
                for value, gradient in zip(trained.parameters(), gradients, strict=True):
                    value -= gradient
    return trained


class Own(nn.Module):
    def forward(self, inputs):
        return inputs


class Residual(nn.Sequential):
    def forward(self, inputs):
        return inputs + super().forward(inputs)


class Doubled(nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


def tied():
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight = one.weight
    return [one, nn.ReLU(), two]


def again():
    layer = nn.Linear(3, 3)
    return [layer, nn.ReLU(), nn.Sequential(layer)]


def hooked(module, how="register_forward_hook"):
    getattr(module, how)(lambda *arguments: None)
    return module


WEIGHT_NORM = nn.utils.parametrizations.weight_norm


@pytest.mark.parametrize(
    ("layers", "named", "instead"),
    [
        ([nn.Conv2d(1, 2, 3)], "layer '0'", "bottom"),
        ([nn.Linear(2, 2), nn.BatchNorm1d(2)], "layer '1'", "fuse_linear_bn_eval"),
        ([nn.Linear(2, 2), nn.Sequential(nn.Softmax(1))], "layer '1.0'", "leave it out"),
        ([nn.Linear(2, 2), nn.LeakyReLU()], "layer '1'", "nn.ReLU"),
        ([nn.ReLU(), nn.Linear(2, 2)], "layer '0'", "nn.Linear before it"),
        ([nn.Linear(2, 2), nn.GELU(approximate="tanh")], "layer '1'", "without options"),
        ([Own()], "layer '0'", "nn.Sequential"),
        ([Residual(nn.Linear(2, 2))], "layer '0'", "nn.Sequential"),
        ([Doubled(2, 2)], "layer '0'", "nn.Linear"),
        ([nn.Linear(2, 2), nn.Flatten(0)], "layer '1'", "nn.Flatten(1)"),
        ([nn.Flatten()], "the model", "nn.Linear"),
        ([nn.Linear(2, 3), nn.ReLU(), nn.Linear(4, 1)], "layer '2'", ""),
        ([nn.Linear(2, 1, dtype=torch.complex64)], "layer '0'", ""),
        (again(), "layer '2.0'", "deepcopy"),
        (tied(), "layer '2'", "deepcopy"),
        (hooked(nn.Sequential(nn.Linear(2, 2))), "the model", "remove them"),
        ([hooked(nn.Linear(2, 2))], "layer '0'", "remove them"),
        ([hooked(nn.Linear(2, 2), "register_forward_pre_hook")], "layer '0'", "remove them"),
        ([nn.Linear(2, 2), hooked(nn.Identity())], "layer '1'", "remove them"),
        # A copy with other weights would keep the old ones.
        ([WEIGHT_NORM(nn.Linear(2, 2))], "layer '0'", "remove_parametrizations"),
    ],
)
def test_other_layers_are_refused_by_name(layers, named, instead):
    with pytest.raises(PrivateLayerError) as caught:
        private(layers if isinstance(layers, nn.Module) else nn.Sequential(*layers))
    assert caught.value.where == named
    assert instead in (caught.value.fix or "")


def test_a_function_may_come_again():
    torch.manual_seed(0)
    act = nn.Tanh()
    plain = nn.Sequential(nn.Linear(3, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 1))
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    with private(plain) as hidden:
        assert error_of(hidden(inputs), plain(inputs)) < 2e-5


def test_how_long_a_party_waits_is_set():
    """What comes of it `test_failures.py` says."""
    with private(model(4, 1), timeout_s=41.5) as hidden:
        links = [one.link for party in hidden._trio.parties for one in party.channels.values()]
        assert {link._timeout_s for link in links} == {41.5}


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1, 0, 1e9])
def test_a_wait_that_is_none_is_refused(timeout_s):
    with pytest.raises(BadOptionError) as caught:
        private(model(4, 1), timeout_s=timeout_s)
    assert (caught.value.where, caught.value.want) == ("option 'timeout_s'", "0.001 to 604800")


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (np.zeros((8, 2)), "ndarray"),
        ([[0.0, 1.0]], "list"),
        (torch.zeros(2), "torch.float32 of axes (2,)"),
        (torch.zeros(0, 2), "torch.float32 of axes (0, 2)"),
        (torch.zeros(8, 2, dtype=torch.complex64), "torch.complex64 of axes (8, 2)"),
    ],
)
def test_what_is_no_rows_is_refused(wrong, got):
    plain = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    with private(plain) as hidden:
        for ask in (hidden, lambda rows: hidden.fit(rows, torch.zeros(8), batch_size=4)):
            with pytest.raises(DataError) as caught:
                ask(wrong)
            assert (caught.value.where, caught.value.got) == ("inputs", got)
        with pytest.raises(DataError, match="these rows cannot be shared"):
            hidden.fit(torch.zeros(8, 2), np.zeros(8), batch_size=4)


def test_whole_numbers_are_answered_with_fractions():
    plain = model(2, 1)
    rows = torch.tensor([[1, 2], [3, -4]])
    with private(plain) as hidden:
        assert error_of(hidden(rows), plain(rows.float())) < 2e-5


LOGISTIC = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())


@pytest.mark.parametrize(("rows", "batch_size"), [(8, 8), (66, 64)])
def test_a_batch_has_64_rows_or_all_by_default(rows, batch_size):
    inputs, found = torch.linspace(-2, 2, 2 * rows).reshape(rows, 2), []
    for options in ({}, {"batch_size": batch_size}):
        with private(LOGISTIC) as hidden:
            hidden.fit(inputs, (inputs[:, 0] > 0).float(), learning_rate=1.0, epochs=2, **options)
            found.append(hidden.reveal())
    for one, other in zip(*(each.parameters() for each in found), strict=True):
        assert error_of(one, other) < 1e-4


@pytest.mark.parametrize(
    ("plain", "targets", "options", "error", "said"),
    [
        (LOGISTIC, torch.zeros(8), {"epochs": 0}, BadOptionError, "epochs"),
        (LOGISTIC, torch.zeros(8), {"seed": -1}, BadOptionError, "seed"),
        (LOGISTIC, torch.zeros(7), {}, WidthError, "target"),
        (LOGISTIC, torch.tensor([0.0] * 7 + [1.5]), {}, DataError, "sigmoid"),
        (LOGISTIC, torch.tensor([0.0] * 7 + [float("nan")]), {}, DataError, "sigmoid"),
        (nn.Sequential(nn.Linear(2, 1)), torch.zeros(8), {}, BadOptionError, "sigmoid"),
        (nn.Sequential(nn.Linear(3, 1)), torch.zeros(8), {"loss": "squared"}, WidthError, "3"),
    ],
)
def test_a_training_that_cannot_be_is_refused(plain, targets, options, error, said):
    with private(plain) as hidden, pytest.raises(error, match=said) as caught:
        hidden.fit(torch.zeros(8, 2), targets, batch_size=4, **options)
    assert "1.5" not in str(caught.value)
