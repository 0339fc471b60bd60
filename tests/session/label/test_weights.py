"""How much each row counts, against scikit-learn; equal weights are no weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_sample_weight

from vfl.config import Experiment
from vfl.core.errors import DataError
from vfl.datasets import Dealing, load_bundled
from vfl.defenses import DEFENSES, Defense
from vfl.session.label.task import training_weights
from vfl.training.local import LocalSession

LABELS = torch.tensor([0, 0, 0, 1, 2, 1, 0])
ALL = torch.arange(7)


def test_balanced_is_scikit_learns():
    found = training_weights(LABELS, ALL, None, "balanced")
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, compute_sample_weight("balanced", LABELS), rtol=1e-6)


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_class_without_training_rows_is_none_of_those_balanced(absent):
    train = torch.nonzero(LABELS.ne(absent))[:, 0]
    found = training_weights(LABELS, train, None, "balanced")[train]
    np.testing.assert_allclose(found, compute_sample_weight("balanced", LABELS[train]), rtol=1e-6)
    assert float(found.double().sum()) == pytest.approx(len(train))


def test_rows_and_classes_multiply():
    own = torch.arange(7).float()
    balanced = compute_sample_weight("balanced", LABELS)
    found = training_weights(LABELS, ALL, own, "balanced")
    np.testing.assert_allclose(found, own.numpy() * balanced, rtol=1e-6)


@pytest.mark.parametrize(
    ("labels", "own", "class_weight"),
    [
        (LABELS, None, "none"),
        (LABELS, torch.full((7,), 0.3), "none"),
        (torch.tensor([0, 1, 0, 1]), None, "balanced"),
    ],
    ids=["none", "all alike", "classes of one size"],
)
def test_equal_weights_are_no_weights(labels, own, class_weight):
    assert training_weights(labels, torch.arange(len(labels)), own, class_weight) is None


def test_other_rows_do_not_make_weights_differ():
    own = torch.tensor([1.0, 1, 1, 5, 5, 5, 5])
    assert training_weights(LABELS, torch.arange(3), own, "none") is None


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (torch.ones(6), "every row needs one weight"),
        (torch.ones(7, 1), "every row needs one weight"),
        (torch.tensor([1.0] * 6 + [-77.25]), "negative or not finite"),
        (torch.tensor([1.0] * 6 + [torch.nan]), "negative or not finite"),
        (torch.tensor([0.0] * 7), "weights of all training rows are zero"),
    ],
)
def test_weights_that_cannot_be_used(own, message):
    with pytest.raises(DataError, match=message) as caught:
        training_weights(LABELS, ALL, own, "none")
    assert "77" not in str(caught.value)


@pytest.fixture(scope="module")
def data():
    return load_bundled("breast_cancer", ["bank", "shop"], "lender", Dealing(0, limit=300))


def trained(data, row_weights=None, class_weight="none", **changes):
    settings = {
        "parties": {name: {"width": 8} for name in ("bank", "shop")},
        "label": {"party": "lender", "class_weight": class_weight},
        "train": {"epochs": 2, "batch_size": 32},
    }
    lender = replace(data["lender"], row_weights=row_weights)
    experiment = Experiment.model_validate(settings | changes)
    return LocalSession(experiment, data | {"lender": lender}, outputs=2).run()


def test_balanced_classes_are_the_row_weights_they_stand_for(data):
    lender = data["lender"]
    own = torch.ones(300)
    labels = lender.labels[lender.split.train]
    own[lender.split.train] = torch.from_numpy(compute_sample_weight("balanced", labels)).float()
    balanced = trained(data, class_weight="balanced")
    assert balanced.weights_digest() == trained(data, own).weights_digest()
    assert balanced.weights_digest() != trained(data).weights_digest()


class Alternating(Defense):
    def labels(self, labels, secret):
        return torch.arange(len(labels)) % 2


def test_classes_are_balanced_as_trained_so_that_hidden_labels_stay_hidden(data, monkeypatch):
    monkeypatch.setattr(DEFENSES, "_members", DEFENSES._members | {"alternating": Alternating})
    digests = {
        trained(data, class_weight=how, defense="alternating").weights_digest()
        for how in ("none", "balanced")
    }
    assert len(digests) == 1
