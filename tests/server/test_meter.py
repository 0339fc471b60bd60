import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error, r2_score
from torch import nn

from vfl.seeds import generator
from vfl.server.meter import Meter, task_loss


def batches(*tensors, rows=(7, 7, 3)):
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def test_classification_against_scikit_learn():
    logits = torch.randn(17, 4, generator=generator(0, "test")).double()
    labels = torch.arange(17) % 4
    meter, loss = Meter("classification"), task_loss("classification")
    for outputs, targets in batches(logits, labels):
        meter.add(outputs, targets, float(loss(outputs, targets)))
    figures = meter.figures("test")
    chances = logits.softmax(1).numpy()
    assert figures.keys() == {"test_loss", "test_accuracy"}
    assert figures["test_accuracy"] == accuracy_score(labels, chances.argmax(1))
    assert figures["test_loss"] == pytest.approx(log_loss(labels, chances))


def test_regression_against_scikit_learn():
    draw = generator(0, "test")
    targets = torch.randn(17, generator=draw).double() * 3 + 1
    outputs = (targets + torch.randn(17, generator=draw))[:, None]
    meter, loss = Meter("regression"), task_loss("regression")
    for given, wanted in batches(outputs, targets):
        meter.add(given, wanted, float(loss(given, wanted)))
    figures = meter.figures("validation")
    squared = mean_squared_error(targets, outputs)
    assert figures == pytest.approx(
        {
            "validation_loss": squared,
            "validation_rmse": np.sqrt(squared),
            "validation_r2": r2_score(targets, outputs),
        }
    )


def test_the_mean_is_over_rows_not_batches():
    meter = Meter("classification")
    right, wrong = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    meter.add(right.repeat(3, 1), torch.ones(3, dtype=torch.int64), loss=1.0)
    meter.add(wrong, torch.ones(1, dtype=torch.int64), loss=5.0)
    assert meter.rows == 4
    assert meter.figures("train") == {"train_loss": 2.0, "train_accuracy": 0.75}


def test_nothing_measured_gives_nothing():
    assert Meter("classification").figures("train") == {}
    assert Meter("regression").figures("train") == {}


def test_targets_that_never_vary_have_no_r2():
    meter = Meter("regression")
    meter.add(torch.zeros(3, 1), torch.ones(3), loss=1.0)
    figures = meter.figures("test")
    assert np.isnan(figures.pop("test_r2"))
    assert figures == {"test_loss": 1.0, "test_rmse": 1.0}


def test_targets_are_not_shown():
    meter = Meter("regression")
    meter.add(torch.zeros(1, 1), torch.tensor([123.25]), loss=1.0)
    assert "123" not in repr(meter)


def test_the_loss_of_a_regression_takes_one_output():
    outputs, targets = torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 2.0])
    assert float(task_loss("regression")(outputs, targets)) == (1 + 4) / 2
    assert isinstance(task_loss("classification"), nn.CrossEntropyLoss)
