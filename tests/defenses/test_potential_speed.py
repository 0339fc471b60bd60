"""How fast the potential energy is, in CPU time: run with `-m slow -s` to see the figures."""

import time
from statistics import median

import numpy as np
import pytest
import torch
from torch import nn

from vfl.config import Experiment
from vfl.core.seeds import generator
from vfl.datasets import PartyData, Split
from vfl.defenses.potential import potential_energy
from vfl.session import rules
from vfl.training.local import LocalSession

pytestmark = pytest.mark.slow


def class_loop(cut, labels):
    """One product, one arccos and one sum a class: what one would write first."""
    units = nn.functional.normalize(cut, dim=1)
    total, pairs = cut.new_zeros(()), 0
    for code in labels.unique():
        own = units[labels == code]
        one, other = torch.triu_indices(len(own), len(own), 1)
        cosines = (own @ own.T)[one, other].clamp(1e-4 - 1, 1 - 1e-4)
        total = total + (1 / torch.arccos(cosines)).sum()
        pairs += len(cosines)
    return total / pairs


def cpu_ms(energy, cut, labels, repeats):
    """CPU time of a forward and a backward pass."""
    started = time.process_time()
    for _ in range(repeats):
        cut.grad = None
        energy(cut, labels).backward()
    return 1e3 * (time.process_time() - started) / repeats


@pytest.mark.parametrize(
    ("rows", "classes", "width", "least"), [(128, 10, 32, 4), (512, 100, 128, 8)]
)
def test_it_is_faster_than_a_loop_over_classes(rows, classes, width, least):
    draw = generator(0, "speed")
    cut = torch.randn(rows, width, generator=draw).requires_grad_()
    labels = torch.randint(classes, (rows,), generator=draw)
    torch.testing.assert_close(potential_energy(cut, labels), class_loop(cut, labels))
    turns = [
        (cpu_ms(class_loop, cut, labels, 20), cpu_ms(potential_energy, cut, labels, 20))
        for _ in range(15)
    ]
    loop, ours = (median(times) for times in zip(*turns, strict=True))
    print(f"\n{rows} rows, {classes} classes, {width} wide: {loop:.2f} -> {ours:.2f} ms")
    assert loop / ours >= least


def pictures(rows, shape):
    """Two parties with random rows of MNIST's size."""
    draw = generator(0, "pictures")
    none = np.empty(0, dtype=np.int64)
    split = Split(np.arange(rows), none, none)
    inputs, labels = torch.rand(rows, *shape, generator=draw), torch.arange(rows) % 10
    return {
        "user": PartyData("user", inputs, None, None, split, bytes(32)),
        "label": PartyData("label", None, labels, tuple(range(10)), split, bytes(32)),
    }


def step_ms(data, defense, bottom, batch_size):
    """CPU time of a training step in process, everything of the session included."""
    experiment = Experiment.model_validate(
        {
            "defense": defense,
            "parties": {"user": {"width": 32, "bottom": bottom}},
            "label": {"top": "linear"},
            "train": {"epochs": 1, "batch_size": batch_size},
        }
    )
    session = LocalSession(experiment, data, outputs=10)
    exchanges = [e for e in rules.schedule(session.terms, data["label"].split) if e.trains]
    started = time.process_time()
    session.label.run(exchanges, session.clients)
    return 1e3 * (time.process_time() - started) / len(exchanges)


@pytest.mark.parametrize(
    ("source", "bottom", "rows", "most"),
    [("mlp", "mlp:hidden=128", 6400, 1.5), ("cnn", "cnn:channels=32-64", 640, 1.05)],
)
def test_a_step_costs_little_more(source, bottom, rows, most):
    """The thesis' MNIST and Fashion-MNIST networks, batches of 128."""
    data = pictures(rows, (784,) if source == "mlp" else (1, 28, 28))
    turns = [
        tuple(step_ms(data, spec, bottom, 128) for spec in ("none", "potential:alpha=4"))
        for _ in range(12)
    ]
    plain, defended = (min(times) for times in zip(*turns, strict=True))  # the least disturbed
    print(f"\n{source}: {plain:.2f} -> {defended:.2f} ms a step, {defended / plain:.2f}x")
    assert defended / plain <= most
