"""Tests that every codec must pass; an author of a plug-in subclasses `CodecContract`.

    class TestMine(CodecContract):
        specs = ["mine:k=3"]

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor

from vfl.compression import INFERENCE, Codec, Encoded, StepContext, make
from vfl.core.errors import FrameError, SpecError
from vfl.core.frame import Payload
from vfl.core.seeds import Secret, generator
from vfl.testing.base import Contract, global_states, require_still

ROWS = (0, 1, 2, 17)


class CodecContract(Contract):
    """Properties of every codec, for cuts and for gradients.

    Attributes:
        specs: specs of the codecs under test, at least one; include the extreme values of their
            options.
        width: width of the bottom model's output, which every codec under test must accept.
    """

    family = "codec"
    width: ClassVar[int] = 12

    def test_cut_and_gradient_round_trip(self, spec: str, training: bool) -> None:
        for rows in ROWS:
            cut, states = _cut(spec, rows, self.width), global_states()
            trip = _Trip(spec, cut, training)
            require_still(states)
            assert _same_bits(cut, _cut(spec, rows, self.width)), "encode changed the cut"
            assert _same_bits(trip.given, _grad(cut)), "encode_grad changed the gradient"
            for tensor in (trip.decoded, trip.grad):
                _require_tensor(tensor, cut)
                assert torch.isfinite(tensor).all(), "a decoded value is not finite"
            limit_bytes = make(spec).payload_limit(*cut.shape)
            largest = max(len(trip.encoded.payload), len(trip.grad_payload))
            assert largest <= limit_bytes, "a payload is above its limit"

            again = _Trip(spec, cut, training)
            same = bytes(trip.encoded.payload) == bytes(again.encoded.payload)
            assert same, "the same cut and context produced other bytes"
            same = bytes(trip.grad_payload) == bytes(again.grad_payload)
            assert same, "the same gradient and context produced other bytes"

            leaf = cut.clone().requires_grad_()
            simulated = make(spec).simulate(
                leaf, _context(training, rows, "feature"), _context(training, rows, "label")
            )
            simulated.backward(_grad(cut))  # type: ignore[no-untyped-call]
            assert leaf.grad is not None, "simulate gave no gradient"
            assert _same_bits(simulated.detach(), trip.decoded), (
                "the result of `simulate` differs from the decoded frame"
            )
            assert _same_bits(leaf.grad, trip.grad), (
                "the gradient of `simulate` differs from the decoded frame"
            )

            if training:
                assert _same_bits(trip.replay(), trip.grad), (
                    "`kept` differs from the values that `encode` kept"
                )
            trip.decoded += 1  # a decoded tensor must have writable memory
            trip.grad += 1

    def test_all_bytes_like_payloads_decode_alike(self, spec: str) -> None:
        trip = _Trip(spec, _cut(spec, 17, self.width), training=True)
        for kind in (bytes, bytearray, memoryview):
            cut_bytes: Payload = kind(bytes(trip.encoded.payload))
            grad_bytes: Payload = kind(bytes(trip.grad_payload))
            assert _same_bits(trip.read(cut_bytes), trip.decoded)
            assert _same_bits(trip.read_grad(grad_bytes), trip.grad)

    def test_prediction_does_not_depend_on_its_batch(self, spec: str) -> None:
        cut = _cut(spec, 5, self.width)
        together = _Trip(spec, cut, training=False).decoded
        for row in range(len(cut)):
            alone = _Trip(spec, cut[row : row + 1], training=False).decoded
            assert _same_bits(alone, together[row : row + 1]), f"row {row} depends on its batch"

    def test_query_length_discloses_only_its_shape(self, spec: str) -> None:
        codec = make(spec)
        width = codec.wire_width(self.width)
        if not codec.equal_queries(width):
            raise SkipTest("this codec declares that its queries differ in length")
        for step in range(3):  # learned state is not secret, but shortens some payloads
            codec.encode(_cut(spec, 17, self.width), _context(True, 17, "feature", step))
            codec.commit(step)
        for rows in ROWS[1:]:
            drawn = _cut(spec, rows, self.width)
            cuts = [drawn, drawn * 0, drawn * 0 + 1, drawn - 1, drawn * 1000, -drawn]
            cuts += [drawn * (drawn > one) for one in (0.5, 1.0, 2.0)]
            lengths = {len(codec.encode(cut).payload) for cut in cuts}
            assert len(lengths) == 1, (
                "the length of a query discloses more than the cut's shape to observers"
            )

    def test_extreme_values_round_trip(self, spec: str, training: bool) -> None:
        shape = _cut(spec, 5, self.width).shape
        largest = torch.finfo(torch.float32).max
        for value in (0.0, 1.0, -0.1, largest, -largest, 1e-45):
            _Trip(spec, torch.full(shape, value), training)
        alternating = torch.full(shape, largest)
        alternating[:, ::2] = -largest
        assert torch.isfinite(_Trip(spec, alternating, training).decoded).all()

    def test_malformed_payloads_are_refused_or_harmless(self, spec: str, training: bool) -> None:
        cut = _cut(spec, 5, self.width)
        trip = _Trip(spec, cut, training)
        both = ((trip.encoded.payload, trip.read), (trip.grad_payload, trip.read_grad))
        for payload, read in both:
            for mutated in _mutations(bytes(payload)):
                try:
                    accepted = read(mutated)
                except FrameError:
                    continue
                _require_tensor(accepted, cut)

    def test_state_survives_a_checkpoint(self, spec: str) -> None:
        cut = _cut(spec, 5, self.width)
        codec, restored = make(spec), make(spec)
        for step in range(3):
            codec.encode(cut, _context(True, 5, "feature", step))
            codec.commit(step)
        state = codec.state_dict()
        assert all(isinstance(tensor, Tensor) for tensor in state.values())
        restored.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
        context = _context(True, 5, "feature")
        expected, found = codec.encode(cut, context), restored.encode(cut, context)
        assert bytes(expected.payload) == bytes(found.payload), (
            "the state of the codec was not restored"
        )

    def test_both_ends_stay_synchronised_and_resume(self, spec: str) -> None:
        cut = _cut(spec, 5, self.width)
        ends, resumed = (make(spec), make(spec)), (make(spec), make(spec))
        for step in range(4):
            if step == 2:
                for end, again in zip(ends, resumed, strict=True):
                    again.load_state_dict({k: v.clone() for k, v in end.state_dict().items()})
            drawn = cut * (step + 1)
            found = _played(ends, drawn, step)
            if step >= 2:
                assert _played(resumed, drawn, step) == found, (
                    "the state of the codecs was not restored"
                )

    def test_row_positions_are_required_or_ignored(self, spec: str) -> None:
        codec, cut = make(spec), _cut(spec, 5, self.width)
        named = _context(True, 5, "feature")
        nameless = replace(named, rows=None)
        if codec.needs_rows:
            for refused in (nameless, replace(named, rows=np.arange(4))):
                try:
                    codec.encode(cut, refused)
                except SpecError:
                    continue
                raise AssertionError(
                    "the codec needs row positions, but accepted a batch without them"
                )
        else:
            sent = [bytes(make(spec).encode(cut, one).payload) for one in (named, nameless)]
            assert sent[0] == sent[1], (
                "the codec uses row positions, but does not declare `needs_rows`"
            )

    def test_gpu_sends_the_same_bytes(self, spec: str, training: bool) -> None:
        if not torch.cuda.is_available():
            raise SkipTest("no graphics card here")
        if not make(spec).on_card:
            raise SkipTest("this codec encodes on the CPU only")
        cut = _cut(spec, 17, self.width)
        here, there = _Trip(spec, cut, training), _Trip(spec, cut, training, device="cuda")
        assert bytes(here.encoded.payload) == bytes(there.encoded.payload)
        assert bytes(here.grad_payload) == bytes(there.grad_payload)
        for one, other in ((here.decoded, there.decoded), (here.grad, there.grad)):
            assert other.is_cuda, "a decoded tensor is on the CPU instead of the GPU"
            assert _same_bits(one, other.cpu()), (
                "the same payload gives other values on a GPU than on the CPU"
            )

    def test_module_loss_and_ratio_fit_the_cut(self, spec: str) -> None:
        codec = make(spec)
        codec.check(self.width)
        module = codec.client_module(self.width)
        outgoing = torch.randn(5, self.width, generator=generator(0, "contract"))
        cut = outgoing if module is None else module(outgoing)
        assert cut.shape == (5, codec.wire_width(self.width)), (
            "the cut does not have the width that `wire_width` returns"
        )
        loss = codec.local_loss(cut.requires_grad_(), _context(True, 5, "feature"))
        assert loss is None or loss.shape == (), "the codec's term of the loss is not a scalar"
        assert 0 < codec.formula_ratio(self.width) <= 1.5, (
            "`formula_ratio` is not a ratio to dense float32"
        )


class _Trip:
    """A cut and its gradient, encoded and decoded; each party has a separate codec object."""

    def __init__(self, spec: str, cut: Tensor, training: bool, device: str = "cpu") -> None:
        self._spec = spec
        self._shape = cut.shape
        self._training = training
        self._sender, self._receiver = make(spec), make(spec)
        if device != "cpu":
            self._sender.device = self._receiver.device = torch.device(device)
        self.encoded: Encoded = self._sender.encode(
            cut.to(device), _context(training, len(cut), "feature")
        )
        rows, width = cut.shape
        self.decoded, saved = self._receiver.decode(
            bytes(self.encoded.payload), rows, width, _context(training, rows)
        )
        self.given = _grad(cut).to(device)
        self.grad_payload = self._receiver.encode_grad(
            self.given, saved, _context(training, rows, "label")
        )
        self.grad = self.read_grad(bytes(self.grad_payload))

    def read(self, payload: Payload) -> Tensor:
        """Decode the cut from its payload, as the label party does."""
        rows, width = self._shape
        return self._receiver.decode(payload, rows, width, _context(self._training, rows)).cut

    def read_grad(self, payload: Payload) -> Tensor:
        """Decode the gradient from its payload, as the feature party does."""
        rows, width = self._shape
        context = _context(self._training, rows)
        return self._sender.decode_grad(payload, self.encoded.saved, rows, width, context)

    def replay(self) -> Tensor:
        """Decode the gradient with a new codec object that receives only the two payloads."""
        rows, width = self._shape
        codec, context = make(self._spec), _context(self._training, rows)
        saved = codec.decode(bytes(self.encoded.payload), rows, width, context).saved
        return codec.decode_grad(
            bytes(self.grad_payload), codec.encoder_state(saved), rows, width, context
        )


def _played(ends: tuple[Codec, Codec], cut: Tensor, step: int) -> tuple[bytes, bytes]:
    """Run one step of a codec at a feature party and a label party.

    Return the decoded cut and the decoded gradient, as bytes.
    """
    sender, receiver = ends
    (rows, width), decoding = cut.shape, _context(True, len(cut), step=step)
    payload, kept = sender.encode(cut, _context(True, rows, "feature", step))
    decoded, saved = receiver.decode(payload, rows, width, decoding)
    sent = receiver.encode_grad(_grad(cut), saved, _context(True, rows, "label", step))
    grad = sender.decode_grad(sent, kept, rows, width, decoding)
    for end in ends:
        end.commit(step)
    return decoded.numpy().tobytes(), grad.numpy().tobytes()


def _cut(spec: str, rows: int, bottom_width: int) -> Tensor:
    """Make a cut of ReLU outputs with the codec's width; all values of its first row are zeros."""
    codec: Codec = make(spec)
    codec.check(bottom_width)
    width = codec.wire_width(bottom_width)
    cut = torch.randn(rows, width, generator=generator(0, "contract", rows)).relu_()
    cut[:1] = 0
    return cut


def _grad(cut: Tensor) -> Tensor:
    return torch.randn(cut.shape, generator=generator(1, "contract", len(cut)))


def _context(training: bool, rows: int, party: str = "", step: int = 3) -> StepContext:
    """Return the step context of the encoding party; without a name, of the decoding party."""
    if not training:
        return INFERENCE
    secret = Secret.of_simulation(0, party) if party else None
    return StepContext(step, training=True, secret=secret, rows=np.arange(rows))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def _require_tensor(tensor: Tensor, cut: Tensor) -> None:
    assert tensor.shape == cut.shape, f"decoded {tuple(tensor.shape)}, sent {tuple(cut.shape)}"
    assert tensor.dtype == torch.float32, f"decoded {tensor.dtype}"


def _mutations(payload: bytes) -> Iterator[bytes]:
    """Yield truncated, extended, bit-flipped and random payloads; every call yields the same."""
    draw = random.Random(0)
    for cut_bytes in {0, 1, len(payload) // 2, len(payload) - 1}:
        yield payload[: max(cut_bytes, 0)]
    for extra in (b"\0", b"\xff", bytes(16), payload or b"\1"):
        yield payload + extra
    yield from (b"\0" * len(payload), b"\xff" * len(payload))
    for _ in range(50):
        flipped = bytearray(payload)
        for _ in range(draw.randint(1, 4) if payload else 0):
            place = draw.randrange(8 * len(payload))
            flipped[place // 8] ^= 1 << place % 8
        yield bytes(flipped)
        yield draw.randbytes(len(payload))
