"""Optimisers and schedules by name, under contract; tests/test_equality.py trains with each."""

import pytest
import torch
from torch import nn

from vfl.config import TrainSettings
from vfl.core.errors import BadOptionError, SpecError, UnknownOptionError
from vfl.core.registry import parse
from vfl.models.optimizers import OPTIMIZERS, SCHEDULES, Optimization
from vfl.testing import OptimizerContract, ScheduleContract


class TestOptimizers(OptimizerContract):
    specs = (*OPTIMIZERS.names(), "sgd:nesterov=true", "adam:amsgrad=true", "AdamW:betas=0.8/0.9")


class TestSchedules(ScheduleContract):
    specs = (
        "constant:total_iters=3",
        "cosine_annealing:T_max=8",
        "cosine_annealing_warm_restarts:T_0=3",
        "cyclic:base_lr=0.01,max_lr=0.1,step_size_up=3",
        "exponential:gamma=0.9",
        "linear",
        "multi_step:milestones=2/5,gamma=0.5",
        "one_cycle:max_lr=0.1,total_steps=9",
        "polynomial:total_iters=6,power=2",
        "StepLR:step_size=3",
    )

    def test_every_registered_name_is_under_contract(self):
        names = {parse(spec)[0] for spec in self.specs}
        assert {SCHEDULES.aliases.get(name, name) for name in names} == set(SCHEDULES.names())


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({}, 2),
        ({"optimizer": "sgd"}, 1),
        ({"optimizer": "sgd", "momentum": 0.0}, 0),
        ({"optimizer": "adam:amsgrad=yes"}, 3),
    ],
)
def test_what_an_optimizer_keeps_is_counted(settings, copies):
    assert Optimization(TrainSettings(**settings)).copies == copies


@pytest.mark.parametrize(
    ("settings", "kind", "why"),
    [
        ({"optimizer": "lbfgs"}, SpecError, "several times"),
        ({"optimizer": "SparseAdam"}, SpecError, "dense"),
        ({"optimizer": "muon"}, SpecError, "matrices only"),
        ({"optimizer": "sgd:momentum=0.5"}, UnknownOptionError, "momentum"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, SpecError, "no weight decay"),
        ({"optimizer": "adam:betas=2/3"}, BadOptionError, "torch does not take"),
        ({"optimizer": "adam:eps=nan"}, BadOptionError, "out of range"),
        ({"optimizer": "sgd:foreach=true"}, UnknownOptionError, "foreach"),
        ({"schedule": "reduce_on_plateau"}, SpecError, "only the label party knows"),
        ({"schedule": "ReduceLROnPlateau"}, SpecError, "only the label party knows"),
        ({"schedule": "lambda"}, SpecError, "a function"),
        ({"schedule": "exponential:gamma=-1"}, BadOptionError, "torch does not take"),
        ({"schedule": "one_cycle:max_lr=1,total_steps=4"}, BadOptionError, "torch does not take"),
        ({"schedule": "cyclic:base_lr=1,max_lr=2,base_momentum=1,max_momentum=2"}, BadOptionError,
         "torch does not take"),
    ],
)  # fmt: skip
def test_what_a_split_training_cannot_follow_is_refused(settings, kind, why):
    with pytest.raises(kind, match=why):
        _ = Optimization(TrainSettings(**settings)).copies


def test_an_optimizer_of_ones_own_is_a_class_of_torchs_kind(monkeypatch):
    class Signs(torch.optim.Optimizer):
        """Moves every weight by the sign of its gradient."""

        def __init__(self, params, lr, shrink: float = 1.0):
            super().__init__(params, {"lr": lr, "shrink": shrink})

        def step(self):
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.data -= group["lr"] * group["shrink"] * weight.grad.sign()

    monkeypatch.setattr(OPTIMIZERS, "_members", dict(OPTIMIZERS._members))
    OPTIMIZERS.register("signs", Signs)
    steps = Optimization(TrainSettings(optimizer="signs:shrink=0.5", learning_rate=0.1))
    weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    weight.grad = torch.tensor([3.0, -7.0])
    steps.build([weight]).step()
    assert torch.allclose(weight, torch.tensor([0.95, 1.05]))
    assert steps.copies == 0
