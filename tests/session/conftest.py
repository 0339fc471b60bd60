from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

from vfl.compression import make as make_codec
from vfl.config import Experiment
from vfl.core.seeds import Secret, generator
from vfl.core.storage import weights_digest
from vfl.datasets import Dealing, load_bundled
from vfl.datasets.party import digest_of
from vfl.defenses import Defense
from vfl.session import FeatureEnd, LabelEnd, Terms
from vfl.session.exchange import HONEST, CutTerms, Own
from vfl.transport.link import LocalLink, local_pair

ROWS, COLUMNS, WIDTH = 5, 4, 3
RATE = 0.1


@pytest.fixture(scope="session")
def experiment():
    return Experiment.model_validate(
        {
            "name": "trial",
            "seed": 5,
            "codec": "topk:k=3",
            "parties": {"bank": {"width": 8, "bottom": "mlp:hidden=4"}, "shop": {"width": 6}},
            "label": {"party": "lender"},
            "train": {"epochs": 2, "batch_size": 50},
        }
    )


@pytest.fixture
def terms(experiment):
    return Terms.of(experiment, "train", "trial-1")


@pytest.fixture(scope="session")
def data():
    """Three parties over the same 200 pictures of digits."""
    return load_bundled("digits", ["bank", "shop"], "lender", Dealing(5, limit=200), flatten=True)


@pytest.fixture
def with_ids():
    """A party's data as if its rows had these ids."""
    return lambda data, ids: replace(data, ids_digest=digest_of(np.array(ids)))


@dataclass
class Round:
    """Both ends and their links; `turn` plays one training exchange."""

    feature: FeatureEnd
    label: LabelEnd
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
        terms = [CutTerms("bank", WIDTH, codec, defense, in_flight) for codec in codecs]
        own = Own(secret or Secret.of_simulation(0, "bank"), adversary)
        feature = FeatureEnd(terms[0], bottom or new_bottom(), own, here, optimizer)
        own = Own(Secret.of_simulation(0, "lender"), label_adversary)
        label = LabelEnd(terms[1], own, there)
        inputs = torch.randn(ROWS, COLUMNS, generator=generator(0, "inputs"))
        return Round(feature, label, here, there, inputs)

    return build
