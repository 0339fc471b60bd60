import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl.compression.coding.values import (
    AffineValues,
    Float32Values,
    dequantise,
    quantise,
)
from vfl.core.errors import CorruptFrameError

LARGEST = float(np.finfo(np.float32).max)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TABLES = st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=6)


def exact_code(value, low, high, bits):
    """Equation (3-1) in exact arithmetic, the top code clamped (erratum E3)."""
    steps = (Fraction(value) - Fraction(low)) * 2**bits / (Fraction(high) - Fraction(low))
    return min(math.floor(steps), 2**bits - 1)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_and_middles_follow_the_equations(bits):
    values = np.random.default_rng(bits).normal(size=(20, 5)).astype(np.float32)
    low, high = float(values.min()), float(values.max())
    codes = quantise(values, low, high, bits)
    middles = dequantise(codes, low, high, bits)
    for value, code, middle in zip(values.flat, codes.flat, middles.flat, strict=True):
        assert code == exact_code(float(value), low, high, bits)
        assert middle == pytest.approx(low + (code + 0.5) * (high - low) / 2**bits, rel=1e-6)


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("bits", [1, 4, 8])
@settings(deadline=None, derandomize=True)
@given(table=TABLES)
def test_ends_enclose_their_values_within_one_bfloat16_step(bits, per_row, table):
    values = np.array(table, np.float32)
    groups = len(values) if per_row else 1
    code = AffineValues(bits)
    scale, codes = code.encode(values, groups)
    decoded = code.decode(scale, codes, groups)
    assert len(scale) == groups * code.scale_bytes == 4 * groups
    assert np.isfinite(decoded).all()
    grouped = values.astype(np.float64).reshape(groups, -1)
    low, high = grouped.min(axis=1), grouped.max(axis=1)
    # Rounding an end outward moves it by less than one part in 128 (or one subnormal bfloat16);
    # above the largest bfloat16 it is clipped, which moves it by less than that too.
    slack = (np.abs(low) + np.abs(high)) / 128 + 2 * 2.0**-133
    step = (high - low + slack) / 2**bits
    error = np.abs(decoded.astype(np.float64).reshape(groups, -1) - grouped).max(axis=1)
    clipped = np.maximum(np.abs(low), np.abs(high)) > 3.38e38
    assert (error <= step / 2 * (1 + 1e-6) + clipped * slack).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 96.0, -(2.0**-130)])
def test_a_constant_bfloat16_batch_decodes_to_itself(value):
    values = np.full((4, 2), value, np.float32)
    code = AffineValues(8)
    assert (code.decode(*code.encode(values, 1), 1) == values).all()


def test_the_two_ends_are_bfloat16_rounded_outward():
    def ends(low, high):
        scale, _ = AffineValues(8).encode(np.array([[low, high]], np.float32), 1)
        return (np.frombuffer(scale, "<u2").astype(np.uint32) << 16).view(np.float32).tolist()

    assert ends(1.001, 1.001) == [1.0, 1.0078125]
    assert ends(-1.001, 0.0) == [-1.0078125, 0.0]
    assert ends(-1.0, 2.5) == [-1.0, 2.5]
    assert ends(-LARGEST, LARGEST) == [-(2.0**127) * (2 - 2**-7), 2.0**127 * (2 - 2**-7)]


@settings(deadline=None, derandomize=True)
@given(TABLES)
def test_float32_values_keep_every_bit(table):
    values = np.array(table, np.float32)
    scale, codes = Float32Values().encode(values, 1)
    decoded = Float32Values().decode(scale, codes.astype(np.int64), 1)
    assert scale == b""
    assert decoded.tobytes() == values.tobytes()


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001])
def test_float32_values_that_are_not_finite_are_refused(bits):
    with pytest.raises(CorruptFrameError, match="finite"):
        Float32Values().decode(b"", np.array([[0, bits]]), 1)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0x7F80, 0x7F80), (0, 0x7F80), (0xFF80, 0), (0x7FC0, 0x7FC0), (0x3F81, 0x3F80)],
)
def test_a_range_that_is_infinite_or_empty_is_refused(low, high):
    scale = np.array([low, high], "<u2").tobytes()
    with pytest.raises(CorruptFrameError, match="range"):
        AffineValues(8).decode(scale, np.zeros((1, 1), np.int64), 1)
