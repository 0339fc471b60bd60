"""Transformers from a folder in the Hugging Face layout, and their tokenizer; no network.

The folder has `config.json`, `model.safetensors` (or its parts and their index) and
`tokenizer.json`. Four layouts are read: "gpt2", "llama" and "vfl-decoder" (of `save_decoder`) as a
`Decoder`, "bert" as an `Encoder`; see `load_pretrained`. A setting that these cannot compute is
refused, and so is a weight that nothing uses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from vfl.core.errors import DataError, MissingDataError, MissingPackageError
from vfl.core.storage import write_bytes, write_text
from vfl.models.decoder import Decoder, DecoderShape, Encoder, EncoderShape

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The layout of `save_decoder`.
OWN = "vfl-decoder"
TOKENIZER = "tokenizer.json"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_MOST_JSON_BYTES = 1 << 24
#: Functions by their names there.
_GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
#: Tensors that hold no weight: masks, and tables that follow from the configuration.
_NO_WEIGHT = re.compile(r"(\.attn\.(masked_)?bias|position_ids|rotary_emb\.inv_freq)$")

_State = dict[str, Tensor]


def load_pretrained(folder: Path) -> Decoder | Encoder:
    """The model of a folder, in evaluation and in float32.

    - ``gpt2``: weights tied or not, ``n_inner``, with or without the prefix ``transformer.``;
      functions other than GELU and scaling by layer are refused.
    - ``llama``: groups, biases, tied or not, ``rope_theta``, stretched positions of Llama 3.1;
      other stretchings and heads of a width of their own are refused.
    - ``bert``: for classification, pairs by segments; relative positions and decoders are refused.

    Raises:
        MissingDataError: a file is not there.
        DataError: a layout, setting or weight that is not what these models have; it is named.
    """
    config = _json(folder / _CONFIG)
    kind = config.get("model_type")
    layout = _LAYOUTS.get(kind) if isinstance(kind, str) else None
    if layout is None:
        raise _refused(folder, f"model_type {kind!r}", f"one of {', '.join(_LAYOUTS)}")
    weights = _Weights(folder)
    try:
        model = layout(_Config(folder, config), weights)
    except KeyError as missing:
        want = f"the settings and weights of {kind}"
        raise _refused(folder, f"no {missing.args[0]!r}", want) from None
    except (TypeError, RuntimeError) as problem:
        want = f"numbers in {_CONFIG}, and weights of their shapes"
        raise _refused(folder, type(problem).__name__, want) from problem
    if left := weights.left():
        raise _refused(
            folder, f"{len(left)} weights besides, such as {left[0]}", f"those of {kind}"
        )
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise _refused(folder / _WEIGHTS, f"NaN or infinity in '{name}'", "finite weights")
    return model.eval()


def save_decoder(folder: Path, model: Decoder) -> None:
    """Write a decoder's folder; a tied head is not written twice."""
    state = {name: each.contiguous().clone() for name, each in model.state_dict().items()}
    if model.shape.tied:
        del state["head.weight"]
    write_bytes(folder / _WEIGHTS, save(state))
    config = {"model_type": OWN, **asdict(model.shape)}
    write_text(folder / _CONFIG, json.dumps(config, indent=2) + "\n")


def names_of(folder: Path) -> dict[str, list[Any]]:
    """What a folder calls its outputs: `labels` of the classes, `end_tokens` of an answer.

    Raises:
        MissingDataError, DataError: no config.json, or one with no such numbers and names.
    """
    config = _json(folder / _CONFIG)
    labels, ends = config.get("id2label") or {}, config.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    try:
        ordered = [str(labels[key]) for key in sorted(labels, key=int)]
        return {"labels": ordered, "end_tokens": [int(one) for one in ends]}
    except (TypeError, ValueError):
        want = "id2label of numbers to names, eos_token_id a number"
        raise _refused(folder / _CONFIG, "other settings", want) from None


def require_tokenizer(folder: Path) -> None:
    """A folder of another layout than our own comes with its tokenizer.

    Raises:
        MissingDataError: this one does not.
    """
    if _json(folder / _CONFIG).get("model_type") != OWN and not (folder / TOKENIZER).is_file():
        raise _missing(folder / TOKENIZER)


def load_tokenizer(folder: Path) -> Tokenizer:
    """What turns text into the model's tokens and back: `encode(text).ids`, `decode(ids)`.

    Raises:
        MissingPackageError: the extra "llm" is not installed.
        MissingDataError, DataError: no tokenizer.json, or none that is one.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingPackageError(
            "a model's tokenizer is read by a package that is not installed",
            want="tokenizers",
            fix="pip install 'vfl[llm]'",
        ) from None
    path = folder / TOKENIZER
    if not path.is_file():
        raise _missing(path)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as problem:  # the package raises nothing narrower
        raise _refused(path, type(problem).__name__, "the file of the tokenizers package") from None


class _Config:
    """Settings of config.json; those that change what is computed have one value they may have."""

    def __init__(self, folder: Path, found: Mapping[str, Any]) -> None:
        self._folder, self._found = folder, found

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def get(self, name: str, default: Any = None) -> Any:
        found = self._found.get(name)
        return default if found is None else found

    def rest(self, *without: str) -> dict[str, Any]:
        return {name: each for name, each in self._found.items() if name not in without}

    def require(self, **wanted: Any) -> None:
        for name, want in wanted.items():
            if self.get(name, want) != want:
                raise _refused(self._folder, f"{name} = {self.get(name)!r}", f"{name} = {want!r}")

    def choose(self, name: str, choices: Mapping[str, str], default: str) -> str:
        got = self.get(name, default)
        if got not in choices:
            raise _refused(self._folder, f"{name} = {got!r}", f"one of {', '.join(choices)}")
        return choices[got]


class _Weights:
    """Tensors of a folder by name, each taken once."""

    def __init__(self, folder: Path) -> None:
        files = {_WEIGHTS}
        if not (folder / _WEIGHTS).is_file() and (folder / _INDEX).is_file():
            listed = _json(folder / _INDEX).get("weight_map")
            files = set(listed.values()) if isinstance(listed, dict) else set()
            if not files or not all(
                isinstance(one, str) and Path(one).name == one for one in files
            ):
                raise _refused(folder / _INDEX, "another weight_map", "file names in this folder")
        self._found: _State = {}
        for name in sorted(files):
            if not (folder / name).is_file():
                raise _missing(folder / name)
            try:
                self._found |= load_file(folder / name)
            except SafetensorError as problem:
                raise _refused(folder / name, type(problem).__name__, "safetensors") from None

    def has(self, name: str) -> bool:
        return name in self._found

    def take(self, name: str) -> Tensor:
        return self._found.pop(name).float()

    def drop(self, name: str) -> None:
        self._found.pop(name, None)

    def take_all(self) -> _State:
        return {name: self.take(name) for name in list(self._found)}

    def left(self) -> list[str]:
        return sorted(name for name in self._found if not _NO_WEIGHT.search(name))

    def norm(self, to: str, name: str) -> _State:
        """A norm's weight, and its bias where it has one; "gamma" and "beta" of older files."""
        found = {}
        for ours, others in (("weight", ("weight", "gamma")), ("bias", ("bias", "beta"))):
            for other in others:
                if self.has(f"{name}.{other}"):
                    found[f"{to}.{ours}"] = self.take(f"{name}.{other}")
        if f"{to}.weight" not in found:
            raise KeyError(f"{name}.weight")
        return found

    def linear(self, to: str, *names: str, bias: bool, turned: bool = False) -> _State:
        """Linear layers side by side as one; a bias that one lacks is zero.

        Args:
            to: our name.
            names: theirs.
            bias: whether ours has one.
            turned: whether theirs have axes (inputs, outputs).
        """
        weights = [self.take(f"{name}.weight") for name in names]
        weights = [each.t().contiguous() for each in weights] if turned else weights
        found = {f"{to}.weight": torch.cat(weights)}
        if bias:
            found[f"{to}.bias"] = torch.cat(
                [
                    self.take(f"{name}.bias")
                    if self.has(f"{name}.bias")
                    else torch.zeros(len(each))
                    for name, each in zip(names, weights, strict=True)
                ]
            )
        return found


def _gpt2(config: _Config, weights: _Weights) -> Decoder:
    config.require(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    shape = DecoderShape(
        vocabulary=config["vocab_size"],
        width=config["n_embd"],
        layers=config["n_layer"],
        heads=config["n_head"],
        inner=config.get("n_inner", 0),
        context=config["n_positions"],
        mlp=config.choose("activation_function", _GELUS, "gelu_new"),  # type: ignore[arg-type]
        tied=config.get("tie_word_embeddings", True),
        epsilon=config.get("layer_norm_epsilon", 1e-5),
    )
    before = "transformer." if weights.has("transformer.wte.weight") else ""
    state = {
        "tokens.weight": weights.take(f"{before}wte.weight"),
        "positions.weight": weights.take(f"{before}wpe.weight"),
        **weights.norm("norm", f"{before}ln_f"),
    }
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}", f"{before}h.{index}"
        state |= weights.norm(f"{ours}.attention_norm", f"{theirs}.ln_1")
        state |= weights.norm(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        for to, name in (
            ("attention_in", "attn.c_attn"),
            ("attention_out", "attn.c_proj"),
            ("mlp_in", "mlp.c_fc"),
            ("mlp_out", "mlp.c_proj"),
        ):
            state |= weights.linear(f"{ours}.{to}", f"{theirs}.{name}", bias=True, turned=True)
    return _decoder(shape, state, weights)


def _llama(config: _Config, weights: _Weights) -> Decoder:
    heads, context = config["num_attention_heads"], config["max_position_embeddings"]
    config.require(hidden_act="silu", head_dim=config["hidden_size"] // heads)
    bias = any(weights.has(f"model.layers.0.{each}.bias") for each in _LLAMA_LINEAR)
    shape = DecoderShape(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        groups=config.get("num_key_value_heads", heads),
        inner=config["intermediate_size"],
        context=context,
        positions="rotary",
        norm="rms",
        mlp="silu",
        tied=config.get("tie_word_embeddings", False),
        bias=bias,
        epsilon=config.get("rms_norm_eps", 1e-6),
        **_rotary(config),
    )
    state = {
        "tokens.weight": weights.take("model.embed_tokens.weight"),
        **weights.norm("norm", "model.norm"),
    }
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        state |= weights.norm(f"{ours}.attention_norm", f"{theirs}.input_layernorm")
        state |= weights.norm(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm")
        q, k, v, o, gate, up, down = (f"{theirs}.{each}" for each in _LLAMA_LINEAR)
        state |= weights.linear(f"{ours}.attention_in", q, k, v, bias=bias)
        state |= weights.linear(f"{ours}.attention_out", o, bias=bias)
        state |= weights.linear(f"{ours}.mlp_in", gate, up, bias=bias)
        state |= weights.linear(f"{ours}.mlp_out", down, bias=bias)
    return _decoder(shape, state, weights)


_LLAMA_LINEAR = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def _rotary(config: _Config) -> dict[str, Any]:
    """Base and stretching of rotary positions; newer files have both in "rope_parameters"."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
    found = {"theta": rope.get("rope_theta", config.get("rope_theta", 10000.0))}
    kind = rope["rope_type"]
    if kind == "llama3":
        return found | {
            "stretch": rope["factor"],
            "stretch_low": rope["low_freq_factor"],
            "stretch_high": rope["high_freq_factor"],
            "trained": rope["original_max_position_embeddings"],
        }
    _Config(config._folder, rope).require(rope_type="default")
    return found


def _bert(config: _Config, weights: _Weights) -> Encoder:
    config.require(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    shape = EncoderShape(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        inner=config["intermediate_size"],
        context=config["max_position_embeddings"],
        mlp=config.choose("hidden_act", _GELUS, "gelu"),  # type: ignore[arg-type]
        epsilon=config.get("layer_norm_eps", 1e-12),
        segments=config["type_vocab_size"],
        classes=len(config.get("id2label", "01")),
    )
    state = {
        f"{to}.weight": weights.take(f"bert.embeddings.{name}.weight")
        for to, name in (
            ("tokens", "word_embeddings"),
            ("segments", "token_type_embeddings"),
            ("positions", "position_embeddings"),
        )
    }
    state |= weights.norm("norm", "bert.embeddings.LayerNorm")
    state |= weights.linear("pooler", "bert.pooler.dense", bias=True)
    state |= weights.linear("head", "classifier", bias=True)
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}", f"bert.encoder.layer.{index}"
        state |= weights.norm(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        state |= weights.norm(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")
        parts = (f"{theirs}.attention.self.{each}" for each in ("query", "key", "value"))
        state |= weights.linear(f"{ours}.attention_in", *parts, bias=True)
        for to, name in (
            ("attention_out", "attention.output.dense"),
            ("mlp_in", "intermediate.dense"),
            ("mlp_out", "output.dense"),
        ):
            state |= weights.linear(f"{ours}.{to}", f"{theirs}.{name}", bias=True)
    with torch.device("meta"):
        model = Encoder(shape)
    model.load_state_dict(state, assign=True)
    return model


def _own(config: _Config, weights: _Weights) -> Decoder:
    return _decoder(DecoderShape(**config.rest("model_type")), weights.take_all(), weights)


_LAYOUTS: Mapping[str, Callable[[_Config, _Weights], Decoder | Encoder]] = {
    OWN: _own,
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
}


def _decoder(shape: DecoderShape, state: _State, weights: _Weights) -> Decoder:
    """With the head, which is the embedding where it is tied."""
    if shape.tied:
        state["head.weight"] = state["tokens.weight"]
    elif "head.weight" not in state:
        state["head.weight"] = weights.take("lm_head.weight")
    weights.drop("lm_head.weight")
    with torch.device("meta"):
        model = Decoder(shape)
    model.load_state_dict(state, assign=True)
    if shape.tied:
        model.head.weight = model.tokens.weight
    return model


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size <= _MOST_JSON_BYTES:
            found = json.loads(path.read_bytes())
            if isinstance(found, dict):
                return found
    except OSError:
        raise _missing(path) from None
    except (ValueError, RecursionError):
        pass
    raise _refused(path, "another file", f"a JSON object of at most {_MOST_JSON_BYTES} bytes")


def _missing(path: Path) -> MissingDataError:
    want = f"{_CONFIG}, {_WEIGHTS} and {TOKENIZER}, as Hugging Face lays them out"
    return MissingDataError("a model's file is missing", where=str(path), want=want)


def _refused(where: Path, got: str, want: str) -> DataError:
    return DataError("this model is not one that is read", where=str(where), got=got, want=want)
