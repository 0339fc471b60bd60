"""The entropy bound beside loops, scipy and closed forms; no packer of ours computes it."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.special import gammaln
from scipy.stats import entropy

from vfl.compression import CODECS, INFERENCE, StepContext, make
from vfl.compression.measure import entropy_bound_bits
from vfl.core.registry import parse
from vfl.core.seeds import Secret, generator

WIDTH, ROWS = 20, 60
TRAINING = StepContext(step=1, training=True, secret=Secret.of_simulation(0, "feature"))
SPECS = [
    "none",
    "topk:k=3",
    "topk:k=3,values=bf16,packer=index",
    "topk:k=3,values=4,packer=range",
    "randtopk:k=3,alpha=0.5,values=8,packer=bitmap",
    "quantise:values=3",
    "quantise:values=3,packer=range",
    "relu:values=1,packer=bitmap",
    "relu:values=fp32,packer=dense",
    "relu:values=4",
    "l1:target=3",
    "size:k=20,values=5",
    "sign",
    "rate:bits=3",
    "bottlenet:k=20,values=4",
]


def uneven_cut(rows=ROWS, width=WIDTH):
    """Units differ in how often and how strongly they are above zero."""
    noise = torch.randn(rows, width, generator=generator(rows, "test", width))
    return (noise * torch.linspace(0.2, 2, width) + torch.linspace(-1, 1, width)).relu()


def log2_sets(width, kept):
    return (gammaln(width + 1) - gammaln(kept + 1) - gammaln(width - kept + 1)) / math.log(2)


def order_0(symbols):
    """Bits of all symbols, by scipy."""
    return len(symbols) * entropy(list(Counter(symbols).values()), base=2)


def bound_of(spec, cut, context=TRAINING):
    return entropy_bound_bits([make(spec).symbols(cut, context)])


def test_every_registered_codec_is_tested():
    unknown = {"error_feedback", "aqsgd"}  # what they send depends on what they sent before
    unknown |= {"c3sl", "splitfc", "fedlite"}  # or on all rows of the batch
    assert {parse(spec)[0] for spec in SPECS} == set(CODECS.names()) - unknown


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("context", [TRAINING, INFERENCE], ids=["training", "inference"])
def test_symbols_are_what_is_sent(spec, context):
    codec, other = make(spec), make(spec)
    cut = uneven_cut()
    symbols = codec.symbols(cut, context)
    assert symbols.support.shape == tuple(cut.shape)
    assert symbols.codes.shape == (symbols.support.sum(),)
    assert symbols.codes.min() >= 0
    assert symbols.codes.max() < symbols.choices
    payload = codec.encode(cut, context).payload
    assert bytes(payload) == bytes(other.encode(cut, context).payload), "it changed the codec"
    decoded = codec.decode(payload, *cut.shape, context).cut.numpy()
    assert not decoded[~symbols.support].any()
    groups = decoded if symbols.choices < 2**16 and context is INFERENCE else decoded[None]
    sent = symbols.support.reshape(groups.shape)
    codes = np.full(groups.shape, -1, np.int64)
    codes[sent] = symbols.codes
    for values, code, travels in zip(groups, codes, sent, strict=True):
        pairs = set(zip(values[travels].tolist(), code[travels].tolist(), strict=True))
        assert len(pairs) == len({value for value, _ in pairs}), "a value has two codes"


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not make(spec).learns])
def test_no_fixed_packer_is_below_the_bound(spec):
    cut = uneven_cut()
    for rows in (1, 7, ROWS):
        payload_bits = 8 * len(make(spec).encode(cut[:rows], TRAINING).payload)
        assert bound_of(spec, cut[:rows]) <= payload_bits


@pytest.mark.parametrize(("width", "k"), [(128, 3), (128, 13), (300, 2), (600, 14), (1280, 9)])
@pytest.mark.parametrize(("values", "bits"), [("fp32", 32), ("bf16", 16), ("4", 4)])
def test_top_k_needs_its_sets_and_its_values(width, k, values, bits):
    bound = bound_of(f"topk:k={k},values={values}", uneven_cut(9, width))
    assert bound == pytest.approx(9 * (log2_sets(width, k) + k * bits), rel=1e-9)


def test_a_rectified_cut_needs_its_supports_how_large_they_are_and_its_values():
    cut = uneven_cut()
    sizes = [sum(value > 0 for value in row) for row in cut.tolist()]
    indices = sum(log2_sets(WIDTH, size) for size in sizes) + order_0(sizes)
    for values in (1, 4):
        expected = indices + sum(sizes) * math.log2(2**values - 1)
        for packer in ("bitmap", "dense"):
            bound = bound_of(f"relu:values={values},packer={packer}", cut)
            assert bound == pytest.approx(expected)


def test_a_rectified_cut_that_may_be_learned_needs_its_units_entropies():
    cut = uneven_cut(400)
    upper = float(cut.max().bfloat16())
    upper = upper if upper >= float(cut.max()) else upper * (1 + 2**-7)
    codes = [[math.ceil(value * 15 / upper) for value in row] for row in cut.double().tolist()]
    expected = sum(order_0(column) for column in zip(*codes, strict=True))
    assert bound_of("relu:values=4", cut) == pytest.approx(expected, rel=1e-3)


def test_quantised_values_that_may_be_learned_need_their_units_entropies():
    cut = uneven_cut(400)
    decoded = make("quantise:values=3").simulate(cut, TRAINING)
    expected = sum(order_0(column) for column in zip(*decoded.tolist(), strict=True))
    assert bound_of("quantise:values=3,packer=range", cut) == pytest.approx(expected)
    assert expected < 0.8 * bound_of("quantise:values=3", cut)


def test_places_that_may_be_learned_need_the_cheaper_of_sets_and_units():
    cut = uneven_cut(400)
    cut[:, 3], cut[:, 5] = 100 + cut[:, 3], -100 - cut[:, 5]  # always among the two largest
    row_values = [sorted(row, key=abs)[-2:] for row in cut.tolist()]
    decoded = make("topk:k=2,values=4").simulate(cut, TRAINING)
    values = decoded[decoded != 0].tolist()
    assert all(abs(value) >= 100 for row in row_values for value in row)
    bound = bound_of("topk:k=2,values=4,packer=range", cut)
    assert bound == pytest.approx(order_0(values))  # places cost nothing
    draws = torch.randn(400, WIDTH, generator=generator(0, "even"))
    decoded = make("topk:k=2,values=4").simulate(draws, TRAINING)
    presence = sum(order_0((unit != 0).tolist()) for unit in decoded.T)
    values = order_0(decoded[decoded != 0].tolist())
    sets = 400 * log2_sets(WIDTH, 2)
    bound = bound_of("topk:k=2,values=4,packer=range", draws)
    assert bound == pytest.approx(min(presence, sets) + values)
    assert sets < presence


def test_batches_count_together():
    spec, cut = "quantise:values=3,packer=range", uneven_cut()
    cut[0] = cut[ROWS - 1] = cut.max()
    cut[0, :2] = cut[ROWS - 1, :2] = 0  # both halves have the ends of the whole
    halves = [make(spec).symbols(half, TRAINING) for half in cut.chunk(2)]
    assert entropy_bound_bits(halves) == pytest.approx(bound_of(spec, cut))
    assert entropy_bound_bits(halves) > sum(entropy_bound_bits([half]) for half in halves)
