"""The periodic embedding, against its formula written out, and for what it is there."""

import math

import pytest
import torch

from vfl.core import seeds
from vfl.core.errors import SpecError
from vfl.models import make_bottom
from vfl.models.periodic import PeriodicEmbedding


def test_the_embedding_is_what_the_paper_writes():
    with seeds.scoped(0):
        module = PeriodicEmbedding(columns=3, frequencies=4, size=5, sigma=0.7)
        rows = torch.randn(6, 3)
    module.requires_grad_(False)
    found = module(rows).reshape(6, 3, 5)
    for row in range(6):
        for column in range(3):
            x = float(rows[row, column])
            angles = [2 * math.pi * float(c) * x for c in module.frequency_weight[column]]
            waves = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            for place in range(5):
                weights = module.weight[column, :, place].tolist()
                mixed = sum(w * v for w, v in zip(weights, waves, strict=True))
                expected = max(0.0, mixed + float(module.bias[column, place]))
                assert float(found[row, column, place]) == pytest.approx(expected, abs=1e-5)


def test_columns_behind_the_first_are_not_embedded():
    module = make_bottom("periodic:first=2").build((5,), 4)
    assert module.embedding.frequency_weight.shape[0] == 2


@pytest.mark.parametrize("shape", [(1, 4, 4), (2,)])
def test_rows_that_do_not_fit_are_refused(shape):
    with pytest.raises(SpecError, match="takes rows of columns"):
        make_bottom("periodic:first=3").build(shape, 4)
