"""Codecs that send every value: their sizes, what comes back, and what they train."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from vfl.compression import INFERENCE, StepContext, make
from vfl.config import Experiment
from vfl.core.errors import BadOptionError, CorruptFrameError, TruncatedFrameError, WidthError
from vfl.core.seeds import Secret, generator
from vfl.datasets import Dealing, load_bundled
from vfl.training.local import LocalSession

ROWS, WIDTH = 9, 7
TRAINING = StepContext(3, training=True)


def normal(rows=ROWS, width=WIDTH):
    return torch.randn(rows, width, generator=generator(rows, "dense", width))


def back(spec, cut, context=TRAINING):
    codec = make(spec)
    return codec.decode(codec.encode(cut, context).payload, *cut.shape, context).cut


@pytest.mark.parametrize("bits", range(1, 9))
def test_quantised_values_take_exactly_their_bits(bits):
    codec = make(f"quantise:values={bits}")
    packed = -(-ROWS * WIDTH * bits // 8)
    assert len(codec.encode(normal(), TRAINING).payload) == 4 + packed
    assert len(codec.encode(normal()).payload) == 4 * ROWS + packed
    assert codec.formula_ratio(WIDTH) == bits / 32


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("packer", ["dense", "range"])
def test_quantised_values_come_back_within_half_a_step(bits, packer):
    cut = normal()
    found = back(f"quantise:values={bits},packer={packer}", cut)
    step = float(cut.max() - cut.min()) / 2**bits
    assert float((found - cut).abs().max()) <= 0.51 * step + 0.02
    assert len(np.unique(found.numpy())) <= 2**bits


@pytest.mark.parametrize("outliers", [1, 3])
def test_outliers_of_a_row_do_not_widen_the_steps_of_the_others(outliers):
    cut = normal()
    cut[:, :outliers] = 1000 * (1 + torch.arange(outliers))
    spec = f"quantise:values=4,scale=row,outliers={outliers}"
    index_bits = (WIDTH - 1).bit_length()
    sizes = 4 * ROWS, -(-ROWS * WIDTH * 4 // 8), -(-ROWS * outliers * (16 + index_bits) // 8)
    assert len(make(spec).encode(cut, TRAINING).payload) == sum(sizes)
    found, others = back(spec, cut), cut[:, outliers:]
    steps = (others.amax(1) - others.amin(1)) / 2**4
    assert ((found[:, outliers:] - others).abs().amax(1) <= 0.51 * steps + 0.02).all()
    torch.testing.assert_close(found[:, :outliers], cut[:, :outliers], rtol=2**-8, atol=0)


def test_as_many_outliers_as_values_are_refused():
    with pytest.raises(WidthError, match="outliers"):
        make("quantise:outliers=3").check(3)


@pytest.mark.parametrize("packer", ["dense", "bitmap", "enumerative", "range"])
def test_a_rectified_cut_keeps_its_zeros(packer):
    cut = normal().relu()
    found = back(f"relu:values=4,packer={packer}", cut)
    assert torch.equal(found > 0, cut > 0)
    assert float((found - cut).abs().max()) <= float(cut.max()) / 15 * 1.02


def test_a_bitmap_of_floats_is_exact():
    cut = normal().relu()
    codec = make("relu:values=fp32,packer=bitmap")
    assert torch.equal(back("relu:values=fp32,packer=bitmap", cut), cut)
    above = int((cut > 0).sum())
    assert len(codec.encode(cut, TRAINING).payload) == -(-ROWS * WIDTH // 8) + 4 * above


def test_an_enumerated_cut_takes_the_bits_of_its_sets_and_codes():
    cut = (normal(40, 100) - 1).relu()
    counts = (cut > 0).sum(dim=1).tolist()
    row_bits = [7 + math.ceil(math.log2(math.comb(100, n))) + 4 * n for n in counts]
    payload = make("relu:values=4,packer=enumerative").encode(cut, TRAINING).payload
    assert len(payload) == 2 + -(-sum(row_bits) // 8)
    assert len(payload) < len(make("relu:values=4,packer=bitmap").encode(cut, TRAINING).payload)


def test_the_documented_enumerated_payload_bit_by_bit():
    """Counts 2 and 1, the set {1} of the second row, {1, 4} of the first, then their codes."""
    cut = torch.tensor([[0.0, 3.0, 0, 0, 1.5], [0.0, 2.0, 0, 0, 0]])
    payload = make("relu:values=2,packer=enumerative").encode(cut, TRAINING).payload
    three = b"\x40\x40"
    assert payload == three + bytes([0b010_001_00, 0b1_0111_11_1, 0b0_10_00000])


@pytest.mark.parametrize(
    ("body", "problem", "match"),
    [
        ([0b010_001_00], TruncatedFrameError, "wrong length"),
        ([], TruncatedFrameError, "inside its counts"),
        ([0b110_001_00, 0, 0], CorruptFrameError, "more values for a row than its width"),
        ([0b010_001_11, 0b1_0111_11_1, 0b0_10_00000], CorruptFrameError, "does not exist"),
        ([0b010_001_00, 0b1_1010_11_1, 0b0_10_00000], CorruptFrameError, "does not exist"),
        ([0b010_001_00, 0b1_0111_00_1, 0b0_10_00000], CorruptFrameError, "marks a zero"),
        ([0b010_001_00, 0b1_0111_11_1, 0b0_10_00001], CorruptFrameError, "after its last row"),
        ([0b010_001_00, 0b1_0111_11_1, 0b0_10_00000, 0], TruncatedFrameError, "wrong length"),
    ],
)
def test_enumerated_payloads_that_cannot_be(body, problem, match):
    codec = make("relu:values=2,packer=enumerative")
    with pytest.raises(problem, match=match):
        codec.decode(b"\x40\x40" + bytes(body), 2, 5, TRAINING)


def test_leaving_out_the_gradients_of_zeros_changes_no_bit():
    """Training behind a rectifier, with all gradients and with those of values above zero."""
    data = load_bundled("digits", ["p"], "label", Dealing(0, limit=300))

    def trained(codec):
        settings = Experiment.model_validate(
            {
                "codec": codec,
                "parties": {"p": {"width": 8, "bottom": "mlp:hidden=16,last=relu"}},
                "train": {"epochs": 2, "batch_size": 30},
            }
        )
        return LocalSession(settings, data, outputs=10).run()

    whole, spared = trained("none"), trained("relu:values=fp32,packer=bitmap")
    assert spared.weights_digest() == whole.weights_digest()
    down = [each.ledger.bytes_by_party("down")["p"] for each in (whole, spared)]
    assert down[1] < 0.8 * down[0]


def test_negative_values_of_a_rectified_cut_are_no_payload():
    codec = make("relu:values=fp32,packer=dense")
    payload = bytearray(codec.encode(normal(1, 2).abs(), TRAINING).payload)
    payload[0] |= 0x80  # the sign comes first
    with pytest.raises(CorruptFrameError, match="negative"):
        codec.decode(payload, 1, 2, TRAINING)


def test_a_marked_zero_is_no_payload():
    codec = make("relu:values=4,packer=bitmap")
    payload = bytearray(codec.encode(torch.tensor([[1.0, 0.0]]), TRAINING).payload)
    payload[-1] = 0
    with pytest.raises(CorruptFrameError, match="marks a zero"):
        codec.decode(payload, 1, 2, TRAINING)


def test_signs_are_one_bit_each():
    cut = normal(256, 117)
    assert len(make("sign:width=117").encode(cut, TRAINING).payload) == 256 * 117 // 8
    assert torch.equal(back("sign:width=117", cut), torch.where(cut >= 0, 1.0, -1.0))
    assert make("sign:width=117").formula_ratio(128) == pytest.approx(117 / 128 / 32)


def test_a_mask_is_the_same_at_both_ends_and_keeps_its_units():
    one, other = make("size:k=3,kind=mask"), make("size:k=3,kind=mask")
    cut = normal()
    units = one.client_module(WIDTH).units.tolist()
    assert units == sorted(units)
    whole = other.server_module(WIDTH)(one.client_module(WIDTH)(cut))
    assert torch.equal(whole[:, units], cut[:, units])
    assert int((whole != 0).sum()) == 3 * ROWS
    assert list(one.client_module(WIDTH).state_dict()) == []


def test_a_narrow_cut_trains_a_layer_at_each_end():
    codec = make("size:k=3")
    assert (codec.wire_width(WIDTH), codec.formula_ratio(128)) == (3, 3 / 128)
    narrow, wide = codec.client_module(WIDTH), codec.server_module(WIDTH)
    assert [narrow.weight.shape, wide.weight.shape] == [(3, WIDTH), (WIDTH, 3)]
    with pytest.raises(WidthError):
        codec.check(2)


@pytest.mark.parametrize(
    "spec",
    ["size:k=0", "size:k=2,kind=wide", "sign:width=-1", "quantise:values=9", "quantise:scale=all",
     "quantise:outliers=-1", "l1:target=-1", "l1:weight=inf", "rate:weight=-1", "rate:bits=9",
     "relu:values=bf16",
     "sign:width=65537", "topk:k=0", "topk:k=-1", "topk:k=two", "topk:k=2,values=9",
     "topk:k=2,packer=zip", "topk:k=2,packer=range", "quantise:values=bf16,packer=range",
     "relu:values=fp32", "randtopk:k=0", "randtopk:k=1,values=16", "randtopk:k=1,law=uniform",
     *(f"randtopk:k=2,alpha={alpha}" for alpha in ("-0.1", "1.1", "nan", "inf"))],
)  # fmt: skip
def test_options_that_cannot_be(spec):
    with pytest.raises(BadOptionError):
        make(spec)


class TestL1:
    def test_no_more_values_than_the_cut_has(self):
        make("l1:target=7").check(WIDTH)
        with pytest.raises(WidthError, match="width 7 cannot have 8 values above zero"):
            make("l1:target=8").check(WIDTH)

    def test_the_penalty_is_the_mean_over_rows_of_the_sum(self):
        cut = normal().relu()
        loss = make("l1:target=0,weight=0.25").local_loss(cut, TRAINING)
        assert float(loss) == pytest.approx(0.25 * float(cut.sum(dim=1).mean()), rel=1e-6)

    @pytest.mark.parametrize("target", [4, 10])
    def test_the_controller_finds_the_weight_that_gives_the_target(self, target):
        """A cut whose count above zero falls with the logarithm of the weight, by its own law."""
        codec, width, rows = make(f"l1:target={target},anneal=150,packer=bitmap"), 64, 4
        counts = []
        for step in range(900):
            count = min(max(20 - 6 * math.log10(codec.weight_now / 0.01), 0), width)
            cut = torch.zeros(rows, width)
            cut[:, : round(count)] = 1
            codec.encode(cut, StepContext(step, training=True))
            codec.commit(step)
            counts.append(count)
        assert np.mean(counts[-100:]) == pytest.approx(target, rel=0.1)

    def test_counts_of_queries_correct_those_of_training(self):
        """Training sees twice as many values as queries do; the target is that of the queries."""
        codec = make("l1:target=6,anneal=0,packer=bitmap")
        half = torch.zeros(10, 64)
        count = 30.0
        for step in range(800):
            count = min(max(20 - 6 * math.log10(codec.weight_now / 0.01), 0), 64)
            half.zero_()
            half[:, : round(2 * count)] = 1
            codec.encode(half, StepContext(step, training=True))
            codec.commit(step)
            half.zero_()
            half[:, : round(count)] = 1
            codec.encode(half, INFERENCE)
        assert count == pytest.approx(6, rel=0.15)

    def test_a_fixed_weight_stays(self):
        codec = make("l1:target=0,weight=0.5")
        codec.encode(normal().relu(), TRAINING)
        codec.commit(3)
        assert codec.weight_now == 0.5


class TestRate:
    def test_bits_are_those_of_a_logistic_distribution(self):
        codec = make("rate")
        model = codec.client_module(WIDTH)
        with torch.no_grad():
            model.center.copy_(torch.linspace(-1, 1, WIDTH))
            model.spread.copy_(torch.linspace(-0.5, 0.5, WIDTH))
        centers, spreads = model.center.tolist(), model.spread.tolist()
        values = normal().double().numpy()

        def below(x, unit):
            return 1 / (1 + math.exp(-(x - centers[unit]) / math.exp(spreads[unit])))

        expected = -np.mean([
            sum(
                math.log2(max(below(v + 0.5, unit) - below(v - 0.5, unit), 1e-9))
                for unit, v in enumerate(row)
            )
            for row in values
        ])  # fmt: skip
        found = model.bits(torch.from_numpy(values).float()).item()
        assert found == pytest.approx(expected, rel=1e-4)

    def test_whole_numbers_travel(self):
        cut = torch.tensor([[0.2, 0.6, 2.5, 70.0, -3.0]])
        assert back("rate:bits=6", cut).tolist() == [[0.0, 1.0, 2.0, 63.0, 0.0]]

    def test_the_noise_is_the_partys_own_and_repeatable(self):
        codec = make("rate:weight=1")
        codec.client_module(WIDTH)
        cut = normal().relu()
        losses = [
            codec.local_loss(cut, StepContext(step, True, Secret.of_simulation(seed, "p"))).item()
            for step, seed in ((0, 0), (0, 0), (1, 0), (0, 1))
        ]
        assert losses[0] == losses[1]
        assert len(set(losses)) == 3

    def test_paying_for_bits_saves_bits(self):
        """A unit nobody needs is worth nothing: with the rate alone as loss it goes silent."""
        codec = make("rate:weight=1")
        model = nn.Sequential(nn.Linear(4, WIDTH), codec.client_module(WIDTH))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        inputs, sizes = normal(64, 4), []
        for step in range(80):
            cut = model(inputs)
            if step in (0, 79):
                context = StepContext(step, training=True)
                sizes.append(len(codec.encode(cut.detach(), context).payload))
            optimizer.zero_grad()
            codec.local_loss(cut, StepContext(step, True, Secret.of_simulation(0, "p"))).backward()
            optimizer.step()
        assert sizes[-1] < 0.2 * sizes[0]
