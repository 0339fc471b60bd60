"""A step under a secure sum beside the plain one: same network, ratios of one turn."""

import pytest

from vfl.bench import secure
from vfl.bench.messages import Measurement
from vfl.bench.secure import MODES, PATHS, bench_secure, format_secure
from vfl.errors import ConfigError


@pytest.mark.slow
def test_every_mode_trains_on_every_path():
    rows = bench_secure(steps=3, repeats=1)
    assert [(row.path, row.secure) for row in rows] == [(p, m) for p in PATHS for m in MODES]
    plain, masked, small, shared = rows[:4]
    assert masked.final_loss == pytest.approx(plain.final_loss, abs=1e-4)
    assert small.final_loss == pytest.approx(plain.final_loss, abs=1e-1)
    assert small.final_loss != plain.final_loss
    assert shared.final_loss < 1.0
    assert [row.final_loss for row in rows[:4]] == [row.final_loss for row in rows[4:]]


class ScriptedCrew:
    """Turns of a machine that gets slower: 1, 10 and 100 ms plain, a tenth more when masked."""

    def __init__(self):
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def measure(self, path, workload, seed, warmup_steps, steps, mode):
        turn = len(self.asked) // len(MODES) % 3
        self.asked.append(mode)
        cost = 10.0**turn * (1.0 if mode == "none" else 1.1)
        return Measurement(cpu_ms=cost, wall_ms=2 * cost, final_loss=0.5)


def test_ratios_are_of_the_same_turn_and_turns_change_their_order(monkeypatch):
    crew = ScriptedCrew()
    monkeypatch.setattr(secure, "Crew", lambda network: crew)
    rows = bench_secure(steps=1, repeats=3)
    assert [row.cpu_ratio for row in rows] == pytest.approx([1, 1.1, 1.1, 1.1] * len(PATHS))
    assert [row.cpu_ms for row in rows[:2]] == pytest.approx([10, 11])
    assert tuple(crew.asked[: len(MODES)]) == MODES
    assert tuple(crew.asked[len(MODES) : 2 * len(MODES)]) == MODES[::-1]
    assert "(1.100x)" in format_secure(rows)


def test_nothing_to_measure_is_refused():
    with pytest.raises(ConfigError, match="nothing to measure"):
        bench_secure(steps=0)
