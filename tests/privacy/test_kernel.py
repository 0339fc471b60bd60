"""Clipping and noise beside exact arithmetic, for any numbers that somebody else may choose."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vfl.core.errors import BadOptionError, NonFiniteError, PrivacyError
from vfl.core.seeds import Secret
from vfl.defenses.noise import RowNoise
from vfl.privacy import kernel
from vfl.privacy.dpsgd import PrivateHalf, RowClipper

SECRET = Secret(b"k" * 32)
ROWS = 4


class Slow(nn.Module):
    """A layer without a rule, whose rows take a backward pass each."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, rows):
        return rows * self.scale


#: Networks of every kind of layer that has a rule, with the shape of a row.
NETWORKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3)), (6,)),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 3), nn.Flatten(), nn.Linear(21, 2)), (7, 6)),
    "few positions": (lambda: nn.Sequential(nn.Linear(12, 10), nn.Flatten()), (2, 12)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)),
        (1, 4, 4),
    ),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 2)), (6,)),
    "words": (lambda: nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 2)), (4,)),
    "no rule": (lambda: nn.Sequential(Slow(), nn.Linear(6, 2)), (6,)),
}
magnitudes = st.floats(-37, 37)
norms = st.floats(math.log10(kernel.LEAST_NORM) + 1e-9, math.log10(kernel.MOST_NORM))


def network(name, weights, inputs, seed):
    torch.manual_seed(seed)
    build, shape = NETWORKS[name]
    model = build()
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(10.0**weights)
    rows = torch.randint(0, 5, (ROWS, *shape)) if name == "words" else torch.randn(ROWS, *shape)
    return model, rows if name == "words" else rows * 10.0**inputs


def clipper_of(name, norm, model):
    """One that takes the rules of layers, as after a trial with weights of usual sizes."""
    clipper = RowClipper(model, norm)
    clipper.trusts_rules = True
    rows = torch.zeros(2, *NETWORKS[name][1])
    with clipper.recording() as calls:
        model(rows.long() if name == "words" else rows)
    assert clipper.follows_rules(calls, 2) is (name != "no rule")
    return clipper


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=30)
@given(weights=magnitudes, inputs=magnitudes, back=magnitudes, norm=norms, seed=st.integers(0, 99))
def test_one_row_moves_a_sum_by_at_most_the_norm(name, weights, inputs, back, norm, seed):
    """Whatever weights, inputs and gradients are: also where float32 overflows or underflows.

    The batch stays as it is, and the row's gradient is there or not.
    """
    norm = 10.0**norm
    model, rows = network(name, weights, inputs, seed)
    clipper, trained = clipper_of(name, norm, model), list(model.parameters())

    def clipped(grad):
        with clipper.recording() as calls:
            output = model(rows)
        try:
            sums, _ = clipper.sums(output, grad[:, : output.shape[1]], trained, calls)
        except NonFiniteError:  # the training ends
            return torch.zeros(1).double()
        return torch.cat([one.reshape(-1) for one in sums])

    grad = 10.0**back * torch.randn(ROWS, 21)
    grad[1] *= -1e3
    whole = clipped(grad)
    assert whole.dtype is torch.float64
    assert bool(whole.isfinite().all())
    for row in range(ROWS):
        others = grad.clone()
        others[row] = 0
        moved = float((whole - clipped(others)).norm())
        assert moved <= norm * (1 + 1e-12)


@given(st.lists(st.floats(-45, 38), min_size=1, max_size=5), st.integers(0, 99))
def test_bounds_of_norms_are_close_from_above_and_of_each_row_alone(sizes, seed):
    draw = torch.Generator().manual_seed(seed)
    rows = torch.rand(len(sizes), 7, 300, generator=draw) - 0.5
    rows *= torch.tensor([10.0**size for size in sizes])[:, None, None]
    found, exact = kernel.norm_bounds(rows), rows.double().flatten(1).norm(dim=1)
    assert bool((found >= exact * (1 - 1e-14)).all())
    assert bool((found <= exact * (1 + 1e-4) + 2.0**-55).all())
    for row, bound in zip(rows, found, strict=True):
        assert torch.equal(kernel.norm_bounds(row[None])[0], bound)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", sorted(set(NETWORKS) - {"words"}))
def test_a_row_that_is_not_finite_adds_nothing(name, broken):
    model, rows = network(name, 0, 0, 0)
    clipper, trained = clipper_of(name, 1.0, model), list(model.parameters())
    rows[2] = broken
    with clipper.recording() as calls:
        output = model(rows)
    if name == "no rule":
        with pytest.raises(NonFiniteError):
            clipper.sums(output, torch.ones_like(output), trained, calls)
        return
    sums, norms = clipper.sums(output, torch.ones_like(output), trained, calls)
    assert not bool(norms[0, 2].isfinite())
    others = torch.tensor([0, 1, 3])
    with clipper.recording() as calls:
        output = model(rows[others])
    without, _ = clipper.sums(output, torch.ones_like(output), trained, calls)
    torch.testing.assert_close(sums, without)


@pytest.mark.parametrize("norm", [0.0, -1.0, 1e-37, 1e30, math.nan, math.inf])
def test_norms_that_float32_cannot_carry_are_refused(norm):
    with pytest.raises(BadOptionError):
        RowClipper(nn.Linear(2, 2), norm)
    if norm != math.inf:
        with pytest.raises(BadOptionError):
            RowNoise(norm, 1.0, "gaussian", 1e-5)


@given(
    norm=norms, noise=st.floats(-2, 6), count=st.sampled_from([1, 7, 10**4, 10**6]),
)  # fmt: skip
def test_the_grid_costs_no_sensitivity(norm, noise, count):
    law = kernel.NoisySum(10.0**norm, 10.0 ** (norm + noise), count)
    assert math.log2(law.step) == round(math.log2(law.step))
    assert law.bound + law.step * math.sqrt(count) <= law.norm or law.bound == 0
    assert law.deviation / law.step >= 2.0**20
    if noise < 2:
        assert law.bound >= 0.99 * law.norm


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_released_sums_lie_on_the_grid_with_noise_in_every_number(scale):
    count = 40_000
    law = kernel.NoisySum(scale, 3 * scale, count)
    total = scale * torch.rand(count, dtype=torch.float64)
    released = kernel.release([law], total, SECRET, "test")
    assert bool((released / law.step % 1 == 0).all())
    noise = (released - total) / law.deviation
    assert float(noise.mean()) == pytest.approx(0, abs=4 / math.sqrt(count))
    assert float(noise.std()) == pytest.approx(1, abs=4 / math.sqrt(2 * count))
    assert float(noise.abs().min()) > 0
    halves = noise[: count // 2], noise[count // 2 :]  # both of a pair of draws
    assert abs(float(torch.corrcoef(torch.stack(halves))[0, 1])) < 4 / math.sqrt(count / 2)


def test_noise_follows_the_normal_law():
    from scipy.stats import kstest

    draws = kernel.normal_draws(SECRET, 100_001, "law").numpy()
    assert len(draws) == 100_001
    assert kstest(draws, "norm").pvalue > 0.01
    assert np.array_equal(draws, kernel.normal_draws(SECRET, 100_001, "law").numpy())


def test_noise_is_bound_to_the_sum_and_to_its_law():
    zeros = torch.zeros(500, dtype=torch.float64)
    one = kernel.release([kernel.NoisySum(1.0, 2.0, 500)], zeros, SECRET, "x")
    others = [
        kernel.release([kernel.NoisySum(1.0, 4.0, 500)], zeros, SECRET, "x") / 2,
        kernel.release([kernel.NoisySum(0.5, 2.0, 500)], zeros, SECRET, "x"),
        kernel.release([kernel.NoisySum(1.0, 2.0, 500)], zeros + 1, SECRET, "x") - 1,
        kernel.release([kernel.NoisySum(1.0, 2.0, 500)], zeros, SECRET, "y"),
    ]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.2


@pytest.mark.parametrize("total", [torch.zeros(3), torch.zeros(1), torch.tensor([1.0, math.nan])])
def test_a_sum_that_noise_does_not_cover_is_refused(total):
    with pytest.raises(PrivacyError):
        kernel.release([kernel.NoisySum(1.0, 1.0, 2)], total, SECRET, "x")


def test_weights_of_other_shapes_are_refused():
    model = nn.Linear(1, 3)
    clipper = RowClipper(model, 1.0)
    with clipper.recording() as calls:
        output = model(torch.ones(2, 1))
    with pytest.raises(ValueError, match="shapes"):
        clipper.sums(output, torch.ones(2, 3), [torch.zeros(1, 1), torch.zeros(3)], calls)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@given(size=st.floats(-40, 38), norm=norms, sigma=st.floats(-5, 6))
def test_a_row_before_noise_is_within_the_norm_and_lies_on_the_grid(law, size, norm, sigma):
    norm, sigma = 10.0**norm, 10.0**sigma
    rows = 10.0**size * torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    still = torch.zeros(3, 9, dtype=torch.float64)
    sent = kernel.release_rows(rows, norm, sigma * norm, law, still).double()
    longest = sent.norm(1 if law == "laplace" else 2, 1).max()
    assert float(longest) <= norm
    drawn = torch.from_numpy((SECRET.laplace if law == "laplace" else SECRET.normal)((3, 9), "x"))
    noisy = kernel.release_rows(rows, norm, sigma * norm, law, drawn).double()
    steps = noisy / (2.0 ** math.ceil(math.log2((norm + 36 * sigma * norm) * 2.0**-27)))
    assert bool((steps % 1 == 0).all())
    assert bool((noisy != sent).any(1).all())


def test_the_gradient_of_released_rows_is_that_of_clipping():
    rows = torch.tensor([[0.3, 0.4], [3.0, 4.0]], requires_grad=True)
    sent = kernel.release_rows(rows, 1.0, 0.5, "gaussian", torch.ones(2, 2).double())
    sent.sum().backward()
    given = rows.grad.clone()
    rows.grad = None
    (rows * (1 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum().backward()
    torch.testing.assert_close(given, rows.grad)


def test_the_norm_that_follows_a_quantile_stays_in_its_range():
    half = PrivateHalf(
        nn.Linear(1, 1, bias=False), norm=2 * kernel.LEAST_NORM, noise=1.0, batch_size=1.0,
        secret=SECRET, party="bank", quantile=0.01,
    )  # fmt: skip
    for step in range(40):
        with half.recording() as calls:
            output = half.clipper._layers[0](torch.zeros(3, 1))
        half.give_gradients(output, torch.zeros(3, 1), calls, step)
    assert kernel.LEAST_NORM <= float(half.clipper.norms) <= kernel.MOST_NORM
