"""Every codec at the edges: what is not finite, no rows, one row, rows of one value."""

import math
from itertools import product

import pytest
import torch

from vfl.compression import INFERENCE, StepContext, make
from vfl.core.errors import NonFiniteError
from vfl.core.seeds import Secret, generator

WIDTH = 6
TRAINING = StepContext(1, training=True, secret=Secret.of_simulation(0, "party"))
SPECS = [
    *("topk:k=2", "topk:k=5,values=4", "topk:k=6,values=8,packer=range", "topk:k=2,packer=bitmap"),
    *("randtopk:k=2", "randtopk:k=5,alpha=1", "randtopk:k=6,law=multinomial,values=1"),
    *("quantise", "quantise:values=2,packer=range", "quantise:values=bf16,scale=row"),
    *("relu", "relu:values=fp32,packer=bitmap", "relu:packer=enumerative", "relu:packer=dense"),
    *("l1", "l1:packer=enumerative,scale=row", "size:k=6", "size:k=6,values=4", "sign", "rate"),
]


def normal(rows=4):
    return torch.randn(rows, WIDTH, generator=generator(rows, "edges"))


def trip(spec, cut, context):
    """The decoded cut and gradient of a constant gradient of 1."""
    sender, receiver = make(spec), make(spec)
    payload, kept = sender.encode(cut, context)
    arrived, saved = receiver.decode(bytes(payload), *cut.shape, context)
    grad = receiver.encode_grad(torch.ones_like(cut), saved, context)
    return arrived, sender.decode_grad(bytes(grad), kept, *cut.shape, context)


BAD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("spec", SPECS)
def test_a_cut_that_is_not_finite_never_leaves(spec):
    for context in (TRAINING, INFERENCE):
        for bad, place in product(BAD, (0, 5)):
            cut = normal()
            cut[2, place] = bad
            with pytest.raises(NonFiniteError):
                make(spec).encode(cut, context)


@pytest.mark.parametrize("spec", SPECS)
def test_a_gradient_that_is_not_finite_never_leaves(spec):
    cut, codec = normal().abs() + 1, make(spec)
    saved = codec.decode(codec.encode(cut, TRAINING).payload, *cut.shape, TRAINING).saved
    for bad in BAD:
        with pytest.raises(NonFiniteError):
            codec.encode_grad(torch.full_like(cut, bad), saved, TRAINING)


@pytest.mark.parametrize("context", [TRAINING, INFERENCE], ids=["training", "inference"])
@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_one_value_and_of_zeros_among_others(spec, context):
    cut = normal(5)
    cut[0], cut[2] = 0.0, 1.5
    arrived, grad = trip(spec, cut, context)
    assert torch.isfinite(arrived).all()
    kept = WIDTH if "k=" not in spec else make(spec).k
    assert int((grad[2] != 0).sum()) == kept
    if spec.startswith(("relu", "l1")):
        assert not arrived[0].any()
        assert not grad[0].any()
