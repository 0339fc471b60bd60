"""Tables of thresholds, held against scikit-learn, and where a run shows them."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
)
from sklearn.metrics import log_loss as sklearn_log_loss

from vfl.core.errors import ConfigError, DataError
from vfl.experiments import thresholds
from vfl.experiments.loaded_run import LoadedRun
from vfl.session.label.scored import GROUPS, Guessed, Residuals, Scored


def drawn(rows, seed=0, shift=0.0):
    """Rows of a rare class whose probabilities hold, moved by `shift` in the logit."""
    draw = np.random.default_rng(seed)
    logit = draw.normal(-2.5, 1.2, rows)
    codes = (draw.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)
    logits = torch.from_numpy(np.stack([np.zeros(rows), logit + shift], axis=1))
    return logits, torch.from_numpy(codes)


def chances_of(logits):
    return torch.softmax(logits, dim=1)[:, 1].numpy()


@pytest.mark.parametrize("rows", [400, 20_000])
def test_figures_are_those_of_scikit_learn(rows):
    logits, codes = drawn(rows)
    scored, chances = Scored.of(logits, codes), chances_of(logits)
    assert len(scored.values) <= GROUPS + 1
    assert (scored.rows, scored.positives) == (rows, int(codes.sum()))
    close = 1e-12 if rows <= GROUPS else 2e-3  # groups of 20 rows
    wanted = average_precision_score(codes, chances)
    assert thresholds.average_precision(scored) == pytest.approx(wanted, abs=close)
    assert thresholds.log_loss(scored) == pytest.approx(sklearn_log_loss(codes, chances), abs=close)
    one = thresholds.confusion_at(scored, 0.2)
    (tn, fp), (fn, tp) = confusion_matrix(codes, chances >= 0.2)
    found = [one.true_negatives, one.false_positives, one.false_negatives, one.true_positives]
    assert np.abs(np.subtract(found, [tn, fp, fn, tp])).max() <= (0 if rows <= GROUPS else 20)


def test_bands_count_every_row_once_and_the_best_first():
    scored = Scored.of(*drawn(20_000))
    found = thresholds.bands(scored)
    assert len(found) == 10
    assert sum(one.rows for one in found) == 20_000
    assert sum(one.positives for one in found) == scored.positives
    assert found[-1].captured == 1.0
    assert found[0].expected > found[-1].expected
    # A model that ranks nothing has one band: all its probabilities are alike.
    flat = Scored.of(torch.zeros(50, 2), torch.arange(50) % 2)
    assert [(one.rows, one.captured) for one in thresholds.bands(flat)] == [(50, 1.0)]


@pytest.mark.parametrize("how", ["isotonic", "platt"])
def test_probabilities_that_are_too_high_are_mended_by_validation_rows(how):
    """As class weights leave them: every logit is 2 too high."""
    validation, tested = (Scored.of(*drawn(8000, seed, shift=2.0)) for seed in (1, 2))
    before = thresholds.calibration_error(tested)
    made = thresholds.calibrated(validation, tested.values, how)
    assert np.all(np.diff(made) >= 0), "the order of rows stays"
    after = thresholds.calibration_error(Scored(made, tested.counts))
    assert before > 0.15
    assert after < 0.02
    assert thresholds.log_loss(tested, made) < thresholds.log_loss(tested) - 0.1


def test_a_cost_chooses_the_threshold():
    scored = Scored.of(*drawn(20_000))
    # Where probabilities hold, flagging pays from 1 / (1 + cost) on (Elkan 2001).
    for cost in (1.0, 4.0, 19.0):
        assert thresholds.cheapest_threshold(scored, cost) == pytest.approx(1 / (1 + cost), abs=0.1)
    with pytest.raises(ConfigError, match="above 0"):
        thresholds.cheapest_threshold(scored, 0.0)


def test_a_record_reads_back_and_another_one_is_refused():
    scored = Scored.of(*drawn(300))
    again = Scored.read(json.loads(json.dumps(scored.record())))
    np.testing.assert_array_equal(again.counts, scored.counts)
    np.testing.assert_array_equal(again.values, scored.values)
    assert Scored.of(torch.tensor([[0.0, np.inf]]), torch.tensor([1])) is None
    for wrong in (None, {}, {"probability": [0.5], "counts": [[1, 2, 3]]}, {"counts": []}):
        with pytest.raises(DataError):
            Scored.read(wrong)


EXPERIMENT = """
name = "rare"
data.source = "breast_cancer"
label = {{ class_weight = "{weight}" }}
parties.laboratory = {{ width = 8, bottom = "mlp:hidden=none" }}
train = {{ epochs = {epochs}{more} }}
"""


@pytest.fixture
def run(vfl, tmp_path):
    def train(weight="none", epochs=2, more="", *settings):
        text = EXPERIMENT.format(weight=weight, epochs=epochs, more=more)
        (tmp_path / "rare.toml").write_text(text)
        done = vfl("train", tmp_path / "rare.toml", "--runs", tmp_path / "runs", *settings)
        assert done.code == 0, done.err
        (folder,) = (tmp_path / "runs").iterdir()
        return folder, done.out

    return train


def test_a_training_shows_thresholds_on_screen_and_page(run, vfl):
    folder, out = run()
    loaded = LoadedRun(folder)
    tested = loaded.scored["test"]
    summary = loaded.summary
    assert thresholds.log_loss(tested) == pytest.approx(summary["test_log_loss"], abs=1e-5)
    one = thresholds.confusion_at(tested, 0.5)
    accuracy = (one.true_positives + one.true_negatives) / tested.rows
    assert accuracy == pytest.approx(summary["test_accuracy"])
    assert f"average precision {thresholds.average_precision(tested):.4f}" in out
    assert "best F1 of validation rows" in out
    assert "label.class_weight" not in out
    page = (folder / "report.html").read_text()
    assert {"Thresholds", "Lift and calibration"} <= set(re.findall(r"<h2>([^<]*)</h2>", page))
    assert f"{one.false_negatives:,}" in page
    costly = vfl("report", folder, "--cost", "25")
    assert "a missed one costs 25 false alarms" in costly.out
    assert "a missed one costs 25 false alarms" in (folder / "report.html").read_text()
    assert vfl("report", folder, "--cost", "-1").code == 2


def test_class_weights_are_warned_of(run):
    folder, out = run("balanced")
    assert "do not read them as shares" in out
    assert "do not read them as shares" in (folder / "report.html").read_text()


def test_validation_rows_are_those_of_the_weights_that_were_kept(run):
    folder, _ = run("none", 6, ', keep = "best", learning_rate = 0.5, patience = 3')
    loaded = LoadedRun(folder)
    best = loaded.epochs[int(loaded.summary["best_epoch"]) - 1]
    found = thresholds.log_loss(loaded.scored["validation"])
    assert found == pytest.approx(best["validation_log_loss"], abs=1e-5)


def test_guesses_of_more_classes_are_those_of_scikit_learn():
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 4, 900)
    logits = draw.normal(size=(900, 4)) + 1.5 * np.eye(4)[codes]
    logits[:, 3] = -9.0  # nothing is guessed to be of the last class
    found = Guessed.of(torch.from_numpy(logits), torch.from_numpy(codes))
    guess = logits.argmax(1)
    np.testing.assert_array_equal(found.counts, confusion_matrix(codes, guess))
    wanted = precision_recall_fscore_support(codes, guess, zero_division=np.nan)
    for name, own in zip(("precision", "recall"), wanted, strict=False):
        np.testing.assert_allclose(getattr(found, name)(), own)
    np.testing.assert_allclose(found.f1(), f1_score(codes, guess, average=None, zero_division=0))
    assert found.sure.rows == 900
    assert found.sure.positives == int((guess == codes).sum())
    again = Guessed.read(json.loads(json.dumps(found.record())))
    np.testing.assert_array_equal(again.counts, found.counts)
    with pytest.raises(DataError):
        Guessed.read({"guesses": [1, 2]})


def test_residuals_are_in_bands_of_answers():
    draw = np.random.default_rng(0)
    answers = torch.from_numpy(draw.normal(size=(1000, 1)))
    labels = answers[:, 0] + 0.1 + 0.5 * torch.from_numpy(draw.normal(size=1000))
    found = Residuals.of(answers, labels)
    order = answers[:, 0].argsort()
    for band, rows in zip(found.bands, order.chunk(10), strict=True):
        apart = (labels - answers[:, 0])[rows]
        wanted = [100, answers[rows].mean(), labels[rows].mean(), apart.abs().mean()]
        np.testing.assert_allclose(band, [*wanted, (apart**2).mean().sqrt()])
    again = Residuals.read(json.loads(json.dumps(found.record())))
    np.testing.assert_array_equal(again.bands, found.bands)
    assert Residuals.of(answers * np.nan, labels) is None
    with pytest.raises(DataError):
        Residuals.read({"residuals": [[1, 2]]})


def test_a_run_of_more_classes_shows_each(tmp_path, vfl):
    (tmp_path / "ten.toml").write_text(
        'name = "ten"\ndata.source = "digits"\ndata.rows = 300\nparties.left = { width = 8 }\n'
        'label.calibration = "platt"\ndata.validation = 0.3\ntrain = { epochs = 3 }\n'
    )
    done = vfl("train", tmp_path / "ten.toml", "--runs", tmp_path / "runs")
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "runs").iterdir()
    loaded = LoadedRun(folder)
    assert loaded.scored == {}
    tested = loaded.guessed["test"].counts
    assert np.trace(tested) / tested.sum() == pytest.approx(loaded.summary["test_accuracy"])
    assert "least recall" in done.out
    assert "before calibration" in done.out
    page = (folder / "report.html").read_text()
    assert {"Classes", "Calibration"} <= set(re.findall(r"<h2>([^<]*)</h2>", page))
    assert "as 10" in page


def test_a_regression_shows_its_residuals(tmp_path, vfl):
    draw = np.random.default_rng(0)
    table = pd.DataFrame(draw.normal(size=(200, 3)), columns=["a", "b", "y"])
    table.to_csv(tmp_path / "t.csv", index_label="id")
    (tmp_path / "r.toml").write_text(
        'name = "r"\ndata = { source = "t.csv", id = "id" }\nparties.left = { columns = ["a"] }\n'
        'parties.right = { columns = ["b"] }\nlabel = { column = "y", task = "regression" }\n'
        "train = { epochs = 1 }\n"
    )
    done = vfl("train", tmp_path / "r.toml", "--runs", tmp_path / "runs")
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "runs").iterdir()
    loaded = LoadedRun(folder)
    rows, *_, squared = loaded.residuals["test"].bands.T
    rmse = np.sqrt((rows * squared**2).sum() / rows.sum())
    assert rmse == pytest.approx(loaded.summary["test_rmse"], rel=1e-6)
    assert "Residuals" in re.findall(r"<h2>([^<]*)</h2>", (folder / "report.html").read_text())
