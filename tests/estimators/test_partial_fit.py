"""partial_fit goes on with one epoch; so often repeated, it is fit."""

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits

from vfl import VFLClassifier, VFLRegressor
from vfl.core.errors import ConfigError, DataError

ARGUMENTS = {
    "codec": "randtopk:k=8,alpha=0.2",
    "bottom": "mlp:hidden=16,dropout=0.2",
    "random_state": 0,
}


@pytest.fixture(scope="module")
def digits():
    return load_digits(return_X_y=True)


def without_times(history):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


def calls(model, count, X, y, **options):
    for _ in range(count):
        model.partial_fit(X, y, **options)
    return model


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_so_many_calls_end_where_fit_ends(digits, optimizer):
    """Random codec and dropout too: steps are numbered on, and optimisers keep their state."""
    X, y = digits[0][:700], digits[1][:700]
    arguments = ARGUMENTS | {"optimizer": optimizer}
    whole = VFLClassifier(2, epochs=3, **arguments).fit(X, y)
    parted = calls(VFLClassifier(2, epochs=3, **arguments), 3, X, y, classes=range(10))
    np.testing.assert_array_equal(parted.predict_proba(X), whole.predict_proba(X))
    assert without_times(parted.history_) == without_times(whole.history_)
    assert parted.wire_ratio_ == whole.wire_ratio_
    begun = calls(VFLClassifier(2, epochs=1, **arguments).fit(X, y), 2, X, y)
    np.testing.assert_array_equal(begun.predict_proba(X), whole.predict_proba(X))


def test_shared_first_layers_go_on_too(digits):
    """Shares are drawn anew at every call; their sums, and so the predictions, are the same."""
    X, y = digits[0][:500], digits[1][:500]
    arguments = {
        "secure": "beaver",
        "merge": "sum",
        "bottom": "mlp:hidden=none",
        "optimizer": "sgd",
        "momentum": 0.0,
        "learning_rate": 0.3,
        "random_state": 0,
    }
    whole = VFLClassifier(2, epochs=4, **arguments).fit(X, y)
    parted = calls(VFLClassifier(2, epochs=4, **arguments), 4, X, y, classes=range(10))
    np.testing.assert_array_equal(parted.predict_proba(X), whole.predict_proba(X))
    assert whole.score(X, y) > 0.8


def test_a_regression_goes_on_too():
    X, y = load_diabetes(return_X_y=True)
    whole = VFLRegressor(2, epochs=4, random_state=1).fit(X, y)
    parted = calls(VFLRegressor(2, random_state=1), 4, X, y)
    np.testing.assert_array_equal(parted.predict(X), whole.predict(X))


def test_numbers_keep_the_scale_of_the_first_call():
    X = np.linspace(-1, 1, 200)[:, None]
    y = 1000 + 100 * X[:, 0]
    model = calls(VFLRegressor(1, learning_rate=0.01, random_state=0), 30, X, y)
    assert model.score(X, y) > 0.95
    before = model.predict(X)
    tail = slice(190, 200)
    model.partial_fit(X[tail], y[tail])  # their own mean is 1095, their deviation 3
    assert np.abs(model.predict(X) - before).max() < 30


def test_weights_are_for_one_call(digits):
    X, y = digits
    nines = y == 9
    model = VFLClassifier(1, random_state=0)
    for _ in range(5):
        model.partial_fit(X, y, classes=range(10), sample_weight=np.where(nines, 0.0, 1.0))
    assert not (model.predict(X) == 9).any()
    calls(model, 5, X, y)
    assert np.mean(model.predict(X[nines]) == 9) > 0.5


def test_what_it_is_told_must_fit(digits):
    X, y = digits
    with pytest.raises(DataError, match="needs the classes"):
        VFLClassifier(1).partial_fit(X, y)
    for classes, what in (([], "no class"), ([7], "only one class")):
        with pytest.raises(DataError, match=what) as caught:
            VFLClassifier(1).partial_fit(X, y, classes=classes)
        assert str(caught.value.got).startswith(str(len(classes)))
    with pytest.raises(ConfigError, match="cannot be balanced"):
        VFLClassifier(1, class_weight="balanced").partial_fit(X, y, classes=range(10))
    model = VFLClassifier(1).partial_fit(X, y, classes=range(10))
    with pytest.raises(DataError, match="differ from those of the first call"):
        model.partial_fit(X, y, classes=range(9))
    with pytest.raises(DataError, match="not among the classes") as caught:
        model.partial_fit(X[:5], [0, 1, 77, 77, 77])
    assert caught.value.got == "3 of 5 rows"
    with pytest.raises(ValueError, match="features"):
        model.partial_fit(X[:, :9], y)


@pytest.mark.parametrize("asked", [{"patience": 2}, {"keep": "best"}])
def test_epochs_one_by_one_are_not_judged(digits, asked):
    with pytest.raises(ConfigError, match="holds no rows out"):
        VFLClassifier(2, validation=0.2, **asked).partial_fit(*digits, classes=range(10))
