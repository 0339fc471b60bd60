"""Defenses: what is done to labels, models, cuts and gradients so that they tell less.

Several are joined with ``+``: ``make("layer_norm+none")``.

To add a defense: one file with a subclass of `Defense`, one line below (or, from another package,
an entry point in the group ``vfl.defenses``), and the contract tests of `vfl.testing`.
"""

from __future__ import annotations

from vfl.defenses.base import Defense, LabelKind, PrivacyStatement, Side
from vfl.defenses.chain import Chain, uses
from vfl.registry import Registry, parts

DEFENSES: Registry[Defense] = Registry(
    kind="defense",
    contract=Defense,
    members={
        "none": "vfl.defenses.none:Undefended",
        "layer_norm": "vfl.defenses.layer_norm:LayerNorm",
        "potential": "vfl.defenses.potential:Potential",
        "dcor": "vfl.defenses.dcor:LabelCorrelation",
        "nopeek": "vfl.defenses.nopeek:NoPeek",
        "probe": "vfl.defenses.probe:Probe",
        "bottleneck": "vfl.defenses.bottleneck:Bottleneck",
        "confusion": "vfl.defenses.confusion:Confusion",
        "label_free": "vfl.defenses.label_free:LabelFree",
        "anchored": "vfl.defenses.anchored:Anchored",
        "label_dp": "vfl.defenses.label_dp:LabelDP",
        "label_dp_two_stage": "vfl.defenses.label_dp_two_stage:TwoStageLabelDP",
        "gradient_noise": "vfl.defenses.gradient_noise:GradientNoise",
        "tpsl": "vfl.defenses.tpsl:TranscriptPrivacy",
        "marvell": "vfl.defenses.marvell:Marvell",
        "max_norm": "vfl.defenses.max_norm:MaxNorm",
        "clipped_noise": "vfl.defenses.clipped_noise:ClippedNoise",
        "mixup": "vfl.defenses.mixup:Mixup",
        "gradient_averaging": "vfl.defenses.gradient_averaging:GradientAveraging",
        "gradient_sparsification": "vfl.defenses.gradient_sparsification:GradientSparsification",
        "passport": "vfl.defenses.passport:Passport",
        "split_guard": "vfl.defenses.split_guard:SplitGuard",
    },
    group="vfl.defenses",
)


def make(spec: str) -> Defense:
    """The defense a spec names; ``a+b`` applies a, then b.

    Raises:
        SpecError: an unknown name or option, with the nearest known one, or two members of which
            one makes the other's promise untrue.
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
    "uses",
]
