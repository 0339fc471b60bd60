"""The script that measures codecs in training counts what really travels."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_codecs.py"
ROWS, BATCHES = 12_000, 94  # of digit_pairs, 128 rows each but the last


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_bits_entropy_and_values_above_zero(script):
    data = script["parties"]("digit_pairs")
    found = script["measure"](data, "quantise:values=2", seed=0, epochs=1)
    rows = ROWS - BATCHES // 2 * 128  # of the second half
    header_and_scale_bytes = 20 * (BATCHES // 2)
    assert found["bits_up"] == pytest.approx(2 * 128 + 8 * header_and_scale_bytes / rows, abs=1e-3)
    assert found["bits_down"] == pytest.approx(32 * 128 + 8 * 16 * 47 / rows, abs=1e-3)
    assert 0 < found["entropy_by_unit"] <= found["entropy_pooled"] <= 256
    assert 20 < found["accuracy"] < 100
    assert 20 < found["above_zero"] < 128
