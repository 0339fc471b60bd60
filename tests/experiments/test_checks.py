"""What does not fit the rows of a grid is told by `vfl check`, and by a cell before it trains."""

from dataclasses import replace

import pytest
import torch
from attack_grids import content, with_grid, written

from vfl.attacks.labels.classifiers import FineTuning
from vfl.config import GridSettings
from vfl.config.run_folder import RunFolder
from vfl.core.errors import NonFiniteError, TooFewRowsError, UserError
from vfl.experiments import training
from vfl.experiments.attack_grid import attack_finished_run
from vfl.experiments.checks import grid_mistakes
from vfl.experiments.scheduler import run_cells
from vfl.training.run import load_data
from vfl.training.run import train as train_once

CONTENT = content(
    {"attacks": ["kmeans:starts=1"], "baselines": ["raw"]},
    data={"validation": 0.2},
    train={"epochs": 1},
)

GRID = {name: CONTENT["grid"][name] for name in ("attacks", "baselines", "leaks", "draws")}


def experiment(**changes):
    return with_grid(CONTENT | changes | {"grid": CONTENT["grid"]}, **changes.get("grid", {}))


@pytest.fixture(scope="module")
def data():
    return load_data(experiment())


def told(rows, **changes):
    asked = experiment(**changes)
    return [
        (".".join(where), str(error)) for where, error in grid_mistakes(asked, asked.grid, rows)
    ]


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("defenses", "marvell", "marvell: 'marvell' hides which of two classes a row has"),
        ("defenses", "label_dp:epsilon=1,prior=0.5-0.5", "another number of classes"),
        ("attacks", "gradient_norm", "gradient_norm: this attack distinguishes two classes only"),
        ("attacks", "gradient_direction", "two classes only"),
        ("attacks", "principal", "two classes only"),
        ("attacks", "direct_label", "a cut of width 8 and 10 classes"),
        ("adversaries", "replacement:target=11", "at least one of class 11"),
        ("leaks", 40, "40 labels of each class should leak, but a class has fewer rows"),
    ],
)
def test_what_a_cell_would_be_stopped_by_is_told(setting, value, message, data):
    asked = {"attacks": ["kmeans:starts=1", "logistic"], setting: [value]}
    ((where, error),) = told(data, grid=asked)
    assert where == f"grid.{setting}"
    assert message in error


def test_leaks_are_of_the_rows_that_they_come_from(data):
    """400 rows of ten classes: 17 of the rarest to train on, fewer to validate with."""
    leaks = {"attacks": ["logistic"], "leaks": [15]}
    assert told(data, grid=leaks) == []
    ((where, error),) = told(data, grid=leaks | {"leaks_from": "validation"})
    assert where == "grid.leaks"
    assert "15 labels of each class should leak" in error
    heard = {"attacks": ["gradient_similarity"], "leaks": [15], "leaks_from": "validation"}
    assert told(data, grid=heard) == []  # who hears a training knows rows of it
    assert told(data, grid={"attacks": ["kmeans"], "leaks": [400]}) == []  # which uses none


def test_who_is_in_use_has_rows_without_labels():
    bare = {"data": {"rows": 400, "validation": 0.0}}
    rows = load_data(experiment(**bare))
    asked = {"attacks": ["kmeans", "surrogate"], "unlabelled": "validation"}
    ((where, error),) = told(rows, **bare, grid=asked)
    assert where == "grid.unlabelled"
    assert "unlabelled rows are the validation rows, but there are none" in error
    assert told(rows, **bare, grid=asked | {"attacks": ["surrogate"]}) == []


def test_an_attribute_is_a_column(data):
    asked = {"attacks": ["attribute"], "attribute": 63}
    assert told(data, grid=asked) == []
    ((where, error),) = told(data, grid=asked | {"attribute": 64})
    assert (where, "0 to 63" in error) == ("grid.attribute", True)
    assert told(data, grid={"attribute": 64}) == []  # nobody looks for it


@pytest.mark.parametrize("spec", ["inversion", "attribute", "likelihood_ratio"])
def test_who_knows_rows_knows_validation_rows(spec):
    bare = {"data": {"rows": 400, "validation": 0.0}}
    rows = load_data(experiment(**bare))
    ((where, error),) = told(rows, **bare, grid={"attacks": [spec, "membership"]})
    assert where == "grid.attacks"
    assert f"{spec}: " in error
    assert "knows columns of validation rows, but none exist" in error


def test_there_are_rows_and_classes_to_attack(data):
    untested = {"data": {"rows": 400, "test": 0.0}}
    with pytest.raises(TooFewRowsError, match="needs test rows"):
        told(load_data(experiment(**untested)), **untested)
    numbers = {**data, "label": replace(data["label"], classes=None)}
    told_of = [error for _, error in told(numbers)]
    assert told_of
    assert all("infers classes, but the labels here are numbers" in error for error in told_of)
    assert all("the pack numbers" in error for error in told_of)
    ((_, error),) = told(data, grid={"attacks": ["regression"]})
    assert "infers numbers, but the labels here are classes" in error


def test_a_cell_trains_nothing_that_its_attacks_could_not_meet(tmp_path, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("it was trained")

    monkeypatch.setattr(training, "train", never)
    asked = experiment(grid={"attacks": ["kmeans:starts=1", "gradient_norm"]})
    folder = written(tmp_path / "grid", asked)
    failed = run_cells(folder, folder.cells())
    assert len(failed) == 2  # the baselines and the victim
    for ended in failed:
        assert ended.failure["what"] == "gradient_norm: this attack distinguishes two classes only"
        assert (ended.failure["where"], ended.failure["exit"]) == ("grid.attacks", 2)


def test_a_run_is_not_attacked_by_half(tmp_path):
    train_once(experiment().model_copy(update={"grid": None}), tmp_path, "run")
    settings = GridSettings.model_validate(GRID | {"attacks": ["kmeans", "principal"]})
    with pytest.raises(UserError, match="principal: this attack distinguishes two classes only"):
        attack_finished_run(RunFolder.open(tmp_path / "run"), settings)
    assert not (tmp_path / "run" / "attacks.jsonl").exists()
    wrong = settings.model_copy(update={"attacks": ("logistic",), "leaks": (50,)})
    with pytest.raises(TooFewRowsError) as refused:
        attack_finished_run(RunFolder.open(tmp_path / "run"), wrong)
    assert refused.value.where == "grid.leaks"


def test_an_attack_that_fails_is_named_and_not_scored(tmp_path, monkeypatch):
    train_once(experiment().model_copy(update={"grid": None}), tmp_path, "run")
    nothing = torch.full((80, 10), torch.nan)
    monkeypatch.setattr(FineTuning, "run", lambda self, view, draw: nothing)
    settings = GridSettings.model_validate(GRID | {"attacks": ["fine_tuning:steps=7"]})
    with pytest.raises(NonFiniteError) as refused:
        attack_finished_run(RunFolder.open(tmp_path / "run"), settings)
    assert refused.value.where == "fine_tuning:steps=7"
    assert not (tmp_path / "run" / "attacks.jsonl").exists()
