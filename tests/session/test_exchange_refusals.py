"""What arrives wrong is refused by name and step, and changes nothing."""

import math

import pytest
import torch
from torch import nn

from vfl.compression.none import dense_bytes
from vfl.core.errors import (
    FrameError,
    LostPeerError,
    NonFiniteError,
    ProtocolError,
    UserError,
    WidthError,
)
from vfl.core.frame import Frame, Kind
from vfl.defenses import Defense
from vfl.session import Adversary
from vfl.session.exchange import check_finite, check_shape

BAD = [math.nan, math.inf, -math.inf]
GRADIENT = dense_bytes(torch.ones(5, 3))


@pytest.mark.parametrize("bad", BAD)
def test_a_codec_that_would_hide_a_broken_cut_never_sends_it(start, bad):
    game = start(codec="topk:k=2,values=8")
    game.inputs[2, 1] = bad
    before = game.digest()
    with pytest.raises(NonFiniteError, match="cut of party 'bank'") as caught:
        game.feature.send_cut(game.inputs, 9)
    assert (caught.value.where, caught.value.got) == ("step 9", "3 of 15 values")
    assert game.digest() == before
    with pytest.raises(ProtocolError, match="nothing to receive"):
        game.label_link.receive()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", [Kind.CUT, Kind.QUERY])
def test_a_broken_cut_is_never_taken(start, bad, kind):
    game = start()
    cut = torch.ones(5, 3)
    cut[0, 0] = bad
    game.feature_link.send(Frame(kind, 9, dense_bytes(cut)))
    receive = game.label.receive_cut if kind is Kind.CUT else game.label.receive_query
    with pytest.raises(NonFiniteError, match="cut of party 'bank'") as caught:
        receive(9, 5)
    assert (caught.value.where, caught.value.got) == ("step 9", "1 of 15 values")


@pytest.mark.parametrize("bad", BAD)
def test_a_broken_gradient_is_never_sent(start, bad):
    game = start()
    game.feature.send_cut(game.inputs, 9)
    cut = game.label.receive_cut(9, 5)
    (cut.sum() * bad).backward()
    with pytest.raises(NonFiniteError, match="the gradient of party 'bank'"):
        game.label.send_gradient(game.labels)
    with pytest.raises(ProtocolError, match="nothing to receive"):
        game.feature_link.receive()


@pytest.mark.parametrize("bad", BAD)
def test_a_broken_gradient_is_never_taken(start, bad):
    game = start(optimizer=lambda parameters: torch.optim.Adam(parameters))
    game.turn(8)
    before = game.digest()
    game.feature.send_cut(game.inputs, 9)
    grad = torch.ones(5, 3)
    grad[4, 2] = bad
    game.label_link.send(Frame(Kind.GRAD, 9, dense_bytes(grad)))
    with pytest.raises(NonFiniteError, match="'bank'") as caught:
        game.feature.take_gradient()
    assert (caught.value.where, caught.value.got) == ("step 9", "1 of 15 values")
    assert game.digest() == before


def test_large_finite_values_are_no_mistake():
    large = torch.full((2, 2), torch.finfo(torch.float32).max)
    assert torch.isinf(large.sum())
    check_finite(large, "cut", "bank", 0)


def test_a_message_about_values_shows_none_of_them():
    values = torch.tensor([[123.25, math.nan]])
    with pytest.raises(NonFiniteError) as caught:
        check_finite(values, "cut", "bank", 0)
    assert "123" not in str(caught.value)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.GRAD, 3, GRADIENT),
        Frame(Kind.GRAD, 5, GRADIENT),
        Frame(Kind.CUT, 4, GRADIENT),
        Frame(Kind.ACK, 4),
        Frame(Kind.GRAD, 4, GRADIENT, peer=1),
    ],
    ids=["replayed", "ahead", "kind", "receipt", "abandoned"],
)
def test_a_frame_out_of_turn_leaves_the_bottom_as_it_was(start, frame):
    game = start()
    game.turn(3)
    before = game.digest()
    game.feature.send_cut(game.inputs, 4)
    game.label_link.send(frame)
    with pytest.raises(ProtocolError, match="unexpected message from the label party"):
        game.feature.take_gradient()
    assert game.digest() == before
    game.label_link.send(Frame(Kind.GRAD, 4, GRADIENT))
    game.feature.take_gradient()
    assert game.digest() != before


@pytest.mark.parametrize(
    "frame",
    [Frame(Kind.CUT, 3, GRADIENT), Frame(Kind.QUERY, 4), Frame(Kind.CUT, 4, GRADIENT, peer=2)],
    ids=["replayed", "query", "abandoned"],
)
def test_a_frame_out_of_turn_at_the_label_party(start, frame):
    game = start()
    game.turn(3)
    game.feature_link.send(frame)
    with pytest.raises(ProtocolError, match="unexpected message from party 'bank'") as caught:
        game.label.receive_cut(4, 5)
    assert caught.value.want == "CUT of step 4, peer 0"
    assert caught.value.got == f"{frame.kind.name} of step {frame.step}, peer {frame.peer}"


def test_a_gradient_cannot_be_applied_twice(start):
    game = start()
    game.turn(0)
    before = game.digest()
    game.label_link.send(Frame(Kind.GRAD, 0, GRADIENT))
    with pytest.raises(AssertionError, match="no cut was sent"):
        game.feature.take_gradient()
    assert game.digest() == before


@pytest.mark.parametrize("payload", [b"", GRADIENT[:-1], GRADIENT + b"\0"])
def test_a_gradient_of_another_length(start, payload):
    game = start()
    before = game.digest()
    game.feature.send_cut(game.inputs, 0)
    game.label_link.send(Frame(Kind.GRAD, 0, payload))
    with pytest.raises(FrameError):
        game.feature.take_gradient()
    assert game.digest() == before


def test_a_cut_of_more_rows_than_the_schedule_says(start):
    game = start()
    game.feature.send_cut(game.inputs, 0)
    with pytest.raises(FrameError) as caught:
        game.label.receive_cut(0, 4)
    assert caught.value.want == "48 bytes for 4 rows of 3"


@pytest.mark.parametrize("step", [0, 2])
def test_a_receipt_out_of_turn(start, step):
    game = start()
    game.label_link.send(Frame(Kind.ACK, step))
    with pytest.raises(ProtocolError, match="unexpected message"):
        game.feature.take_receipt(1)


def test_a_closed_link_ends_a_round(start):
    game = start()
    game.feature.send_cut(game.inputs, 0)
    before = game.digest()
    game.label_link.close()
    with pytest.raises(LostPeerError):
        game.feature.take_gradient()
    assert game.digest() == before


@pytest.mark.parametrize("shape", [(5,), (4, 3), (5, 3, 1)])
def test_shapes_of_a_cut_are_checked(shape):
    with pytest.raises(WidthError, match="whose shape differs"):
        check_shape(torch.zeros(shape), 5, 3, "bank")


class Tampering(Adversary):
    """Changes whatever an adversary may change, and notes what it sees."""

    def __init__(self):
        self.seen = []

    def batch(self, inputs, context):
        return torch.ones_like(inputs)

    def optimizer(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 100.0
        return optimizer

    def cut(self, cut, context):
        assert not cut.requires_grad
        return cut + 7

    def gradient(self, party, grad, context):
        self.seen.append(("sent", party, context.step))
        return torch.zeros_like(grad)

    def received(self, party, values, context):
        self.seen.append((party, context.step, values.clone()))


def test_a_dishonest_feature_party(start):
    adversary = Tampering()
    game = start(adversary=adversary)
    linear = game.feature.model["bottom"]
    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    cut = game.turn(2)
    torch.testing.assert_close(cut, (weight.sum(1) + bias + 7).expand(5, 3))
    ((party, step, gradient),) = adversary.seen
    assert (party, step) == ("bank", 2)
    torch.testing.assert_close(gradient, cut)
    torch.testing.assert_close(linear.bias.detach(), bias - 100 * cut.sum(0))


class Asking(Adversary):
    """Computes the cuts of its batch in one of its methods, or keeps the function for the test."""

    def __init__(self, method):
        self.method, self.cuts = method, []

    def model(self, cuts_of):
        self.cuts_of = cuts_of

    def _ask(self, method, inputs):
        if method == self.method:
            self.cuts.append(self.cuts_of(inputs))

    def batch(self, inputs, context):
        self._ask("batch", inputs)
        return inputs

    def cut(self, cut, context):
        self._ask("cut", torch.ones(2, 4))
        return cut

    def received(self, party, values, context):
        self._ask("received", torch.ones(2, 4))


def test_an_adversary_computes_cuts_of_its_batch(start):
    game, honest = start(adversary=(adversary := Asking("batch"))), start()
    before = game.feature.query_cut(game.inputs)
    assert torch.equal(game.turn(), honest.turn())
    torch.testing.assert_close(adversary.cuts, [before])
    assert game.digest() == honest.digest()


@pytest.mark.parametrize("method", ["cut", "received", "between two steps"])
def test_an_adversary_computes_no_cuts_in_other_methods(start, method):
    game = start(adversary=(adversary := Asking(method)))

    def play():
        game.turn()
        adversary.cuts_of(game.inputs)

    with pytest.raises(UserError, match="outside of its method 'batch'"):
        play()
    assert game.feature.model.training  # the refused call did not change the mode


def test_a_dishonest_label_party(start):
    adversary = Tampering()
    game = start(label_adversary=adversary)
    before = game.digest()
    cut = game.turn(2)
    (party, step, seen), sent = adversary.seen
    assert (party, step, sent) == ("bank", 2, ("sent", "bank", 2))
    torch.testing.assert_close(seen, cut)
    assert game.digest() == before  # it sent gradients of zero


def test_the_bottom_a_defense_wraps_is_the_one_that_trains(start):
    class Doubling(Defense):
        def wrap_bottom(self, bottom, width):
            return nn.Sequential(bottom, nn.LayerNorm(width))

    game = start(defense=Doubling())
    assert torch.allclose(game.turn().mean(1), torch.zeros(5), atol=1e-6)
    assert "bottom.1.weight" in game.feature.model.state_dict()
