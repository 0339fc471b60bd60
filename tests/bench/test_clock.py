from types import SimpleNamespace

import numpy as np
import pytest

from vfl.bench import clock
from vfl.bench.clock import Clock
from vfl.session.schedule import training


class Hands:
    """A machine on which step `s` takes `durations[s]` seconds, half of them CPU time."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def process_time(self):
        return self.now / 2


def run(monkeypatch, durations, warmup_steps):
    hands = Hands()
    monkeypatch.setattr(
        clock,
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
    steps, measurement = run(monkeypatch, durations, warmup_steps=2)
    assert steps == [0, 1, 2, 3, 4]
    assert measurement.wall_ms == pytest.approx(2000)  # the median of 1, 2 and 6 s
    assert measurement.cpu_ms == pytest.approx(1500)  # half of 9 s, over 3 steps
    assert measurement.final_loss == 0.5


def test_without_a_warm_up_every_step_counts(monkeypatch):
    _, measurement = run(monkeypatch, [4.0, 4.0], warmup_steps=0)
    assert measurement.cpu_ms == pytest.approx(2000)
