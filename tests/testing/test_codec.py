"""Codecs that break the contract, each found by the test that is there for it."""

import struct

import numpy as np
import pytest
import torch
from torch import nn

from vfl.compression import CODECS, INFERENCE, Codec, Decoded, Encoded
from vfl.core.errors import FrameError, TruncatedFrameError
from vfl.testing import CodecContract

TESTS = [name for name in dir(CodecContract) if name.startswith("test_")]
REFUSED = (AssertionError, FrameError, TypeError, struct.error)


def from_floats(payload, rows, width):
    if len(payload) != 4 * rows * width:
        raise TruncatedFrameError("a payload has the wrong length")
    return torch.from_numpy(np.frombuffer(payload, "<f4").reshape(rows, width).copy())


class Floats(Codec):
    """A sound codec, which all broken ones are made of: the values as they are."""

    def encode(self, cut, context=INFERENCE):
        return Encoded(cut.numpy().tobytes(), None)

    def decode(self, payload, rows, width, context=INFERENCE):
        values = from_floats(payload, rows, width)
        return Decoded(values.nan_to_num_(), None)

    def encode_grad(self, grad, saved, context=INFERENCE):
        return grad.numpy().tobytes()

    def decode_grad(self, payload, saved, rows, width, context=INFERENCE):
        return from_floats(payload, rows, width)

    def formula_ratio(self, width):
        return 1.0


class WithoutTrailingZeros(Floats):
    """Shorter where values are zero, in queries too."""

    def encode(self, cut, context=INFERENCE):
        return Encoded(cut.numpy().tobytes().rstrip(b"\0"), None)

    def decode(self, payload, rows, width, context=INFERENCE):
        return super().decode(bytes(payload).ljust(4 * rows * width, b"\0"), rows, width)


class Doubles(Floats):
    def decode(self, payload, rows, width, context=INFERENCE):
        return Decoded(super().decode(payload, rows, width).cut.double(), None)


class Flat(Floats):
    def decode_grad(self, payload, saved, rows, width, context=INFERENCE):
        return super().decode_grad(payload, saved, rows, width).flatten()


class Idealised(Floats):
    """Trains with more than the wire carries."""

    def decode(self, payload, rows, width, context=INFERENCE):
        return Decoded(super().decode(payload, rows, width).cut.half().float(), None)

    def simulate(self, cut, context=INFERENCE, grad_context=None):
        return cut * 1.0


class Unrepeatable(Floats):
    runs = 0

    def encode(self, cut, context=INFERENCE):
        type(self).runs += 1
        return super().encode(cut + self.runs / 1024)


class OnlyBytes(Floats):
    def decode(self, payload, rows, width, context=INFERENCE):
        if not isinstance(payload, bytes):
            raise TypeError("not bytes")
        return super().decode(payload, rows, width)


class Remembering(Floats):
    """The feature party undoes a scale that the gradient's maker never had."""

    def encode(self, cut, context=INFERENCE):
        return Encoded(super().encode(cut).payload, 2.0)

    def decode_grad(self, payload, saved, rows, width, context=INFERENCE):
        return super().decode_grad(payload, None, rows, width) * (saved or 1.0)


class InPlace(Floats):
    def encode(self, cut, context=INFERENCE):
        return super().encode(cut.mul_(0.5))


class OfTheGlobalGenerator(Floats):
    def encode_grad(self, grad, saved, context=INFERENCE):
        return super().encode_grad(grad + 1e-6 * torch.rand(1), saved)


class BatchScaled(Floats):
    def encode(self, cut, context=INFERENCE):
        return super().encode(cut / max(len(cut), 1))


class Overflowing(Floats):
    """Leaves the range of its numbers on the way."""

    def decode(self, payload, rows, width, context=INFERENCE):
        values = super().decode(payload, rows, width).cut
        return Decoded(values * 4 / 4, None)


class Padded(Floats):
    def encode(self, cut, context=INFERENCE):
        return Encoded(super().encode(cut).payload + bytes(65), None)

    def decode(self, payload, rows, width, context=INFERENCE):
        return super().decode(payload[:-65], rows, width)


class Unchecked(Floats):
    """Leaves it to the standard library to find a payload of the wrong length."""

    def decode(self, payload, rows, width, context=INFERENCE):
        values = struct.unpack(f"<{rows * width}f", payload)
        return Decoded(torch.tensor(values).view(rows, width), None)


class Trusting(Floats):
    """Takes the number of rows from the payload's length."""

    def decode(self, payload, rows, width, context=INFERENCE):
        whole = len(payload) // (4 * width)
        return super().decode(payload[: 4 * width * whole], whole, width)


class Forgetful(Floats):
    """What it learned from earlier steps is not in its state."""

    steps = 0

    def encode(self, cut, context=INFERENCE):
        return super().encode(cut + self.steps)

    def commit(self, step):
        self.steps += 1


class HalfForgetful(Forgetful):
    """Its reading end adds what it learned, which is not in its state."""

    def encode(self, cut, context=INFERENCE):
        return Floats.encode(self, cut)

    def decode(self, payload, rows, width, context=INFERENCE):
        return Decoded(super().decode(payload, rows, width).cut + self.steps, None)


class Positional(Floats):
    """Sends something else where it knows the positions of rows, and without declaring this."""

    def encode(self, cut, context=INFERENCE):
        return super().encode(cut if context.rows is None else cut + 1)


class Nameless(Floats):
    """Says that it needs positions, and takes batches without them."""

    needs_rows = True


class Widening(Floats):
    """Its module gives another width than it says."""

    def client_module(self, width):
        return nn.Linear(width, width + 1)


class RowLosses(Floats):
    def local_loss(self, cut, context):
        return cut.square().sum(1)


class Percent(Floats):
    def formula_ratio(self, width):
        return 100.0


class OfTheProcessor(Floats):
    """Says that it takes a card's tensors, and does not."""

    on_card = True


@pytest.fixture
def broken(request, monkeypatch):
    monkeypatch.setattr(CODECS, "_members", {"broken": request.param})


def run(test):
    """One test of the contract, while it trains if it tells the two apart."""
    contract = CodecContract()
    method = getattr(contract, test)
    both = {"spec": "broken", "training": True}
    method(**{name: both[name] for name in method.__code__.co_varnames if name in both})


@pytest.mark.parametrize("broken", [Floats], indirect=True)
@pytest.mark.parametrize("test", TESTS)
def test_the_codec_that_all_are_made_of_is_sound(broken, test):
    run(test)


TRAVEL = "cut_and_gradient_round_trip"
BROKEN = [
    (Doubles, TRAVEL, "decoded torch.float64"),
    (Flat, TRAVEL, "decoded .*sent"),
    (Idealised, TRAVEL, "`simulate` differs from the decoded frame"),
    (Unrepeatable, TRAVEL, "the same cut and context produced other bytes"),
    (OnlyBytes, "all_bytes_like_payloads_decode_alike", "not bytes"),
    (Remembering, TRAVEL, "`kept` differs from the values"),
    (InPlace, TRAVEL, "encode changed the cut"),
    (OfTheGlobalGenerator, TRAVEL, "changed: torch"),
    (BatchScaled, "prediction_does_not_depend_on_its_batch", "depends on its batch"),
    (
        WithoutTrailingZeros,
        "query_length_discloses_only_its_shape",
        "the length of a query discloses",
    ),
    (Overflowing, "extreme_values_round_trip", ".*"),
    (Padded, TRAVEL, "a payload is above its limit"),
    (Unchecked, "malformed_payloads_are_refused_or_harmless", ".*"),
    (Trusting, "malformed_payloads_are_refused_or_harmless", ".*"),
    (Forgetful, "state_survives_a_checkpoint", "was not restored"),
    (HalfForgetful, "both_ends_stay_synchronised_and_resume", "was not restored"),
    (Positional, "row_positions_are_required_or_ignored", "does not declare"),
    (Nameless, "row_positions_are_required_or_ignored", "accepted a batch without"),
    (Widening, "module_loss_and_ratio_fit_the_cut", "not have the width"),
    (RowLosses, "module_loss_and_ratio_fit_the_cut", "not a scalar"),
    (Percent, "module_loss_and_ratio_fit_the_cut", "not a ratio to dense"),
]


#: What only a machine with a card finds.
BROKEN_ON_A_CARD = [(OfTheProcessor, "gpu_sends_the_same_bytes", "convert cuda")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no graphics card here")
@pytest.mark.parametrize(("broken", "test", "why"), BROKEN_ON_A_CARD, indirect=["broken"])
def test_the_contract_finds_a_codec_that_breaks_it_on_a_card(broken, test, why):
    with pytest.raises(REFUSED, match=why):
        run(f"test_{test}")


def test_every_test_of_the_contract_finds_something():
    assert {f"test_{test}" for _, test, _ in [*BROKEN, *BROKEN_ON_A_CARD]} == set(TESTS)


@pytest.mark.parametrize(("broken", "test", "why"), BROKEN, indirect=["broken"])
def test_the_contract_finds_a_codec_that_breaks_it(broken, test, why):
    with pytest.raises(REFUSED, match=why):
        run(f"test_{test}")
