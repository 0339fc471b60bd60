"""An honest round: what both halves compute, in which order, and what they leave alone."""

import numpy as np
import pytest
import torch
from torch import nn

from vfl.compression import INFERENCE, Decoded
from vfl.compression.none import Uncompressed
from vfl.core.errors import WidthError
from vfl.core.seeds import Secret
from vfl.defenses import Defense

RATE, ROWS = 0.1, 5


def test_a_round_is_one_step_of_the_whole_network(start):
    game = start()
    weight, bias = (p.detach().clone() for p in game.feature.model["bottom"].parameters())
    cut = game.turn()
    expected = game.inputs @ weight.T + bias
    torch.testing.assert_close(cut, expected)
    # The gradient of half the sum of squares is the cut; the chain rule is written out here.
    new_weight, new_bias = game.feature.model["bottom"].parameters()
    torch.testing.assert_close(new_weight.detach(), weight - RATE * expected.T @ game.inputs)
    torch.testing.assert_close(new_bias.detach(), bias - RATE * expected.sum(0))


def test_a_query_moves_nothing_and_is_confirmed(start):
    game = start(bottom=nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9)))
    before = game.digest()
    game.feature.send_query(game.inputs, 3)
    cut = game.label.receive_query(3, 5)
    game.label.confirm(3, b"told")
    assert game.feature.take_receipt(3) == b"told"
    torch.testing.assert_close(cut, game.feature.model["bottom"][0](game.inputs).detach())
    assert game.digest() == before
    assert not cut.requires_grad


@pytest.mark.parametrize("out", [2, 4])
def test_a_bottom_of_another_width(start, out):
    game = start(bottom=nn.Linear(4, out))
    with pytest.raises(WidthError, match="'bank'") as caught:
        game.feature.send_cut(game.inputs, 0)
    assert (caught.value.got, caught.value.want) == (f"(5, {out})", "(5, 3)")


class TestRandomness:
    def bottom(self):
        bottom = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
        nn.init.ones_(bottom[0].weight)
        nn.init.ones_(bottom[0].bias)
        return bottom

    def cuts(self, start, secret, steps=(0, 1)):
        game = start(bottom=self.bottom(), secret=secret, optimizer=None)
        return [game.turn(step) for step in steps]

    def test_dropout_follows_from_the_partys_secret_and_the_step(self, start):
        one, other = Secret.of_simulation(0, "bank"), Secret.of_simulation(1, "bank")
        first = self.cuts(start, one)
        torch.rand(3)
        assert all(map(torch.equal, first, self.cuts(start, one)))
        assert not torch.equal(first[0] == 0, first[1] == 0)
        assert not torch.equal(first[0] == 0, self.cuts(start, other)[0] == 0)

    def test_a_step_does_not_depend_on_the_steps_before(self, start):
        secret = Secret.of_simulation(0, "bank")
        assert torch.equal(
            self.cuts(start, secret)[1] == 0, self.cuts(start, secret, steps=(1,))[0] == 0
        )

    def test_the_global_generator_is_left_alone(self, start):
        game = start(bottom=self.bottom())
        before = torch.random.get_rng_state()
        game.turn()
        assert torch.equal(torch.random.get_rng_state(), before)


class Recorder(Defense):
    """Notes every hook with the value it met, and changes each."""

    def __init__(self):
        self.notes = []

    def batch(self, inputs, labels, context):
        self.notes.append(("batch", context.training, labels))
        return inputs + 1, labels

    def embedding(self, cut, context):
        self.notes.append(("embedding", context.training, cut.detach().clone()))
        return cut * 2

    def gradient(self, grad, labels, context):
        self.notes.append(("gradient", context.training, grad.clone(), labels.tolist()))
        return grad * 10

    def local_loss(self, cut, inputs, context):
        self.notes.append(("local_loss", context.training, cut.detach().clone(), inputs.clone()))
        return None


def test_the_hooks_of_a_defense_meet_the_data_in_order(start):
    defense = Recorder()
    game = start(defense=defense)
    linear = game.feature.model["bottom"]
    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    cut = game.turn()
    fed = game.inputs + 1
    raw = fed @ weight.T + bias
    names = [note[0] for note in defense.notes]
    assert names == ["batch", "embedding", "gradient", "local_loss"]
    assert all(note[1] for note in defense.notes)
    torch.testing.assert_close(defense.notes[1][2], raw)
    torch.testing.assert_close(cut, 2 * raw)
    torch.testing.assert_close(defense.notes[2][2], cut)
    assert defense.notes[2][3] == [0, 1, 0, 1, 0]
    torch.testing.assert_close(defense.notes[3][2], cut)
    torch.testing.assert_close(defense.notes[3][3], fed)
    # cut = 2 raw and its gradient arrives ten times too large: d loss / d bias = 2 * 10 * cut.
    torch.testing.assert_close(linear.bias.detach(), bias - RATE * 20 * cut.sum(0))


def test_a_query_meets_the_embedding_hook_only(start):
    defense = Recorder()
    game = start(defense=defense)
    game.feature.send_query(game.inputs, 0)
    game.label.receive_query(0, 5)
    assert [note[:2] for note in defense.notes] == [("embedding", False)]


class Pull(Defense):
    def local_loss(self, cut, inputs, context):
        return 3 * cut.sum()


class PullingCodec(Uncompressed):
    def local_loss(self, cut, context):
        return 5 * cut.sum()


def test_local_losses_join_the_backward_pass(start):
    game = start(defense=Pull(), codec=PullingCodec())
    bias = game.feature.model["bottom"].bias.detach().clone()
    cut = game.turn()
    expected = bias - RATE * (cut.sum(0) + 5 * (3 + 5))
    torch.testing.assert_close(game.feature.model["bottom"].bias.detach(), expected)


class Adapted(Uncompressed):
    """A codec with a trainable module at each end: widths 3 -> 2 on the wire -> 3."""

    def __init__(self):
        self.committed = []

    def wire_width(self, width):
        return 2

    def client_module(self, width):
        return nn.Linear(width, 2, bias=False)

    def server_module(self, width):
        return nn.Linear(2, width, bias=False)

    def commit(self, step):
        self.committed.append(step)


def test_the_modules_of_a_codec_stand_at_both_ends(start):
    codec = Adapted()
    game = start(codec=codec)
    there, here = game.feature.model["codec"], game.label.adapter
    raw = game.feature.model["bottom"](game.inputs).detach()
    narrow = raw @ there.weight.detach().T
    received = game.turn(4)
    torch.testing.assert_close(received, narrow @ here.weight.detach().T)
    assert codec.committed == [4, 4]
    # d loss / d narrow = received @ W_server; the client module's own gradient follows from it.
    expected = (received @ here.weight.detach()).T @ raw
    torch.testing.assert_close(there.weight.grad, expected)
    torch.testing.assert_close(here.weight.grad, received.T @ narrow)
    assert set(game.feature.model.state_dict()) == {
        "bottom.weight",
        "bottom.bias",
        "codec.weight",
    }


class Counting(Uncompressed):
    """A codec with adaptive state: what travels depends on the steps that were committed."""

    def __init__(self):
        self.committed = 0

    def encode(self, cut, context=INFERENCE):
        return super().encode(cut + self.committed, context)

    def decode(self, payload, rows, width, context=INFERENCE):
        cut, saved = super().decode(payload, rows, width, context)
        return Decoded(cut - self.committed, saved)

    def commit(self, step):
        self.committed += 1

    def state_dict(self):
        return {"committed": torch.tensor(self.committed)}

    def load_state_dict(self, state):
        self.committed = int(state["committed"])


def play(game, steps, depth):
    """Like `turn`, with several in flight; the cuts that arrived."""
    cuts = []
    for step in steps:
        game.feature.send_cut(game.inputs, step)
        cut = game.label.receive_cut(step, ROWS)
        cuts.append(cut.detach())
        (cut**2 / 2).sum().backward()
        game.label.send_gradient(game.labels)
        while game.feature.awaiting >= depth:
            game.feature.take_gradient()
    return cuts


@pytest.mark.parametrize("depth", [1, 3])
def test_both_ends_have_committed_the_same_steps_when_a_cut_travels(start, depth):
    """The state cancels out exactly when they have."""
    counting = play(start(codec=Counting, in_flight=depth), range(8), depth)
    plain = play(start(in_flight=depth), range(8), depth)
    torch.testing.assert_close(counting, plain)


def test_cuts_in_flight_are_made_again_from_the_state_they_were_made_with(start):
    game = start(codec=Counting, in_flight=3)
    play(game, range(6), 3)
    kept, sent = game.feature.training_state(), game.label.sent_state()
    assert [each["step"] for each in kept["in_flight"]] == [4, 5]
    assert [each["step"] for each in sent] == [4, 5]
    again = start(codec=Counting, in_flight=3)
    again.feature.load_training_state(kept, lambda step: (again.inputs, np.arange(ROWS)))
    again.label.send_again(sent)
    again.label.codec.load_state_dict(game.label.codec.state_dict())
    for each in (game, again):
        play(each, range(6, 11), 3)
        each.label.drained()
    assert again.digest() == game.digest()
    for each in (game, again):
        assert (each.feature.codec.committed, each.label.codec.committed) == (9, 11)
