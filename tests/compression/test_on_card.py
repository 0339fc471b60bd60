"""What codecs do on a card, done by the same functions on the processor: the same bytes.

`CodecContract` and tests/test_cuda.py repeat it where there is a card.
"""

import numpy as np
import pytest
import torch

from vfl.compression.coding.bits import EveryIndex, pack, pack_codes, to_bits, unpack_codes
from vfl.compression.coding.values import AffineValues
from vfl.compression.topk import _find_top_on_card, find_top
from vfl.core.errors import CorruptFrameError
from vfl.core.seeds import generator


def normal(*shape):
    return torch.randn(*shape, generator=generator(0, "cut"))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 240, 1001])
def test_codes_of_any_number_of_bits_are_packed_without_gaps(bits, count):
    codes = torch.randint(0, 2**bits, (count,), generator=generator(bits, "codes")).byte()
    packed = pack_codes(codes, bits)
    assert bytes(packed.numpy()) == pack(to_bits(codes.numpy()[:, None], bits))
    assert torch.equal(unpack_codes(packed, count, bits), codes)


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 20])
def test_a_tensor_is_quantised_as_an_array_is(bits, groups):
    cut = normal(20, 33)
    cut[1] = 0
    cut[0, :3] = torch.tensor([0.0, -0.0, 1e-45])
    here, there = AffineValues(bits), AffineValues(bits)
    scale, codes = here.encode(cut.numpy(), groups)
    assert there.encode(cut, groups).scale == scale
    found = there.encode(cut, groups).codes
    assert np.array_equal(found.numpy(), codes)
    assert np.array_equal(
        there.decode(scale, found, groups).numpy(), here.decode(scale, codes, groups)
    )
    if groups == 1:
        within = np.clip(cut.numpy(), -0.5, 0.5)
        scale, _ = here.encode(within, 1)
        assert np.array_equal(
            there.encode_within(cut, scale).numpy(), here.encode_within(cut.numpy(), scale)
        )
    layout = EveryIndex(33, 33, bits)
    assert layout.pack(np.zeros((20, 0), np.int64), found) == layout.pack(
        np.zeros((20, 0), np.int64), codes
    )


def test_ends_in_the_wrong_order_are_refused():
    ends = np.array([0x3F80, 0x0000], "<u2").tobytes()  # from 1 to 0
    with pytest.raises(CorruptFrameError, match="ends below its start"):
        AffineValues(4).decode(ends, torch.zeros(2, 3, dtype=torch.uint8), 1)


@pytest.mark.parametrize("k", [1, 3, 12])
def test_the_largest_and_ties_are_found_alike(k):
    cut = normal(50, 12)
    cut[::2] = (cut[::2] * 2).round()  # many of the same magnitude, of both signs
    cut[1] = 0
    here, there = find_top(cut, k), _find_top_on_card(cut, k)
    assert np.array_equal(here.indices, there.indices)
    assert np.array_equal(here.tied, there.tied)
