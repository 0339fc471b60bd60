"""Trainings with a party in the middle, or with two label parties, command by command."""

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
[train]
epochs = 2
"""
MIDDLE = """
[middle]
party = "compute"
width = 48
"""
TASKS = """
[[tasks]]
party = "insurer"
column = "target"
task = "regression"
weight = 0.5
"""
#: What is said of who sees what and of who held what, why commands refuse, and what is predicted.
KINDS = {
    MIDDLE: (
        "compute sees every cut and no label",
        "clinic held the labels and the head; compute held the middle model",
        "a party in the middle",
        ["predictions.csv"],
    ),
    TASKS: (
        "clinic and insurer see every cut",
        "clinic and insurer each held labels and a top model of their own",
        "label part",
        ["predictions.csv", "predictions-insurer.csv"],
    ),
}


@pytest.mark.parametrize("kind", KINDS, ids=["middle", "tasks"])
def test_from_a_file_to_predictions_a_report_and_exports(well, refused, kind):
    seen, held, why, predictions = KINDS[kind]
    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["high"] = (frame.target > frame.target.median()).map({True: "yes", False: "no"})
    frame.to_csv("table.csv", index=False)
    Path("x.toml").write_text(EXPERIMENT + kind)
    assert seen in well("check", "x.toml").out
    well("train", "x.toml")
    (folder,) = Path("runs").iterdir()
    run = RunFolder.open(folder)
    shown = well("evaluate", folder).out
    assert run.evaluation()["test_loss"] == run.summary()["test_loss"]
    if kind is TASKS:
        rmse = run.summary()["tasks"]["insurer"]["test_rmse"]
        assert f"insurer test rmse {rmse:.4f}" in shown
    well("predict", folder)
    for name in predictions:
        assert len((folder / name).read_text().splitlines()) == 1 + 88
    well("report", folder)
    assert held in (folder / "report.html").read_text()
    for party in ("bank", "clinic"):
        well("export", folder, "--party", party, "--to", "torch")
    commands = [("attack", folder), ("value", "x.toml"), ("grid", "x.toml")]
    commands.append(("compare", "x.toml", "--codec", "none"))
    if kind is MIDDLE:
        commands.append(("export", folder, "--party", "compute", "--to", "torch"))
    for command in commands:
        assert why in refused(*command).err
