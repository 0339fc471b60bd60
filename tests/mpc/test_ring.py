import numpy as np
import pytest
import torch

from vfl.core.errors import NonFiniteError, RingRangeError
from vfl.mpc.ring import batched, decode, encode, limit_bits, matmul, product_shape


@pytest.mark.parametrize("bits", [8, 20, 23])
def test_encoding_is_exact_to_half_a_unit(bits):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(bits), dtype=torch.float64)
    assert float((decode(encode(values, bits, "x"), bits) - values).abs().max()) <= 2.0 ** -(
        bits + 1
    )


def test_test_vectors():
    """Eq 5-3 with its rounding: 2^64 - 1.5 * 2^20 stands for -1.5."""
    words = encode(torch.tensor([1.0, -1.5, 2**-21, 0.0]), 20, "x")
    assert words.numpy().view(np.uint64).tolist() == [2**20, 2**64 - 3 * 2**19, 0, 0]


@pytest.mark.parametrize("bits", [20, 23])
def test_the_largest_value_and_one_more(bits):
    most = 2.0 ** limit_bits(bits)
    encode(torch.tensor([most - 1, 1 - most], dtype=torch.float64), bits, "x")
    with pytest.raises(RingRangeError) as caught:
        encode(torch.tensor([0.0, -most], dtype=torch.float64), bits, "2.weight")
    assert caught.value.where == "2.weight"
    assert caught.value.got == f"{limit_bits(bits) + 1} bits before the point"
    assert str(int(most)) not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite(value):
    with pytest.raises(NonFiniteError, match="not finite"):
        encode(torch.tensor([value]), 20, "x")


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 33])
@pytest.mark.parametrize("inner", [1, 6, 40])
@pytest.mark.parametrize(
    ("most", "kind"), [(2**15, torch.int16), (2**31, torch.int32), (2**40, torch.int64)]
)
def test_products_with_a_plaintext_weight(rows, inner, most, kind):
    """In as few bytes as hold it, and with axes in either order in memory."""
    draw = np.random.default_rng(rows + inner)
    left = torch.from_numpy(draw.integers(-(2**63), 2**63, (rows, inner)))
    weight = torch.from_numpy(draw.integers(-most, most, (inner, 30)))
    weight[0, 0], weight[-1, -1] = -most, most - 1
    wanted = (left[:, :, None] * weight[None]).sum(1)
    assert torch.equal(matmul(left, weight.to(kind)), wanted)
    turned = weight.to(kind).t().contiguous().t()
    assert torch.equal(matmul(left, turned), wanted)


@pytest.mark.parametrize("rows", [1, 3])
def test_products_one_by_one(rows):
    draw = np.random.default_rng(rows)
    axes = (5, rows, 6), (5, 6, 4)
    left, right = (torch.from_numpy(draw.integers(-(2**63), 2**63, each)) for each in axes)
    wanted = torch.stack([matmul(a, b) for a, b in zip(left, right, strict=True)])
    assert torch.equal(batched(left, right), wanted)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_wrap_as_whole_numbers_would(rows, columns, transposed):
    draw = np.random.default_rng(rows + columns)
    left = draw.integers(-(2**63), 2**63, (rows, 7))
    right = draw.integers(-(2**63), 2**63, (7, columns))
    wanted = [
        [
            sum(int(a) * int(b) for a, b in zip(row, column, strict=True)) % 2**64
            for column in right.T
        ]
        for row in left
    ]
    own = torch.from_numpy(left.T.copy()).t() if transposed else torch.from_numpy(left)
    product = matmul(own, torch.from_numpy(right))
    assert product.numpy().view(np.uint64).tolist() == wanted
    assert product.shape == product_shape(matmul, own, torch.from_numpy(right))
