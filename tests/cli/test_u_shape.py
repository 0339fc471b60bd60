"""A training with a party in the middle, command by command."""

from pathlib import Path

from vfl.config.run_folder import RunFolder

EXPERIMENT = """
[parties.bank]
[parties.shop]
[label]
party = "clinic"
top = "linear"
[middle]
party = "compute"
width = 48
[data]
source = "breast_cancer"
[train]
epochs = 3
"""


def test_from_a_file_to_predictions_and_a_report(vfl, well):
    Path("u.toml").write_text(EXPERIMENT)
    assert "compute sees every cut and no label" in vfl("check", "u.toml").out
    well("train", "u.toml")
    (folder,) = Path("runs").iterdir()
    run = RunFolder.open(folder)
    assert run.summary()["test_accuracy"] > 0.8
    well("evaluate", folder)
    assert run.evaluation()["test_loss"] == run.summary()["test_loss"]
    well("predict", folder)
    answers = (folder / "predictions.csv").read_text().splitlines()
    assert len(answers) == 1 + round(0.2 * 569)
    well("report", folder)
    page = (folder / "report.html").read_text()
    assert "compute sees every cut and no label" in page
    assert "clinic held the labels and the head, compute the model in the middle" in page


def test_halves_are_exported_where_no_middle_is_needed_and_refused_elsewhere(vfl):
    Path("u.toml").write_text(EXPERIMENT)
    vfl("train", "u.toml", "-s", "train.epochs=1")
    (folder,) = Path("runs").iterdir()
    for party, file in (("bank", "bottom.pt2"), ("clinic", "top.pt2")):
        assert file in vfl("export", folder, "--party", party, "--to", "torch").out
    refused = [
        vfl("export", folder, "--party", "compute", "--to", "torch"),
        vfl("attack", folder),
        vfl("value", "u.toml"),
        vfl("compare", "u.toml", "--codec", "none"),
        vfl("grid", "u.toml"),
    ]
    for one in refused:
        assert one.code == 2
        assert "a party in the middle" in one.err
