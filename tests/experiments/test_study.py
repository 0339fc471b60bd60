"""What every study does with an experiment, whichever kind it is."""

import numpy as np
import pytest

from vfl.config import Experiment
from vfl.core.errors import ConfigError, RunFolderError
from vfl.core.storage import read_json, write_json
from vfl.experiments import GridFolder, study
from vfl.experiments.cells import GRID, experiment_digest
from vfl.experiments.on_ray import RayCluster
from vfl.experiments.pages import build_report, write_results
from vfl.experiments.pages.build import list_runs
from vfl.experiments.scheduler import FinishedCell
from vfl.experiments.study import plan_study
from vfl.training.run import load_data

KINDS = {
    "compare": {"codecs": ["topk:k=3"], "seeds": [0]},
    "grid": {"defenses": ["layer_norm"], "attacks": ["kmeans"], "seeds": [0]},
    "value": {"seeds": [0]},
}


def experiment(kind, **data):
    return Experiment.model_validate(
        {"data": data, "parties": {"a": {}, "b": {}}, kind: KINDS[kind]}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_cells_are_split_class_by_class_unless_the_experiment_says_otherwise(kind):
    cells = plan_study(kind, experiment(kind)).cells
    assert {cell.experiment.data.split for cell in cells} == {"stratified"}
    cells = plan_study(kind, experiment(kind, split="shuffled")).cells
    assert {cell.experiment.data.split for cell in cells} == {"shuffled"}


def test_the_test_rows_hold_every_class_as_often_as_all_rows():
    shares = {}
    for split in ("stratified", "shuffled"):
        own = load_data(experiment("compare", split=split))["label"]
        labels = own.labels.numpy()
        tested = np.bincount(labels[own.split.test]) / len(own.split.test)
        shares[split] = abs(tested - np.bincount(labels) / len(labels)).max()
    assert shares["stratified"] < 1 / len(own.split.test) < shares["shuffled"]


def test_a_folder_of_another_split_is_refused_and_says_how_to_go_on(tmp_path):
    def write(study):
        GridFolder(tmp_path).write(study.experiment, study.cells, "vfl compare x.toml")
        return study.cells

    old = experiment("compare")  # no folder from before says how its rows were split
    GridFolder(tmp_path).write(old, (), "vfl compare x.toml")
    assert "split" not in (tmp_path / "config.toml").read_text()
    with pytest.raises(RunFolderError, match=r"-s data\.split=shuffled") as caught:
        write(plan_study("compare", old))
    assert caught.value.want == "data.split = 'shuffled'"
    (cell, *_) = write(plan_study("compare", experiment("compare", split="shuffled")))
    (before, *_) = plan_study("compare", old).cells
    unsaid = before.experiment.model_copy(
        update={"data": before.experiment.data.model_copy(update={"split": None})}
    )
    assert experiment_digest(cell.experiment) == experiment_digest(unsaid)
    assert experiment_digest(cell.experiment) != experiment_digest(before.experiment)


@pytest.mark.parametrize("asked", ["auto,cpu=2", "auto,cpus=many", "auto,gpus=-1", "auto,cpus=0"])
def test_what_a_cell_takes_of_a_cluster_is_checked_before_it_is_sought(asked):
    with pytest.raises(ConfigError) as caught:
        RayCluster.of(asked)
    assert caught.value.where == "--ray"


def test_the_folder_of_another_format_is_refused_and_listed(tmp_path):
    path = tmp_path / "old"
    study = plan_study("grid", experiment("grid"))
    GridFolder(path).write(study.experiment, study.cells, "vfl grid x.toml")
    record = read_json(path / GRID)
    write_json(path / GRID, record | {"format": 1, "vfl": "0.0.3"})
    for use in (
        lambda: GridFolder(path).write(study.experiment, study.cells, "vfl grid x.toml"),
        lambda: write_results(GridFolder(path)),
        lambda: build_report(path),
    ):
        with pytest.raises(RunFolderError, match="another version of vfl") as caught:
            use()
        assert caught.value.fix == "pip install vfl==0.0.3 in a separate environment can read it"
    (listed,) = list_runs(tmp_path)
    assert (listed.kind, listed.state) == ("grid", "damaged")
    assert "another version" in listed.sentence


def test_a_failed_training_of_a_party_alone_is_a_failure_of_the_study(tmp_path, monkeypatch):
    study_of = plan_study("compare", experiment("compare"))
    failure = {"what": "too few rows", "exit": 2}
    ended = FinishedCell(study_of.cells[0], failure, 1.0, 1, 1, 0.0, 1.0)
    monkeypatch.setattr(study, "run_cells", lambda *arguments, **options: [])
    monkeypatch.setattr(study, "train_alone", lambda *arguments: [ended])
    found = study.run_study(study_of, tmp_path, "vfl compare x.toml")
    assert found.failed == [ended]
