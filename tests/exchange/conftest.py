"""Two halves of a round, joined by a link in this process."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from vfl.compression import make as make_codec
from vfl.defenses import Defense
from vfl.exchange import FeatureHalf, LabelHalf
from vfl.exchange.adversary import HONEST
from vfl.seeds import Secret, generator
from vfl.storage import weights_digest
from vfl.transport.local import LocalLink, local_pair

ROWS, COLUMNS, WIDTH = 5, 4, 3
RATE = 0.1


@dataclass
class Round:
    """Both halves and their links; `turn` plays one training exchange."""

    feature: FeatureHalf
    label: LabelHalf
    feature_link: LocalLink
    label_link: LocalLink
    inputs: torch.Tensor
    labels: torch.Tensor = field(default_factory=lambda: torch.arange(ROWS) % 2)

    def turn(self, step=0):
        """Loss: half the sum of squares of the cut, so that its gradient is the cut itself."""
        self.feature.send_cut(self.inputs, step)
        cut = self.label.receive_cut(step, len(self.inputs))
        (cut**2 / 2).sum().backward()
        self.label.send_gradient(self.labels)
        self.feature.take_gradient()
        return cut.detach()

    def digest(self):
        return weights_digest(self.feature.model.state_dict())


def new_bottom():
    bottom = nn.Linear(COLUMNS, WIDTH)
    with torch.no_grad():
        for parameter in bottom.parameters():
            parameter.normal_(generator=generator(0, "bottom"))
    return bottom


@pytest.fixture
def start():
    """Builds a round; everything has a plain default."""

    def build(
        bottom=None,
        codec="none",
        defense=None,
        adversary=HONEST,
        label_adversary=HONEST,
        secret=None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        in_flight=1,
    ):
        there, here = local_pair()
        codecs = [make_codec(codec) if isinstance(codec, str) else codec for _ in range(2)]
        codecs = [codec() if isinstance(codec, type) else codec for codec in codecs]
        defense = defense or Defense()
        feature = FeatureHalf(
            "bank",
            bottom or new_bottom(),
            WIDTH,
            codecs[0],
            defense,
            here,
            secret or Secret.of_simulation(0, "bank"),
            optimizer,
            adversary,
            in_flight,
        )
        label = LabelHalf(
            "bank",
            WIDTH,
            codecs[1],
            defense,
            there,
            Secret.of_simulation(0, "lender"),
            label_adversary,
            in_flight,
        )
        inputs = torch.randn(ROWS, COLUMNS, generator=generator(0, "inputs"))
        return Round(feature, label, here, there, inputs)

    return build
