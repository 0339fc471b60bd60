import pytest

from vfl.config import Experiment
from vfl.datasets import Dealing, load_bundled

PARTIES = ("left", "right")


@pytest.fixture(scope="session")
def data():
    """Digits in two halves; the label party has no columns."""
    return load_bundled("digits", PARTIES, "label", Dealing(0, limit=300), flatten=True)


@pytest.fixture(scope="session")
def experiment():
    """Two epochs of ten steps or less with a defense, and with other settings of the training."""

    def make(defense, codec="none", **train):
        defaults = {"epochs": 2, "batch_size": 32, "learning_rate": 0.01, "checkpoint_every": 5}
        return Experiment.model_validate(
            {
                "defense": defense,
                "codec": codec,
                "parties": {name: {"width": 8, "bottom": "mlp:hidden=16"} for name in PARTIES},
                "label": {"party": "label", "top": "mlp:hidden=12"},
                "train": defaults | train,
            }
        )

    return make
