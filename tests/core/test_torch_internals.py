"""What vfl uses of torch's insides gives what torch's public ways give."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import vfl
from vfl.config import Experiment, TrainSettings
from vfl.core import torch_internals
from vfl.core.products import products
from vfl.datasets import Dealing, load_bundled
from vfl.models.optimizers import Optimization
from vfl.training.local import LocalSession

PARTIES = ("left", "right")


def trained(data, **train):
    settings = Experiment.model_validate(
        {
            "codec": "l1:target=4",
            "parties": {name: {"width": 8, "bottom": "mlp:hidden=16"} for name in PARTIES},
            "train": {"epochs": 2, "batch_size": 30, **train},
        }
    )
    return LocalSession(settings, data, outputs=10).run().weights_digest()


@pytest.mark.parametrize("train", [{}, {"optimizer": "sgd", "momentum": 0.5}, {"in_flight": 2}])
def test_the_public_ways_train_to_the_same_bits(monkeypatch, train):
    data = load_bundled("digits", PARTIES, "label", Dealing(0, limit=120))
    privately = trained(data, **train)
    monkeypatch.setattr(torch_internals, "_KNOWN_HOOKS", False)
    monkeypatch.setattr(torch_internals, "_ENGINE", None)
    assert trained(data, **train) == privately


def test_nothing_else_in_the_kernel_touches_what_torch_keeps_private():
    package = Path(vfl.__file__).parent
    private = re.compile(
        r"\btorch(\.\w+)*\._[a-zA-Z]|_execution_engine|_global_optimizer|\b_Options\b"
    )
    found = [path for path in package.rglob("*.py") if private.search(path.read_text("utf-8"))]
    rooms = {path.relative_to(package).parts[0]: path.name for path in found}
    assert {room: name for room, name in rooms.items() if room not in products()} == {
        "core": "torch_internals.py"
    }


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_what_was_registered_for_every_optimizer_runs_around_each_step(name):
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    weight, seen = nn.Parameter(torch.ones(1)), []
    weight.grad = torch.ones(1)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(weight.item())),
        register_optimizer_step_post_hook(lambda *_: seen.append(weight.item())),
    ]
    try:
        Optimization(TrainSettings(optimizer=name)).build([weight]).step()
    finally:
        for handle in handles:
            handle.remove()
    before, after = seen
    assert before == 1
    assert after < 1
