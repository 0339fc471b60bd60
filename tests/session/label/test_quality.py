"""Figures against loops that count, and what is left out where it means nothing."""

import numpy as np
import pytest
import torch
from sklearn import metrics

from vfl.core.seeds import generator
from vfl.session.label.quality import (
    classification_quality,
    label_ranks,
    reduced,
    reduced_quality,
    regression_quality,
)


def drawn(rows, classes):
    logits = torch.randn(rows, classes, generator=generator(classes, "test"))
    return logits, torch.arange(rows) % classes


@pytest.mark.parametrize("classes", [2, 7])
def test_figures_are_scikit_learns(classes):
    """With ties, classes that are rare or never guessed, and chances that round to 0."""
    logits, codes = drawn(300, classes)
    logits, codes = (40 * logits).round(), (codes * codes) % classes
    logits[:, 0] += 10
    chances, truth = logits.double().softmax(1).numpy(), codes.numpy()
    guess = logits.argmax(1).numpy()
    several = {"average": "macro"} if classes > 2 else {}
    missing = {code for code in range(classes) if code not in truth}
    expected = {
        "accuracy": metrics.accuracy_score(truth, guess),
        "log_loss": metrics.log_loss(truth, chances, labels=range(classes)),
        "f1": metrics.f1_score(truth, guess, **several),
    }
    if not missing:
        of = chances[:, 1] if classes == 2 else chances
        expected["auc"] = metrics.roc_auc_score(truth, of, multi_class="ovr")
    assert classification_quality(logits, codes) == pytest.approx(expected, rel=1e-12)
    expected.pop("auc", None)
    if classes > 2:
        found = reduced_quality(reduced(logits, codes), codes)
        assert found == pytest.approx(expected, rel=1e-5)  # of chances in float32


def test_numbers_are_judged_as_scikit_learn_does():
    truth, guess = drawn(50, 2)[0].T
    assert regression_quality(guess[:, None], truth) == pytest.approx(
        {
            "rmse": metrics.root_mean_squared_error(truth.double(), guess.double()),
            "mae": metrics.mean_absolute_error(truth.double(), guess.double()),
            "r2": metrics.r2_score(truth.double(), guess.double()),
        },
        rel=1e-12,
    )


def test_without_a_class_there_is_no_auc():
    logits, codes = drawn(10, 2)
    assert "auc" not in classification_quality(logits, torch.zeros_like(codes))
    logits, codes = drawn(10, 3)
    figures = classification_quality(logits, codes.clamp(max=1))
    assert figures.keys() == {"accuracy", "log_loss", "f1"}


def test_without_a_positive_anywhere_there_is_no_f1():
    logits, codes = torch.tensor([[1.0, 0.0]] * 3), torch.tensor([0, 0, 0])
    assert classification_quality(logits, codes).keys() == {"accuracy", "log_loss"}
    assert classification_quality(logits.flip(1), codes)["f1"] == 0
    assert classification_quality(logits, 1 - codes)["f1"] == 0


def test_outputs_that_are_not_finite_leave_the_accuracy():
    logits = torch.tensor([[1.0, torch.inf], [torch.nan, 0.0]])
    assert classification_quality(logits, torch.tensor([1, 1])) == {"accuracy": 0.5}
    assert regression_quality(logits[:, :1], torch.tensor([1.0, 2.0])) == {}


def test_certain_outputs_of_any_size_have_finite_figures():
    logits = torch.tensor([[1e30, 0.0], [0.0, 1e30]])
    figures = classification_quality(logits, torch.tensor([0, 1]))
    assert figures == pytest.approx({"accuracy": 1, "auc": 1, "log_loss": 0, "f1": 1})


def test_labels_that_never_vary_have_no_r2():
    assert regression_quality(torch.zeros(3, 1), torch.ones(3)).keys() == {"rmse", "mae"}
    assert regression_quality(torch.zeros(1, 1), torch.ones(1)).keys() == {"rmse", "mae"}


def sorted_place(row, code):
    """Where a stable sort, largest first, puts a class."""
    return sorted(range(len(row)), key=lambda n: -row[n]).index(code)


def test_a_hit_is_a_class_among_the_largest_outputs():
    logits, codes = drawn(60, 30)
    logits = (4 * logits).round()  # with ties, of which the lower class comes first
    want = [sorted_place(row.tolist(), int(code)) for row, code in zip(logits, codes, strict=True)]
    assert label_ranks(logits.numpy(), codes.numpy()).tolist() == want
    for hits in (1, 5, 20, 30, 99):
        figures = classification_quality(logits, codes, hits)
        assert figures["hit_rate"] == np.mean([place < hits for place in want])
    assert classification_quality(logits, codes, hits=99)["hit_rate"] == 1


@pytest.mark.parametrize("rows", [(40,), (25, 1, 14)])
def test_figures_of_three_numbers_a_row_are_those_of_all_outputs(rows):
    logits, codes = drawn(40, 9)
    logits[3] = -1e6 * torch.nn.functional.one_hot(codes[3], 9)  # no chance at all
    parts = [reduced(*part) for part in zip(logits.split(rows), codes.split(rows), strict=True)]
    whole = classification_quality(logits, codes, hits=4)
    del whole["auc"]
    assert reduced_quality(torch.cat(parts), codes, hits=4) == pytest.approx(whole, rel=1e-6)


def test_three_numbers_of_outputs_that_are_not_finite_leave_the_accuracy():
    logits, codes = drawn(4, 5)
    logits[2, 1] = torch.inf
    figures = reduced_quality(reduced(logits, codes), codes, hits=2)
    guess = logits.argmax(dim=1)
    assert figures == {"accuracy": (guess == codes).double().mean().item()}
