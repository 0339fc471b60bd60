"""Defenses: they change labels, models, cuts or gradients, so that these disclose less.

In a spec, ``+`` joins several defenses: ``make("layer_norm+none")``.

To add a defense, write one file with a subclass of `Defense`, add one line to `DEFENSES` below, and
run the contract tests of `vfl.testing`. Another package registers its defense by an entry point in
the group ``vfl.defenses``.
"""

from __future__ import annotations

from vfl.core.registry import Registry, parts
from vfl.defenses.base import (
    Chain,
    Defense,
    LabelKind,
    Side,
    protects,
    uses,
)
from vfl.privacy import PrivacyStatement

DEFENSES: Registry[Defense] = Registry(
    kind="defense",
    contract=Defense,
    members={
        "none": "vfl.defenses.base:Undefended",
        "layer_norm": "vfl.defenses.potential:LayerNorm",
        "potential": "vfl.defenses.potential:Potential",
        "dcor": "vfl.defenses.dcor:LabelCorrelation",
        "nopeek": "vfl.defenses.dcor:NoPeek",
        "probe": "vfl.defenses.probe:Probe",
        "bottleneck": "vfl.defenses.bottleneck:Bottleneck",
        "confusion": "vfl.defenses.confusion:Confusion",
        "label_free": "vfl.defenses.label_free:LabelFree",
        "anchored": "vfl.defenses.label_free:Anchored",
        "pretrained": "vfl.defenses.label_free:Pretrained",
        "few_rounds": "vfl.defenses.few_rounds:FewRounds",
        "label_dp": "vfl.defenses.label_dp:LabelDP",
        "label_dp_two_stage": "vfl.defenses.label_dp:TwoStageLabelDP",
        "gradient_noise": "vfl.defenses.noise:GradientNoise",
        "tpsl": "vfl.defenses.tpsl:TranscriptPrivacy",
        "marvell": "vfl.defenses.marvell:Marvell",
        "max_norm": "vfl.defenses.marvell:MaxNorm",
        "clipped_noise": "vfl.defenses.noise:ClippedNoise",
        "mixup": "vfl.defenses.mixup:Mixup",
        "gradient_averaging": "vfl.defenses.gradients:GradientAveraging",
        "gradient_sparsification": "vfl.defenses.gradients:GradientSparsification",
        "passport": "vfl.defenses.passport:Passport",
        "vflip": "vfl.defenses.purification:VFLIP",
        "copur": "vfl.defenses.purification:CoPur",
        "subspace_votes": "vfl.defenses.subspace_votes:SubspaceVotes",
        "santext": "vfl.defenses.sanitisation:SanText",
        "custext": "vfl.defenses.sanitisation:CusText",
        "split_and_denoise": "vfl.defenses.split_and_denoise:SplitAndDenoise",
        "split_guard": "vfl.defenses.split_guard:SplitGuard",
    },
    group="vfl.defenses",
    aliases={
        "cae": "confusion",
        "mid": "bottleneck",
        "fedpass": "passport",
        "snd": "split_and_denoise",
    },
)


def make(spec: str) -> Defense:
    """Build the defense that a spec names; for ``a+b``, defense a is applied before defense b.

    Raises:
        SpecError: a name or an option is unknown (the error suggests the most similar known name),
            or one defense of the chain would invalidate another one's guarantee.
    """
    members = [DEFENSES.make(part) for part in parts(spec)]
    return members[0] if len(members) == 1 else Chain(members)


__all__ = [
    "DEFENSES",
    "Chain",
    "Defense",
    "LabelKind",
    "PrivacyStatement",
    "Side",
    "make",
    "parts",
    "protects",
    "uses",
]
