"""Generalised linear models against statsmodels, and what a fit refuses.

The numbers in STATSMODELS were made by statsmodels 0.15.0 on the tables of `table`:
`OLS(y, X).fit()`, and `GLM(y, X, family=...).fit(tol=1e-14)`.
"""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_diabetes

from vfl.config import Experiment
from vfl.core.errors import DataError, SpecError, TooFewRowsError
from vfl.training.run import train
from vfl.trees.newton import (
    FAMILIES,
    Penalty,
    Selection,
    family,
    fit,
    local_sums,
    outcome_of,
    stepwise,
)

SPECS = {"gaussian": "linear", "binomial": "logistic", "poisson": "poisson"}
#: Coefficients, standard errors, p-values, log-likelihood and deviance.
STATSMODELS = {
    "gaussian": {
        "coefficients": [
            152.133484163,
            -6.81159949939,
            27.9455210327,
            13.4156167325,
            25.4905521132,
            2.92675615107,
        ],
        "errors": [
            2.63940728461,
            2.74604088078,
            3.11124665398,
            3.09261742736,
            3.20855509614,
            3.15246544356,
        ],
        "p_values": [
            4.66560690718e-206,
            0.0134956019987,
            8.05497096658e-18,
            1.78871007464e-05,
            1.6769041161e-14,
            0.353712607054,
        ],
        "interval": [-11.3380524427, -2.28514655608],
        "log_likelihood": -2399.314802774,
        "deviance": 1342522.523521,
        "null_deviance": 2621009.124434,
        "aic": 4810.629605549,
        "bic": 4835.177464841,
    },
    "binomial": {
        "coefficients": [
            1.06119942917,
            -1.81333271903,
            -1.83612456897,
            -0.921433064663,
            1.42348359805,
            0.920472987582,
        ],
        "errors": [
            0.141832317352,
            0.183460127206,
            0.215405874996,
            0.169089582793,
            0.204583982089,
            0.167832072458,
        ],
        "p_values": [
            7.31605537678e-14,
            4.88093250764e-23,
            1.5410540137e-17,
            5.05462615074e-08,
            3.45277902367e-12,
            4.14668628318e-08,
        ],
        "interval": [-2.11509777466, -1.51156766339],
        "log_likelihood": -211.6474896119,
        "deviance": 423.2949792239,
        "null_deviance": 751.4400053842,
        "aic": 435.2949792239,
        "bic": 461.3582618286,
    },
    "poisson": {
        "coefficients": [
            2.62965780813,
            -0.0428662604583,
            0.179002572426,
            0.0903508955251,
            0.172937969228,
            0.0190529568323,
        ],
        "errors": [
            0.0131366077685,
            0.012789966117,
            0.0135747800883,
            0.0139231899625,
            0.0145788006635,
            0.0145934860484,
        ],
        "p_values": [
            0,
            0.000803594023227,
            1.05075403605e-39,
            8.62715031401e-11,
            1.85821080234e-32,
            0.191695581168,
        ],
        "interval": [-0.0639038826145, -0.0218286383021],
        "log_likelihood": -1447.35941171,
        "deviance": 953.3377866674,
        "null_deviance": 1806.163721155,
        "aic": 2906.71882342,
        "bic": 2931.266682713,
    },
}


def table(name):
    """Standardised columns behind one of ones, and labels."""
    if name == "binomial":
        cells, labels = load_breast_cancer(return_X_y=True)
        cells = cells[:, [1, 4, 8, 9, 11]]
    else:
        cells, labels = load_diabetes(return_X_y=True)
        cells = cells[:, [1, 2, 3, 8, 9]]
        labels = labels // 10 if name == "poisson" else labels
    cells = (cells - cells.mean(0)) / cells.std(0)
    return np.column_stack([np.ones(len(cells)), cells]), labels.astype(float)


def fitted(name, inputs, labels, weights=None, **more):
    of = family(name)
    counted = labels if weights is None else labels * weights
    outcome = outcome_of(of, inputs.T @ counted, labels, weights)
    return fit(of, outcome, local_sums(of, inputs, weights), **more)


def selected(name, inputs, labels, selection):
    of = family(name)
    outcome = outcome_of(of, inputs.T @ labels, labels)
    return stepwise(of, outcome, local_sums(of, inputs), selection)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fit_is_that_of_statsmodels(name):
    found, want = fitted(name, *table(name)), STATSMODELS[name]
    np.testing.assert_allclose(found.coefficients, want["coefficients"], rtol=1e-9)
    np.testing.assert_allclose(found.standard_errors, want["errors"], rtol=1e-9)
    np.testing.assert_allclose(found.p_values, want["p_values"], rtol=1e-6)
    np.testing.assert_allclose(found.intervals(0.9)[1], want["interval"], rtol=1e-9)
    assert found.log_likelihood == pytest.approx(want["log_likelihood"], rel=1e-12)
    assert found.deviance == pytest.approx(want["deviance"], rel=1e-9)
    assert found.null_deviance == pytest.approx(want["null_deviance"], rel=1e-9)
    assert (found.aic, found.bic) == pytest.approx((want["aic"], want["bic"]), rel=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_session_of_three_parties_fits_what_statsmodels_fits(tmp_path, name):
    """Real tables, whose cells are float32 here, all rows of which train."""
    cells, labels = table(name)
    frame = pd.DataFrame(cells[:, 1:], columns=list("abcde"))
    frame.assign(label=labels.astype(int)).to_csv(tmp_path / "table.csv", index=False)
    content = {
        "model": "regression:family=" + SPECS[name],
        "data": {"source": str(tmp_path / "table.csv"), "validation": 0.0, "test": 0.0},
        "parties": {"bank": {"columns": ["a", "b", "c"]}, "shop": {"columns": ["d", "e"]}},
        "label": {"party": "lender", "column": "label"},
        "train": {"epochs": 1},
    }
    content["label"]["task"] = "classification" if name == "binomial" else "regression"
    found = train(Experiment.model_validate(content), tmp_path, "run")["regression"]
    want = STATSMODELS[name]
    for ours, theirs in (("coefficient", "coefficients"), ("standard_error", "errors")):
        values = [one[ours] for one in found["columns"]]
        np.testing.assert_allclose(values, np.roll(want[theirs], -1), rtol=1e-6)
    assert found["log_likelihood"] == pytest.approx(want["log_likelihood"], rel=1e-7)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_installed_statsmodels_says_so_too(name):
    api = pytest.importorskip("statsmodels.api")
    inputs, labels = table(name)
    kind = {"gaussian": "Gaussian", "binomial": "Binomial", "poisson": "Poisson"}[name]
    weights = np.random.default_rng(1).integers(1, 4, len(labels)).astype(float)
    model = api.GLM(labels, inputs, family=getattr(api.families, kind)(), freq_weights=weights)
    want, found = model.fit(tol=1e-14), fitted(name, inputs, labels, weights)
    np.testing.assert_allclose(found.coefficients, want.params, rtol=1e-8)
    np.testing.assert_allclose(found.standard_errors, want.bse, rtol=1e-8)


def test_rows_count_as_often_as_their_weights_say():
    inputs, labels = table("binomial")
    weights = np.random.default_rng(1).integers(1, 4, len(labels))
    often = np.repeat(np.arange(len(labels)), weights)
    once = fitted("binomial", inputs, labels, weights.astype(float))
    again = fitted("binomial", inputs[often], labels[often])
    np.testing.assert_allclose(once.coefficients, again.coefficients, rtol=1e-10)
    np.testing.assert_allclose(once.covariance, again.covariance, rtol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("penalty", [Penalty(l2=0.1), Penalty(l1=0.05), Penalty(0.02, 0.05)])
def test_penalties_are_minimised(name, penalty):
    """Against a general optimiser, on b = p - m with both parts at least 0."""
    inputs, labels = table(name)
    found, of = fitted(name, inputs, labels, penalty=penalty), family(name)
    columns = inputs.shape[1] - 1

    def loss(parts):
        b = np.concatenate([parts[:1], parts[1 : 1 + columns] - parts[1 + columns :]])
        margins = inputs @ b
        slope = inputs.T @ (of.mean(margins) - labels) / len(labels)
        value = (of.normaliser(margins) - labels * margins).mean()
        value += penalty.l1 * parts[1:].sum() + penalty.l2 / 2 * b[1:] @ b[1:]
        own = slope[1:] + penalty.l2 * b[1:]
        return value, np.concatenate([slope[:1], own + penalty.l1, penalty.l1 - own])

    start = np.full(1 + 2 * columns, 0.1)
    start[0] = found.coefficients[0] * 0.9
    bounds = [(None, None)] + [(0, None)] * (2 * columns)
    options = {"maxiter": 10000, "ftol": 1e-15, "gtol": 1e-10}
    best = minimize(loss, start, jac=True, bounds=bounds, options=options).x
    want = np.concatenate([best[:1], best[1 : 1 + columns] - best[1 + columns :]])
    scale = np.abs(want).max()
    np.testing.assert_allclose(found.coefficients, want, atol=1e-5 * scale)
    assert np.isnan(found.standard_errors).all()


def test_a_large_penalty_leaves_the_intercept_alone():
    inputs, labels = table("binomial")
    found = fitted("binomial", inputs, labels, penalty=Penalty(l1=10))
    assert found.coefficients[1:].tolist() == [0.0] * 5
    assert found.deviance == pytest.approx(found.null_deviance)


def test_a_column_enters_by_the_test_that_it_then_has():
    inputs, labels = table("gaussian")
    active = np.array([True, True, False, False, True, False])
    before = fitted("gaussian", inputs, labels, active=active)
    active[3] = True
    after = fitted("gaussian", inputs, labels, active=active)
    assert before.entry_p_values()[3] == pytest.approx(after.p_values[3], rel=1e-6)
    assert np.isnan(before.entry_p_values()[[0, 1, 4]]).all()


@pytest.mark.parametrize("by", ["p", "aic", "bic"])
@pytest.mark.parametrize("name", ["gaussian", "binomial"])
def test_selection_takes_columns_that_matter(name, by):
    inputs, labels = table(name)
    draw = np.random.default_rng(3)
    noise = draw.normal(size=(len(labels), 6))
    found = selected(name, np.column_stack([inputs, noise]), labels, Selection(by))
    assert found.active[2]
    p_values = found.p_values[found.active][1:]
    if by == "p":
        assert (p_values < 0.05).all()
        assert np.nanmin(found.entry_p_values()) > 0.05
        return
    for place in range(1, len(found.active)):  # no neighbour is better
        active = found.active.copy()
        active[place] ^= True
        other = fitted(name, np.column_stack([inputs, noise]), labels, active=active)
        assert getattr(other, by) > getattr(found, by)


def test_what_cannot_be_fitted_is_refused():
    inputs, labels = table("binomial")
    separated = (inputs[:, 1] > 0).astype(float)
    with pytest.raises(DataError, match="separates"):
        fitted("binomial", inputs, separated)
    half = np.where(inputs[:, 1] > 0.5, 1.0, labels)
    half[inputs[:, 1] <= 0.5] = labels[inputs[:, 1] <= 0.5]
    quasi = np.column_stack([inputs, inputs[:, 1] > 0.5])
    with pytest.raises(DataError, match="separates"):
        fitted("binomial", quasi, half)
    assert fitted("binomial", inputs, separated, penalty=Penalty(l2=0.01)).steps > 1
    double = np.column_stack([inputs, inputs[:, 1] - 2 * inputs[:, 2]])
    with pytest.raises(DataError, match="columns 1, 2, 6"):
        fitted("binomial", double, labels)
    with pytest.raises(DataError, match="0 in every row"):
        fitted("binomial", np.column_stack([inputs, np.zeros(len(labels))]), labels)
    with pytest.raises(TooFewRowsError):
        fitted("gaussian", inputs[:6], labels[:6])
    with pytest.raises(DataError, match="two classes"):
        fitted("binomial", inputs, np.ones(len(labels)))
    with pytest.raises(DataError, match="counts"):
        fitted("poisson", inputs, labels - 1)
    with pytest.raises(SpecError, match="gaussian"):
        family("gausian")


def test_p_values_are_uniform_where_a_column_says_nothing():
    draw = np.random.default_rng(5)
    found = []
    for _ in range(300):
        inputs = np.column_stack([np.ones(60), draw.normal(size=(60, 2))])
        labels = draw.poisson(np.exp(0.5 + 0.4 * inputs[:, 1])).astype(float)
        found.append(fitted("poisson", inputs, labels).p_values[2])
    assert stats.kstest(found, "uniform").pvalue > 0.01
