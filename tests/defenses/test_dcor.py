"""Distance correlation against numpy, at its ends, and at the two sides that use it."""

import numpy as np
import pytest
import torch

from vfl.compression import StepContext
from vfl.core.seeds import generator
from vfl.defenses import make
from vfl.defenses.dcor import distance_correlation, distances, label_distances


def drawn(rows, width, purpose="dcor"):
    return torch.randn(rows, width, generator=generator(rows, purpose))


def by_hand(one, other):
    """Squared distance correlation in float64, from the definition."""
    centred = []
    for values in (one, other):
        rows = values.double().numpy().reshape(len(values), -1)
        away = np.array([[np.linalg.norm(a - b) for b in rows] for a in rows])
        away = away - away.mean(0) - away.mean(1)[:, None] + away.mean()
        centred.append(away)
    a, b = centred
    return (a * b).mean() / np.sqrt((a * a).mean() * (b * b).mean())


@pytest.mark.parametrize(("rows", "width"), [(2, 1), (9, 3), (60, 20)])
def test_it_is_the_definition(rows, width):
    cut, other = drawn(rows, width), drawn(rows, 2, "other")
    other = other + cut[:, :1]
    found = distance_correlation(distances(cut), distances(other)).item()
    assert found == pytest.approx(by_hand(cut, other), rel=1e-4)


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_labels_are_one_hot_rows_or_numbers(task):
    cut, labels = drawn(30, 4), torch.arange(30) % 3
    labels = drawn(30, 1, "labels")[:, 0] if task == "numbers" else labels
    rows = labels if task == "numbers" else torch.nn.functional.one_hot(labels).float()
    found = distance_correlation(distances(cut), label_distances(labels)).item()
    assert found == pytest.approx(by_hand(cut, rows), rel=1e-4)


def test_its_ends():
    rows = drawn(200, 3)
    itself = distance_correlation(distances(rows), distances(5 - 3 * rows)).item()
    strangers = distance_correlation(distances(rows), distances(drawn(200, 3, "other"))).item()
    assert itself == pytest.approx(1, abs=1e-5)
    assert strangers < 0.1


ODD = {
    "same": torch.ones(6, 3),
    "zeros": torch.zeros(6, 3),
    "one": torch.ones(1, 3),
    "empty": torch.ones(0, 3),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_batches_have_finite_gradients(case):
    cut = ODD[case].clone().requires_grad_()
    labels = torch.arange(len(cut)) % 2
    for spec in ("dcor:alpha=32", "nopeek"):
        defense = make(spec)
        if spec == "nopeek":
            loss = defense.local_loss(cut, torch.ones(len(cut), 2, 2), StepContext())
        else:
            loss = defense.loss({"bank": cut}, labels, cut, StepContext())
        (grad,) = torch.autograd.grad(loss, cut)
        assert torch.isfinite(loss)
        assert torch.isfinite(grad).all()


def test_a_single_class_tells_nothing():
    labels = torch.zeros(9, dtype=torch.long)
    assert make("dcor").loss({"bank": drawn(9, 2)}, labels, drawn(9, 2), StepContext()).item() == 0


def test_the_gradient_is_that_of_the_value():
    cut = drawn(8, 3).double().requires_grad_()
    labels = torch.arange(8) % 3
    assert torch.autograd.gradcheck(
        lambda h: distance_correlation(distances(h), label_distances(labels).double()), cut
    )


def test_every_party_is_counted_and_weighed():
    one, other, labels = drawn(20, 4), drawn(20, 2, "other"), torch.arange(20) % 4
    found = make("dcor:alpha=5").loss({"a": one, "b": other}, labels, one, StepContext()).item()
    apart = label_distances(labels)
    expected = sum(distance_correlation(distances(cut), apart).item() for cut in (one, other))
    assert found == pytest.approx(5 * expected)


def test_nopeek_looks_at_whole_pictures():
    cut, pictures = drawn(12, 4), drawn(12, 18, "pictures").view(12, 2, 3, 3)
    found = make("nopeek:alpha=2").local_loss(cut, pictures, StepContext()).item()
    assert found == pytest.approx(2 * by_hand(cut, pictures), rel=1e-4)
