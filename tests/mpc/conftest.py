import itertools

import pytest
import torch

from vfl.mpc.rules import Rules
from vfl.mpc.three_party.network import Layer, Network
from vfl.mpc.three_party.trio import Trio


def draw(*shape, seed=0, scale=1.0):
    source = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=source, dtype=torch.float64)


class Plain:
    """The same network in plaintext."""

    def __init__(self, layers, values):
        self.layers, self.values = layers, values

    def __call__(self, inputs, *, last=True):
        values = inputs
        for index, layer in enumerate(self.layers):
            values = values @ self.values[f"{index}.weight"] + self.values.get(f"{index}.bias", 0)
            if layer.function and (last or index < len(self.layers) - 1):
                values = getattr(torch, layer.function)(values)
        return values


class Setting:
    """Three parties that have shared weights of P1, targets of P1 and inputs of both holders."""

    def __init__(self, mode, layers, inputs, targets=None, values=None, **rules):
        self.layers = layers
        self.inputs, self.targets = inputs, targets
        self.values = {}
        for index, layer in enumerate(layers):
            scale = layer.inputs**-0.5
            self.values[f"{index}.weight"] = draw(
                layer.inputs, layer.outputs, seed=index, scale=scale
            )
            if layer.bias:
                self.values[f"{index}.bias"] = draw(layer.outputs, seed=100 + index, scale=0.1)
        self.values |= values or {}
        self.plain = Plain(layers, self.values)
        self.trio = Trio(Rules(mode, **rules), timeout_s=60)
        self.networks, self.shared, self.labels = [None] * 3, [None] * 3, [None] * 3
        self.trio.run(self._share)
        self.trio.hops()

    def _share(self, party):
        role = party.role
        own = self.values if role == 1 else None
        self.networks[role] = Network.share(party, self.layers, 1, own)
        halves = self.inputs.tensor_split(2, 1)
        left, right = (
            party.share(owner, half.shape, half if role == owner else None, "inputs")
            for owner, half in enumerate(halves)
        )
        (self.shared[role],) = party.open(left.beside(right), phase="setup")
        if self.targets is not None:
            y, bits = self.targets if role == 1 else None, party.rules.delta_bits
            self.labels[role] = party.share(1, self.targets.shape, y, "targets", bits)

    def infer(self):
        def program(party):
            outputs = self.networks[party.role].infer(party, self.shared[party.role])
            return party.reveal(outputs, "outputs", 0)

        return self.trio.run(program)[0]

    def train_step(self, loss, learning_rate):
        def program(party):
            role = party.role
            network = self.networks[role]
            network.train_step(party, self.shared[role], self.labels[role], loss, learning_rate)

        self.trio.run(program)

    def weights(self):
        return self.trio.run(lambda party: self.networks[party.role].reveal(party, 1))[1]


@pytest.fixture
def setting():
    made = []

    def make(*arguments, **more):
        made.append(Setting(*arguments, **more))
        return made[-1]

    yield make
    for each in made:
        each.trio.close()


@pytest.fixture(scope="session")
def chain():
    """Layers of some widths, with a function between them and one at the end."""

    def make(*widths, function="relu", last="sigmoid", bias=True):
        pairs = list(itertools.pairwise(widths))
        names = [function] * (len(pairs) - 1) + [last]
        return [
            Layer(inputs, outputs, name, bias)
            for (inputs, outputs), name in zip(pairs, names, strict=True)
        ]

    return make
