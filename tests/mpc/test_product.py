"""A product alone, in both modes."""

import pytest
import torch

from vfl.mpc.ring import decode, inner, matmul
from vfl.mpc.rules import Rules
from vfl.mpc.three_party.trio import Trio


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("mode", ["thesis", "fast"])
@pytest.mark.parametrize(
    ("operation", "plain"),
    [(matmul, lambda x, y: x @ y), (inner, lambda x, y: x.t() @ y), (torch.mul, torch.mul)],
)
def test_a_product_that_is_not_divided(mode, operation, plain):
    x, y = draw(4, 4, seed=0), draw(4, 4, seed=1)

    def program(party):
        left, right = (
            party.share(owner, (4, 4), value if party.role == owner else None, "x").alone()
            for owner, value in enumerate((x, y))
        )
        return party.multiply(*party.open(left, right), operation, where="z")

    with Trio(Rules(mode), timeout_s=60) as trio:
        (one, none), (two, _), _ = trio.run(program)
    assert none is None
    assert one.bits == 2 * Rules(mode).bits
    assert float((decode(one.share + two.share, one.bits) - plain(x, y)).abs().max()) < 1e-5
