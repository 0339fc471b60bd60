"""A party's part of a network that nobody holds: its state, its frames, what it consists of."""

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
    """Three parties, of whom P2 has the labels, and every frame they send."""

    def __init__(self, mode, layers):
        self.frames = {}
        self.trio = Trio(Rules(mode), timeout_s=60)
        for party in self.trio.parties:
            for peer in party.channels:
                self._watch(party, peer)
        self.networks = [
            ThreePartyNetwork(party, layers, COLUMNS, 2) for party in self.trio.parties
        ]
        self.trio.run(self._prepare)

    def _watch(self, party, peer):
        sent = self.frames[party.role, peer] = []
        link = party.channels[peer].link
        send = link.send

        def watched(frame):
            sent.append(len(frame.payload))
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
        network.share_targets(ROWS, Y if role == 2 else None)

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


@pytest.fixture
def session():
    made = []

    def make(*arguments, **more):
        made.append(Session(*arguments, **more))
        return made[-1]

    yield make
    for each in made:
        each.trio.close()


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
    largest = max(size for sent in played.frames.values() for size in sent)
    most = three_party.most_frame_bytes(layers, ROWS // 3)
    assert largest <= most <= 8 * largest
