"""A label party that looks for the pictures of digits behind one party's cuts, bottom by bottom."""

import copy

import torch
from torch import nn

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View
from vfl.attacks.active import make_adversary
from vfl.attacks.base import through
from vfl.attacks.scoring import Case
from vfl.config import Experiment
from vfl.core.seeds import generator, scoped
from vfl.datasets import load_bundled
from vfl.training.local import LocalSession

GRANTS = frozenset(
    {Grant.CUTS, Grant.LABELS, Grant.LEAKED_INPUTS, Grant.BOTTOM_RECIPE, Grant.TOP, Grant.OUTPUTS}
)


def convolution():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Flatten())


def convolutions():
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(8, 4, 3, padding=1)
    return nn.Sequential(*layers, nn.Flatten())


def convolution_dense():
    return nn.Sequential(convolution(), nn.LeakyReLU(), nn.Linear(512, 64))


def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


BOTTOMS = (convolution, convolutions, convolution_dense, dense)


def victim(bottom, seed, epochs=4, adversary=None):
    """Its case after a training, and the adversary that took part or None; a fifth leaked."""
    data = load_bundled("digits", ["bank"], seed, "lender", validation=0.2)
    inputs, label = data["bank"].inputs, data["lender"]
    with scoped(seed):
        trained = bottom()
    leaked, test = (torch.from_numpy(part) for part in (label.split.validation, label.split.test))
    known = Evidence(inputs[leaked], labels=label.labels[leaked])
    shape = tuple(inputs.shape[1:])
    if adversary is not None:
        adversary = make_adversary(adversary)
        threat = ThreatModel("label party", "training", GRANTS, behaviour="malicious")
        held = Holdings(leaked=known, new_bottom=bottom, shape=shape)
        adversary.begin(View(threat, 10, held).only(adversary.holds), generator(seed, "active"))
    session = LocalSession(
        Experiment.model_validate(
            {
                "seed": seed,
                "parties": {"bank": {"width": through(trained, inputs[:1]).shape[1]}},
                "label": {"party": "lender"},
                "train": {"epochs": epochs, "batch_size": 32},
            }
        ),
        data,
        outputs=10,
        bottoms={"bank": trained},
        adversaries={} if adversary is None else {"lender": adversary},
    ).run()
    cuts, top = through(session.clients[0].end.model["bottom"], inputs), session.label.model["top"]
    holdings = Holdings(
        targets=Evidence(None, cuts[test]),
        leaked=Evidence(inputs[leaked], cuts[leaked], label.labels[leaked]),
        new_bottom=bottom,
        top=lambda: copy.deepcopy(top),
        shape=shape,
    )
    view = View(ThreatModel("label party", "inference", GRANTS), 10, holdings)
    return Case(view, inputs=inputs[test]), adversary
