"""What is measured of a codec on a cut: real bytes, agreed by both ends, beside a bound."""

import math
from itertools import count

import numpy as np
import pytest
import torch

from vfl.compression import INFERENCE, StepContext, make
from vfl.compression.measure import measure_codec
from vfl.compression.none import Uncompressed
from vfl.core.errors import NonFiniteError, SpecError, UserError
from vfl.core.frame import HEADER_BYTES
from vfl.core.seeds import Secret, generator

ADAPTIVE = ["topk:k=3,values=4,packer=range", "quantise:values=3,packer=range", "relu", "rate"]
TABLE_3_2 = [(128, 3), (128, 6), (128, 13), (300, 2), (600, 2), (600, 14), (1280, 2), (1280, 9)]
SECRET = Secret.of_simulation(3, "feature")


def cut_of(rows, width=16):
    noise = torch.randn(rows, width, generator=generator(rows, "test", width))
    return noise * torch.linspace(0.2, 2, width) + torch.linspace(-1, 1, width)


def session_bytes(spec, cut, batch_size, in_training=True):
    """Wire bytes of a session, its steps committed one after another."""
    codec, total, steps = make(spec), 0, count(1)
    for start in range(0, len(cut), batch_size):
        step = next(steps)
        context = StepContext(step, training=True, secret=SECRET) if in_training else INFERENCE
        total += HEADER_BYTES + len(codec.encode(cut[start : start + batch_size], context).payload)
        codec.commit(step)
    return total


@pytest.mark.parametrize("spec", ["none", "randtopk:k=2,values=8", "relu:packer=bitmap", *ADAPTIVE])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_bytes_are_those_of_a_session(spec, training):
    cut = cut_of(101)
    measured = measure_codec(
        make(spec), cut, width=16, batch_size=20, training=training, secret=SECRET
    )
    assert measured.wire_bytes == session_bytes(spec, cut, 20, training)
    assert measured.dense_bytes == 4 * 101 * 16
    assert measured.wire_ratio == measured.wire_bytes / (4 * 101 * 16)
    assert (measured.rows, measured.width, measured.batch_size) == (101, 16, 20)
    assert measured.formula_ratio == make(spec).formula_ratio(16)
    assert 0 < measured.encode_ms < 1000
    assert 0 < measured.decode_ms < 1000


@pytest.mark.parametrize(
    "spec", [f"{spec}{',scale=row,' if '=' in spec else ':'}pad=no" for spec in ADAPTIVE]
)
def test_the_codec_stays_as_it_is_and_what_it_learned_is_used(spec):
    cut, codec = cut_of(400), make(spec)
    fresh = measure_codec(codec, cut, width=16, batch_size=40, training=False)
    assert bytes(codec.encode(cut).payload) == bytes(make(spec).encode(cut).payload)
    for step in range(10):
        codec.encode(cut[40 * step : 40 * step + 40], StepContext(step, training=True))
        codec.commit(step)
    learned = measure_codec(codec, cut, width=16, batch_size=40, training=False)
    assert learned.wire_bytes < fresh.wire_bytes
    assert learned.entropy_bound_bytes == fresh.entropy_bound_bytes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("width", "k"), TABLE_3_2)
def test_frames_stay_within_five_percent_of_the_bound(width, k, bits):
    measured = measure_codec(make(f"topk:k={k},values={bits}"), cut_of(256, width), width=width)
    bound = 256 * (math.log2(math.comb(width, k)) + k * bits) / 8
    assert measured.entropy_bound_bytes == pytest.approx(bound)
    assert 1 < measured.wire_bytes / measured.entropy_bound_bytes <= 1.05


def test_many_frames_come_near_the_bound_of_what_is_learned():
    """Whole numbers have no scale, so that every frame is alike."""
    cut = cut_of(20_000, 8).abs()
    measured = measure_codec(make("rate:bits=3"), cut, width=8)
    frames = -(-20_000 // 256)
    around = frames * (HEADER_BYTES + 1)  # a header and a history byte
    assert 1 < (measured.wire_bytes - around) / measured.entropy_bound_bytes < 1.025


def test_the_error_is_that_of_the_values():
    cut = cut_of(50)
    kept = np.abs(cut.numpy()).argsort(axis=1)[:, -4:]
    lost = cut.double().numpy().copy()
    np.put_along_axis(lost, kept, 0, axis=1)
    measured = measure_codec(make("topk:k=4"), cut, width=16, batch_size=7)
    assert measured.relative_error == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(cut))
    assert measure_codec(make("none"), cut, width=16).relative_error == 0


def test_a_narrower_cut_is_compared_with_the_original_one():
    measured = measure_codec(make("size:k=4"), cut_of(10, 4), width=16)
    assert measured.dense_bytes == 4 * 10 * 16
    assert measured.wire_bytes == HEADER_BYTES + 4 * 10 * 4
    assert measured.entropy_bound_bytes == 4 * 10 * 4


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_a_frame_of_one_row_takes_26_bytes(training):
    """128 wide: a scale, then 19 bits of indices and 3 x 8 of values, which are 6 bytes."""
    codec, cut = make("topk:k=3,values=8"), cut_of(5, 128)
    measured = measure_codec(codec, cut, width=128, batch_size=1, training=training)
    assert measured.wire_bytes == 5 * (HEADER_BYTES + 4 + 6) == 5 * 26


class Silent(Uncompressed):
    def symbols(self, cut, context=INFERENCE):
        return super(Uncompressed, self).symbols(cut, context)


class Forgetful(Uncompressed):
    """Its ends drift apart: one adds how many cuts it has encoded."""

    encoded = 0

    def encode(self, cut, context=INFERENCE):
        self.encoded += 1
        return super().encode(cut, context)

    def decode(self, payload, rows, width, context=INFERENCE):
        decoded = super().decode(payload, rows, width, context)
        decoded.cut.add_(self.encoded)
        return decoded


def test_an_outside_codec_that_tells_no_symbols_has_no_bound():
    measured = measure_codec(Silent(), cut_of(10), width=16)
    assert math.isnan(measured.entropy_bound_bytes)
    assert measured.wire_bytes == HEADER_BYTES + 4 * 10 * 16


def test_ends_that_do_not_agree_are_found_out():
    with pytest.raises(SpecError, match="decode a frame differently") as caught:
        measure_codec(Forgetful(), cut_of(10), width=16)
    assert caught.value.got == "Forgetful"


@pytest.mark.parametrize(("rows", "batch_size"), [(0, 4), (4, 0), (4, -1)])
def test_nothing_to_measure(rows, batch_size):
    with pytest.raises(UserError, match="nothing to measure"):
        measure_codec(make("none"), torch.zeros(rows, 4), width=4, batch_size=batch_size)


def test_a_cut_that_is_not_finite_is_refused():
    with pytest.raises(NonFiniteError):
        measure_codec(make("quantise"), torch.tensor([[1.0, math.nan]]), width=2)
