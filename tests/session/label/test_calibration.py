"""Curves against scikit-learn's, and trainings whose probabilities they mend."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, log_loss

from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConfigError, SpecError
from vfl.estimators import VFLClassifier
from vfl.session import PartyFolder
from vfl.session.label.calibration import CURVES, Calibration, smoothed
from vfl.session.label.task import FEW_CLASSES, make_task
from vfl.training.export import export_half


def drawn(rows, classes, seed=0):
    """Logits whose probabilities are off, and classes."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(rows, classes))
    shares = np.exp(0.5 * logits) / np.exp(0.5 * logits).sum(1, keepdims=True)
    codes = (shares.cumsum(1) > draw.random((rows, 1))).argmax(1)
    return torch.from_numpy(logits), torch.from_numpy(codes)


@pytest.mark.parametrize("rows", [7, 400, 3000])
def test_isotonic_regression_is_that_of_scikit_learn(rows):
    logits, codes = drawn(rows, 2)
    chances = torch.softmax(logits, dim=1)[:, 1].round(decimals=2)  # many are equal
    curve = CURVES["isotonic"]()
    curve.fit(chances.numpy(), codes.numpy())
    wanted = IsotonicRegression(out_of_bounds="clip").fit(chances, smoothed(codes.numpy()))
    asked = torch.linspace(0, 1, 501, dtype=torch.float64)
    np.testing.assert_allclose(curve(asked).numpy(), wanted.predict(asked), atol=1e-12)


def test_platt_scaling_is_a_logistic_regression_on_smoothed_targets():
    logits, codes = drawn(900, 2)
    chances = torch.softmax(logits, dim=1)[:, 1]
    margin = (logits[:, 1] - logits[:, 0]).numpy()
    curve = CURVES["platt"]()
    curve.fit(chances.numpy(), codes.numpy())
    target = smoothed(codes.numpy())
    twice = np.tile(margin[:, None], (2, 1))
    wanted = LogisticRegression(C=1e12, tol=1e-10, max_iter=1000).fit(
        twice, np.repeat([1, 0], 900), sample_weight=np.concatenate([target, 1 - target])
    )
    np.testing.assert_allclose(
        curve(chances).numpy(), wanted.predict_proba(margin[:, None])[:, 1], atol=1e-6
    )


@pytest.mark.parametrize("how", ["isotonic", "platt"])
@pytest.mark.parametrize("classes", [2, 4])
def test_curves_mend_probabilities_of_new_rows(how, classes):
    made = Calibration(how, classes)
    made.fit(*drawn(6000, classes, seed=1))
    logits, codes = drawn(6000, classes, seed=2)
    before, after = (torch.softmax(one, dim=1).numpy() for one in (logits, made(logits)))
    np.testing.assert_allclose(after.sum(1), 1, atol=1e-12)
    best = torch.softmax(0.5 * logits, dim=1).numpy()
    assert log_loss(codes, before) > log_loss(codes, best) + 0.03
    assert log_loss(codes, after) < log_loss(codes, best) + 0.01


def test_one_against_the_rest_is_divided_by_its_sum():
    logits, codes = drawn(3000, 3)
    made = Calibration("isotonic", 3)
    made.fit(logits, codes)
    chances = torch.softmax(logits, dim=1).numpy()
    own = np.stack(
        [
            IsotonicRegression(out_of_bounds="clip")
            .fit(chances[:, one], smoothed(codes.numpy() == one))
            .predict(chances[:, one])
            for one in range(3)
        ],
        axis=1,
    )
    found = torch.softmax(made(logits), dim=1).numpy()
    np.testing.assert_allclose(found, own / own.sum(1, keepdims=True), atol=1e-9)


def test_as_many_knots_are_read_as_were_kept():
    one, other = (make_task("classification", 3, calibration="isotonic") for _ in range(2))
    one.calibration.fit(*drawn(500, 3))
    other.load_state_dict(one.state_dict())
    logits, _ = drawn(50, 3, seed=5)
    assert torch.equal(one.calibrated(logits), other.calibrated(logits))


def test_rows_that_lack_a_class_fit_nothing():
    made = Calibration("platt", 3)
    logits, codes = drawn(300, 3)
    made.fit(logits, codes)
    made.fit(logits, codes.clamp(max=1))
    assert made.doubts == [
        "probabilities are not calibrated: the 300 validation rows lack 1 of 3 classes"
    ]
    np.testing.assert_allclose(made(logits).exp(), torch.softmax(logits, dim=1), atol=1e-9)
    with pytest.raises(SpecError, match="51 classes"):
        make_task("classification", FEW_CLASSES + 1, calibration="platt")


EXPERIMENT = """
name = "rare"
{model}
data = {{ source = "breast_cancer", validation = 0.3 }}
label = {{ class_weight = "{weight}", calibration = "{how}" }}
parties.laboratory = {{ {party} }}
train = {{ epochs = {epochs}, {more} }}
"""


@pytest.fixture
def run(vfl, tmp_path):
    def train(how="platt", weight="balanced", model="", epochs=3, more="keep = 'best'", name="r"):
        path = tmp_path / f"{name}.toml"
        party = "" if model else 'width = 8, bottom = "mlp:hidden=none"'
        given = {"how": how, "weight": weight, "model": model, "epochs": epochs}
        path.write_text(EXPERIMENT.format(**given, more=more, party=party))
        done = vfl("train", path, "--runs", tmp_path / name)
        assert done.code == 0, done.err
        (folder,) = (tmp_path / name).iterdir()
        return folder, done

    return train


@pytest.mark.parametrize(
    ("how", "model", "more", "weight"),
    [
        ("isotonic", "", "keep = 'best', patience = 1", "balanced"),
        ("platt", "", "keep = 'last'", "balanced"),
        ("platt", 'model = "trees"', "keep = 'best', patience = 2", "balanced"),
        ("isotonic", 'model = "scorecard:l2=0.01"', "keep = 'last'", "none"),
        ("platt", 'model = "regression:l2=0.01"', "keep = 'last'", "none"),
    ],
)
def test_every_answer_of_a_run_is_calibrated(run, vfl, how, model, more, weight):
    folder, done = run(how, weight, model, 1 if "l2" in model else 6, more)
    summary = RunFolder(folder).summary()
    assert vfl("predict", folder).code == 0
    table = pd.read_csv(folder / "predictions.csv")
    after, before = (
        table.filter(like=name).iloc[:, 1].to_numpy() for name in ("probability_", "uncalibrated_")
    )
    assert np.abs(after - before).max() > 0.01
    assert np.all(np.diff(after[before.argsort()]) >= -1e-6), "the order of rows stays"
    # The figures are those of the answers, before and after.
    truth = labels_of_test_rows(folder, table["id"].to_numpy())
    for told, chances in (("", after), ("uncalibrated_", before)):
        assert summary[f"test_{told}brier"] == pytest.approx(
            brier_score_loss(truth, chances), abs=1e-6
        )
        wanted = log_loss(truth, np.clip(chances, 2.3e-16, 1 - 2.3e-16).astype(np.float64))
        assert summary[f"test_{told}log_loss"] == pytest.approx(wanted, abs=1e-4)
    evaluated = vfl("evaluate", folder)
    assert evaluated.code == 0
    assert RunFolder(folder).evaluation()["test_brier"] == pytest.approx(summary["test_brier"])
    page = (folder / "report.html").read_text()
    assert "Before calibration" in page
    assert f"After it ({how}, as answered)" in page
    assert "do not read them as shares" not in page
    assert "before calibration" in done.out
    assert ("overfits below" in done.out) == (how == "isotonic")


def labels_of_test_rows(folder, rows):
    from vfl.training.run import load_rows

    data = load_rows(RunFolder(folder))
    return data[RunFolder(folder).experiment().label.party].labels[torch.tensor(rows)].numpy()


def test_curves_are_part_of_the_weights(run):
    folder, _ = run("isotonic")
    kept = PartyFolder(folder / "parties" / "label").weights()
    assert kept["task.calibration.curves.0.knots"].shape[1] == 2
    without, _ = run("none", name="without")
    assert not [
        one for one in PartyFolder(without / "parties" / "label").weights() if "calibration" in one
    ]


def test_a_forest_of_another_program_lies_beside_its_curves(run):
    folder, _ = run("isotonic", "none", 'model = "trees"', 6, "keep = 'last'")
    made = export_half(folder, "label", "xgboost", None)
    found = json.loads(Path(made["calibration"]).read_text())
    kept = PartyFolder(folder / "parties" / "label").weights()
    assert found["calibration"] == "isotonic"
    assert found["curves"] == [{"knots": kept["task.calibration.curves.0.knots"].tolist()}]


def test_a_classifier_answers_calibrated_probabilities():
    draw = np.random.default_rng(0)
    X = draw.normal(size=(3000, 4))
    y = (X @ [1.0, -1.0, 0.5, 0.0] + 2 * draw.normal(size=3000) > 2).astype(int)
    settings = {"parties": 2, "epochs": 4, "class_weight": "balanced", "validation": 0.3}
    losses = [
        log_loss(y[2000:], VFLClassifier(**settings, calibration=how, random_state=0)
                 .fit(X[:2000], y[:2000]).predict_proba(X[2000:]))
        for how in ("none", "platt")
    ]  # fmt: skip
    assert losses[1] < losses[0] - 0.05
    with pytest.raises(ConfigError, match="holds no rows out"):
        VFLClassifier(2, calibration="platt", validation=0.3).partial_fit(X, y, classes=[0, 1])


@pytest.mark.parametrize("defense", ["label_dp:epsilon=2", "label_dp_two_stage:epochs=1", "tpsl"])
def test_it_is_refused_beside_a_promise_for_labels_against_everybody(defense):
    """Whoever reads calibrated answers learns of labels that the noise does not cover."""
    X = np.random.default_rng(0).normal(size=(90, 4))
    y = (X[:, 0] > 0).astype(int)
    settings = {"parties": 2, "epochs": 2, "validation": 0.3, "defense": defense}
    with pytest.raises(SpecError, match="from all parties, and calibrated answers disclose"):
        VFLClassifier(**settings, calibration="platt").fit(X, y)
    VFLClassifier(**settings).fit(X, y)


def test_it_is_refused_where_there_is_nothing_to_fit(vfl, tmp_path):
    path = tmp_path / "rare.toml"
    path.write_text(
        EXPERIMENT.format(
            how="platt", weight="none", model="", epochs=1, more="keep = 'last'", party=""
        )
    )
    for setting, told in (
        ("data.validation=0", "label.calibration = 'platt' is fitted to validation rows"),
        ("dp={noise=1.0}", "the noise of [dp] does not protect"),
        ("label.task=regression", "calibration is for classification"),
    ):
        done = vfl("train", path, "--runs", tmp_path / "runs", "-s", setting)
        assert done.code == 2, done.out
        assert told in done.err
