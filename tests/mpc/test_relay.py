"""Three parties of whom one carries what the others send each other, and cannot read it."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from vfl.core.errors import AuthenticationError, ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret
from vfl.mpc import Rules, make_party
from vfl.mpc.engine import traffic
from vfl.mpc.in_process import Star
from vfl.mpc.rules import NAMES
from vfl.mpc.secure.ends import Framed
from vfl.mpc.secure.keys import TAG_BYTES, pair_seals
from vfl.mpc.secure.permuted import Permuted
from vfl.mpc.three_party.network import Layer
from vfl.mpc.three_party.training import ThreePartyNetwork, first_weights
from vfl.session.relay import SealedLinks, Switchboard

COLUMNS, ROWS = (3, 2), 40
X = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0)).double()
Y = (X.sum(1, keepdim=True) > 0).double()
LAYERS = [Layer(5, 4, "relu"), Layer(4, 1, "sigmoid")]


def outer_links(streams, name):
    """The links of a party at an outer end, with a key that nobody else needs to know here."""
    peers = list(streams.outer)
    (other,) = set(peers) - {name}
    stream = Framed(streams.outer[name], Permuted(), 1 + peers.index(other))
    seals = pair_seals(name, {other: bytes(32)})
    return SealedLinks(stream, seals, peers, 64, Permuted().about)


class Session:
    """Three parties in threads, of whom one carries what the others say, and what passes there."""

    def __init__(self, middle, tamper=lambda frame: frame, timeout_s=60):
        self.middle, self.seen, self.links = middle, [], {}
        self.streams = Star(NAMES, NAMES[middle], timeout_s=timeout_s)
        for stream in self.streams.inner.values():
            stream.send = lambda frame, send=stream.send: send(tamper(frame))
        for name in self.streams.outer:
            links = outer_links(self.streams, name)
            self.links[NAMES.index(name)] = {
                middle: links.direct,
                **{NAMES.index(other): link for other, link in links.others.items()},
            }
        inner = {
            name: Framed(stream, Permuted(), 1 + at)
            for at, (name, stream) in zip((1, 0), self.streams.inner.items(), strict=True)
        }

        def receive_any():
            self.seen.append(self.streams.receive_any())
            name, frame = self.seen[-1]
            return name, inner[name].taken(frame)

        self.relay = Switchboard(inner, receive_any, lambda one, two: one != two, 64).links
        self.links[middle] = {NAMES.index(name): link for name, link in self.relay.items()}

    def run(self, program, mode):
        """The parties, and what the program gave each."""

        def play(party):
            result = program(party)
            if party.role == self.middle:
                for name in self.streams.outer:
                    assert self.relay[name].receive().kind is Kind.DONE
            else:
                self.streams.outer[NAMES[party.role]].send(Frame(Kind.DONE))
            return result

        parties = [make_party(role, self.links[role], Rules(mode)) for role in range(3)]
        with ThreadPoolExecutor(3) as pool:
            return parties, list(pool.map(play, parties))


def train(party, label_role=2):
    """Two steps and the outputs of all rows, under keys that are always the same."""
    for peer in party.channels:
        pair = sorted((party.role, peer))
        party.use_key(peer, bytes([10 * pair[0] + pair[1]]) * 32, "session", 0)
    network = ThreePartyNetwork(party, LAYERS, COLUMNS, label_role)
    holds = network.holds_shares
    secret = Secret.of_simulation(4, f"P{party.role}")
    network.share_weights(first_weights(LAYERS, secret) if holds else None)
    network.share_rows("train", ROWS, X.split(COLUMNS, 1)[party.role] if holds else None, "x")
    network.share_targets(ROWS, Y if party.role == label_role else None)
    for start in (0, 8):
        network.train_step(torch.arange(start, start + 8), 0.5)
    return network.outputs("train", torch.arange(ROWS), "outputs"), network.weights()


@pytest.mark.parametrize("mode", ["thesis", "fast"])
@pytest.mark.parametrize("middle", [0, 1, 2])
def test_it_makes_no_difference_who_stands_in_the_middle(mode, middle):
    parties, found = Session(middle).run(train, mode)
    others, wanted = Session((middle + 1) % 3).run(train, mode)
    for (outputs, weights), (expected, shares) in zip(found, wanted, strict=True):
        assert (outputs is None) == (expected is None)
        assert outputs is None or torch.equal(outputs, expected)
        assert all(torch.equal(value, weights[name]) for name, value in shares.items())
    assert [traffic(each) for each in parties] == [traffic(each) for each in others]


@pytest.mark.parametrize("mode", ["thesis", "fast"])
def test_the_dealer_in_the_middle_cannot_undo_its_masks(mode):
    """What P0 and P1 open, less the masks that P2 dealt, would be their columns and weights."""
    plain, carried = [], []
    star = Session(2)

    def program(party):
        for peer, channel in party.channels.items():
            send = channel.send_bytes

            def watched(payload, number, phase, send=send, peer=peer):
                if party.role != 2 and peer != 2:
                    plain.append((number, bytes(payload)))
                send(payload, number, phase)

            channel.send_bytes = watched
        return train(party)

    star.run(program, mode)
    carried = [frame for _, frame in star.seen if frame.kind is Kind.OPENING]
    assert len(carried) == len(plain) > 5
    assert sum(len(frame.payload) for frame in carried) == sum(
        len(payload) + TAG_BYTES for _, payload in plain
    )
    seen = b"".join(bytes(frame.payload) for frame in carried)
    assert not any(payload[:16] in seen for _, payload in plain if len(payload) >= 16)
    ones = np.unpackbits(np.frombuffer(seen, np.uint8)).mean()
    assert abs(ones - 0.5) < 5 * 0.5 / (8 * len(seen)) ** 0.5


def test_a_changed_message_does_not_open():
    def flipped(frame):
        if frame.kind is not Kind.OPENING or frame.step < 3:
            return frame
        payload = bytearray(frame.payload)
        payload[0] ^= 1
        return Frame(frame.kind, frame.step, payload)

    with pytest.raises(AuthenticationError):
        Session(2, flipped, timeout_s=0.5).run(train, "fast")


def test_who_waits_for_one_party_keeps_few_messages_of_another():
    streams = Star(NAMES, "P2", timeout_s=60)
    outer = outer_links(streams, "P0")
    for kind in (Kind.OPENING, Kind.PROTOCOL, Kind.ACK):
        streams.inner["P0"].send(Frame(kind, 7))
    assert [outer.direct.receive().kind for _ in range(2)] == [Kind.PROTOCOL, Kind.ACK]
    with pytest.raises(AuthenticationError):
        outer.others["P1"].receive()
    for _ in range(65):
        streams.inner["P0"].send(Frame(Kind.OPENING))
    with pytest.raises(ProtocolError):
        outer.direct.receive()
