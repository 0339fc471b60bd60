"""Attacks: what an attacker makes of what it saw, under a threat model that is named.

>>> make("logistic:scaler=whiten").goal
'labels'

To add an attack: one file with a subclass of `Attack`, one line below (or, from another package,
an entry point in the group ``vfl.attacks``), and the contract tests of `vfl.testing`.
"""

from __future__ import annotations

from vfl.attacks.base import Attack, Goal
from vfl.attacks.threat import Grant, ThreatModel
from vfl.attacks.view import Evidence, Heard, Holdings, Seen, View
from vfl.registry import Registry

ATTACKS: Registry[Attack] = Registry(
    kind="attack",
    contract=Attack,  # type: ignore[type-abstract]
    members={
        "fine_tuning": "vfl.attacks.fine_tuning:FineTuning",
        "logistic": "vfl.attacks.logistic:Logistic",
        "svm": "vfl.attacks.svm:SVM",
        "nearest_mean": "vfl.attacks.nearest_mean:NearestMean",
        "knn": "vfl.attacks.knn:KNN",
        "label_propagation": "vfl.attacks.label_propagation:LabelPropagation",
        "self_training": "vfl.attacks.self_training:SelfTraining",
        "teacher_student": "vfl.attacks.teacher_student:TeacherStudent",
        "unfreeze": "vfl.attacks.unfreeze:Unfreeze",
        "model_completion": "vfl.attacks.model_completion:ModelCompletion",
        "kmeans": "vfl.attacks.kmeans:KMeans",
        "gaussian_mixture": "vfl.attacks.gaussian_mixture:GaussianMixture",
        "spectral": "vfl.attacks.spectral:Spectral",
        "principal": "vfl.attacks.principal:Principal",
        "averaging": "vfl.attacks.averaging:Averaging",
        "scratch": "vfl.attacks.scratch:Scratch",
    },
    group="vfl.attacks",
)


def make(spec: str) -> Attack:
    """The attack a spec names, such as ``fine_tuning:steps=200,at=before``.

    Raises:
        SpecError: an unknown name or option, with the nearest known one.
    """
    return ATTACKS.make(spec)


__all__ = [
    "ATTACKS",
    "Attack",
    "Evidence",
    "Goal",
    "Grant",
    "Heard",
    "Holdings",
    "Seen",
    "ThreatModel",
    "View",
    "make",
]
