"""Marvell and max-norm against a general solver, closed forms and real gradients."""

import numpy as np
import pytest
import torch
from leaking import figures
from scipy.optimize import minimize

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.seeds import Secret, generator
from vfl.defenses import LabelKind, make
from vfl.defenses.marvell import Gradients, Noise, best, divergence, measure

LENDER, OTHER = (Secret.of_simulation(0, name) for name in ("lender", "other"))
CASES = [
    Gradients(1.0, 0.1, 0.1, 0.5, 4),
    Gradients(1.0, 0.01, 0.5, 0.1, 16),
    Gradients(4.0, 0.5, 0.01, 0.1, 16),
    Gradients(0.3, 0.02, 0.04, 0.9, 2),
    Gradients(2.0, 1e-4, 2.0, 0.3, 1),
]


def kl_sum(found, noise):
    """From the matrices themselves."""
    towards = np.zeros(found.width)
    towards[0] = np.sqrt(found.distance2)
    axis = np.zeros((found.width, found.width))
    axis[0, 0] = 1
    rest = np.eye(found.width) - axis
    zero = found.spread0 * np.eye(found.width) + noise.along0 * axis + noise.across0 * rest
    one = found.spread1 * np.eye(found.width) + noise.along1 * axis + noise.across1 * rest

    def kl(a, b):
        inner = np.trace(np.linalg.solve(b, a)) + towards @ np.linalg.solve(b, towards)
        return (inner - found.width + np.log(np.linalg.det(b) / np.linalg.det(a))) / 2

    return kl(zero, one) + kl(one, zero)


def spent(found, noise):
    zero = noise.along0 + (found.width - 1) * noise.across0
    one = noise.along1 + (found.width - 1) * noise.across1
    return (1 - found.share1) * zero + found.share1 * one


@pytest.mark.parametrize("found", CASES)
def test_the_divergence_is_that_of_the_matrices(found):
    for noise in (Noise(0.0, 0.0, 0.0, 0.0), Noise(0.7, 0.2, 1.5, 0.01)):
        assert divergence(found, noise) == pytest.approx(kl_sum(found, noise), rel=1e-6)


@pytest.mark.parametrize("found", CASES)
@pytest.mark.parametrize("power", [0.1, 1.0, 10.0])
def test_no_general_solver_finds_better_noise(found, power):
    noise = best(found, power)
    assert min(noise) >= 0
    assert spent(found, noise) <= power * (1 + 1e-6)
    draw = np.random.default_rng(0)
    for _ in range(5):
        start = draw.dirichlet(np.ones(4)) * power / found.width
        other = minimize(
            lambda x: kl_sum(found, Noise(*np.maximum(x, 0))),
            start,
            method="SLSQP",
            bounds=[(0, None)] * 4,
            constraints={"type": "ineq", "fun": lambda x: power - spent(found, Noise(*x))},
        )
        rival = np.maximum(other.x, 0)
        rival *= min(1, power / spent(found, Noise(*rival)))
        assert divergence(found, noise) <= kl_sum(found, Noise(*rival)) * (1 + 1e-5)


def batch(rows=40_000, width=6):
    draw = generator(0, "marvell")
    labels = (torch.rand(rows, generator=draw) < 0.2).long()
    means = torch.zeros(2, width)
    means[1, 0], means[0, 1] = 3.0, 1.0
    spreads = torch.tensor([0.3, 0.8])
    noise = torch.randn(rows, width, generator=draw)
    return means[labels] + spreads[labels][:, None] * noise, labels


@pytest.mark.parametrize("shape", ["optimal", "iso"])
def test_what_is_added_has_the_covariances_and_the_power(shape):
    grad, labels = batch()
    noise = sent(f"marvell:power=2,shape={shape}", grad, labels) - grad
    is_one = labels == 1
    difference = (grad[is_one].mean(0) - grad[~is_one].mean(0)).double()
    found = measure(grad.double(), is_one, float(difference.square().sum()))
    assert noise.square().sum(1).mean() == pytest.approx(2 * found.distance2, rel=0.05)
    direction = difference / difference.norm()
    wanted = best(found, 2 * found.distance2)
    if shape == "iso":
        wanted = Noise(*[2 * found.distance2 / found.width] * 4)
    for one, along, across in (
        (~is_one, wanted.along0, wanted.across0),
        (is_one, wanted.along1, wanted.across1),
    ):
        covariance = torch.cov(noise[one].double().T)
        on_axis = float(direction @ covariance @ direction)
        rest = (float(covariance.trace()) - on_axis) / (found.width - 1)
        assert on_axis == pytest.approx(along, rel=0.08)
        assert rest == pytest.approx(across, rel=0.08, abs=1e-3)


def test_a_batch_of_one_class_gets_round_noise():
    grad = batch()[0]
    noise = sent("marvell:power=2", grad, torch.zeros(len(grad), dtype=torch.long)) - grad
    power = 2 * grad.mean(0).square().sum()
    np.testing.assert_allclose(noise.var(0), power / 6, rtol=0.05)
    equal = torch.ones(3, 2)
    assert torch.equal(sent("marvell:power=2", equal * 0, torch.tensor([0, 1, 1])), equal * 0)


def test_max_norm_makes_every_norm_the_largest_on_average():
    grad = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    labels = torch.tensor([0, 1, 0]).repeat(4000)
    many = sent("max_norm", grad.repeat(4000, 1), labels).view(4000, 3, 2).double()
    np.testing.assert_allclose(many.mean(0), grad, atol=0.2)
    np.testing.assert_allclose(many.square().sum(2).mean(0), [25, 25, 0], rtol=0.1)
    assert torch.equal(many[:, 0], grad[0].double().expand(4000, 2))
    assert torch.equal(many[:, 1, 0], torch.zeros(4000).double())


@pytest.mark.parametrize("spec", ["marvell", "max_norm"])
def test_their_noise_is_the_label_partys(spec):
    grad, labels = batch(50)
    assert torch.equal(sent(spec, grad, labels), sent(spec, grad, labels))
    assert not torch.equal(sent(spec, grad, labels), sent(spec, grad, labels, OTHER))
    assert not torch.equal(sent(spec, grad, labels), sent(spec, grad, labels, step=3))


@pytest.mark.parametrize("spec", ["marvell", "max_norm"])
def test_labels_of_other_than_two_classes(spec):
    with pytest.raises(SpecError) as caught:
        make(spec).prepare(LabelKind(10))
    assert caught.value.what == f"'{spec}' hides which of two classes a row has"
    assert (caught.value.got, caught.value.want) == ("10 classes", "2 classes")
    with pytest.raises(SpecError, match="the labels of a regression are numbers"):
        make(spec).prepare(LabelKind(None))
    make(spec).prepare(LabelKind(2))


def context(step=2, secret=LENDER):
    return StepContext(step, training=True, secret=secret)


def sent(spec, grad, labels, secret=LENDER, step=2):
    return make(spec).gradient(grad, labels, context(step, secret))


@pytest.mark.slow
def test_norms_and_directions_of_real_gradients():
    """Li et al. 2022 find both to tell labels of a rare class; hiding costs 2.5 points here."""
    plain, hidden = (
        np.mean([figures(spec, epochs=15, rate=0.002, first=3, seed=seed) for seed in range(3)], 0)
        for spec in ("none", "marvell:power=2")
    )
    assert min(plain[:2]) > 0.95
    assert max(hidden[:2]) < 0.6
    assert hidden[2] > plain[2] - 0.04
