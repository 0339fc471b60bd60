"""What a notebook calls: objects with tables, a page and figures."""

import re

import pandas as pd
import pytest

import vfl
from vfl.config import Experiment
from vfl.core.errors import ConfigError, UserError
from vfl.experiments.plots import plot_study

CONTENT = {
    "name": "tiny",
    "data": {"rows": 400},
    "parties": {"client": {"width": 8, "bottom": "mlp:hidden=16"}},
    "label": {"top": "linear"},
    "train": {"epochs": 2, "learning_rate": 0.02},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    return vfl.train(CONTENT, "train.epochs=3", runs=runs, name="one", progress=False)


def test_a_run_has_figures_tables_and_a_page(run):
    assert run.table.epoch.tolist() == [1, 2, 3]
    assert run.summary["test_accuracy"] > 0.3
    assert run.page.read_text().startswith("<!doctype html>")
    assert re.match(
        r"<run .*one: Test accuracy [0-9.]+\s%, .* sent in .*; labels were not", repr(run)
    )
    shown = run._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert 'sandbox="allow-scripts"' in shown
    assert len(run.predict()) == 80
    assert vfl.Run(run.path).summary == run.summary


def test_attacks_are_one_call(run):
    found = run.attack("nearest_mean", "kmeans:starts=1", leaks=[2], draws=1, measure="auc")
    table = found.table
    assert set(table.subject) == {"nearest_mean", "kmeans:starts=1"}
    auc = table[(table.subject == "nearest_mean") & (table.measure == "auc")]
    assert float(auc.guess.iloc[0]) == 0.5 < float(auc.value.iloc[0])
    assert "| nearest_mean    | 2 | 1     | auc" in repr(found)
    assert "<table" in found._repr_html_()
    assert "the best attack on labels gains" in run.glance.sentence
    with pytest.raises(ConfigError, match="no setting is called 'leeks'"):
        run.attack("kmeans", leeks=[1])


def test_codecs_are_compared(tmp_path):
    found = vfl.compare(
        Experiment.model_validate(CONTENT), codecs=["none", "topk:k=2"], seeds=[0], out=tmp_path,
        progress=False,
    )  # fmt: skip
    table = found.table
    assert table.training.unique().tolist() == ["none", "topk:k=2"]
    sent = table[table.measure == "wire_ratio_up"].set_index("training").value
    assert sent["topk:k=2"] < sent["none"]
    assert repr(found).startswith(f"<results of {tmp_path}: ")
    assert found.content["codecs"][0]["repeats"] == 1
    assert found.sentence.startswith("With none the test accuracy is ")
    assert found.sentence.endswith("With one repeat, no codec is shown to be as good as none.")
    again = vfl.Results.of(tmp_path)
    pd.testing.assert_frame_equal(again.table, table)
    assert found.failed == []


def test_a_grid_has_one_row_a_measure(tmp_path, capsys):
    asked = {"defenses": ["layer_norm"], "attacks": ["nearest_mean"], "leaks": [1], "draws": 1}
    found = vfl.grid(CONTENT, out=tmp_path, seeds=[0], baselines=["scratch"], pictures=0, **asked)
    assert "3/3" in capsys.readouterr().err
    rows = found.table[found.table.evaluator == "attack"]
    assert set(rows.measure) == {"accuracy", "balanced_accuracy", "auc", "average_precision"}
    assert not rows[["guess", "no_model"]].isna().any(axis=None)
    assert "give" in found.sentence or "undecided" in found.sentence


def test_figures_are_drawn_where_matplotlib_is(run, tmp_path, monkeypatch):
    compared = vfl.compare(CONTENT, codecs=["none"], seeds=[0], out=tmp_path / "c", progress=False)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="plots need matplotlib"):
        run.plot()
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    run.plot().savefig(tmp_path / "run.png")
    compared.plot().savefig(tmp_path / "compared.png")
    with pytest.raises(UserError, match="no quality on test rows"):
        plot_study(compared.path, compared.table.head(0))
    assert (tmp_path / "compared.png").stat().st_size > 1000
