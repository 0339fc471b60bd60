"""Losses with and without weights against numpy, and labels made standard and back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vfl.core.seeds import generator
from vfl.session.label.task import FEW_CLASSES, Classification, ManyClasses, Regression, make_task


def test_outputs_over_many_classes_are_not_kept():
    assert type(make_task("classification", FEW_CLASSES)) is Classification
    task = make_task("classification", FEW_CLASSES + 1, hits=20)
    assert isinstance(task, ManyClasses)
    logits = torch.randn(7, FEW_CLASSES + 1, generator=generator(0, "test"))
    labels = torch.arange(7)
    kept = task.evidence(logits, labels)
    assert kept.shape == (7, 3)
    hits = [int(code) in row.topk(20).indices for row, code in zip(logits, labels, strict=True)]
    assert task.quality(kept, labels)["hit_rate"] == np.mean(hits)
    assert task.answers(logits) is logits  # a prediction needs them all


def test_the_weighted_cross_entropy():
    logits, labels = torch.randn(9, 3, generator=generator(0, "test")), torch.arange(9) % 3
    weights = torch.arange(9).float()
    exact = logits.double().numpy()
    losses = np.log(np.exp(exact).sum(1)) - exact[range(9), labels]
    task = Classification()
    assert float(task(logits, labels)) == pytest.approx(losses.mean(), rel=1e-6)
    weighted = (weights.numpy() * losses).sum() / weights.sum().item()
    assert float(task(logits, labels, weights)) == pytest.approx(weighted, rel=1e-6)


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=12),
    st.sampled_from([Classification, Regression]),
)
def test_a_weight_is_a_number_of_copies(counts, kind):
    """Rows with whole weights cost what so many copies of them cost; 0 leaves a row out."""
    rows, task = len(counts), kind()
    outputs = torch.randn(rows, 2, generator=generator(2, "test"), dtype=torch.float64)
    labels = torch.arange(rows) % 2
    labels = labels.double() if kind is Regression else labels
    weights = torch.tensor(counts).double()
    loss = float(task(outputs, labels, weights))
    if not sum(counts):
        assert loss == 0
        return
    copies = torch.arange(rows).repeat_interleave(torch.tensor(counts))
    assert loss == pytest.approx(float(task(outputs[copies], labels[copies])))


def test_a_batch_that_weighs_nothing_teaches_nothing():
    outputs = torch.ones(3, 1, requires_grad=True)
    Regression()(outputs, torch.zeros(3), torch.zeros(3)).backward()
    assert (outputs.grad == 0).all()


def test_the_loss_of_a_regression_takes_one_output():
    outputs, labels = torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 2.0])
    assert float(Regression()(outputs, labels)) == (1 + 4) / 2


@pytest.mark.parametrize(("center", "scale"), [(0, 1), (-5e5, 20.0), (0, 1e-8), (0, 1e20)])
def test_labels_become_standard_and_come_back(center, scale):
    labels = center + scale * torch.randn(400, generator=generator(3, "test")).double()
    task = Regression()
    task.fit(labels.float())
    assert float(task.center) == pytest.approx(labels.mean().item(), rel=1e-4, abs=scale * 1e-3)
    assert float(task.scale) == pytest.approx(labels.numpy().std(), rel=1e-3)
    standard = (labels - task.center) / task.scale
    torch.testing.assert_close(task.answers(standard[:, None])[:, 0], labels)
    # The answer 0 is the mean, whose squared error is the variance, in the labels' own units.
    loss = float(task(torch.zeros(400, 1), labels.float()))
    assert loss == pytest.approx(1, rel=1e-3)
    assert task.own_units(loss) == pytest.approx(labels.numpy().var(), rel=1e-2)


def test_labels_that_never_vary_are_only_moved():
    task = Regression()
    task.fit(torch.full((7,), 0.1))
    assert float(task.scale) == 1
    assert float(task.answers(torch.zeros(1, 1))) == pytest.approx(0.1, rel=1e-6)


def test_weights_decide_what_is_standard():
    task = Regression()
    task.fit(torch.tensor([1.0, 5.0, 900.0]), torch.tensor([3.0, 1.0, 0.0]))
    assert (float(task.center), float(task.scale)) == (2, np.sqrt(3))
    task.fit(torch.tensor([1.0, 1.0, 900.0]), torch.tensor([3.0, 1.0, 0.0]))
    assert (float(task.center), float(task.scale)) == (1, 1)
