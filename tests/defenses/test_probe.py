"""The few-shot probe against scikit-learn's ridge regression, and what a training makes of it."""

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge
from torch import nn

from vfl.compression import StepContext
from vfl.core.seeds import generator, scoped
from vfl.defenses import make
from vfl.defenses.probe import probe_alignment


def batch(rows=40, classes=4, width=6):
    draw = generator(rows, "probe")
    labels = torch.randint(classes, (rows,), generator=draw)
    centres = torch.randn(classes, width, generator=draw)
    noise = torch.randn(rows, width, generator=draw)
    return centres[labels] + 0.3 * noise @ torch.randn(width, width, generator=draw), labels


def with_scikit_learn(cut, labels, classes, support, whiten):
    rows = cut.double().numpy()
    rows = rows - rows.mean(0)
    if whiten:
        covariance = rows.T @ rows / len(rows)
        covariance += (2e-3 * np.trace(covariance) / len(covariance) + 1e-6) * np.eye(
            len(covariance)
        )
        rows = np.linalg.solve(np.linalg.cholesky(covariance), rows.T).T
    else:
        rows = rows / np.sqrt((rows**2).mean(0) + 1e-6)
    truth = np.eye(classes)[labels.numpy()] - 1 / classes
    width = cut.shape[1]
    ridge = KernelRidge(alpha=0.3, kernel=lambda a, b: a @ b / width)
    ridge.fit(rows[:support], truth[:support])
    right = (ridge.predict(rows[support:]) * truth[support:]).sum(1)
    asked = labels.numpy()[support:]
    return np.mean([abs(right[asked == code].mean()) for code in np.unique(asked)])


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("classes", [4, 9])
def test_it_is_a_ridge_regression(classes, whiten):
    cut, labels = batch(classes=4)
    found = probe_alignment(cut, labels, classes, 15, whiten).item()
    assert found == pytest.approx(with_scikit_learn(cut, labels, classes, 15, whiten), rel=1e-3)


@pytest.mark.parametrize("whiten", [False, True])
def test_gradients_go_through_support_and_queries(whiten):
    cut, labels = batch(12, 3, 4)
    cut = cut.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda h: probe_alignment(h, labels, 3, 5, whiten), cut)
    (grad,) = torch.autograd.grad(probe_alignment(cut, labels, 3, 5, whiten), cut)
    assert (grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize("spec", ["probe", "probe:whiten=yes,support=3"])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 40])
def test_batches_of_any_size(spec, rows):
    """A wide cut of equal rows has no covariance to whiten with."""
    cut = torch.ones(rows, 60, requires_grad=True)
    logits = torch.zeros(rows, 3)
    loss = make(spec).loss({"bank": cut}, torch.arange(rows) % 3, logits, StepContext())
    (grad,) = torch.autograd.grad(loss, cut)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()


def test_odd_steps_know_twice_as_many_rows():
    cut, labels = batch()
    defense, logits = make("probe:alpha=2,support=7"), torch.zeros(40, 4)
    for step, support in ((0, 7), (1, 14), (2, 7)):
        expected = 2 * probe_alignment(cut, labels, 4, support).item()
        found = defense.loss({"bank": cut}, labels, logits, StepContext(step, training=True)).item()
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("whiten", ["no", "yes"])
def test_a_bottom_learns_to_withhold_what_a_reader_would_find(whiten):
    inputs, labels = batch(128)
    with scoped(0):
        bottom = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8))
    steps = torch.optim.Adam(bottom.parameters(), lr=0.01)
    defense, logits = make(f"probe:support=20,alpha=1,whiten={whiten}"), torch.zeros(128, 4)
    losses = []
    for step in range(60):
        loss = defense.loss(
            {"bank": bottom(inputs)}, labels, logits, StepContext(step, training=True)
        )
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
