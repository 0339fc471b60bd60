"""Sample weights and class weights of the classifier."""

import numpy as np
import pytest
from sklearn.datasets import make_classification
from sklearn.metrics import recall_score
from sklearn.utils.class_weight import compute_sample_weight

from vfl import VFLClassifier
from vfl.core.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def rare():
    """One row in twenty is "yes", and most rows overlap."""
    X, y = make_classification(
        600, 6, n_informative=3, weights=[0.95], class_sep=0.5, random_state=0
    )
    return X, np.array(["no", "yes"])[y]


def fitted(rare, sample_weight=None, **arguments):
    model = VFLClassifier(2, epochs=5, random_state=0, **arguments)
    return model.fit(*rare, sample_weight=sample_weight)


def same(one, other, X):
    return np.array_equal(one.predict_proba(X), other.predict_proba(X))


def test_equal_weights_change_no_bit(rare):
    X, _ = rare
    plain = fitted(rare)
    assert same(plain, fitted(rare, np.full(len(X), 0.3)), X)
    assert same(plain, fitted(rare, class_weight={"no": 2, "yes": 2}), X)
    assert same(plain, fitted(rare, class_weight={}), X)


def test_balanced_classes_find_the_rare_one(rare):
    X, y = rare
    recalls = [
        recall_score(y, fitted(rare, class_weight=how).predict(X), pos_label="yes")
        for how in (None, "balanced")
    ]
    assert recalls[1] > recalls[0] + 0.2


def test_all_ways_to_say_balanced_are_one(rare):
    X, y = rare
    counts = {name: np.sum(y == name) for name in ("no", "yes")}
    by_name = {name: len(y) / (2 * count) for name, count in counts.items()}
    balanced = fitted(rare, class_weight="balanced")
    assert same(balanced, fitted(rare, class_weight=by_name), X)
    assert same(balanced, fitted(rare, compute_sample_weight("balanced", y)), X)
    assert not same(balanced, fitted(rare), X)


def test_weights_of_rows_and_classes_multiply(rare):
    X, y = rare
    own = 1 + np.arange(len(X)) % 4  # powers of two keep every product exact
    own = 2.0**own
    by_class = np.where(y == "yes", 4.0, 1.0)
    both = fitted(rare, own, class_weight={"yes": 4})
    assert same(both, fitted(rare, own * by_class), X)


@pytest.mark.parametrize(
    ("class_weight", "error", "message"),
    [
        ("balance", ConfigError, "label.class_weight = balance"),
        ({"maybe": 2}, DataError, "labels that are not among the classes"),
        ({"no": -1.0}, DataError, "negative or not finite"),
    ],
)
def test_class_weights_that_cannot_be_used(rare, class_weight, error, message):
    with pytest.raises(error, match=message):
        fitted(rare, class_weight=class_weight)
