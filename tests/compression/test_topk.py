import math

import pytest
import torch

from vfl.compression import INFERENCE, StepContext, make
from vfl.core.errors import (
    CorruptFrameError,
    NonFiniteError,
    TruncatedFrameError,
    WidthError,
)
from vfl.core.seeds import Secret, generator

TRAINING = StepContext(step=1, training=True, secret=Secret.of_simulation(0, "feature"))


def normal_cut(rows, width):
    return torch.randn(rows, width, generator=generator(rows, "test", width))


def round_trip(spec, cut, context=INFERENCE):
    codec = make(spec)
    return codec.decode(codec.encode(cut, context).payload, *cut.shape, context).cut


@pytest.mark.parametrize("packer", ["enumerative", "index"])
@pytest.mark.parametrize(("width", "k"), [(7, 1), (16, 5), (128, 13), (600, 14), (1280, 9), (6, 6)])
def test_float32_keeps_the_largest_values_exactly(width, k, packer):
    cut = normal_cut(20, width)
    decoded = round_trip(f"topk:k={k},packer={packer}", cut)
    for row, kept in zip(cut.tolist(), decoded.tolist(), strict=True):
        largest = sorted(range(width), key=lambda place: -abs(row[place]))[:k]
        assert kept == [row[place] if place in largest else 0 for place in range(width)]


def test_the_documented_payload_bit_by_bit():
    """Locations {1, 4} of 5 have rank C(1,1) + C(4,2) = 7 of 10; 2-bit codes in a range [-1, 3]."""
    cut = torch.tensor([[0.5, -1.0, 0.0, 0.0, 3.0]])
    payload = make("topk:k=2,values=2").encode(cut, TRAINING).payload
    minus_one, three = b"\x80\xbf", b"\x40\x40"
    assert payload == minus_one + three + bytes([0b0111_00_11])
    assert round_trip("topk:k=2,values=2", cut).tolist() == [[0, -0.5, 0, 0, 2.5]]


def test_one_scale_a_batch_in_training_and_one_a_row_at_inference():
    cut = torch.tensor([[1.0, 0, 0, 2.0], [100.0, 0, 0, 200.0]])
    codec = make("topk:k=2,values=4")
    body_bytes = 3  # two rows of 3 + 2 x 4 bits
    assert len(codec.encode(cut, TRAINING).payload) == 4 + body_bytes
    assert len(codec.encode(cut, INFERENCE).payload) == 2 * 4 + body_bytes
    assert round_trip("topk:k=2,values=4", cut)[0, 0] == 1 + 1 / 32
    assert round_trip("topk:k=2,values=4", cut, TRAINING)[0, 0] == 1 + 199 / 32


@pytest.mark.parametrize("values", ["fp32", "4"])
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("value", [0.0, -1.5])
def test_constant_cuts_keep_their_lowest_places(rows, value, values):
    for context in (TRAINING, INFERENCE):
        decoded = round_trip(f"topk:k=2,values={values}", torch.full((rows, 5), value), context)
        assert decoded.tolist() == [[value, value, 0, 0, 0]] * rows


@pytest.mark.parametrize("rows", [0, 1, 256])
@pytest.mark.parametrize("spec", ["topk:k=3", "topk:k=3,values=8", "topk:k=40,values=1"])
def test_payload_limit_is_reached(spec, rows):
    codec = make(spec)
    cut = normal_cut(rows, 64)
    payload, _ = codec.encode(cut)
    saved = codec.decode(payload, *cut.shape).saved
    grad_payload = codec.encode_grad(cut, saved)
    assert codec.payload_limit(rows, 64) == max(len(payload), len(grad_payload))


def test_gradients_travel_as_their_kept_values_alone():
    cut, grad = normal_cut(9, 50), normal_cut(9, 50) + 1
    codec = make("topk:k=4,values=8")
    payload, kept = codec.encode(cut, TRAINING)
    decoded, saved = codec.decode(payload, 9, 50, TRAINING)
    grad_payload = codec.encode_grad(grad, saved, TRAINING)
    assert len(grad_payload) == 9 * 4 * 4
    top = torch.zeros(9, 50).scatter(1, cut.abs().topk(4).indices, 1.0)
    assert ((decoded != 0) == top.bool()).all()
    assert torch.equal(codec.decode_grad(grad_payload, kept, 9, 50, TRAINING), grad * top)


def test_gradients_that_are_not_finite_are_refused_where_they_travel():
    codec = make("topk:k=1")
    kept = codec.encode(torch.tensor([[0.0, 2.0, 1.0]])).saved
    with pytest.raises(NonFiniteError):
        codec.encode_grad(torch.tensor([[0.0, math.nan, 0.0]]), kept)
    assert bytes(codec.encode_grad(torch.tensor([[math.nan, 1.0, 0.0]]), kept)) == b"\0\0\x80?"
    for payload in (b"\0\0\x80\x7f", b"\0\0\xc0\x7f"):
        with pytest.raises(CorruptFrameError, match="finite"):
            codec.decode_grad(payload, kept, 1, 3)
    with pytest.raises(TruncatedFrameError):
        codec.decode_grad(b"\0\0\x80", kept, 1, 3)


def test_a_width_below_k_is_refused_with_the_cure():
    for call in (
        lambda codec: codec.check(16),
        lambda codec: codec.encode(torch.ones(2, 16)),
        lambda codec: codec.decode(b"", 2, 16),
    ):
        with pytest.raises(WidthError) as caught:
            call(make("topk:k=40"))
        error = caught.value
        assert error.what == "top-k keeps 40 values of a cut that is 16 wide"
        assert (error.want, error.fix) == ("k <= 16", "k=2 keeps one value in 8")
    make("topk:k=16").check(16)
