"""Whole trainings with a merger that has weights, and with a learning rate that changes."""

import runpy
from pathlib import Path

import pytest
import torch
from killing import Killed

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConfigError, ExposedCutError, SpecError, VFLError
from vfl.datasets import Dealing, load_bundled
from vfl.models import MERGERS
from vfl.training.export import export_half
from vfl.training.local import LocalSession
from vfl.training.run import evaluate, load_data, train
from vfl.training.specs import checked

PARTIES = ["bank", "shop"]
ATTENTION = Path(__file__).parents[2] / "examples" / "outside_merger.py"


@pytest.fixture(autouse=True)
def _attention(monkeypatch):
    monkeypatch.setattr(MERGERS, "_members", dict(MERGERS._members))
    runpy.run_path(str(ATTENTION))


def experiment_of(changes=None, **train_settings):
    content = {
        "seed": 2,
        "data": {"source": "digits", "rows": 300},
        "parties": {name: {"width": 6, "bottom": "mlp:hidden=12"} for name in PARTIES},
        "label": {"party": "lender"},
        "train": {"epochs": 3, "batch_size": 32, "learning_rate": 0.01, **train_settings},
    }
    return Experiment.model_validate(content | (changes or {}))


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, "lender", Dealing(2, limit=300), flatten=True)


@pytest.mark.parametrize("changes", [{}, {"middle": {"party": "compute"}}])
def test_a_merger_of_ones_own_trains_where_the_cuts_are(data, changes):
    session = LocalSession(experiment_of({"merge": "attention", **changes}), data, outputs=10)
    (owner,) = [one for one in (session.label, session.middle) if one is not None][-1:]
    before = {name: one.clone() for name, one in owner.weights().items() if "merger" in name}
    session.run()
    assert before
    assert all(not torch.equal(one, owner.weights()[name]) for name, one in before.items())
    losses = [record["train_loss"] for record in session.label.history]
    assert losses[-1] < losses[0]


def test_a_run_keeps_the_mergers_weights_and_exports_them(tmp_path):
    experiment = experiment_of({"merge": "attention:heads=3"}, epochs=1)
    summary = train(experiment, tmp_path, "run", data=load_data(experiment))
    folder = RunFolder.open(tmp_path / "run")
    assert evaluate(folder)["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-5)
    assert export_half(folder.path, "lender", "torch", None)["difference"] < 1e-5


@pytest.mark.parametrize(
    ("settings", "exchanges"),
    [
        ({"schedule": "one_cycle:max_lr=0.05,total_steps=4", "in_flight": 2}, 16),
        ({"optimizer": "nadam", "schedule": "multi_step:milestones=1/2,gamma=0.3"}, 13),
    ],
)
def test_a_resumed_training_has_the_rate_of_its_epoch(data, tmp_path, settings, exchanges):
    experiment, seen = experiment_of(checkpoint_every=2, **settings), []

    def kill(party, direction, frame):
        seen.append(frame)
        if len(seen) > 4 * exchanges:
            raise Killed

    whole = LocalSession(experiment, data, outputs=10).run()
    with pytest.raises(Killed):
        LocalSession(experiment, data, outputs=10, checkpoints=tmp_path, observers=[kill]).run()
    resumed = LocalSession(experiment, data, outputs=10, checkpoints=tmp_path).run()
    assert resumed.weights_digest() == whole.weights_digest()
    constant = LocalSession(experiment_of(), data, outputs=10).run()
    assert constant.weights_digest() != whole.weights_digest()


SHARED = {
    "merge": "sum",
    "secure": "beaver",
    "parties": {name: {"width": 6, "bottom": "mlp:hidden=none"} for name in PARTIES},
}
SGD = {"optimizer": "sgd", "momentum": 0}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"merge": "mean", "secure": "sum"}, "sees each cut"),
        ({**SHARED, "train": {**SGD, "schedule": "linear"}}, "train.schedule"),
        ({**SHARED, "train": {**SGD, "optimizer": "sgd:dampening=0.1"}}, "train.optimizer"),
    ],
)
def test_where_parties_share_values_only_a_sum_and_plain_steps_go(changes, why):
    with pytest.raises(ExposedCutError, match=why):
        checked(experiment_of(changes).model_dump(), "a test")


@pytest.mark.parametrize(
    ("changes", "where", "kind"),
    [
        ({"merge": "men"}, "merge", SpecError),
        ({"merge": "max", "parties": {"a": {"width": 3}, "b": {"width": 4}}}, "merge", SpecError),
        ({"train": {"optimizer": "lbfgs"}}, "train.optimizer", SpecError),
        ({"train": {"schedule": "lambda"}}, "train.schedule", SpecError),
        ({"train": {"optimizer": "adam:x=1", "schedule": "step"}}, None, SpecError),
        ({"train": {"optimizer": "muon"}, "merge": "men"}, None, ConfigError),
    ],
)
def test_wrong_specs_are_told_where_they_stand(changes, where, kind):
    with pytest.raises(VFLError) as problem:
        checked(experiment_of(changes).model_dump(), "a test")
    assert isinstance(problem.value, kind)
    assert where is None or where in problem.value.where
