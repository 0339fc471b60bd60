"""Families of pretrained models against `transformers`, by small models of random weights."""

import json
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file

import vfl
from vfl.core.errors import DataError
from vfl.models.decoder import cached
from vfl.models.pretrained import load_pretrained

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)

TOKENS = torch.tensor(
    [[5, 17, 3, 60, 89, 0, 41, 8, 22, 31, 7, 64], [9, 4, 33, 2, 1, 77, 6, 50, 3, 3, 12, 5]]
)
WIDE = {
    "vocab_size": 90,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
GROUPED = WIDE | {"num_key_value_heads": 2}
YARN_FREE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 64,
}
GPT2 = {
    "vocab_size": 90, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 40,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
OPT = {name: each for name, each in WIDE.items() if name != "intermediate_size"} | {
    "ffn_dim": 96, "word_embed_proj_dim": 64,
}  # fmt: skip
PICTURES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
GEMMA = GROUPED | {"head_dim": 32}
LOCAL = {"sliding_window": 4}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

DECODERS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied": ("GPT2", GPT2 | {"tie_word_embeddings": False, "n_inner": 96}),
    "opt": ("OPT", OPT),
    "gpt_neox": ("GPTNeoX", WIDE | {"rotary_pct": 0.5}),
    "gpt_neox, serial": ("GPTNeoX", WIDE | {"use_parallel_residual": False}),
    "llama": ("Llama", GROUPED),
    "llama 3": ("Llama", GROUPED | {"rope_parameters": LLAMA3}),
    "llama, stretched": ("Llama", GROUPED | {"rope_parameters": YARN_FREE}),
    "llama, yarn": ("Llama", GROUPED | {"rope_parameters": YARN, "head_dim": 24}),
    "llama, wide heads and biases": (
        "Llama", GROUPED | {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", GROUPED | LOCAL),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2, windows": (
        "Qwen2", GROUPED | LOCAL | {"use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 32}),
    "gemma": ("Gemma", GEMMA),
    "gemma, an older name": ("Gemma", GEMMA | {"hidden_act": "gelu"}),
    "gemma2, no bounds": (
        "Gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2": ("Gemma2", GEMMA | LOCAL | {"query_pre_attn_scalar": 20}),
    "gemma3": (  # it has no bound of scores
        "Gemma3", GEMMA | LOCAL | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    ),
    "gemma3, stretched": ("Gemma3", GEMMA | LOCAL | {"rope_parameters": GEMMA3_ROPE}),
    "phi3": ("Phi3", GROUPED | LOCAL),
    "phi3, part of a head": ("Phi3", GROUPED | {"partial_rotary_factor": 0.5}),
}  # fmt: skip
ENCODERS = {
    "bert": ("Bert", WIDE),
    "roberta": ("Roberta", WIDE | {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", WIDE | {"type_vocab_size": 1}),
    "distilbert": (
        "DistilBert",
        {"vocab_size": 90, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96,
         "max_position_embeddings": 40, "pad_token_id": 1},
    ),
}  # fmt: skip


def published(name):
    """A class of `transformers`, imported by the first test that needs it."""
    return getattr(import_module("transformers"), name)


def made(folder, family, settings, kind):
    """A model of random weights in a folder; norms and biases are drawn too."""
    config = published(f"{CONFIGS.get(family, family)}Config")(**settings)
    torch.manual_seed(0)
    model = published(f"{family}{kind}")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return model


CONFIGS = {"Gemma3": "Gemma3Text"}


def relative(found, want):
    return float((found - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_decoders(tmp_path, name):
    family, settings = DECODERS[name]
    kind = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = made(tmp_path, family, settings, kind)
    ours = load_pretrained(tmp_path)
    with torch.no_grad():
        want = model(TOKENS)
        assert relative(ours(TOKENS), want.logits) < 1e-5
        with cached(ours):
            steps = [ours(TOKENS[:, part]) for part in (slice(0, 7), slice(7, 8), slice(8, 12))]
        assert relative(torch.cat(steps, 1), want.logits) < 1e-5


@pytest.mark.parametrize("name", DECODERS)
def test_hidden_states_of_decoders(tmp_path, name):
    family, settings = DECODERS[name]
    model = made(tmp_path, family, settings, "Model" if family != "Gemma3" else "TextModel")
    ours = load_pretrained(tmp_path, "body")
    with torch.no_grad():
        want = model(TOKENS, output_hidden_states=True).hidden_states
        for layer in (0, 1, ours.shape.layers, None):
            found = ours.hidden(TOKENS, layer)
            assert relative(found, want[-1 if layer is None else layer]) < 1e-5


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification", "ForMaskedLM"])
def test_encoders(tmp_path, name, kind):
    family, settings = ENCODERS[name]
    model = made(tmp_path, family, settings, kind)
    mask = torch.ones_like(TOKENS)
    mask[1, 7:] = 0
    # RoBERTa counts positions by the tokens that are not padding.
    tokens = torch.where(mask.bool(), TOKENS.clamp(min=4), 1)
    ours = load_pretrained(tmp_path, "body")
    with torch.no_grad():
        want = model(tokens, attention_mask=mask, output_hidden_states=True)
        for layer in (0, 2, None):
            found = ours.hidden(tokens, layer, mask.bool())
            hidden = want.hidden_states[-1 if layer is None else layer]
            assert relative(found[0], hidden[0]) < 1e-5
            assert relative(found[1, :7], hidden[1, :7]) < 1e-5
        if kind == "ForSequenceClassification":
            found = load_pretrained(tmp_path)(tokens, real=mask.bool())
            assert relative(found, want.logits) < 1e-5
        want = model(TOKENS, output_hidden_states=True)  # RoBERTa's padding within a text
        assert relative(ours.hidden(TOKENS), want.hidden_states[-1]) < 1e-5


@pytest.mark.parametrize("kind", ["Model", "ForImageClassification"])
def test_pictures(tmp_path, kind):
    model = made(tmp_path, "ViT", PICTURES, kind)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    torch.manual_seed(1)
    pictures = torch.randn(2, 3, 16, 16)
    ours = load_pretrained(tmp_path, "body")
    assert ours.shape.mean == (0.1, 0.2, 0.3)
    with torch.no_grad():
        want = model(pictures, output_hidden_states=True)
        assert relative(ours.hidden(pictures, 2), want.hidden_states[2]) < 1e-5
        if kind == "Model":
            assert relative(ours.hidden(pictures), want.last_hidden_state) < 1e-5
        else:
            assert relative(load_pretrained(tmp_path)(pictures), want.logits) < 1e-5


def test_towers_of_clip(tmp_path):
    text = {name: WIDE[name] for name in WIDE} | {"eos_token_id": 3}
    config = {"text_config": text, "vision_config": PICTURES, "projection_dim": 32}
    model = made(tmp_path, "CLIP", config, "Model")
    torch.manual_seed(1)
    pictures = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        want = model.vision_model(pictures).last_hidden_state
        vision = load_pretrained(tmp_path, "vision")
        assert relative(vision.hidden(pictures, 3)[:, 1:], vision.norm(want)[:, 1:]) < 1e-5
        want = model.text_model(TOKENS).last_hidden_state
        assert relative(load_pretrained(tmp_path, "text").hidden(TOKENS), want) < 1e-5


@pytest.mark.parametrize("kind", ["Text", "Vision"])
def test_a_tower_of_clip_by_itself(tmp_path, kind):
    settings = WIDE if kind == "Text" else PICTURES
    config = published(f"CLIP{kind}Config")(**settings)
    model = published(f"CLIP{kind}ModelWithProjection")(config).eval()
    model.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, "body")
    torch.manual_seed(1)
    with torch.no_grad():
        inputs = TOKENS if kind == "Text" else torch.randn(2, 3, 16, 16)
        want = model(inputs, output_hidden_states=True).hidden_states
        assert relative(ours.hidden(inputs, 2), want[2]) < 1e-5


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gemma2", ["attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"]),
        ("gemma3", ["rope_parameters", "layer_types"]),
        ("phi3", ["rms_norm_eps", "sliding_window"]),
        ("mistral", ["rms_norm_eps"]),
    ],
)
def test_settings_that_are_missing_are_those_of_the_family(tmp_path, name, missing):
    family, settings = DECODERS[name]
    made(tmp_path, family, settings, "ForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in missing}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    model = published(f"{family}ForCausalLM").from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert relative(load_pretrained(tmp_path)(TOKENS), model(TOKENS).logits) < 1e-5


def test_pictures_of_settings_that_people_write(tmp_path):
    settings = PICTURES | {"num_labels": 5, "image_size": [16, 16], "patch_size": [4, 4]}
    model = made(tmp_path, "ViT", settings, "ForImageClassification")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["id2label"], config["label2id"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_labels": 5}))
    pictures = torch.ones(1, 3, 16, 16)
    with torch.no_grad():
        assert relative(load_pretrained(tmp_path)(pictures), model(pictures).logits) < 1e-5
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_size": [16, 8]}))
    with pytest.raises(DataError, match="square"):
        load_pretrained(tmp_path, "body")


def test_a_vit_that_learned_from_hidden_patches(tmp_path):
    settings = PICTURES | {"encoder_stride": 4}
    model = made(tmp_path, "ViT", settings, "ForMaskedImageModeling")
    pictures = torch.ones(1, 3, 16, 16)
    with torch.no_grad():
        want = model.vit(pictures).last_hidden_state
        assert relative(load_pretrained(tmp_path, "body").hidden(pictures), want) < 1e-5


def test_heads_that_turn_in_part_are_refused_where_transformers_turns_whole_ones(tmp_path):
    made(tmp_path, "Llama", GROUPED, "ForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"partial_rotary_factor": 0.5}))
    with pytest.raises(DataError, match="partial_rotary_factor"):
        load_pretrained(tmp_path)


def test_a_refused_model_is_cut_as_a_module_as_the_refusal_says(tmp_path):
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    settings = WIDE | {"rope_scaling": longrope, "original_max_position_embeddings": 8}
    model = made(tmp_path, "Phi3", settings, "ForCausalLM")
    with pytest.raises(DataError, match="not supported") as refused:
        load_pretrained(tmp_path)
    assert "vfl.split" in refused.value.fix
    at = ["model.layers.0", "model.layers.1"]
    cut = vfl.split(model, at=at, example=TOKENS, row_axes=2).eval()
    with torch.no_grad():
        assert torch.equal(cut(TOKENS).logits, model(TOKENS).logits)
    assert cut.ledger.total_bytes("up") > 0


def test_weights_are_read_whatever_their_prefix(tmp_path):
    model = made(tmp_path, "Llama", GROUPED, "ForCausalLM")
    whole = load_pretrained(tmp_path, "body").hidden(TOKENS)
    bare = {name: each.clone() for name, each in model.model.state_dict().items()}
    save_file(bare, tmp_path / "model.safetensors")
    assert torch.equal(load_pretrained(tmp_path, "body").hidden(TOKENS), whole)
