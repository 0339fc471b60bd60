"""Codecs: each one converts a cut-layer activation (cut) and its gradient to bytes and back.

>>> make("topk:k=3,values=8").formula_ratio(width=128) < 0.03
True

To add a codec, write one file with a subclass of `Codec`, add one line to `CODECS` below, and run
the contract tests of `vfl.testing`. Another package registers its codec by an entry point in the
group ``vfl.codecs``.
"""

from __future__ import annotations

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, StepContext, Symbols
from vfl.core.registry import Registry

CODECS: Registry[Codec] = Registry(
    kind="codec",
    contract=Codec,  # type: ignore[type-abstract]
    members={
        "none": "vfl.compression.none:Uncompressed",
        "topk": "vfl.compression.topk:TopK",
        "randtopk": "vfl.compression.topk:RandTopK",
        "quantise": "vfl.compression.quantise:Quantise",
        "relu": "vfl.compression.relu:Rectified",
        "l1": "vfl.compression.relu:L1",
        "size": "vfl.compression.size:Size",
        "sign": "vfl.compression.size:Sign",
        "rate": "vfl.compression.rate:Rate",
        "error_feedback": "vfl.compression.feedback:ErrorFeedback",
        "aqsgd": "vfl.compression.feedback:AQSGD",
        "c3sl": "vfl.compression.bound:Bound",
        "splitfc": "vfl.compression.columns:Columns",
        "bottlenet": "vfl.compression.bottlenet:BottleNet",
        "fedlite": "vfl.compression.codebook:ProductQuantise",
    },
    group="vfl.codecs",
    aliases={"efvfl": "error_feedback"},
)

#: Builds the codec that a spec names, such as ``randtopk:k=4,alpha=0.1,values=8``.
make = CODECS.make


__all__ = ["CODECS", "INFERENCE", "Codec", "Decoded", "Encoded", "StepContext", "Symbols", "make"]
