import numpy as np
import pytest
import torch

from vfl.mpc.shares import Truncation, bits_after, truncate_first, truncate_second
from vfl.mpc.stream import PadStream

KEY = bytes(range(32))


def shared(values, purpose):
    first = torch.from_numpy(PadStream(KEY).elements64(values.numel(), purpose).view(np.int64))
    return first, values - first


def scaled(values, truncation, purpose="x"):
    first, second = shared(values, purpose)
    (moved,) = truncate_first(first, [truncation])
    truncate_second(second, [truncation], [moved])
    return first + second, moved


def draw(count, bits, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**bits) + 1, 2**bits, (count,), generator=source)


@pytest.mark.parametrize("bits", [46, 56, 61])
def test_no_share_wraps(bits):
    values = draw(200_000, bits)
    found, moved = scaled(values, Truncation(20, bits))
    assert int((found - (values >> 20)).abs().max()) <= 1
    expected = len(values) * 2.0 ** (bits + 1 - 64)
    assert abs(len(moved) - expected) < 6 * expected**0.5 + 6


@pytest.mark.parametrize("share", [2**63 - 1, -(2**63), 2**63 - 2**40, -(2**63) + 2**40, 0, -1])
@pytest.mark.parametrize("value", [0, 1, -1, 2**45, -(2**45), 2**46 - 1, 1 - 2**46])
def test_the_edges_of_the_ring(share, value):
    first = torch.tensor([share])
    second, truncations = torch.tensor([value]) - first, [Truncation(23, 46)]
    truncate_second(second, truncations, truncate_first(first, truncations))
    assert abs(int(first + second) - value / 2**23) <= 1


def test_a_rate_is_a_whole_factor_and_a_division():
    values = draw(50_000, 40)
    found, _ = scaled(values, Truncation(20, 50, times=819, rate=True))
    exact = values.double() * 819 / 2**20
    assert float((found.double() - exact).abs().max()) <= 1
    assert bits_after(40, [Truncation(20, 46), Truncation(20, 50, 819, rate=True)]) == 20


def test_rounding_has_no_side():
    """What many steps add up does not drift: local division of random shares is unbiased."""
    values = torch.full((200_000,), 2**19 + 12345)
    found, _ = scaled(values, Truncation(20, 46))
    exact = (2**19 + 12345) / 2**20
    assert abs(float(found.double().mean()) - exact) < 5 * 0.5 / 200_000**0.5
