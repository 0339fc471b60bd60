"""Estimators of boosted trees: against XGBoost, what crosses, and what is refused."""

import inspect
import json

import numpy as np
import pandas as pd
import pytest
import torch
from packaging.version import Version
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from vfl.config import Experiment
from vfl.core.errors import ConfigError, DataError, ExposedCutError, ProtocolError, SpecError
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret
from vfl.datasets import Split
from vfl.session import Exchange, Terms
from vfl.session.secure_mode import OwnRows
from vfl.transport.link import local_pair
from vfl.trees import VFLBoostingClassifier, VFLBoostingRegressor
from vfl.trees.bins import fit_bins, quantile_edges, randomised
from vfl.trees.grow import Layout
from vfl.trees.mode import Trees

PARTIES = {"bank": ["a0", "a1", "a2"], "shop": ["a3", "a4", "city"]}


@pytest.fixture(scope="module")
def table():
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({f"a{column}": draw.normal(size=3000) for column in range(5)})
    frame["city"] = draw.choice(list("abcdef"), 3000)
    frame.loc[draw.random(3000) < 0.1, "a3"] = np.nan
    effect = frame.city.map(dict(zip("abcdef", [2, -2, 0, 1, -1, 0], strict=True)))
    score = frame.a0 * 1.5 - frame.a3.fillna(0) + effect
    return frame, score.to_numpy(), draw


def fitted(table, labels, kind=VFLBoostingClassifier, **options):
    usual = {"label_party": "bank", "n_estimators": 20, "max_depth": 4, "random_state": 0}
    return kind(PARTIES, **(usual | options)).fit(table[0][:2000], labels[:2000])


@pytest.mark.filterwarnings("ignore:no party is given")
def test_first_rounds_split_on_the_own_columns_alone(table):
    labels = (table[1] > 0).astype(int)
    model = fitted(table, labels, n_estimators=3, own_rounds=3, colsample_bytree=0.5)
    assert len(model._weights()["shop"]["columns"]) == 0, "nothing was asked of it"
    model = fitted(table, labels, n_estimators=3, own_rounds=2)
    assert len(model._weights()["shop"]["columns"]) > 0, "of the third round"
    own = fitted(table, labels, n_estimators=2, own_rounds=2)
    alone = VFLBoostingClassifier(
        {"bank": PARTIES["bank"], "post": ["a4"]}, label_party="bank",
        n_estimators=2, max_depth=4, random_state=0, own_rounds=2,
    ).fit(table[0][:2000], labels[:2000])  # fmt: skip
    np.testing.assert_array_equal(own.predict_proba(table[0]), alone.predict_proba(table[0]))
    with pytest.raises(ExposedCutError, match="own_rounds"):
        VFLBoostingClassifier(PARTIES, own_rounds=1).fit(table[0][:200], labels[:200])


@pytest.mark.filterwarnings("ignore:no party is given")
def test_an_auc_is_that_of_xgboost_in_one_place(table):
    xgboost = pytest.importorskip("xgboost")
    frame, score, draw = table
    labels = (draw.random(3000) < 1 / (1 + np.exp(-score))).astype(int)
    model = fitted(table, labels, max_bin=64)
    together = frame.assign(city=frame.city.astype("category"))
    theirs = xgboost.XGBClassifier(
        n_estimators=20, max_depth=4, max_bin=64, enable_categorical=True, n_jobs=1
    ).fit(together[:2000], labels[:2000])
    ours = roc_auc_score(labels[2000:], model.predict_proba(frame[2000:])[:, 1])
    central = roc_auc_score(labels[2000:], theirs.predict_proba(together[2000:])[:, 1])
    assert ours == pytest.approx(central, abs=0.01)
    alone = VFLBoostingClassifier({"bank": PARTIES["bank"], "shop": ["a4"]}, label_party="bank")
    alone.set_params(n_estimators=20).fit(frame[:2000], labels[:2000])
    assert ours > 0.1 + roc_auc_score(labels[2000:], alone.predict_proba(frame[2000:])[:, 1])


@pytest.mark.filterwarnings("ignore:no party is given")
def test_importances_are_those_of_xgboost_in_one_place(table):
    xgboost = pytest.importorskip("xgboost")
    frame, score, draw = table
    numbers = frame.drop(columns="city").round(1)
    labels = (draw.random(3000) < 1 / (1 + np.exp(-score))).astype(int)
    for parties in ({"shop": ["a3", "a0"], "bank": ["a4", "a1"]}, {"shop": ["a3"], "far": ["a1"]}):
        used = [name for own in parties.values() for name in own]
        model = VFLBoostingClassifier(parties, label_party="bank", n_estimators=5, max_depth=4)
        model.fit(numbers, labels)
        theirs = xgboost.XGBClassifier(
            n_estimators=5, max_depth=4, importance_type="total_gain", max_bin=255, n_jobs=1
        ).fit(numbers[used], labels)
        wanted = dict(zip(used, theirs.feature_importances_, strict=True))
        expected = [wanted.get(name, 0) for name in numbers]
        assert np.allclose(model.feature_importances_, expected, atol=0.01)


def test_a_bin_a_cell_crosses_once_and_what_is_kept_has_no_edge_of_another(table):
    model = fitted(table, (table[1] > 0).astype(int), n_estimators=3)
    up = {row.phase: row for row in model.ledger_.rows() if row.direction == "up"}
    assert up["setup"].frames == 2
    assert 2000 * 3 <= up["setup"].payload_bytes < 2000 * 3 + 200
    assert up["train"].frames == 1, "the last word"
    kept = model._weights()
    assert len(kept["bank"]["share.own.edges"]) <= 3 * 254
    assert "share.edges" not in kept["bank"]
    assert kept["shop"]["columns"].max() <= 2


def test_counts_classes_and_early_stopping(table):
    frame, score, draw = table
    counts = draw.poisson(np.exp(score / 2))
    model = fitted(table, counts, VFLBoostingRegressor, objective="poisson")
    error = np.mean((model.predict(frame[2000:]) - counts[2000:]) ** 2)
    assert error < 0.7 * counts[2000:].var()
    three = np.digitize(score + draw.normal(size=3000), [-1, 1])
    model = fitted(
        table, three, n_estimators=100, validation=0.3, early_stopping_rounds=3, max_depth=6
    )
    assert model.score(frame[2000:], three[2000:]) > 0.6
    losses = [one["validation_loss"] for one in model.history_]
    assert len(losses) < 100
    assert min(losses) == losses[-4]
    assert len(model._weights()["bank"]["share.nodes"]) == 3 * (len(losses) - 3)


def test_a_weight_of_two_is_a_row_twice(table):
    labels, weights = (table[1] > 0).astype(int), np.ones(2000)
    weights[:500] = 2
    frame = table[0][:2000]
    options = {"label_party": "bank", "n_estimators": 3, "random_state": 0, "max_bin": 4096}
    weighted = VFLBoostingClassifier(PARTIES, **options).fit(frame, labels[:2000], weights)
    twice = pd.concat([frame, frame[:500]])
    again = VFLBoostingClassifier(PARTIES, **options).fit(
        twice, np.concatenate([labels[:2000], labels[:500]])
    )
    one, other = (model.predict_proba(table[0][2000:]) for model in (weighted, again))
    assert np.allclose(one, other, atol=1e-4)


def test_a_monotone_column_only_raises_the_outcome(table):
    frame, _, draw = table
    labels = (draw.random(3000) < 1 / (1 + np.exp(-np.sin(3 * frame.a3.fillna(0))))).astype(int)
    model = fitted(table, labels, monotone_constraints={"a3": 1})
    rows = frame[:1].loc[[0] * 50].assign(a3=np.linspace(-2, 2, 50))
    assert (np.diff(model.predict_proba(rows)[:, 1]) >= 0).all()


def test_randomised_response_moves_as_many_cells_as_its_epsilon_says():
    layout, rows = Layout((7, 3), (False, True)), 40_000
    bins = np.tile(np.array([[2, layout.width - 1]], np.uint8), (rows, 1))
    drawn = randomised(bins, layout, 1.0, Secret.fresh())
    for column, count in ((0, 8), (1, 4)):
        cells = drawn[:, column]
        stays = np.exp(1) / (np.exp(1) + count - 1)
        shares = [np.mean(cells == one) for one in (*range(count - 1), layout.width - 1)]
        wanted = [
            stays if one == bins[0, column] else (1 - stays) / (count - 1)
            for one in (*range(count - 1), layout.width - 1)
        ]
        assert np.allclose(shares, wanted, atol=5 * np.sqrt(0.25 / rows))


def test_noise_costs(table):
    labels = (table[1] > 0).astype(int)
    clear, noisy = (
        roc_auc_score(
            labels[2000:], fitted(table, labels, epsilon=one).predict_proba(table[0][2000:])[:, 1]
        )
        for one in (None, 1.0)
    )
    assert noisy < clear - 0.02


# What a party may be sent by one that does not follow the protocol.


@pytest.fixture
def terms():
    content = {"model": "trees", "parties": {"shop": {}}, "label": {"party": "bank"}}
    return Terms.of(Experiment.model_validate(content), "train", "run")


SPLIT = Split(np.arange(4), np.empty(0, np.int64), np.empty(0, np.int64))


@pytest.mark.parametrize(
    ("layout", "payload"),
    [
        ({"bins": [4], "categorical": [False], "monotone": [0]}, bytes([0, 1, 2])),
        ({"bins": [4], "categorical": [False], "monotone": [0]}, bytes([0, 1, 9, 2])),
        ({"bins": [4], "categorical": [False], "monotone": [2]}, bytes(4)),
        ({"bins": [4], "categorical": [False, True], "monotone": [0]}, bytes(4)),
        ({"bins": [0], "categorical": [False], "monotone": [0]}, bytes(4)),
        ({"bins": [1 << 40], "categorical": [False], "monotone": [0]}, bytes(8)),
        ({"bins": [300], "categorical": [False], "monotone": [0]}, bytes(8)),  # agreed are 255
        ({"bins": [], "categorical": [], "monotone": []}, b""),
        ({"bins": [4.5], "categorical": [False], "monotone": [0]}, bytes(4)),
        (dict.fromkeys(("bins", "categorical", "monotone"), [1 << 15] * 200), bytes(1600)),
        ("nothing", bytes(4)),
    ],
)
def test_bins_that_fit_no_columns_are_refused(terms, layout, payload):
    label, owner = local_pair()
    owner.send(Frame(Kind.PROTOCOL, 0, json.dumps(layout).encode()))
    owner.send(Frame(Kind.PROTOCOL, 0, payload))
    rows = OwnRows(Secret.fresh(), split=SPLIT, labels=torch.zeros(4).long(), classes=2)
    end = Trees().middle_network(terms, ("s", 0), {"shop": label}, receive_of(label), rows)
    with pytest.raises(ProtocolError):
        end.begin(None)


def receive_of(link):
    return lambda: ("shop", link.receive())


@pytest.mark.parametrize(
    "split", [[2, 1, True], [-1, 1, True], [0, 4, True], [0, -1, False], [0, 1, 1], [0, [1], True],
              [1, 1, True], [1, [7], True], "no", [0, 1.0, True]],
)  # fmt: skip
def test_splits_of_other_columns_are_refused(terms, split):
    label, owner = local_pair()
    cells = torch.tensor([[1.0, 0], [2, 1], [3, 1], [3, 0]])
    rows = OwnRows(Secret.fresh(), split=SPLIT, inputs=cells, categories=(0, 2))
    end = Trees().outer_network("shop", terms, None, owner, rows)
    for _ in range(2):
        label.send(Frame(Kind.PROTOCOL, 0, b""))
    end.begin(None)
    label.send(Frame(Kind.PROTOCOL, 1, json.dumps([split]).encode()))
    with pytest.raises(ProtocolError):
        end.train(Exchange(1, "train", 1, np.arange(4), last=True))


def test_a_party_keeps_no_more_splits_than_its_answers_can_hold(terms, monkeypatch):
    monkeypatch.setattr("vfl.trees.ends.MOST_SPLITS", 3)
    label, owner = local_pair()
    rows = OwnRows(Secret.fresh(), split=SPLIT, inputs=torch.arange(4.0)[:, None])
    end = Trees().outer_network("shop", terms, None, owner, rows)
    for _ in range(2):
        label.send(Frame(Kind.PROTOCOL, 0, b""))
    end.begin(None)
    for step in (1, 2):
        label.send(Frame(Kind.PROTOCOL, step, json.dumps([[0, 1, True]] * 2).encode()))
    end.train(Exchange(1, "train", 1, np.arange(4), last=True))
    with pytest.raises(DataError, match="too many splits"):
        end.train(Exchange(2, "train", 2, np.arange(4), last=True))


def test_a_table_or_a_forest_that_is_too_large_is_refused(table, monkeypatch):
    with monkeypatch.context() as small:
        small.setattr("vfl.trees.ends._MOST_PLACES", 100)
        with pytest.raises(DataError, match="too many bins"):
            fitted(table, table[1] > 0)
    monkeypatch.setattr("vfl.trees.ends.MOST_SPLITS", 9)
    with pytest.raises(DataError, match="too many splits"):
        fitted(table, table[1] > 0)


def test_bad_arguments_and_labels_have_errors(table):
    with pytest.raises(SpecError, match="max_bin"):
        fitted(table, table[1] > 0, max_bin=1)
    with pytest.raises(ConfigError, match="patience"):
        fitted(table, table[1] > 0, early_stopping_rounds=3)
    with pytest.raises(DataError, match="counts"):
        fitted(table, table[1], VFLBoostingRegressor, objective="poisson")
    names = pd.DataFrame({"who": [str(number) for number in range(200)]})
    with pytest.raises(DataError, match="categories"):
        VFLBoostingClassifier(1).fit(names, np.arange(200) % 2)


def test_columns_without_a_choice_grow_no_split():
    frame = pd.DataFrame({"same": np.ones(50), "none": np.full(50, np.nan)})
    model = VFLBoostingClassifier(2, n_estimators=2).fit(frame, np.arange(50) % 2)
    assert not len(model._weights()["label"]["share.columns"])
    assert np.allclose(model.predict_proba(frame), 0.5)


@pytest.mark.parametrize(("rows", "max_bin"), [(16, 2), (40, 5), (500, 64), (2000, 255)])
@pytest.mark.parametrize("kind", ["normal", "counts", "mostly zero", "missing", "few"])
def test_edges_are_those_of_xgboost(kind, rows, max_bin):
    """Exactly before 3.3, whose summary of many values holds fewer of them; then within ranks."""
    xgboost = pytest.importorskip("xgboost")
    draw = np.random.default_rng(max_bin)
    column = draw.normal(size=rows).astype(np.float32)
    if kind == "counts":
        column = draw.poisson(40, rows).astype(np.float32)
    if kind == "few":
        column = draw.integers(0, max_bin, rows).astype(np.float32)
    if kind == "mostly zero":
        column[draw.random(rows) < 0.8] = 0
    if kind == "missing":
        column[draw.random(rows) < 0.3] = np.nan
    table = xgboost.QuantileDMatrix(column[:, None], np.zeros(rows), max_bin=max_bin)
    _, cuts = table.get_quantile_cut()  # which begins below and ends above all values
    ours, theirs = quantile_edges(column, max_bin), cuts[1:-1]
    if kind == "few" or Version(xgboost.__version__) < Version("3.3"):
        assert np.array_equal(ours, theirs)
    values = np.sort(column[~np.isnan(column)])
    mine, others = (np.searchsorted(values, edges) for edges in (ours, theirs))
    nearest = np.abs(mine[:, None] - others).min(1)
    assert nearest.max() <= len(values) / max_bin / 2  # half the rows of a bin


def test_bins_of_many_columns_come_in_order():
    cells = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    bins = fit_bins(cells, (0, 0, 0), 8).bins(cells)
    assert bins.max() == 7
    assert all(
        (np.diff(bins[np.argsort(cells[:, one]), one].astype(int)) >= 0).all() for one in range(3)
    )


@parametrize_with_checks(
    [VFLBoostingClassifier(1, n_estimators=4), VFLBoostingRegressor(1, n_estimators=8)],
    expected_failed_checks=lambda estimator: {
        "check_sample_weight_equivalence_on_dense_data": (
            "a row of weight 0 still has bins of its own, for a feature party knows no weights"
        )
    },
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def test_breast_cancer():
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    model = VFLBoostingClassifier(3, n_estimators=20, random_state=0).fit(X[:400], y[:400])
    assert roc_auc_score(y[400:], model.predict_proba(X[400:])[:, 1]) > 0.98


def test_estimators_take_every_option_of_the_model():
    """An option of the model that an estimator does not know would be dropped without a word."""
    given = {"monotone_constraints", "objective", *VFLBoostingClassifier._get_param_names()}
    options = {*inspect.signature(Trees).parameters} - {"rising", "falling"}
    assert options <= given
