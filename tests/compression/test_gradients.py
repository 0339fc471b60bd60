"""Gradients in b bits: unbiased, zero where they were zero, and no longer than they must be."""

import math

import numpy as np
import pytest
import torch

from vfl.compression import INFERENCE, StepContext
from vfl.compression.coding.values import GradientCode
from vfl.core.errors import CorruptFrameError, NonFiniteError, TruncatedFrameError
from vfl.core.seeds import Secret, generator

ROWS, WIDTH = 6, 5


def context(step=0):
    return StepContext(step, training=True, secret=Secret.of_simulation(0, "label"))


def gradient(rows=ROWS, width=WIDTH):
    grad = torch.randn(rows, width, generator=generator(rows, "gradient"))
    grad[0] = 0
    return grad


def there_and_back(code, grad, mask=None, at=INFERENCE):
    return code.decode(code.encode(grad, mask, at), *grad.shape, mask)


def bfloat16_from(value):
    """The smallest bfloat16 that is not below a value: 8 significant bits, rounded up."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(math.ceil(fraction * 2**8), exponent - 8)


def test_float32_is_exact():
    grad = gradient()
    assert np.array_equal(there_and_back(GradientCode("fp32"), grad), grad.numpy())


def test_bfloat16_is_the_nearest():
    grad = gradient()
    found = there_and_back(GradientCode("bf16"), grad)
    assert np.array_equal(found, grad.bfloat16().float().numpy())


@pytest.mark.parametrize("bits", range(2, 9))
def test_b_bits_are_a_whole_number_of_steps_of_the_rows_scale(bits):
    grad = gradient().numpy()
    found = there_and_back(GradientCode(str(bits)), torch.from_numpy(grad), at=context())
    top = 2 ** (bits - 1) - 1
    for row, back in zip(grad, found, strict=True):
        step = bfloat16_from(float(np.abs(row).max()) / top)
        assert np.abs(back - row).max() <= step
        counts = back / (step or 1)
        assert np.array_equal(counts, np.rint(counts))
        assert np.abs(counts).max() <= top


@pytest.mark.parametrize("bits", [2, 4])
def test_rounding_at_random_loses_nothing_on_average(bits):
    grad, code = gradient(4, 3), GradientCode(str(bits))
    draws = there_and_back(code, grad.repeat(4000, 1), at=context()).reshape(4000, *grad.shape)
    error = np.abs(draws.mean(axis=0) - grad.numpy())
    scale = grad.abs().max(dim=1, keepdim=True).values.numpy() / (2 ** (bits - 1) - 1)
    assert (error <= 4 * scale * 0.5 / np.sqrt(len(draws)) + 1e-9).all()
    assert (draws[:, 0] == 0).all()


def test_without_a_secret_the_nearest_is_taken():
    grad = torch.tensor([[7.0, 3.4, -3.6, 0.2]])
    assert there_and_back(GradientCode("4"), grad).tolist() == [[7.0, 3.0, -4.0, 0.0]]


@pytest.mark.parametrize("spec", ["fp32", "bf16", "4"])
def test_a_mask_leaves_the_others_out(spec):
    code, grad = GradientCode(spec), gradient()
    mask = np.random.default_rng(0).random(grad.shape) < 0.4
    payload = code.encode(grad, mask, context())
    assert len(payload) == code.payload_bytes(ROWS, int(mask.sum()))
    found = code.decode(payload, *grad.shape, mask)
    assert (found[~mask] == 0).all()
    hidden = torch.where(torch.from_numpy(mask), grad, torch.tensor(1e9))
    assert bytes(code.encode(hidden, mask, context())) == payload


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad):
    grad = gradient()
    grad[1, 1] = bad
    with pytest.raises(NonFiniteError):
        GradientCode("4").encode(grad, None, context())


def test_what_no_encoder_writes_is_refused():
    code = GradientCode("2")
    payload = bytearray(code.encode(gradient(), None, context()))
    with pytest.raises(TruncatedFrameError):
        code.decode(payload[:-1], ROWS, WIDTH, None)
    beyond = payload.copy()
    beyond[2 * ROWS] = 0xFF  # codes of 2 bits end at 2
    with pytest.raises(CorruptFrameError, match="out of their range"):
        code.decode(beyond, ROWS, WIDTH, None)
    payload[1] = 0x80  # a negative scale
    with pytest.raises(CorruptFrameError, match="out of their range"):
        code.decode(payload, ROWS, WIDTH, None)
