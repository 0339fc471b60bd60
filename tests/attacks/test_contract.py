"""Every attack under the contract that outside packages use too."""

from vfl.attacks import ATTACKS
from vfl.registry import parse
from vfl.testing import AttackContract

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


def test_every_attack_is_under_contract():
    assert {parse(spec)[0] for spec in SPECS} == set(ATTACKS.names())
