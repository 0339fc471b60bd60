"""Every attack under the contract that outside packages use too."""

import torch
from torch import nn

from vfl.attacks import ATTACKS, Evidence, Holdings, ThreatModel, View
from vfl.attacks.case import Case
from vfl.registry import parse
from vfl.seeds import generator
from vfl.testing import AttackContract, GradientAttackContract, InputAttackContract

SPECS = [
    "fine_tuning",
    "fine_tuning:at=before",
    "fine_tuning:at=inputs",
    "logistic",
    "logistic:scaler=whiten",
    "logistic:scaler=cosine,at=before",
    "logistic:scaler=none,at=inputs",
    "kmeans",
    "kmeans:starts=2,at=inputs",
]


class TestAttacks(AttackContract):
    specs = SPECS


class TestGradientAttacks(GradientAttackContract):
    specs = ("gradient_similarity", "gradient_similarity:epochs=2,rounds=0", "surrogate")
    epochs = 3


class TestGradientAttacksOnTwoClasses(GradientAttackContract):
    specs = ("gradient_norm:epochs=2", "gradient_direction", "gradient_direction:epochs=2")
    classes, positive = 2, 0.1


class TestDirectLabel(GradientAttackContract):
    specs = ("direct_label", "direct_label:epochs=2")
    width = 3
    top = "identity"


class TestInputAttacks(InputAttackContract):
    specs = (
        "inversion:steps=200",
        "white_box_inversion:steps=150",
        "pseudo_client:steps=200,rate=0.01,align=10",
    )


class TestGenerative(InputAttackContract):
    """Of four columns two resemble the label party's own; the predictions tell of the others."""

    specs = ("generative:steps=300,rate=0.01",)
    joint, wins = True, 0.8


class TestUnSplit(InputAttackContract):
    """A bottom whose architecture leaves one number open."""

    specs = ("unsplit:rounds=10",)

    def recipe(self):
        return nn.Sequential(nn.PReLU(), nn.Flatten())


class TestPictures(InputAttackContract):
    specs = ("inversion:steps=200", "white_box_inversion:steps=150", "unsplit:rounds=10")

    def recipe(self):
        return nn.Sequential(nn.PReLU(), nn.Flatten())

    def _rows(self, draw):
        """Pictures of 4 x 2: a bright corner for each class."""
        inputs, labels = super()._rows(draw)
        return inputs.repeat_interleave(2, dim=1).view(-1, 1, 4, 2), labels


class TestAttribute(AttackContract):
    specs = ("attribute",)

    def case(self, leaking, grants):
        draw = generator(0, "attribute", int(leaking))
        values = torch.arange(self.rows) % self.classes
        means = 4 * leaking * torch.eye(self.classes, self.width)[values]
        cuts = means + torch.randn(self.rows, self.width, generator=draw)
        view = View(
            ThreatModel("label party", "inference", grants),
            self.classes,
            Holdings(Evidence(cuts=cuts[60:]), Evidence(cuts=cuts[:60], labels=values[:60])),
        )
        return Case(view, values[60:])


CONTRACTS = (
    TestAttacks,
    TestGradientAttacks,
    TestGradientAttacksOnTwoClasses,
    TestDirectLabel,
    TestInputAttacks,
    TestGenerative,
    TestUnSplit,
    TestPictures,
    TestAttribute,
)


def test_every_attack_is_under_contract():
    specs = [spec for contract in CONTRACTS for spec in contract.specs]
    assert {parse(spec)[0] for spec in specs} == set(ATTACKS.names())
