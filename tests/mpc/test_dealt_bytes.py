"""P2 deals the upper bytes of a product alone: which, and how far that takes it from exact."""

from itertools import product as pairs

import pytest
import torch

from vfl.mpc.ring import inner, matmul
from vfl.mpc.rules import Rules
from vfl.mpc.shares import SharedTensor, Truncation, blank
from vfl.mpc.three_party.network import fixed_point_rate
from vfl.mpc.three_party.party import Product
from vfl.mpc.three_party.trio import Trio

ROWS = 40


def unfinished(left_bits, right_bits, truncations=()):
    left, right = (SharedTensor(blank((2, 2)), bits) for bits in (left_bits, right_bits))
    return Product(1, left, right, matmul, truncations, "layer 0")


@pytest.mark.parametrize(("bits", "rate"), [*pairs(range(8, 29), (1e-5, 0.1 / 128, 0.3, 7.0))])
def test_what_is_left_out_is_an_eighth_of_a_unit_at_most(bits, rate):
    rules = Rules("fast", bits, delta_bits=8, magnitude_bits=4)
    times, shift = fixed_point_rate(rate)
    for truncations, unit in (
        ((), 2.0**bits),
        ((Truncation(bits, 40),), 2.0**bits),
        (
            (Truncation(bits, 40), Truncation(shift, 40, times, rate=True)),
            2.0 ** (bits + shift) / times,
        ),
    ):
        left_out = 8 - unfinished(bits, bits, truncations).dealt_bytes(rules)
        assert not left_out or 2 ** (8 * left_out - 1) <= unit / 8


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("operation", [matmul, inner, torch.mul])
def test_the_product_is_off_by_half_a_byte_that_was_dealt(owned, operation):
    if owned and operation is torch.mul:
        pytest.skip("columns with an owner are multiplied as matrices")
    source = torch.Generator().manual_seed(0)
    x, w = (torch.randn(ROWS, ROWS, generator=source, dtype=torch.float64) for _ in range(2))
    shares = []

    def program(party):
        left, right = (
            party.share(owner, (ROWS, ROWS), value if party.role == owner else None, "x")
            for owner, value in ((0, x), (1, w))
        )
        left, right = (left if owned else left.alone()), right.alone()
        right = right.facing(left) if owned and operation is matmul else right
        left, right = party.open(left, right)
        z, _ = party.multiply(left, right, operation, where="z")
        shares.append(z.share.clone() if party.role < 2 else 0)

    with Trio(Rules("fast"), timeout_s=60) as trio:
        trio.run(program)
        dealt = [each for each in trio.traffic() if each.phase == "offline"]
    found = sum(shares)
    exact = operation((x * 2**21).round().long(), (w * 2**21).round().long())
    assert 0 < int((found - exact).abs().max()) <= 2**15
    assert sum(each.wire_bytes for each in dealt) == 6 * ROWS * ROWS + 16
