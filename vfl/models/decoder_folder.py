"""A decoder in a folder: config.json with its shape, model.safetensors with its weights.

Folders of others are read too: see `vfl.models.pretrained`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vfl.core.errors import DataError, MissingDataError, VFLError
from vfl.core.storage import write_bytes, write_text
from vfl.models.decoder import Decoder, DecoderShape

MODEL_TYPE = "vfl-decoder"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20


def save_decoder(folder: Path, model: Decoder) -> None:
    """Write a decoder; a tied head is not written twice."""
    from safetensors.torch import save

    state = {name: each.contiguous().clone() for name, each in model.state_dict().items()}
    if model.shape.tied:
        del state["head.weight"]
    write_bytes(folder / _WEIGHTS, save(state))
    config = {"model_type": MODEL_TYPE, **asdict(model.shape)}
    write_text(folder / _CONFIG, json.dumps(config, indent=2) + "\n")


def load_decoder(folder: Path) -> Decoder:
    """Read a decoder, of this package or in the Hugging Face layout.

    Raises:
        MissingDataError: a file is not there.
        DataError: the files are no decoder's, or do not fit each other.
    """
    from vfl.models.pretrained import DECODERS, load_pretrained

    if model_type(folder) in DECODERS:
        found = load_pretrained(folder)
        assert isinstance(found, Decoder), "of these layouts"
        return found
    from safetensors import SafetensorError
    from safetensors.torch import load

    config = _config(folder / _CONFIG)
    try:
        model = Decoder(DecoderShape(**config))
        state = load(_read(folder / _WEIGHTS))
        if model.shape.tied and "tokens.weight" in state:
            state["head.weight"] = state["tokens.weight"]
        model.load_state_dict(state)
    except VFLError:
        raise
    except (TypeError, RuntimeError, SafetensorError) as problem:
        raise DataError(
            "this folder holds no decoder",
            where=str(folder),
            got=type(problem).__name__,
            want=f"{_CONFIG} with the shape, and {_WEIGHTS} with weights of that shape",
        ) from None
    return model.eval()


def model_type(folder: Path) -> object:
    """What a folder's config.json says it is; None where it says nothing."""
    try:
        found = json.loads(_read(folder / _CONFIG)[:_MOST_CONFIG_BYTES])
    except ValueError:
        return None
    kind = found.get("model_type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None


def _config(path: Path) -> dict[str, Any]:
    content = _read(path)[:_MOST_CONFIG_BYTES]
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.pop("model_type", None) != MODEL_TYPE:
        raise DataError(
            "this is no decoder's config.json", where=str(path), want=f"model_type {MODEL_TYPE!r}"
        )
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        raise MissingDataError("a decoder's file is missing", where=str(path)) from None
