"""VFLRegressor in the units of its numbers."""

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_diabetes
from sklearn.metrics import root_mean_squared_error
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vfl import VFLRegressor
from vfl.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def diabetes():
    X, y = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    return train_test_split(X, y, random_state=0)


def test_it_learns_from_parties_with_named_columns(diabetes):
    X_train, X_test, y_train, y_test = diabetes
    parties = {"clinic": ["age", "sex", "b*"], "laboratory": ["s[1-6]"]}
    model = VFLRegressor(parties, epochs=10, random_state=0, validation=0.2).fit(X_train, y_train)
    assert model.score(X_test, y_test) > 0.3
    assert list(model.feature_names_in_) == list(X_train)
    last = model.history_[-1]
    assert {f"validation_{name}" for name in ("loss", "rmse", "mae", "r2")} <= last.keys()
    assert last["validation_rmse"] == pytest.approx(last["validation_loss"] ** 0.5)
    assert 40 < last["train_rmse"] < 65  # y has a deviation of 77


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_units_do_not_matter(diabetes, scale):
    X_train, X_test, y_train, _ = diabetes
    plain, scaled = (
        VFLRegressor(2, epochs=3, random_state=0).fit(X_train, factor * y_train)
        for factor in (1.0, scale)
    )
    np.testing.assert_allclose(scaled.predict(X_test), scale * plain.predict(X_test), rtol=1e-3)
    losses = [model.history_[-1]["train_loss"] for model in (plain, scaled)]
    assert losses[1] == pytest.approx(losses[0] * scale**2, rel=1e-3)


def test_figures_are_about_what_it_predicts(diabetes):
    """All rows in one batch and steps too small to change a weight."""
    X, _, y, _ = diabetes
    model = VFLRegressor(2, epochs=1, batch_rows=1000, optimizer="sgd", learning_rate=1e-30)
    rmse = root_mean_squared_error(y, model.fit(X, y).predict(X))
    assert model.history_[-1]["train_rmse"] == pytest.approx(rmse, rel=1e-4)


def test_rows_of_weight_zero_are_not_learned(diabetes):
    X_train, X_test, y_train, y_test = diabetes
    wrong = np.arange(len(y_train)) % 2 == 0
    mixed = y_train.mask(wrong, 10_000)
    model = VFLRegressor(2, epochs=10, random_state=0)
    assert model.fit(X_train, mixed, sample_weight=~wrong).score(X_test, y_test) > 0.3
    assert model.fit(X_train, mixed).score(X_test, y_test) < 0


def test_pipeline_and_grid_search(diabetes):
    X_train, _, y_train, _ = diabetes
    pipeline = make_pipeline(StandardScaler(), VFLRegressor(2, epochs=5, random_state=0))
    search = GridSearchCV(pipeline, {"vflregressor__codec": ["none", "topk:k=8"]}, cv=2)
    search.fit(X_train.to_numpy(), y_train.to_numpy())
    assert search.best_score_ > 0.2


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([1.0, np.nan, 2.0], "NaN or infinity"),
        ([1.0, 1e39, 2.0], "NaN or infinity"),
        (["77.25x", "2", "3"], "no number"),
    ],
)
def test_what_is_no_number(y, message):
    with pytest.raises(DataError, match=message) as caught:
        VFLRegressor(1).fit(pd.DataFrame({"a": [1, 2, 3]}), y)
    assert "77" not in str(caught.value)


def test_a_regression_has_no_class_weights():
    assert "class_weight" not in VFLRegressor().get_params()
    with pytest.raises(ConfigError, match="bottom = 3"):
        VFLRegressor(1, bottom=3).fit(np.ones((3, 1)), [1.0, 2.0, 3.0])
