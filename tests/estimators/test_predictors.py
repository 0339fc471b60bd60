"""VFLClassifier is a scikit-learn estimator over real frames."""

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vfl import VFLClassifier, VFLRegressor
from vfl.core.errors import (
    ConfigError,
    DataError,
    MissingColumnError,
    SharedColumnError,
    UnknownNameError,
)


@pytest.fixture(scope="module")
def cancer():
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    return train_test_split(X, y, random_state=0)


def test_frames_with_named_columns(cancer):
    X_train, X_test, y_train, y_test = cancer
    parties = {"clinic": ["mean *"], "laboratory": ["worst *", "* error"]}
    model = VFLClassifier(parties, random_state=0).fit(X_train, y_train)
    assert model.score(X_test, y_test) > 0.93
    assert [len(columns) for columns in model.parties_.values()] == [10, 20]
    assert len(model.history_) == model.epochs
    assert model.wire_ratio_ == 1.0


def test_columns_by_position_and_by_name_are_the_same(cancer):
    X_train, X_test, y_train, _ = cancer
    named = {"a": list(X_train.columns[:9]), "b": list(X_train.columns[9:])}
    placed = {"a": range(9), "b": range(9, 30)}
    answers = [
        VFLClassifier(parties, epochs=3, random_state=1).fit(X_train, y_train).predict_proba(X_test)
        for parties in (named, placed)
    ]
    np.testing.assert_array_equal(*answers)


def test_a_compressed_cut_costs_what_was_sent():
    X, y = load_digits(return_X_y=True)
    model = VFLClassifier(2, codec="topk:k=4,values=8", epochs=2, random_state=0).fit(X, y)
    rows = (len(X) // 64 * 64 + (len(X) % 64 if len(X) % 64 > 1 else 0)) * 2
    steps = model.history_[-1]["steps"]
    # Per party and row: 16 bits for C(32,4) = 35,960 index sets, 4 values of 8 bits, and a
    # gradient of 4 float32; per frame a scale of 4 bytes, and the last byte filled up.
    least = 2 * (rows * (16 + 32) / 8 + rows * 16 + steps * 4)
    sent = model.ledger_.payload_bytes("train")
    assert least <= sent <= least + 2 * steps
    assert model.wire_ratio_ == pytest.approx(sent / (2 * 2 * rows * 32 * 4))


def test_a_fit_that_stops_early_keeps_its_best_weights(cancer):
    X_train, _, y_train, _ = cancer
    arguments = {"epochs": 40, "learning_rate": 0.02, "validation": 0.3, "random_state": 0}
    whole = VFLClassifier(2, **arguments).fit(X_train, y_train)
    losses = [record["validation_loss"] for record in whole.history_]
    lowest = losses.index(min(losses))
    stopped = VFLClassifier(2, patience=2, keep="best", **arguments).fit(X_train, y_train)
    assert len(stopped.history_) < len(losses)
    assert stopped.history_[-1]["best_epoch"] == lowest + 1
    as_long = VFLClassifier(2, **arguments | {"epochs": lowest + 1}).fit(X_train, y_train)
    np.testing.assert_array_equal(stopped.predict_proba(X_train), as_long.predict_proba(X_train))


@pytest.mark.filterwarnings("ignore:no party is given")
def test_sum_merge_and_a_label_party_with_columns(cancer):
    X_train, X_test, y_train, y_test = cancer
    parties = {"bank": ["mean *"], "shop": ["worst *"]}
    model = VFLClassifier(parties, label_party="shop", merge="sum", random_state=0)
    model.fit(X_train, y_train)
    assert model.score(X_test, y_test) > 0.9
    assert set(model.ledger_.bytes_by_party("up")) == {"bank"}


def test_text_labels_and_mixed_columns():
    rows = 80
    X = pd.DataFrame(
        {
            "age": np.arange(rows),
            "city": ["oslo", "rome"] * (rows // 2),
            "poor": [True, False] * (rows // 2),
        }
    )
    y = np.where(X["city"] == "oslo", "yes", "no")
    model = VFLClassifier({"a": ["age"], "b": ["city", "poor"]}, random_state=0).fit(X, y)
    assert list(model.classes_) == ["no", "yes"]
    assert model.score(X, y) == 1.0


def test_pipeline_and_grid_search_of_a_classifier(cancer):
    X_train, _, y_train, _ = cancer
    pipeline = make_pipeline(StandardScaler(), VFLClassifier(2, epochs=2, random_state=0))
    search = GridSearchCV(pipeline, {"vflclassifier__codec": ["none", "topk:k=8"]}, cv=2)
    search.fit(X_train.to_numpy(), y_train.to_numpy())
    assert search.best_score_ > 0.8


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"codec": "randtopp"}, UnknownNameError, "did you mean 'randtopk'"),
        ({"merge": "meen"}, UnknownNameError, "did you mean 'mean'"),
        ({"parties": {"a": ["mean radiuss"]}}, MissingColumnError, "mean radius"),
        ({"parties": {"a": [0], "b": [77]}}, MissingColumnError, "numbers from 0 to"),
        ({"parties": {"a": ["mean *"], "b": ["mean area"]}}, SharedColumnError, "a and b"),
        ({"epochs": 0}, ConfigError, "train.epochs = 0"),
    ],
)
def test_mistakes_are_told_with_their_cure(cancer, arguments, error, message):
    X_train, _, y_train, _ = cancer
    with pytest.raises(error, match=message):
        VFLClassifier(**arguments).fit(X_train, y_train)


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


def test_units_do_not_matter(diabetes):
    scale = 1e12
    X_train, X_test, y_train, _ = diabetes
    plain, scaled = (
        VFLRegressor(2, epochs=3, random_state=0).fit(X_train, factor * y_train)
        for factor in (1.0, scale)
    )
    np.testing.assert_allclose(scaled.predict(X_test), scale * plain.predict(X_test), rtol=1e-3)
    losses = [model.history_[-1]["train_loss"] for model in (plain, scaled)]
    assert losses[1] == pytest.approx(losses[0] * scale**2, rel=1e-3)


def test_rows_of_weight_zero_are_not_learned(diabetes):
    X_train, X_test, y_train, y_test = diabetes
    wrong = np.arange(len(y_train)) % 2 == 0
    mixed = y_train.mask(wrong, 10_000)
    model = VFLRegressor(2, epochs=10, random_state=0)
    assert model.fit(X_train, mixed, sample_weight=~wrong).score(X_test, y_test) > 0.3
    assert model.fit(X_train, mixed).score(X_test, y_test) < 0


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
