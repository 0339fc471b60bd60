"""Grids of attacks small enough to play in a second or two: their experiment, and playing them."""

from typing import Any

from vfl.config import Experiment
from vfl.experiments import GridFolder
from vfl.experiments.attack_grid import grid_cells
from vfl.experiments.results import LoadedGrid
from vfl.experiments.scheduler import run_cells


def content(grid: dict[str, Any], **changes: dict[str, Any]) -> dict[str, Any]:
    """An experiment of digits with one small feature party, and a grid of one victim and draw.

    Args:
        grid: changes of its table.
        changes: changes of the experiment's other tables, by name; parties replace the default one.
    """
    parties = changes.pop("parties", {"client": {"width": 8, "bottom": "mlp:hidden=16"}})
    made: dict[str, Any] = {
        "name": "attacked",
        "data": {"rows": 400},
        "label": {"top": "linear"},
        "train": {"epochs": 3, "learning_rate": 0.02},
        "grid": {"leaks": [1], "draws": 1, "seeds": [0], "pictures": 0} | grid,
    }
    changed = {name: made[name] | own for name, own in changes.items()}
    return made | changed | {"parties": parties}


def with_grid(made: dict[str, Any], **changes: Any) -> Experiment:
    """The experiment of a content, with changes of its grid."""
    return Experiment.model_validate(made | {"grid": made["grid"] | changes})


def written(path: Any, experiment: Experiment) -> GridFolder:
    """The folder of a grid of which nothing is played."""
    folder = GridFolder(path)
    folder.write(experiment, grid_cells(experiment), "vfl grid attacked.toml")
    return folder


def played(path: Any, experiment: Experiment) -> GridFolder:
    """The folder of a grid whose every cell is trained and attacked."""
    folder = written(path, experiment)
    assert run_cells(folder, folder.cells()) == []
    return folder


def timeless(folder: GridFolder) -> list[dict[str, Any]]:
    """Every row of attacks without the seconds it took."""
    return [vars(row) | {"seconds": None} for row in LoadedGrid(folder).attacks]
