"""Attacks: each infers private values from the data that its threat model grants.

>>> make("logistic:scaler=whiten").goal
'labels'

The private values that an attack infers decide its folder: `labels`, `inputs` or `membership`. The
folder `active` contains adversaries that tamper with a training; the file `permuted` contains
attacks on the permuted values of a private network. The attacks in `wrappers` change the attacker's
evidence and pass it to another attack. To understand one attack, read `base`, the attack's own
file, and the file of its base class. Other modules run the attacks: `view` (threat models and their
grants), `transcript` (all messages about each row), `cases` (the data of a victim or of a recorded
training), `scoring` and `baselines`.

To add an attack, write one file with a subclass of `Attack`, add one line to `ATTACKS` below, and
run the contract tests of `vfl.testing`. Another package registers its attack by an entry point in
the group ``vfl.attacks``. `principal` is the "spectral attack" of Sun et al. 2022; the attack
`spectral` clusters rows.
"""

from __future__ import annotations

from vfl.attacks.base import Attack, Goal
from vfl.attacks.transcript import RecordedExchange, SentCuts, Transcript
from vfl.attacks.view import (
    Evidence,
    Grant,
    GrantedRows,
    Holdings,
    ThreatModel,
    View,
)
from vfl.core.registry import Registry

ATTACKS: Registry[Attack] = Registry(
    kind="attack",
    contract=Attack,  # type: ignore[type-abstract]
    members={
        "adaptive": "vfl.attacks.labels.adaptive:Adaptive",
        "fine_tuning": "vfl.attacks.labels.classifiers:FineTuning",
        "logistic": "vfl.attacks.labels.classifiers:Logistic",
        "svm": "vfl.attacks.labels.classifiers:SVM",
        "nearest_mean": "vfl.attacks.labels.classifiers:NearestMean",
        "knn": "vfl.attacks.labels.classifiers:KNN",
        "ridge": "vfl.attacks.labels.classifiers:Ridge",
        "discriminant": "vfl.attacks.labels.classifiers:Discriminant",
        "trees": "vfl.attacks.labels.classifiers:Trees",
        "mlp": "vfl.attacks.labels.classifiers:MLP",
        "label_propagation": "vfl.attacks.labels.propagation:LabelPropagation",
        "joined_propagation": "vfl.attacks.labels.propagation:JoinedPropagation",
        "self_training": "vfl.attacks.labels.classifiers:SelfTraining",
        "teacher_student": "vfl.attacks.labels.classifiers:TeacherStudent",
        "unfreeze": "vfl.attacks.labels.fine_tuning:Unfreeze",
        "model_completion": "vfl.attacks.labels.model_completion:ModelCompletion",
        "kmeans": "vfl.attacks.labels.clusters:KMeans",
        "gaussian_mixture": "vfl.attacks.labels.clusters:GaussianMixture",
        "spectral": "vfl.attacks.labels.clusters:Spectral",
        "principal": "vfl.attacks.labels.principal:Principal",
        "averaging": "vfl.attacks.wrappers:Averaging",
        "pooled": "vfl.attacks.wrappers:Pooled",
        "subtraction": "vfl.attacks.wrappers:Subtraction",
        "scratch": "vfl.attacks.labels.scratch:Scratch",
        "regression": "vfl.attacks.labels.regression:Regression",
        "direct_label": "vfl.attacks.labels.gradients:DirectLabel",
        "gradient_norm": "vfl.attacks.labels.gradients:GradientNorm",
        "gradient_direction": "vfl.attacks.labels.gradients:GradientDirection",
        "gradient_similarity": "vfl.attacks.labels.gradients:GradientSimilarity",
        "gradient_teacher": "vfl.attacks.labels.gradients:GradientTeacher",
        "gradient_mixture": "vfl.attacks.labels.gradient_mixture:GradientMixture",
        "batch_sums": "vfl.attacks.labels.batch_sums:BatchSums",
        "exact": "vfl.attacks.labels.exact:EXACT",
        "surrogate": "vfl.attacks.labels.surrogate:Surrogate",
        "inversion": "vfl.attacks.inputs.inversion:Inversion",
        "white_box_inversion": "vfl.attacks.inputs.white_box_inversion:WhiteBoxInversion",
        "text_inversion": "vfl.attacks.inputs.texts:TextInversion",
        "token_search": "vfl.attacks.inputs.texts:TokenSearch",
        "two_stage_inversion": "vfl.attacks.inputs.texts:TwoStageInversion",
        "token_network": "vfl.attacks.inputs.texts:TokenNetwork",
        "unsplit": "vfl.attacks.inputs.unsplit:UnSplit",
        "pseudo_client": "vfl.attacks.inputs.pseudo_client:PseudoClient",
        "sdar": "vfl.attacks.inputs.sdar:SDAR",
        "sdar_labels": "vfl.attacks.inputs.sdar:SDARLabels",
        "fora": "vfl.attacks.inputs.fora:FORA",
        "generative": "vfl.attacks.inputs.generative:Generative",
        "attribute": "vfl.attacks.inputs.attribute:Attribute",
        "membership": "vfl.attacks.membership.loss:Membership",
        "likelihood_ratio": "vfl.attacks.membership.likelihood_ratio:LikelihoodRatio",
    },
    group="vfl.attacks",
    aliases={"grna": "generative", "pmc": "model_completion"},
    former_options={
        "rate": "learning_rate",
        "bottom_rate": "bottom_learning_rate",
        "input_rate": "input_learning_rate",
        "model_rate": "model_learning_rate",
    },
    option_aliases={"of": "at"},
)


def make(spec: str) -> Attack:
    """Return the attack that a spec names, such as ``fine_tuning:steps=200,at=before``.

    Raises:
        SpecError: the name or an option is unknown; the error suggests the most similar known name.
    """
    return ATTACKS.make(spec)


__all__ = [
    "ATTACKS",
    "Attack",
    "Evidence",
    "Goal",
    "Grant",
    "GrantedRows",
    "Holdings",
    "RecordedExchange",
    "SentCuts",
    "ThreatModel",
    "Transcript",
    "View",
    "make",
]
