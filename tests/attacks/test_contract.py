"""Every attack under the contract that outside packages use too."""

import torch

from vfl.attacks import ATTACKS, Evidence, Heard, Holdings, ThreatModel, View
from vfl.attacks.case import Case
from vfl.registry import parse
from vfl.seeds import generator
from vfl.testing import AttackContract

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
    "teacher_student:teacher=scratch,scaler=none,at=before",
    "unfreeze:steps=50",
    "model_completion:steps=60",
    "model_completion:steps=60,bottom_rate=0.001",
    "kmeans",
    "kmeans:starts=2,at=inputs",
    "gaussian_mixture",
    "gaussian_mixture:covariance=full,at=before",
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


def test_every_attack_is_under_contract():
    specs = [*SPECS, *TestScoresOfARareClass.specs, *TestNoisyCuts.specs]
    assert {parse(spec)[0] for spec in specs} == set(ATTACKS.names())
