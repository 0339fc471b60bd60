"""Regressions over hidden common rows, beside the joined table."""

import numpy as np
import pandas as pd
import pytest
from cut_tables import cut, real_table

from vfl.config import read_experiment
from vfl.core.errors import ConfigError, ConsentError
from vfl.training import hidden

EXPERIMENT = """\
[data]
id = "key"
id_rules = "decimal+zeros"
source = "label.csv"
[parties.bank]
source = "bank.csv"
[parties.label]
columns = ["own"]
[label]
column = "{label}"
"""


@pytest.fixture
def made(tmp_path, data_root):
    def make(name="bank", rows=3000):
        frame, label = real_table(data_root, name)
        cut(frame, label, tmp_path, overlap=0.8, rows=rows)
        own = pd.read_csv(tmp_path / "label.csv")
        codes = pd.factorize(own[label])[0]
        own["own"] = codes + np.random.default_rng(0).normal(size=len(own))
        own.to_csv(tmp_path / "label.csv", index=False)
        (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(label=label))
        return read_experiment(tmp_path / "experiment.toml"), label

    return make


@pytest.mark.parametrize("name", ["bank", "credit"])
def test_shares_of_variance_are_those_of_the_joined_table(made, monkeypatch, name):
    experiment, _ = made(name)
    brought, read = {}, hidden._read

    def recorded(experiment, party, *rest):
        brought[party] = read(experiment, party, *rest)
        return brought[party]

    monkeypatch.setattr(hidden, "_read", recorded)
    done = hidden.hidden_statistics(experiment, 3000)
    keys = {party: {key: row for row, key in enumerate(own.keys)} for party, own in brought.items()}
    common = sorted(keys["label"].keys() & keys["bank"].keys())
    mine, theirs = (
        brought[party].inputs.numpy()[[keys[party][key] for key in common]]
        for party in ("label", "bank")
    )
    assert done.common == len(common)
    for name_, inputs in {
        "label": mine[:, :-1],
        "bank": theirs,
        "both": np.concatenate([mine[:, :-1], theirs], axis=1),
    }.items():
        design = np.concatenate([np.ones((len(common), 1)), inputs], axis=1)
        target = mine[:, -1]
        rank = np.linalg.lstsq(design, target, rcond=None)[0]
        left = ((target - design @ rank) ** 2).sum() / ((target - target.mean()) ** 2).sum()
        adjusted = 1 - left * (len(common) - 1) / (len(common) - design.shape[1])
        assert done.explained[name_] == pytest.approx(adjusted, abs=2e-3)
    assert done.explained["both"] > done.explained["bank"] + 0.05


def test_few_common_rows_for_so_many_inputs_are_refused(made, monkeypatch):
    monkeypatch.setattr(hidden, "ROWS_AN_INPUT", 100)
    experiment, _ = made()
    with pytest.raises(ConsentError, match="so few common rows"):
        hidden.hidden_statistics(experiment, 3000)


def test_a_label_with_hardly_any_rows_of_a_class_is_refused(made):
    experiment, _ = made(rows=300)
    with pytest.raises(ConfigError, match="no class of the label"):
        hidden.hidden_statistics(experiment, 300)


def test_three_parties_are_told_what_to_do(made, tmp_path):
    made()
    text = (tmp_path / "experiment.toml").read_text() + '[parties.shop]\nsource = "shop.csv"\n'
    (tmp_path / "experiment.toml").write_text(text)
    with pytest.raises(ConfigError, match="one feature party"):
        hidden.hidden_statistics(read_experiment(tmp_path / "experiment.toml"), 3000)


def test_inputs_that_few_rows_have_are_left_out():
    inputs = np.zeros((100, 3))
    inputs[:30, 0], inputs[:5, 1] = 1, 1
    kept, left_out = hidden._common_enough(inputs, 10)
    assert kept.shape == (100, 1)
    assert left_out == 2
    assert kept.std() == pytest.approx(1)
