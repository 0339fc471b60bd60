"""Every attack under the contract that outside packages use too."""

import torch
from torch import nn

from vfl.attacks import ATTACKS, Evidence, Heard, Holdings, ThreatModel, View
from vfl.attacks.case import Case
from vfl.attacks.features import through
from vfl.attacks.fit import fit
from vfl.registry import parse
from vfl.seeds import generator, scoped
from vfl.testing import AttackContract, GradientAttackContract, InputAttackContract

SPECS = [
    "fine_tuning",
    "fine_tuning:at=before",
    "fine_tuning:at=inputs",
    "logistic",
    "logistic:scaler=whiten",
    "logistic:scaler=cosine,at=before",
    "logistic:scaler=none,at=inputs",
    "svm",
    "svm:scaler=none,at=bottom",
    "nearest_mean",
    "nearest_mean:measure=euclid,scaler=whiten",
    "knn",
    "knn:neighbours=1,scaler=cosine",
    "label_propagation",
    "label_propagation:scaler=standard,at=inputs",
    "self_training:scaler=whiten,rounds=2",
    "teacher_student",
    "teacher_student:student=top,rounds=1",
    "teacher_student:teacher=scratch,scaler=none,at=before",
    "unfreeze:steps=50",
    "model_completion:steps=60",
    "model_completion:steps=60,bottom_rate=0.001",
    "kmeans",
    "kmeans:starts=2,at=inputs",
    "gaussian_mixture",
    "gaussian_mixture:covariance=full,at=before",
    "gaussian_mixture:columns=4",
    "spectral",
    "spectral:most=100,at=inputs",
    "scratch",
    "scratch:unlabelled=true,rounds=1",
]


class TestAttacks(AttackContract):
    specs = SPECS


class TestScoresOfARareClass(AttackContract):
    """One row in four is positive, and lies apart from the others or not."""

    specs = ("principal", "principal:at=inputs")
    classes = 2

    def case(self, leaking, grants):
        positive = torch.arange(self.rows) % 4 == 0
        rows = torch.randn(self.rows, self.width, generator=generator(0, "rare"))
        rows[:, 2] -= 6.0 * leaking * positive
        threat = ThreatModel("feature party", "inference", grants)
        view = View(threat, self.classes, Holdings(Evidence(inputs=rows, cuts=rows)))
        return Case(view, positive.long(), positive=positive)


class TestNoisyCuts(AttackContract):
    """A label party recorded 16 epochs of cuts, each with noise far larger than the classes lie."""

    specs = ("averaging", "averaging:of=gaussian_mixture,last=14")

    def case(self, leaking, grants):
        draw = generator(0, "noisy")
        labels = torch.arange(self.rows) % self.classes
        clean = 6 * leaking * torch.eye(self.classes, self.width)[labels]
        cuts = clean + 5 * torch.randn(16, self.rows, self.width, generator=draw)
        heard = []
        for epoch, one in enumerate(cuts, start=1):
            order = torch.randperm(self.rows, generator=draw)
            heard.append(Heard(epoch, epoch, order, one[order], torch.zeros_like(one)))
        threat = ThreatModel("label party", "training", grants)
        holdings = Holdings(Evidence(cuts=cuts[-1]), heard=heard)
        return Case(View(threat, self.classes, holdings), labels)

    def test_one_noisy_cut_is_not_enough(self):
        single = self._attempt(ATTACKS.make("kmeans"), leaking=True)
        assert single.value < 0.75 < self._attempt(ATTACKS.make("averaging"), leaking=True).value


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

    specs = ("unsplit:rounds=10,input_rate=0.05",)

    def recipe(self):
        return nn.Sequential(nn.PReLU(), nn.Flatten())


class TestPictures(InputAttackContract):
    specs = (
        "inversion:steps=200",
        "white_box_inversion:steps=150",
        "unsplit:rounds=10,input_rate=0.05",
    )

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


class TestMembership(AttackContract):
    """Half the rows were trained on, until they were learned by heart; or none of them."""

    specs = ("membership", "likelihood_ratio:shadows=4,steps=100")
    width = 16
    wins = 0.8

    def case(self, leaking, grants):
        draw = generator(0, "membership")
        rows = 2 * self.rows
        inputs = torch.randn(rows, self.width, generator=draw)
        noise = 3 * torch.randn(rows, generator=draw)
        labels = (inputs[:, 0] + noise > 0).long()
        member = torch.arange(self.rows) % 2 == 0
        trained = torch.nonzero(member)[:, 0] if leaking else torch.arange(self.rows, rows)[::2]
        with scoped(4):
            net = nn.Sequential(nn.Linear(self.width, 128), nn.ReLU(), nn.Linear(128, self.classes))
        fit(net, inputs[trained], labels[trained], 200, 0.03, draw)
        holdings = Holdings(
            targets=Evidence(
                inputs[: self.rows], None, labels[: self.rows], through(net, inputs[: self.rows])
            ),
            leaked=Evidence(inputs[self.rows :], labels=labels[self.rows :]),
            new_bottom=lambda: nn.Sequential(nn.Linear(self.width, 128), nn.ReLU()),
            new_top=lambda width: nn.Linear(width, self.classes),
        )
        view = View(ThreatModel("outsider", "inference", grants), self.classes, holdings)
        return Case(view, labels[: self.rows], positive=member)


CONTRACTS = (
    TestAttacks,
    TestScoresOfARareClass,
    TestNoisyCuts,
    TestGradientAttacks,
    TestGradientAttacksOnTwoClasses,
    TestDirectLabel,
    TestInputAttacks,
    TestGenerative,
    TestUnSplit,
    TestPictures,
    TestAttribute,
    TestMembership,
)


def test_every_attack_is_under_contract():
    specs = [spec for contract in CONTRACTS for spec in contract.specs]
    assert {parse(spec)[0] for spec in specs} == set(ATTACKS.names())
