"""A training that keeps its promise is not refuted; one that leaves something out is."""

import pytest
import torch

from vfl.config import Experiment
from vfl.core.errors import PrivacyError
from vfl.datasets import Dealing, load_bundled
from vfl.privacy import kernel
from vfl.training.privacy_audit import audit

ROWS = 700


def experiment(bottom="mlp:hidden=8", dp=None, **changes):
    return Experiment.model_validate(
        {
            "parties": {name: {"width": 8, "bottom": bottom} for name in ("left", "right")},
            "data": {"rows": ROWS},
            "label": {"top": "linear"},
            "train": {"epochs": 8, "batch_size": 50, "optimizer": "sgd", "learning_rate": 0.01},
            "dp": {"noise": 5.0, "clip": 0.1} if dp is None else dp,
        }
        | changes
    )


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["left", "right"], "label", Dealing(0, limit=ROWS))


#: So that little is claimed.
MUCH_NOISE = {"noise": 10.0, "clip": 0.1}
#: Without a clip the weights grow until each row needs a backward pass; few steps prove it as well.
FEW_STEPS = {"epochs": 2, "batch_size": 50, "optimizer": "sgd", "learning_rate": 0.01}
draws = kernel.normal_draws
BROKEN = {
    "noise left out": ("normal_draws", lambda secret, count, *purpose: torch.zeros(count).double()),
    "clip left out": ("clip_factors", lambda norms, bound: torch.ones_like(norms)),
    "seed reused": ("normal_draws", lambda secret, count, *law: draws(secret, count, *law[:2])),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_mechanism_is_refuted(data, monkeypatch, broken):
    """An audit is a draw as well: about one in a hundred of these finds nothing, never three."""
    monkeypatch.setattr(kernel, *BROKEN[broken])
    settings = experiment(dp=MUCH_NOISE)
    if broken == "clip left out":
        settings = experiment(dp={"noise": 6.0, "clip": 0.1}, train=FEW_STEPS)
    audits = (audit(settings, data, canaries=200) for _ in range(3))
    report = next((one for one in audits if one.refuted), None)
    assert report is not None
    assert report.proved.epsilon > report.claimed.epsilon > 0.3
    assert "REFUTED" in str(report)


@pytest.mark.parametrize("dp", [{"noise": 5.0}, {"noise": 2.0, "clip_by": "layer", "quantile": 0.5},
                                {"noise": 6.0, "sampling": "shuffled"}], ids=str)  # fmt: skip
def test_a_right_one_is_not(data, dp):
    report = audit(experiment(dp=dp), data, canaries=100, seed=1)
    assert not report.refuted, report
    assert report.proved.trainings == 1


def test_little_noise_proves_more_than_nothing(data):
    report = audit(experiment(dp={"noise": 0.4}), data, canaries=150)
    assert 0.3 < report.proved.epsilon < report.claimed.epsilon


def test_a_bottom_of_pictures_gets_pictures_as_canaries(data):
    report = audit(experiment("cnn:channels=2-2", train={"epochs": 1}), data, canaries=20)
    assert not report.refuted


@pytest.mark.slow
def test_many_trainings_with_one_canary_each(data, monkeypatch):
    settings = experiment(train={"epochs": 1, "batch_size": 100, "optimizer": "sgd"})
    right = audit(settings, data, trainings=60)
    assert (right.proved.method, right.proved.canaries) == ("many runs", 1)
    assert not right.refuted
    monkeypatch.setattr(kernel, *BROKEN["noise left out"])
    assert audit(settings, data, trainings=60).refuted


@pytest.mark.parametrize(
    ("changes", "options"),
    [({"dp": None}, {}), ({"secure": "sum", "merge": "sum"}, {}), ({}, {"canaries": 5}),
     ({}, {"canaries": 500})],
)  # fmt: skip
def test_what_proves_nothing_is_refused(data, changes, options):
    settings = experiment().model_copy(update=changes)
    with pytest.raises(PrivacyError):
        audit(settings, data, **options)
