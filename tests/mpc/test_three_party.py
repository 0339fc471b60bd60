"""One party's part of a network that nobody holds: the same network, and a way back into it."""

import io
from itertools import pairwise

import pytest
import torch
from torch import nn

from vfl.core.errors import PrivateLayerError, RunFolderError
from vfl.core.seeds import Secret
from vfl.mpc import Rules, Trio
from vfl.mpc.three_party import training as three_party
from vfl.mpc.three_party.network import Layer
from vfl.mpc.three_party.training import ThreePartyNetwork, first_weights, whole_network

ROWS, COLUMNS, RATE = 24, (3, 2), 0.3
X = torch.randn(ROWS, sum(COLUMNS), generator=torch.Generator().manual_seed(1)).double()
Y = (X.sum(1, keepdim=True) > 0).double()
TEST = torch.randn(5, sum(COLUMNS), generator=torch.Generator().manual_seed(2)).double()


def layers_of(*widths, last="sigmoid"):
    pairs = list(pairwise([sum(COLUMNS), *widths, 1]))
    return [Layer(*pair, "relu") for pair in pairs[:-1]] + [Layer(*pairs[-1], last)]


class Session:
    """Three parties under keys that depend on the attempt alone, and every frame they send."""

    def __init__(self, mode, layers, label_role=2, attempt=0):
        self.label_role, self.frames = label_role, {}
        self.trio = Trio(Rules(mode), timeout_s=60, agreed=False)
        for party in self.trio.parties:
            for peer in party.channels:
                secret = bytes([10 * min(party.role, peer) + max(party.role, peer)]) * 32
                party.use_key(peer, secret, "session", attempt)
                self._watch(party, peer)
        self.networks = [
            ThreePartyNetwork(party, layers, COLUMNS, label_role) for party in self.trio.parties
        ]
        self.trio.run(self._prepare)

    def _watch(self, party, peer):
        sent = self.frames[party.role, peer] = []
        link = party.channels[peer].link
        send = link.send

        def watched(frame):
            sent.append((frame.step, bytes(frame.payload)))
            send(frame)

        link.send = watched

    def _prepare(self, party):
        network, role = self.networks[party.role], party.role
        network.share_weights(
            first_weights(network.layers, Secret.of_simulation(4, f"P{role}"))
            if network.holds_shares
            else None
        )
        for name, rows in (("train", X), ("test", TEST)):
            own = rows.split(COLUMNS, 1)[role] if network.holds_shares else None
            network.share_rows(name, len(rows), own, name)
        network.share_targets(ROWS, Y if role == self.label_role else None)

    def train(self, steps):
        def program(party):
            for step in steps:
                index = torch.arange(step, ROWS, 3)
                self.networks[party.role].train_step(index, RATE)

        self.trio.run(program)

    def outputs(self):
        every = torch.arange(len(TEST))
        return self.trio.run(lambda party: self.networks[party.role].outputs("test", every, "x"))

    def states(self):
        return self.trio.run(lambda party: self.networks[party.role].state_dict())

    def load(self, states, **how):
        self.trio.run(
            lambda party: self.networks[party.role].load_state_dict(states[party.role], **how)
        )

    def shares(self):
        return [network.weights() for network in self.networks]

    def since(self, number):
        """By operation, for P2 deals while it waits: which goes first hangs on time."""
        return {
            pair: sorted((each for each in sent if each[0] > number), key=lambda each: each[0])
            for pair, sent in self.frames.items()
        }

    def accounts(self):
        return self.trio.traffic(), self.trio.leaks()


@pytest.fixture
def session():
    made = []

    def make(*arguments, **more):
        made.append(Session(*arguments, **more))
        return made[-1]

    yield make
    for each in made:
        each.trio.close()


def through_a_file(states):
    """As checkpoints keep them."""
    content = io.BytesIO()
    torch.save(states, content)
    content.seek(0)
    return torch.load(content, weights_only=True)


def in_clear(layers, steps):
    halves = [first_weights(layers, Secret.of_simulation(4, f"P{role}")) for role in (0, 1)]
    weights = {name: (halves[0][name] + halves[1][name]).requires_grad_() for name in halves[0]}

    def forward(rows):
        for index, layer in enumerate(layers):
            rows = rows @ weights[f"{index}.weight"] + weights[f"{index}.bias"]
            if layer.function == "relu":
                rows = torch.relu(rows)
        return rows

    for step in steps:
        index = torch.arange(step, ROWS, 3)
        loss = nn.functional.binary_cross_entropy_with_logits(forward(X[index]), Y[index])
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for value, gradient in zip(weights.values(), gradients, strict=True):
                value -= RATE * gradient
    return forward(TEST).detach()


@pytest.mark.parametrize("mode", ["thesis", "fast"])
@pytest.mark.parametrize("label_role", [0, 1, 2])
def test_the_label_party_alone_is_disclosed_the_outputs_of_the_same_network(
    session, mode, label_role
):
    layers = layers_of(4)
    played = session(mode, layers, label_role)
    played.train(range(3))
    found = played.outputs()
    assert [each is not None for each in found] == [role == label_role for role in range(3)]
    wanted = in_clear(layers, range(3))
    assert float((found[label_role][:, 1:] - wanted).abs().max()) < 2e-3
    assert not found[label_role][:, 0].any()


@pytest.mark.parametrize("mode", ["thesis", "fast"])
def test_a_new_attempt_goes_on_under_new_keys(session, mode):
    layers = layers_of(4)
    whole = session(mode, layers)
    whole.train(range(2))
    whole.outputs()
    states = through_a_file(whole.states())
    whole.train(range(2, 4))

    resumed = session(mode, layers, attempt=1)
    resumed.load(states)
    for before, after in zip(states, resumed.shares(), strict=True):
        assert all(torch.equal(value, after[name]) for name, value in before["weights"].items())
    resumed.train(range(2, 4))
    assert float((resumed.outputs()[2] - whole.outputs()[2]).abs().max()) < 1e-3
    sent, again = whole.frames[0, 1], resumed.frames[0, 1]
    # All but index lists, of which most are empty, looks like new.
    assert not {each for _, each in sent if len(each) > 16} & {each for _, each in again}


def test_the_dealer_keeps_no_share_and_a_state_holds_no_key(session):
    played = session("fast", layers_of(4))
    played.train(range(1))
    states = played.states()
    assert states[2]["weights"] == {}
    assert set(states[0]) == {"weights", "openings", "operations", "leakage", "traffic"}
    assert all(each["openings"] == {} for each in states)  # weights have moved since


def test_shares_of_another_network_are_refused(session):
    states = session("fast", layers_of(4)).states()
    with pytest.raises(RunFolderError) as caught:
        session("fast", layers_of(3)).networks[0].load_state_dict(states[0])
    assert caught.value.where == "0.weight"


def test_bottoms_and_top_are_one_network():
    top = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    summed = whole_network((3, 2), 4, top, classes=2)
    assert summed == [Layer(5, 4), Layer(4, 3, "relu"), Layer(3, 1, "sigmoid")]
    beside = whole_network((3, 1), None, top, classes=0)
    assert beside == [Layer(4, 3, "relu"), Layer(3, 1)]
    with pytest.raises(PrivateLayerError):
        whole_network((3, 1), None, nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), classes=2)


@pytest.mark.parametrize("mode", ["thesis", "fast"])
@pytest.mark.parametrize("widths", [(), (4,), (12, 3)])
def test_no_frame_is_larger_than_what_is_announced(session, monkeypatch, mode, widths):
    monkeypatch.setattr(three_party, "BLOCK_BYTES", 1 << 8)
    layers = layers_of(*widths)
    played = session(mode, layers)
    played.train(range(2))
    played.outputs()
    largest = max(len(payload) for sent in played.frames.values() for _, payload in sent)
    most = three_party.most_frame_bytes(layers, ROWS // 3)
    assert largest <= most <= 8 * largest
