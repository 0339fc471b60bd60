"""A step under a secure sum beside the plain one: same network, ratios of one turn."""

import pytest

from benchmarks import secure
from benchmarks.emulation import Wan
from benchmarks.secure import MODES, PATHS, TABLE, bench_secure
from benchmarks.training_step import Measurement


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


@pytest.mark.slow
def test_over_a_computed_line_a_step_takes_what_bytes_and_hops_take():
    """Cuts travel at once, and both gradients leave over one line; shares open before they cut."""
    line, ms = Wan(mbps=80, round_trip_ms=40), 1e-4
    rows = bench_secure(steps=2, repeats=1, wan=line, network="model")
    assert [(row.path, row.network, row.secure) for row in rows] == [
        ("model", "model", mode) for mode in MODES
    ]
    dense = 16 + 4 * 128 * 500
    small = 16 + 128 * 500
    assert rows[0].wall_ms == pytest.approx(40 + 3 * dense * ms)
    assert rows[1].wall_ms == pytest.approx(rows[0].wall_ms)
    assert rows[2].wall_ms == pytest.approx(40 + (small + 2 * dense) * ms)
    opened = 8 * (128 * 501 + 501 * 500) + 2 * 16 + 16
    told = opened + 8 * 128 * 500
    cut, gradient = 16 + 8 * 128 * 500, 16 + 8 * (128 * 500 + 501 * 500)
    slow = 80 + (opened + 2 * told + cut + 2 * gradient) * ms
    assert rows[3].wall_ms == pytest.approx(slow)
    assert [row.limit_ms for row in rows] == pytest.approx([row.wall_ms for row in rows])
    assert "line ms" in TABLE(rows)


class ScriptedParties:
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
    parties = ScriptedParties()
    monkeypatch.setattr(secure, "Parties", lambda network: parties)
    rows = bench_secure(steps=1, repeats=3)
    assert [row.cpu_ratio for row in rows] == pytest.approx([1, 1.1, 1.1, 1.1] * len(PATHS))
    assert [row.cpu_ms for row in rows[:2]] == pytest.approx([10, 11])
    assert tuple(parties.asked[: len(MODES)]) == MODES
    assert tuple(parties.asked[len(MODES) : 2 * len(MODES)]) == MODES[::-1]
    assert "(1.100x)" in TABLE(rows)
