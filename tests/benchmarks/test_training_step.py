"""What a step trains from the seed, and the clock that measures it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import training_step
from benchmarks.training_step import (
    FEATURE_PARTIES,
    LABEL_PARTY,
    Clock,
    Setup,
    StepJob,
    monolith,
)
from vfl.session.schedule import training


def test_the_monolith_is_plain_gradient_descent_with_momentum():
    torch.set_num_threads(1)
    job = StepJob(path="monolith", workload="mlp_small", seed=3, warmup_steps=1, steps=4)
    reported = monolith(Setup(job)).final_loss

    setup = Setup(job)
    halves = [*setup.bottoms().values(), setup.top()]
    weights = [value for half in halves for value in half.parameters()]
    speeds = [torch.zeros_like(value) for value in weights]
    losses = []
    for exchange in setup.schedule():
        rows = torch.from_numpy(exchange.rows)
        cuts = [
            half(setup.data[name].inputs[rows])
            for half, name in zip(halves, FEATURE_PARTIES, strict=False)
        ]
        logits = halves[-1](torch.cat(cuts, dim=1))
        loss = nn.functional.cross_entropy(logits, setup.data[LABEL_PARTY].labels[rows])
        losses.append(loss.item())
        for value, speed, grad in zip(
            weights, speeds, torch.autograd.grad(loss, weights), strict=True
        ):
            speed.mul_(0.9).add_(grad)
            value.data.sub_(0.05 * speed)
    assert reported == pytest.approx(sum(losses) / len(losses), rel=1e-5)


class Hands:
    """A machine on which step `s` takes `durations[s]` seconds, half of them CPU time."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def process_time(self):
        return self.now / 2


def clocked(monkeypatch, durations, warmup_steps):
    hands = Hands()
    monkeypatch.setattr(
        training_step,
        "time",
        SimpleNamespace(process_time=hands.process_time),
    )
    rows = np.arange(8)
    schedule = training(0, 100, 2, rows, rows[:0], rows[:0])
    measured = Clock(warmup_steps, len(durations) - warmup_steps, hands.perf_counter)
    steps = []
    for exchange in measured.over(schedule):
        steps.append(exchange.step)
        hands.now += durations[exchange.step]
    return steps, measured.measurement(final_loss=0.5)


def test_the_clock_starts_after_the_warm_up(monkeypatch):
    durations = [50.0, 70.0, 1.0, 2.0, 6.0]
    steps, measurement = clocked(monkeypatch, durations, warmup_steps=2)
    assert steps == [0, 1, 2, 3, 4]
    assert measurement.wall_ms == pytest.approx(2000)  # the median of 1, 2 and 6 s
    assert measurement.cpu_ms == pytest.approx(1500)  # half of 9 s, over 3 steps
    assert measurement.final_loss == 0.5
