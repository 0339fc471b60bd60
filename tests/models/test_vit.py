from __future__ import annotations

import pytest
import torch

from vfl.core import seeds
from vfl.core.errors import SpecError
from vfl.models import make_bottom


def pictures(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeds.generator(0, "pictures"))


def test_the_order_of_patches_matters_and_that_of_rows_does_not():
    with seeds.scoped(1):
        module = make_bottom("vit:patch=4,tokens=16,layers=2,heads=2").build((3, 8, 8), 5).eval()
    rows = pictures(3, 3, 8, 8)
    cut = module(rows)
    assert cut.shape == (3, 5)
    torch.testing.assert_close(module(rows.flip(0)), cut.flip(0))
    assert not torch.allclose(module(rows.flip(3)), cut, atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 8, 4), (3, 10, 10), (12,)])
def test_other_pictures_are_refused(shape):
    with pytest.raises(SpecError, match=r"accepts|takes"):
        make_bottom("vit:patch=4").build(shape, 5)
