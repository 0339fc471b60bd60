"""Trainings in one process whose parties record what they see."""

import pytest

from vfl.config import Experiment
from vfl.datasets import Dealing, load_bundled
from vfl.session.trace import read
from vfl.training.local import LocalSession

SETTINGS = {
    "codec": "randtopk:k=3,alpha=0.3,values=8",
    "parties": {"bank": {"width": 8, "bottom": "mlp:hidden=8"}, "shop": {"width": 6}},
    "label": {"party": "lender"},
    "train": {"epochs": 3, "batch_size": 40, "checkpoint_every": 4},
    "trace": {"phases": ["train", "validation", "test"], "snapshots": 2},
}


class Killed(Exception):
    """Stands for a process that ends between two frames."""


class Training:
    """A training of three parties in a folder of its own.

    Attributes:
        heard: every cut and gradient that crossed, in order.
        kill_at: the exchange whose gradient or receipt ends the process.
    """

    def __init__(self, folder, data):
        self.folder = folder
        self.data = data
        self.heard = []
        self.kill_at = None

    def session(self, adversaries=None, **changes):
        experiment = Experiment.model_validate(SETTINGS | changes)
        return LocalSession(
            experiment,
            self.data,
            outputs=10,
            checkpoints=self.folder,
            adversaries=adversaries,
            observers=[self._hear],
        )

    def path(self, party):
        return self.folder / party / "trace"

    def read(self, party):
        return read(self.path(party))

    def frames(self, party, **chosen):
        """A party's trace, spelt as `heard`."""
        frames = self.read(party).frames(**chosen)
        return [(one.party, one.direction, one.kind, one.step, one.payload) for one in frames]

    def _hear(self, party, direction, frame):
        if frame.payload:
            payload = bytes(frame.payload)
            self.heard.append((party, direction, frame.kind, frame.step, payload))
        if frame.step == self.kill_at and direction == "down":
            raise Killed


@pytest.fixture(scope="session")
def data():
    return load_bundled("digits", ["bank", "shop"], "lender", Dealing(0, limit=300), flatten=True)


@pytest.fixture(scope="session")
def training_in(data):
    return lambda folder: Training(folder, data)


@pytest.fixture
def training(tmp_path, training_in):
    return training_in(tmp_path)


@pytest.fixture
def killed():
    return Killed
