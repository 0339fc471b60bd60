"""Victims that are recorded anew keep their scores, wherever that was interrupted."""

import pytest
from attack_grids import content, timeless, with_grid, written

from vfl.config import TraceSettings
from vfl.experiments import training
from vfl.experiments.scheduler import run_cells
from vfl.training.run import train as train_once

CONTENT = content(
    {"baselines": ["raw"]},
    data={"rows": 300, "validation": 0.2},
    train={"epochs": 4, "checkpoint_every": 1},
)

OF_TRAINING = TraceSettings(phases=("train",))


def started(path, *attacks):
    """What failed of a grid of these attacks, and its folder."""
    folder = written(path, with_grid(CONTENT, attacks=attacks))
    return run_cells(folder, folder.cells()), folder


@pytest.fixture
def trainings(monkeypatch):
    """What each training recorded; the next one ends in its third epoch if `cut` is in it."""
    noted = []

    def noting(experiment, *arguments, **options):
        cut = "cut" in noted
        noted[:] = [one for one in noted if one != "cut"] + [experiment.trace]

        def third(epoch):
            if cut and epoch.epoch == 3:
                raise OSError("as if it were killed")

        return train_once(experiment, *arguments, **options, on_epoch=third)

    monkeypatch.setattr(training, "train", noting)
    return noted


def test_a_training_that_recorded_something_else_begins_again(tmp_path, trainings):
    trainings.append("cut")
    failed, _ = started(tmp_path / "cut", "kmeans:starts=1")
    assert [ended.cell.victim for ended in failed] == ["none"]
    failed, cut = started(tmp_path / "cut", "kmeans:starts=1", "surrogate:steps=5")
    assert failed == []
    assert trainings == [TraceSettings(), OF_TRAINING]
    _, whole = started(tmp_path / "whole", "kmeans:starts=1", "surrogate:steps=5")
    assert timeless(cut) == timeless(whole)


def test_scores_survive_a_training_that_was_interrupted_while_it_was_recorded(tmp_path, trainings):
    path = tmp_path / "grid"
    _, folder = started(path, "gradient_similarity")
    first, *_ = timeless(folder)
    trainings.append("cut")
    more = "gradient_similarity", "kmeans:starts=1", "inversion:steps=5"
    failed, _ = started(path, *more)
    assert [ended.cell.victim for ended in failed] == ["none"]
    failed, _ = started(path, *more)
    assert failed == []
    queries = TraceSettings(phases=("validation", "test"))
    assert trainings == [OF_TRAINING, queries, queries]  # what is scored is not recorded again
    assert first in timeless(folder)
    assert {row["subject"] for row in timeless(folder)} == set(more)
    assert not list((path / "aside").iterdir())
