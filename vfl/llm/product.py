"""Registration of `vfl.llm` with the kernel."""

from __future__ import annotations

from vfl.core.products import Product

LLM_FILE = "llm.toml"

PRODUCT = Product(
    commands={"Train and predict": {"llm": "vfl.llm.command:llm"}},
    members={
        "vfl.mpc.private": {
            "decoder": "vfl.llm.private_decoder:PrivateDecoder",
            "encoder": "vfl.llm.private_decoder:PrivateEncoder",
        }
    },
    files={LLM_FILE: "vfl.llm.file:LlmFile"},
    ledgers=("vfl.llm.ledger:questions_of",),
    listeners={LLM_FILE: "vfl llm serve or deal"},
)
