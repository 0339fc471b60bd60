"""Published families of transformers: how vfl reads their configurations and weight names.

To add a family, write a function that converts its `config.json` to a shape, state the names of its
weights, and add one line to `LAYOUTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vfl.models.decoder import (
    BlockShape,
    Decoder,
    DecoderShape,
    Encoder,
    EncoderShape,
    PictureEncoder,
    PictureShape,
    Vectors,
    VectorShape,
)

#: Family name (`model_type`) in the folders that `save_decoder` writes, for vfl's own decoders.
OWN = "vfl-decoder"
#: Family name (`model_type`) in folders with word vectors.
VECTORS = "vfl-vectors"
#: vfl's name of each activation, by its name in `config.json`: first for an MLP without a gate,
#: then for an MLP with a gate.
_PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
_GATED = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gated_gelu",
    "gelu_new": "gated_gelu_tanh",
    "gelu_pytorch_tanh": "gated_gelu_tanh",
}


class Refused(Exception):
    """Raised for a setting that vfl's models cannot compute.

    Attributes:
        got: the refused setting and its value.
        want: values that vfl can compute.
    """

    def __init__(self, got: str, want: str) -> None:
        super().__init__(got)
        self.got, self.want = got, want


class Config:
    """Settings in `config.json`, and the names of the weights in the same folder.

    Args:
        found: the settings.
        has: function that returns whether the folder has a weight with a given name (without the
            family's prefix).
        pictures: settings in `preprocessor_config.json`; empty if there is no such file.
    """

    def __init__(
        self, found: Mapping[str, Any], has: Callable[[str], bool], pictures: Mapping[str, Any]
    ) -> None:
        self.found, self.has, self.pictures = found, has, pictures

    def __getitem__(self, name: str) -> Any:
        return self.found[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting, or the default if it is missing or null."""
        found = self.found.get(name)
        return default if found is None else found

    def given(self, name: str, default: Any) -> Any:
        """Return a setting: the default if it is missing, and 0 if it is null."""
        return self.found.get(name, default) or 0

    def require(self, **wanted: Any) -> None:
        """Raise `Refused` if a setting differs from the wanted value; it may be missing."""
        for name, want in wanted.items():
            if self.get(name, want) != want:
                raise Refused(f"{name} = {self.get(name)!r}", f"{name} = {want!r}")

    def choose(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Return vfl's name for the value of a setting; raise `Refused` if vfl has no such name."""
        got = self.get(name, default)
        if got not in choices:
            raise Refused(f"{name} = {got!r}", f"one of {', '.join(choices)}")
        return choices[got]

    def inside(self, name: str) -> Config:
        """Return the settings of a part of the model, such as one of two towers."""
        return Config(self[name], self.has, self.pictures)


@dataclass(frozen=True)
class Names:
    """Maps names of vfl's modules to a family's names; one vfl module can join several modules.

    Attributes:
        top: the family's names of modules outside blocks, by vfl's names.
        block: prefix of a block's names, where "{}" stands for the block's number.
        blocks: the family's names of modules inside blocks (after this prefix), by vfl's names.
        turned: whether linear layers in blocks are stored transposed, with axes (inputs, outputs).
        plus_one: whether norms are stored as their weights minus 1 (Gemma).
        interleaved: whether the weights of queries, keys and values are stored head by head
            (GPT-NeoX).
        skipped: number of rows at the beginning of the position table that no text uses.
    """

    top: Mapping[str, str]
    block: str
    blocks: Mapping[str, tuple[str, ...]]
    turned: bool = False
    plus_one: bool = False
    interleaved: bool = False
    skipped: int = 0

    def of(self, module: str) -> tuple[str, ...]:
        """Return the family's names for one of vfl's modules, such as ``layers.3.mlp_in``.

        Raises:
            KeyError: the family has no such module.
        """
        if not module.startswith("layers."):
            return (self.top[module],)
        _, number, inside = module.split(".")
        return tuple(f"{self.block.format(number)}.{name}" for name in self.blocks[inside])


@dataclass(frozen=True)
class Layout:
    """Description of a family: its model class, architecture, and names of stored weights.

    Attributes:
        model: class of the family's models.
        shape: function from a configuration to the shape of the whole model, including its head if
            it has one.
        names: names of the model's weights, or a function from a configuration to them; None means
            vfl's own names.
        prefixes: texts with which the names of all weights of the body begin; files that contain
            only the body lack these prefixes.
        unused: name prefixes of weights of heads for other tasks, which vfl does not use.
    """

    model: type[Decoder] | type[Encoder] | type[PictureEncoder] | type[Vectors]
    shape: Callable[[Config], BlockShape]
    names: Names | Callable[[Config], Names] | None
    prefixes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def _blocks(**names: str) -> Mapping[str, tuple[str, ...]]:
    return {ours: tuple(theirs.split()) for ours, theirs in names.items()}


#: Settings of most families that state the sizes of a picture encoder, and of a text model.
_PICTURE_SIZES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
}
_TEXT_SIZES = {"vocabulary": "vocab_size", **_PICTURE_SIZES, "context": "max_position_embeddings"}


def _sizes(config: Config, **others: str) -> dict[str, Any]:
    """Return a text model's sizes; `others` are settings whose names differ in its family."""
    return {size: config[name] for size, name in (_TEXT_SIZES | others).items()}


# Decoder families derived from GPT-2.


def _gpt2(config: Config) -> DecoderShape:
    config.require(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    return DecoderShape(
        vocabulary=config["vocab_size"],
        width=config["n_embd"],
        layers=config["n_layer"],
        heads=config["n_head"],
        inner=config.get("n_inner", 0),
        context=config["n_positions"],
        mlp=config.choose("activation_function", _PLAIN, "gelu_new"),
        tied=config.get("tie_word_embeddings", True),
        epsilon=config.get("layer_norm_epsilon", 1e-5),
    )


_GPT2 = Names(
    top={"tokens": "wte", "positions": "wpe", "norm": "ln_f", "head": "lm_head"},
    block="h.{}",
    blocks=_blocks(
        attention_norm="ln_1",
        attention_in="attn.c_attn",
        attention_out="attn.c_proj",
        mlp_norm="ln_2",
        mlp_in="mlp.c_fc",
        mlp_out="mlp.c_proj",
    ),
    turned=True,
)


def _opt(config: Config) -> DecoderShape:
    config.require(
        do_layer_norm_before=True,
        word_embed_proj_dim=config["hidden_size"],
        layer_norm_elementwise_affine=True,
        _remove_final_layer_norm=False,
    )
    return DecoderShape(
        **_sizes(config, inner="ffn_dim"),
        mlp=config.choose("activation_function", _PLAIN, "relu"),
        tied=config.get("tie_word_embeddings", True),
        bias=config.get("enable_bias", True),
    )


_OPT = Names(
    top={
        "tokens": "embed_tokens",
        "positions": "embed_positions",
        "norm": "final_layer_norm",
        "head": "lm_head",
    },
    block="layers.{}",
    blocks=_blocks(
        attention_norm="self_attn_layer_norm",
        attention_in="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        attention_out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        mlp_in="fc1",
        mlp_out="fc2",
    ),
    skipped=2,
)


def _gpt_neox(config: Config) -> DecoderShape:
    rope = _rotary(config, base="rotary_emb_base", part=config.get("rotary_pct", 0.25))
    return DecoderShape(
        **_sizes(config),
        positions="rotary",
        parallel=config.get("use_parallel_residual", True),
        mlp=config.choose("hidden_act", _PLAIN, "gelu"),
        tied=config.get("tie_word_embeddings", False),
        epsilon=config.get("layer_norm_eps", 1e-5),
        **rope,
    )


_GPT_NEOX = Names(
    top={"tokens": "embed_in", "norm": "final_layer_norm", "head": "embed_out"},
    block="layers.{}",
    blocks=_blocks(
        attention_norm="input_layernorm",
        attention_in="attention.query_key_value",
        attention_out="attention.dense",
        mlp_norm="post_attention_layernorm",
        mlp_in="mlp.dense_h_to_4h",
        mlp_out="mlp.dense_4h_to_h",
    ),
    interleaved=True,
)


# Decoder families derived from LLaMA.


def _llama_like(
    config: Config, *, tied: bool = False, part: float | None = None, **others: Any
) -> DecoderShape:
    sizes = _sizes(config)
    linear = [name for names in _LLAMA_BLOCKS.values() for name in names if "norm" not in name]
    common = {
        "groups": config.get("num_key_value_heads", sizes["heads"]),
        "head_width": config.get("head_dim", 0),
        "positions": "rotary",
        "norm": "rms",
        "tied": config.get("tie_word_embeddings", tied),
        "bias": any(config.has(f"layers.0.{name}.bias") for name in linear),
        "epsilon": config.get("rms_norm_eps", 1e-6),
    }
    if "mlp" not in others:
        common["mlp"] = config.choose("hidden_act", _GATED, "silu")
    rope = _rotary(config, head=others.get("head_width"), part=part)
    return DecoderShape(**(sizes | common | rope | others))


_LLAMA_BLOCKS = _blocks(
    attention_norm="input_layernorm",
    attention_in="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    attention_out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    mlp_in="mlp.gate_proj mlp.up_proj",
    mlp_out="mlp.down_proj",
)
_HEAD_NORMS = _blocks(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
_FOUR_NORMS = _blocks(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_FUSED = _blocks(attention_in="self_attn.qkv_proj", mlp_in="mlp.gate_up_proj")


def _llama_names(*changed: Mapping[str, tuple[str, ...]], plus_one: bool = False) -> Names:
    blocks = dict(_LLAMA_BLOCKS)
    for each in changed:
        blocks |= each
    top = {"tokens": "embed_tokens", "norm": "norm", "head": "lm_head"}
    return Names(top, "layers.{}", blocks, plus_one=plus_one)


def _mistral(config: Config) -> DecoderShape:
    size = config.given("sliding_window", _WINDOW)
    return _llama_like(config, windows=(size,) * config["num_hidden_layers"] if size else ())


def _phi3(config: Config) -> DecoderShape:
    if (kind := _rope_kind(_rope(config))) != "default":
        raise Refused(f"rope_type = {kind!r}", "default")
    size = config.get("sliding_window", 0)
    windows = (size,) * config["num_hidden_layers"] if size else ()
    return _llama_like(
        config,
        windows=windows,
        epsilon=config.get("rms_norm_eps", 1e-5),
        part=config.get("partial_rotary_factor", 1.0),
    )


def _qwen2(config: Config, **others: Any) -> DecoderShape:
    first = config.get("max_window_layers", 28)
    used = config.get("use_sliding_window", False)
    windows = _windows(config, lambda layer: used and layer >= first)
    return _llama_like(config, windows=windows, **others)


def _qwen3(config: Config) -> DecoderShape:
    return _qwen2(config, head_norm=True, head_width=config.get("head_dim", 128))


def _gemma_like(config: Config, **others: Any) -> DecoderShape:
    config.require(use_bidirectional_attention=False)
    # The configuration of the first Gemma says "gelu", but the model uses the tanh approximation of
    # GELU.
    first = config["model_type"] == "gemma"
    acts = _GATED | ({"gelu": "gated_gelu_tanh"} if first else {})
    act = config.choose("hidden_act" if first else "hidden_activation", acts, "gelu_pytorch_tanh")
    return _llama_like(
        config,
        mlp=act,
        tied=True,
        head_width=config.get("head_dim", 256),
        embedding_scale=config["hidden_size"] ** 0.5,
        **others,
    )


def _gemma2(config: Config) -> DecoderShape:
    return _gemma_like(
        config,
        norms_at="both",
        scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        cap=config.given("attn_logit_softcapping", 50.0),
        head_cap=config.given("final_logit_softcapping", 30.0),
        windows=_windows(config, lambda layer: layer % 2 == 0),
    )


def _gemma3(config: Config) -> DecoderShape:
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    if (kind := _rope_kind(local)) != "default":
        raise Refused(f"rope_type = {kind!r} of sliding_attention", "default")
    theta = local.get("rope_theta", config.get("rope_local_base_freq", 10000.0))
    return _gemma_like(
        config,
        norms_at="both",
        head_norm=True,
        scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        head_cap=config.get("final_logit_softcapping", 0.0),
        windows=_windows(config, lambda layer: (layer + 1) % every > 0),
        window_theta=theta,
        **_rotary(config, theta=1e6, head=config.get("head_dim", 256)),
    )


#: Number of tokens in an attention window, if a configuration does not state it.
_WINDOW = 4096


def _windows(config: Config, local: Callable[[int], bool]) -> tuple[int, ...]:
    """Return each block's window size, from a list of block types or (old files) from a rule."""
    size = config.given("sliding_window", _WINDOW)
    layers = range(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [
        "sliding_attention" if local(layer) else "full_attention" for layer in layers
    ]
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise Refused(f"layer_types with {kind!r}", "sliding_attention or full_attention")
    windows = tuple(size if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _rope(config: Config) -> Mapping[str, Any]:
    """Return the settings of rotary positions; newer files have them in "rope_parameters"."""
    newer = config.get("rope_parameters") or {}
    found: Mapping[str, Any] = newer.get("full_attention") or newer
    return {**found, **(config.get("rope_scaling") or {})}


def _rope_kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rotary(
    config: Config,
    base: str = "rope_theta",
    part: float | None = None,
    theta: float = 10000.0,
    head: int | None = None,
) -> dict[str, Any]:
    """Return vfl's options for rotary positions.

    Args:
        config: settings of the model, from its `config.json`.
        base: name of the setting with the base of the frequencies.
        part: share of a head's entries that rotary positions change if no setting states it; None
            if the family always changes whole heads.
        theta: base of the frequencies if no setting states it.
        head: width of an attention head; None takes it from the settings.
    """
    rope = _rope(config)
    default = config.get("partial_rotary_factor", 1.0) if part is None else part
    turned = rope.get("partial_rotary_factor", default)
    if part is None and turned != 1:  # transformers ignores this or fails
        raise Refused(
            f"partial_rotary_factor = {turned!r}", "1, as heads of this family turn whole"
        )
    found = {"theta": rope.get("rope_theta", config.get(base, theta)), "rotated": turned}
    kind = _rope_kind(rope)
    if kind == "yarn":
        head = head or config.get(
            "head_dim", config["hidden_size"] // config["num_attention_heads"]
        )
        width = int(head * found["rotated"])
        return found | _yarn(rope, width, found["theta"], config["max_position_embeddings"])
    if kind == "llama3":
        return found | {
            "stretch": rope["factor"],
            "stretch_low": rope["low_freq_factor"],
            "stretch_high": rope["high_freq_factor"],
            "trained": rope.get(
                "original_max_position_embeddings", config["max_position_embeddings"]
            ),
        }
    if kind == "linear":  # with trained = 1, every frequency is stretched
        return found | {"stretch": rope["factor"], "trained": 1}
    if kind != "default":
        raise Refused(f"rope_type = {kind!r}", "default, linear, llama3 or yarn")
    return found


def _yarn(rope: Mapping[str, Any], width: int, theta: float, context: int) -> dict[str, Any]:
    """Return the frequencies' divisors, and the scale (YaRN; Peng et al. 2023, 3.2 and 3.4)."""
    trained = rope.get("original_max_position_embeddings") or context
    factor = rope.get("factor") or context / trained

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    def place(turns: float) -> float:
        """Return the index of the frequency with so many periods in the trained context length."""
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    most, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    scale = grown(most) / grown(of_all) if most and of_all else grown(1)
    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    kept = [1 - min(max((one - low) / (high - low), 0), 1) for one in range(width // 2)]
    return {
        "slowed": tuple(1 / ((1 - one) / factor + one) for one in kept),
        "turn_scale": rope.get("attention_factor") or scale,
    }


# Text encoders.


def _classes(config: Config, head: str) -> int:
    """Return the number of classes of a head; 0 if the folder has no weights of this head."""
    names = config.get("id2label", range(config.get("num_labels", 2)))
    return len(names) if config.has(f"{head}.weight") else 0


def _bert(config: Config) -> EncoderShape:
    config.require(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    padding, sizes = _bert_padding(config), _sizes(config)
    sizes["context"] -= padding + 1
    head = "classifier" if config["model_type"] == "bert" else "classifier.out_proj"
    return EncoderShape(
        **sizes,
        mlp=config.choose("hidden_act", _PLAIN, "gelu"),
        epsilon=config.get("layer_norm_eps", 1e-12),
        segments=config.get("type_vocab_size", 2),
        classes=_classes(config, head),
        padding=padding,
    )


def _bert_padding(config: Config) -> int:
    """Return RoBERTa's padding token, by whose number positions are shifted; -1 for BERT."""
    return -1 if config["model_type"] == "bert" else int(config.get("pad_token_id", 1))


def _bert_names(config: Config) -> Names:
    heads = {"pooler": "pooler.dense", "head": "classifier"}
    if config["model_type"] != "bert":
        heads = {"pooler": "classifier.dense", "head": "classifier.out_proj"}
    return Names(
        top={
            "tokens": "embeddings.word_embeddings",
            "segments": "embeddings.token_type_embeddings",
            "positions": "embeddings.position_embeddings",
            "norm": "embeddings.LayerNorm",
            **heads,
        },
        block="encoder.layer.{}",
        blocks=_blocks(
            attention_norm="attention.output.LayerNorm",
            attention_in="attention.self.query attention.self.key attention.self.value",
            attention_out="attention.output.dense",
            mlp_norm="output.LayerNorm",
            mlp_in="intermediate.dense",
            mlp_out="output.dense",
        ),
        skipped=max(0, _bert_padding(config)),
    )


def _distilbert(config: Config) -> EncoderShape:
    return EncoderShape(
        **_sizes(config, width="dim", layers="n_layers", heads="n_heads", inner="hidden_dim"),
        mlp=config.choose("activation", _PLAIN, "gelu"),
        epsilon=1e-12,
        segments=0,
        classes=_classes(config, "classifier"),
        pooled="relu",
    )


_DISTILBERT = Names(
    top={
        "tokens": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
        "pooler": "pre_classifier",
        "head": "classifier",
    },
    block="transformer.layer.{}",
    blocks=_blocks(
        attention_norm="sa_layer_norm",
        attention_in="attention.q_lin attention.k_lin attention.v_lin",
        attention_out="attention.out_lin",
        mlp_norm="output_layer_norm",
        mlp_in="ffn.lin1",
        mlp_out="ffn.lin2",
    ),
)


# Picture encoders, and the two towers of CLIP.


def _side(config: Config, name: str) -> int:
    """Return the side length of a square picture or patch, given once or as height and width."""
    found = config[name]
    sides = found if isinstance(found, list) else [found]
    if len(set(sides)) != 1:
        raise Refused(f"{name} = {found!r}", "a square")
    return int(sides[0])


def _picture(config: Config, **others: Any) -> PictureShape:
    channels = config.get("num_channels", 3)
    half = [0.5] * channels
    return PictureShape(
        **{size: config[name] for size, name in _PICTURE_SIZES.items()},
        size=_side(config, "image_size"),
        patch=_side(config, "patch_size"),
        channels=channels,
        mean=config.pictures.get("image_mean", half),
        deviation=config.pictures.get("image_std", half),
        **others,
    )


def _vit(config: Config) -> PictureShape:
    return _picture(
        config,
        mlp=config.choose("hidden_act", _PLAIN, "gelu"),
        epsilon=config.get("layer_norm_eps", 1e-12),
        classes=_classes(config, "classifier"),
    )


_VIT = Names(
    top={
        "patches": "embeddings.patch_embeddings.projection",
        "first": "embeddings.cls_token",
        "positions": "embeddings.position_embeddings",
        "norm": "layernorm",
        "head": "classifier",
    },
    block="encoder.layer.{}",
    blocks=_blocks(
        attention_norm="layernorm_before",
        attention_in=(
            "attention.attention.query attention.attention.key attention.attention.value"
        ),
        attention_out="attention.output.dense",
        mlp_norm="layernorm_after",
        mlp_in="intermediate.dense",
        mlp_out="output.dense",
    ),
)


#: Name prefixes of weights that vfl does not use: heads, and the vector of masked patches
#: (`ViTForMaskedImageModeling`).
_VIT_UNUSED = ("pooler.", "decoder.", "embeddings.mask_token")


def _clip_vision(config: Config) -> PictureShape:
    return _picture(
        config,
        mlp=config.choose("hidden_act", _PLAIN, "quick_gelu"),
        epsilon=config.get("layer_norm_eps", 1e-5),
        patch_bias=False,
        first_norm=True,
    )


def _clip_text(config: Config) -> DecoderShape:
    return DecoderShape(
        **_sizes(config),
        mlp=config.choose("hidden_act", _PLAIN, "quick_gelu"),
        epsilon=config.get("layer_norm_eps", 1e-5),
    )


_CLIP_BLOCKS = _blocks(
    attention_norm="layer_norm1",
    attention_in="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    attention_out="self_attn.out_proj",
    mlp_norm="layer_norm2",
    mlp_in="mlp.fc1",
    mlp_out="mlp.fc2",
)
_CLIP_TEXT = Names(
    top={
        "tokens": "embeddings.token_embedding",
        "positions": "embeddings.position_embedding",
        "norm": "final_layer_norm",
    },
    block="encoder.layers.{}",
    blocks=_CLIP_BLOCKS,
)
_CLIP_VISION = Names(
    top={
        "patches": "embeddings.patch_embedding",
        "first": "embeddings.class_embedding",
        "positions": "embeddings.position_embedding",
        "first_norm": "pre_layrnorm",
        "norm": "post_layernorm",
    },
    block="encoder.layers.{}",
    blocks=_CLIP_BLOCKS,
)


_ROBERTA = Layout(
    Encoder, _bert, _bert_names, ("roberta.",), ("lm_head.", "pooler.", "qa_outputs.")
)
_LLAMA = Layout(Decoder, _llama_like, _llama_names(), ("model.",))
#: Every family by its `model_type`; towers of CLIP by the `model_type` of the tower.
LAYOUTS: Mapping[str, Layout] = {
    OWN: Layout(Decoder, lambda config: DecoderShape(**_without_type(config.found)), None),
    VECTORS: Layout(Vectors, lambda config: VectorShape(**_without_type(config.found)), None),
    "gpt2": Layout(Decoder, _gpt2, _GPT2, ("transformer.",)),
    "opt": Layout(Decoder, _opt, _OPT, ("model.decoder.", "decoder.")),
    "gpt_neox": Layout(Decoder, _gpt_neox, _GPT_NEOX, ("gpt_neox.",)),
    "llama": _LLAMA,
    "mistral": Layout(Decoder, _mistral, _llama_names(), ("model.",)),
    "qwen2": Layout(Decoder, _qwen2, _llama_names(), ("model.",)),
    "qwen3": Layout(Decoder, _qwen3, _llama_names(_HEAD_NORMS), ("model.",)),
    "gemma": Layout(Decoder, _gemma_like, _llama_names(plus_one=True), ("model.",)),
    "gemma2": Layout(Decoder, _gemma2, _llama_names(_FOUR_NORMS, plus_one=True), ("model.",)),
    "gemma3_text": Layout(
        Decoder, _gemma3, _llama_names(_FOUR_NORMS, _HEAD_NORMS, plus_one=True), ("model.",)
    ),
    "phi3": Layout(Decoder, _phi3, _llama_names(_FUSED), ("model.",)),
    "bert": Layout(Encoder, _bert, _bert_names, ("bert.",), ("cls.", "pooler.", "qa_outputs.")),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": Layout(
        Encoder, _distilbert, _DISTILBERT, ("distilbert.",), ("vocab_", "qa_outputs.")
    ),
    "vit": Layout(PictureEncoder, _vit, _VIT, ("vit.",), _VIT_UNUSED),
    "clip_text_model": Layout(
        Decoder, _clip_text, _CLIP_TEXT, ("text_model.",), ("text_projection.",)
    ),
    "clip_vision_model": Layout(
        PictureEncoder, _clip_vision, _CLIP_VISION, ("vision_model.",), ("visual_",)
    ),
}
#: For each tower of a whole CLIP model: the name of its settings, its family, and the name prefixes
#: of the other tower's weights.
TOWERS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "text": ("text_config", "clip_text_model", ("vision_model.", "visual_", "logit_scale")),
    "vision": ("vision_config", "clip_vision_model", ("text_", "logit_scale")),
}


def _without_type(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in found.items() if name != "model_type"}
