"""Attacks: what an attacker makes of what it saw, under a threat model that is named.

>>> make("logistic:scaler=whiten").goal
'labels'

To add an attack: one file with a subclass of `Attack`, one line below (or, from another package,
an entry point in the group ``vfl.attacks``), and the contract tests of `vfl.testing`. The
"spectral attack" of Sun et al. 2022 is `principal`; `spectral` clusters.
"""

from __future__ import annotations

from vfl.attacks.base import Attack, Goal
from vfl.attacks.evidence import Evidence, Heard, Holdings, Sent
from vfl.attacks.threat import Grant, ThreatModel
from vfl.attacks.view import Seen, View
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
        "joined_propagation": "vfl.attacks.joined_propagation:JoinedPropagation",
        "self_training": "vfl.attacks.self_training:SelfTraining",
        "teacher_student": "vfl.attacks.teacher_student:TeacherStudent",
        "unfreeze": "vfl.attacks.unfreeze:Unfreeze",
        "model_completion": "vfl.attacks.model_completion:ModelCompletion",
        "kmeans": "vfl.attacks.kmeans:KMeans",
        "gaussian_mixture": "vfl.attacks.gaussian_mixture:GaussianMixture",
        "spectral": "vfl.attacks.spectral:Spectral",
        "principal": "vfl.attacks.principal:Principal",
        "averaging": "vfl.attacks.averaging:Averaging",
        "pooled": "vfl.attacks.pooled:Pooled",
        "subtraction": "vfl.attacks.subtraction:Subtraction",
        "scratch": "vfl.attacks.scratch:Scratch",
        "direct_label": "vfl.attacks.direct_label:DirectLabel",
        "gradient_norm": "vfl.attacks.gradient_norm:GradientNorm",
        "gradient_direction": "vfl.attacks.gradient_direction:GradientDirection",
        "gradient_similarity": "vfl.attacks.gradient_similarity:GradientSimilarity",
        "surrogate": "vfl.attacks.surrogate:Surrogate",
        "inversion": "vfl.attacks.inversion:Inversion",
        "white_box_inversion": "vfl.attacks.white_box_inversion:WhiteBoxInversion",
        "unsplit": "vfl.attacks.unsplit:UnSplit",
        "pseudo_client": "vfl.attacks.pseudo_client:PseudoClient",
        "generative": "vfl.attacks.generative:Generative",
        "attribute": "vfl.attacks.attribute:Attribute",
        "membership": "vfl.attacks.membership:Membership",
        "likelihood_ratio": "vfl.attacks.likelihood_ratio:LikelihoodRatio",
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
    "Sent",
    "ThreatModel",
    "View",
    "make",
]
