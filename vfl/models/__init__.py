"""Bottoms, mergers and tops: the parts of a network, each with a name.

A feature party builds a bottom from the shape of its rows and the width of its cut. The label party
builds a merger from the widths of all cuts, and a top from the width of the merged cut. In split
training, no party receives another party's weights.

>>> make_top("linear").build(width=8, outputs=3)
Linear(in_features=8, out_features=3, bias=True)

To add a model, write a file with a subclass of `Bottom`, `Merger` or `Top`, add one line to the
registry below, and run the model's contract tests of `vfl.testing`. Another package declares an
entry point in the group ``vfl.models.bottoms``, ``vfl.mergers`` or ``vfl.models.tops``. For updates
of weights, see `vfl.models.optimizers`. A user's own model needs no registered name: `bring`
imports it from a path.
"""

from __future__ import annotations

from vfl.core.registry import Registry
from vfl.models.base import (
    Bottom,
    FixedBottom,
    JointBottom,
    Merger,
    Shape,
    Top,
    require_tokens,
)
from vfl.models.bring import bring, bring_top

BOTTOMS: Registry[Bottom] = Registry(
    kind="bottom",
    contract=Bottom,  # type: ignore[type-abstract]
    members={
        "mlp": "vfl.models.mlp:MLPBottom",
        "cnn": "vfl.models.pictures:CNNBottom",
        "resnet20": "vfl.models.pictures:ResNet20Bottom",
        "efficientnet_b0": "vfl.models.pictures:EfficientNetB0Bottom",
        "vit": "vfl.models.pictures:ViTBottom",
        "hog": "vfl.models.pictures:HOGBottom",
        "gru4rec": "vfl.models.sequences:GRU4RecBottom",
        "textcnn": "vfl.models.sequences:TextCNNBottom",
        "decoder_front": "vfl.models.language:DecoderFront",
        "decoder_middle": "vfl.models.language:DecoderMiddle",
        "pretrained": "vfl.models.features:PretrainedBottom",
        "periodic": "vfl.models.periodic:PeriodicBottom",
        "identity": "vfl.models.mlp:IdentityBottom",
    },
    group="vfl.models.bottoms",
)

MERGERS: Registry[Merger] = Registry(
    kind="merger",
    contract=Merger,  # type: ignore[type-abstract]
    members={
        "concat": "vfl.models.mergers:Concat",
        "sum": "vfl.models.mergers:Sum",
        "mean": "vfl.models.mergers:Mean",
        "max": "vfl.models.mergers:Maximum",
    },
    group="vfl.mergers",
)

TOPS: Registry[Top] = Registry(
    kind="top",
    contract=Top,  # type: ignore[type-abstract]
    members={
        "mlp": "vfl.models.mlp:MLPTop",
        "linear": "vfl.models.mlp:LinearTop",
        "decoder": "vfl.models.language:DecoderTop",
        "identity": "vfl.models.mlp:IdentityTop",
    },
    group="vfl.models.tops",
)
#: Makes the bottom that a spec names, such as ``mlp:hidden=64-32,last=relu``.
make_bottom = BOTTOMS.make

#: Makes the merger that a spec names, such as ``mean``.
make_merger = MERGERS.make

#: Makes the top that a spec names, such as ``mlp:hidden=64``.
make_top = TOPS.make


__all__ = [
    "BOTTOMS",
    "MERGERS",
    "TOPS",
    "Bottom",
    "FixedBottom",
    "JointBottom",
    "Merger",
    "Shape",
    "Top",
    "bring",
    "bring_top",
    "make_bottom",
    "make_merger",
    "make_top",
    "require_tokens",
]
