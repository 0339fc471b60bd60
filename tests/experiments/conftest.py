"""A comparison that is small enough to train in a second."""

import pytest

from vfl.config import Experiment
from vfl.experiments import GridFolder
from vfl.experiments.comparison import comparison_of
from vfl.experiments.scheduler import run_cells

CONTENT = {
    "name": "tiny",
    "data": {"rows": 400},
    "parties": {"client": {"width": 16, "bottom": "mlp:hidden=16,last=relu"}},
    "label": {"top": "linear"},
    "train": {"epochs": 3, "checkpoint_every": 3, "learning_rate": 0.02},
    "compare": {
        "codecs": ["none", "topk:k=?"],
        "levels": [20],
        "seeds": [0, 1],
        "accuracy": [0.15, 2.0],
    },
}


def _tiny(**compare):
    return Experiment.model_validate(CONTENT | {"compare": CONTENT["compare"] | compare})


def _written(path, experiment):
    """A grid's folder and its cells."""
    folder = GridFolder(path)
    comparison = comparison_of(experiment)
    folder.write(experiment, comparison.cells, "vfl compare tiny.toml", comparison.notes)
    return folder, comparison.cells


@pytest.fixture
def tiny():
    """Makes the experiment, with changes of its table."""
    return _tiny


@pytest.fixture
def written():
    """Writes a grid's folder; the folder and its cells."""
    return _written


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a comparison with every cell trained."""
    folder, cells = _written(tmp_path_factory.mktemp("grid") / "tiny", _tiny())
    assert run_cells(folder, cells) == []
    return folder
