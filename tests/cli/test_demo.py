"""`vfl demo`; the demo on real Flower processes is in tests/federation."""

import json
from pathlib import Path

from vfl.cli import project
from vfl.training import demo


def test_the_demo_in_one_process(vfl):
    done = vfl("demo", "--in-process", "--json", "-s", "train.epochs=5")
    figures = json.loads(done.out)
    assert done.code == 0
    assert figures["test_accuracy"] >= 0.7
    assert set(figures["bytes_by_party"]) == {"left", "right"}
    assert figures["bytes_up"] == sum(sent["up"] for sent in figures["bytes_by_party"].values())
    assert Path(figures["run"]).is_dir()
    assert Path(figures["report"]).is_file()
    assert sum(line.startswith("epoch") for line in done.err.splitlines()) == 5
    (folder,) = Path("runs").iterdir()
    assert f"the project of the demo is {folder}" in done.err


def test_a_folder_and_settings_of_ones_own(well, refused):
    settings = ["-s", "train.epochs=1", "-s", "codec=randtopk:k=4,values=8"]
    done = well("demo", "here", "--in-process", *settings)
    assert "randtopk:k=4,values=8" in done.out
    assert {entry.name for entry in Path("here").iterdir()} >= {"label", "left", "right", "runs"}
    again = refused("demo", "here", "--in-process")
    assert "not empty" in again.err


def test_without_a_flag_the_demo_is_a_federation(well, monkeypatch):
    """The command hands everything to `run_federated` and shows what it left behind."""

    def played(folder, label, say, on_epoch):
        say("starting")
        return demo.run_in_process(folder, label, on_epoch)

    monkeypatch.setattr(demo, "run_federated", played)
    monkeypatch.setattr(project, "run_among_parties", lambda: None)  # where nothing is played
    done = well("demo", "here", "-s", "train.epochs=1")
    assert "starting" in done.err.splitlines()
    assert "test accuracy" in done.out
