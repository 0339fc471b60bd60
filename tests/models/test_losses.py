"""Losses by name, under contract and against formulas; tests/training/test_recipes.py trains."""

import numpy as np
import pytest
import torch

from vfl.core.errors import BadOptionError, ConfigError, SpecError, UnknownNameError
from vfl.core.registry import parse
from vfl.models.losses import LOSSES, Loss, make_loss
from vfl.session.label.task import make_task
from vfl.testing import LossContract
from vfl.training.specs import checked


class TestLosses(LossContract):
    specs = (*LOSSES.names(), "cross_entropy:smoothing=0.1", "focal:gamma=0.5", "huber:delta=0.1")

    def test_every_registered_name_is_under_contract(self):
        assert {parse(spec)[0] for spec in self.specs} == set(LOSSES.names())


def by_hand(spec):
    """The losses of two rows, with numpy."""
    outputs, codes = np.array([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]]), [0, 2]
    chances = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    own = chances[[0, 1], codes]
    if spec == "focal:gamma=2":
        return -((1 - own) ** 2) * np.log(own)
    smooth = 0.3
    targets = (1 - smooth) * np.eye(3)[codes] + smooth / 3
    return -(targets * np.log(chances)).sum(1)


@pytest.mark.parametrize("spec", ["cross_entropy:smoothing=0.3", "focal:gamma=2"])
def test_losses_of_classes_follow_their_formulas(spec):
    outputs = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]])
    found = make_loss(spec, "classification").rows(outputs, torch.tensor([0, 2]))
    np.testing.assert_allclose(found.numpy(), by_hand(spec), rtol=1e-5)


def test_a_regressions_loss_is_told_in_units_of_the_labels():
    labels, outputs = torch.tensor([10.0, 30.0, 50.0]), torch.tensor([[0.0], [1.0], [-2.0]])
    for spec in ("absolute_error", "squared_error"):
        task = make_task("regression", 1, loss=spec)
        task.fit(labels)
        told = task.own_units(float(task(outputs, labels)))
        missed = (task.answers(outputs)[:, 0] - labels).abs()
        want = missed if spec == "absolute_error" else missed**2
        assert told == pytest.approx(float(want.mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "task", "kind"),
    [
        ("huber", "classification", SpecError),
        ("focal", "regression", SpecError),
        ("hinge", "classification", UnknownNameError),
        ("cross_entropy:smoothing=1", "classification", BadOptionError),
        ("huber:delta=0", "regression", BadOptionError),
    ],
)
def test_a_loss_that_means_nothing_is_refused_by_the_setting(spec, task, kind):
    with pytest.raises(kind):
        make_loss(spec, task)
    with pytest.raises((SpecError, ConfigError), match=r"label\.loss"):
        checked({"parties": {"p": {}}, "label": {"loss": spec, "task": task}}, "here")


def test_a_loss_of_ones_own_is_one_method(monkeypatch):
    class Margin(Loss):
        """Multi-class hinge of the largest other output."""

        def rows(self, outputs, targets):
            own = outputs.gather(1, targets[:, None])
            others = outputs.scatter(1, targets[:, None], -torch.inf).max(1, keepdim=True).values
            return (1 + others - own).clamp(min=0)[:, 0]

    monkeypatch.setattr(LOSSES, "_members", dict(LOSSES._members))
    LOSSES.register("margin", Margin)
    task = make_task("classification", 3, loss="margin")
    outputs = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    assert float(task(outputs, torch.tensor([0, 0]))) == pytest.approx(0.75)
