"""A training with two label parties, command by command."""

from pathlib import Path

import pytest
from sklearn.datasets import load_diabetes

from vfl.config.run_folder import RunFolder

EXPERIMENT = """
[data]
source = "table.csv"
[parties.bank]
columns = ["age", "sex", "b*"]
[parties.lab]
columns = ["s[1-6]"]
[label]
party = "clinic"
column = "high"
[[tasks]]
party = "insurer"
column = "target"
task = "regression"
weight = 0.5
[train]
epochs = 3
"""


@pytest.fixture
def run(well):
    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["high"] = (frame.target > frame.target.median()).map({True: "yes", False: "no"})
    frame.to_csv("table.csv", index=False)
    Path("m.toml").write_text(EXPERIMENT)
    well("train", "m.toml")
    (folder,) = Path("runs").iterdir()
    return folder


def test_from_a_file_to_predictions_of_both(vfl, well, run):
    assert "clinic and insurer see every cut" in vfl("check", "m.toml").out
    trained = RunFolder.open(run).summary()["tasks"]["insurer"]
    shown = vfl("evaluate", run).out
    assert f"insurer test rmse {trained['test_rmse']:.4f}" in shown
    assert "bank to insurer" in shown
    well("predict", run)
    rows = [len((run / name).read_text().splitlines()) for name in PREDICTIONS]
    assert rows == [1 + 88] * 2
    well("report", run)
    page = (run / "report.html").read_text()
    assert "clinic and insurer each held labels and a top model of their own" in page
    assert "RMSE, insurer" in page
    for party in ("bank", "clinic", "insurer"):
        well("export", run, "--party", party, "--to", "torch")


PREDICTIONS = ("predictions.csv", "predictions-insurer.csv")


def test_commands_with_one_label_party_refuse_them(vfl, run):
    refused = [
        vfl("attack", run),
        vfl("value", "m.toml"),
        vfl("compare", "m.toml", "--codec", "none"),
        vfl("grid", "m.toml"),
    ]
    for one in refused:
        assert one.code == 2, one.err
        assert "label part" in one.err
