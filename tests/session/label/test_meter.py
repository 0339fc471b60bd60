"""What is reported of a phase: about all its rows at once, whatever the batches were."""

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_squared_error, r2_score

from vfl.core.seeds import generator
from vfl.session.label.task import Classification, Meter, Regression


def metered(meter, outputs, labels, rows=(7, 7, 3), weights=None):
    parts = [labels.split(rows), [None] * len(rows) if weights is None else weights.split(rows)]
    for given, wanted, own in zip(outputs.split(rows), *parts, strict=True):
        meter.add(given, wanted, float(meter.task(given, wanted, own)), own)
    return meter


@pytest.fixture
def classes():
    logits = torch.randn(17, 4, generator=generator(0, "test")).double()
    return logits, torch.arange(17) % 4


@pytest.fixture
def numbers():
    draw = generator(0, "test")
    labels = torch.randn(17, generator=draw) * 300 + 1000
    task = Regression()
    task.fit(labels)
    return task, torch.randn(17, 1, generator=draw), labels


def test_batches_do_not_matter(classes, numbers):
    task, *drawn = numbers
    for meters, data in (
        ([Meter(Classification(), "test") for _ in range(2)], classes),
        ([Meter(task, "test") for _ in range(2)], drawn),
    ):
        whole, parted = metered(meters[0], *data, rows=(17,)), metered(meters[1], *data)
        assert parted.figures() == pytest.approx(whole.figures())
        without_loss = [dict(list(meter.figures().items())[1:]) for meter in (whole, parted)]
        assert without_loss[0] == without_loss[1]


def test_a_regression_is_told_in_the_labels_own_units(numbers):
    task, outputs, labels = numbers
    guess = outputs[:, 0].double().numpy() * labels.numpy().std() + labels.double().mean().item()
    squared = mean_squared_error(labels, guess)
    figures = metered(Meter(task, "validation"), outputs, labels).figures()
    assert figures == pytest.approx(
        {
            "validation_loss": squared,
            "validation_rmse": np.sqrt(squared),
            "validation_mae": np.abs(labels.numpy() - guess).mean(),
            "validation_r2": r2_score(labels, guess),
        }
    )
    trained = metered(Meter(task, "train"), outputs, labels).figures()
    assert trained == pytest.approx({"train_loss": squared, "train_rmse": np.sqrt(squared)})


def test_a_weighted_loss_is_the_weighted_mean_of_the_epoch(classes):
    logits, labels = classes
    weights = torch.arange(17).float()
    figures = metered(Meter(Classification(), "train"), *classes, weights=weights).figures()
    losses = -logits.log_softmax(1)[range(17), labels].numpy()
    assert figures["train_loss"] == pytest.approx(np.average(losses, weights=weights))


def test_rows_that_weigh_nothing_lose_nothing(classes):
    meter = metered(Meter(Classification(), "train"), *classes, weights=torch.zeros(17))
    assert meter.figures()["train_loss"] == 0


@pytest.mark.parametrize("phase", ["train", "test"])
def test_nothing_measured_gives_nothing(phase):
    assert Meter(Classification(), phase).figures() == {}
    assert Meter(Regression(), phase).figures() == {}


@pytest.mark.parametrize("phase", ["train", "validation"])
def test_a_meter_goes_on_from_its_state(classes, phase):
    logits, labels = classes
    whole = metered(Meter(Classification(), phase), *classes)
    begun = metered(Meter(Classification(), phase), logits[:7], labels[:7], rows=(7,))
    resumed = Meter.restored(Classification(), phase, begun.state())
    metered(resumed, logits[7:], labels[7:], rows=(7, 3))
    assert resumed.figures() == whole.figures()


def test_what_is_restored_leaves_the_state_alone(classes):
    state = metered(Meter(Classification(), "test"), *classes).state()
    metered(Meter.restored(Classification(), "test", state), *classes)
    assert len(state["labels"]) == 3


def test_labels_are_not_shown():
    meter = Meter(Regression(), "test")
    meter.add(torch.zeros(1, 1), torch.tensor([123.25]), loss=1.0)
    assert "123" not in repr(meter)
