"""Every attack under the contract that outside packages use too."""

from vfl.attacks import ATTACKS
from vfl.registry import parse
from vfl.testing import AttackContract, GradientAttackContract

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


CONTRACTS = (
    TestAttacks,
    TestGradientAttacks,
    TestGradientAttacksOnTwoClasses,
    TestDirectLabel,
)


def test_every_attack_is_under_contract():
    specs = [spec for contract in CONTRACTS for spec in contract.specs]
    assert {parse(spec)[0] for spec in specs} == set(ATTACKS.names())
