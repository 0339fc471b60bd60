"""Weights in the layouts of others, against references of their own."""

import builtins
import json
import resource

import pytest
import torch
from model_folders import MODELS, write_model
from safetensors.torch import save_file

from vfl.core.errors import DataError, MissingDataError, MissingPackageError, StorageError
from vfl.llm.text import read_tokenizer
from vfl.models.decoder import Decoder, DecoderShape, Encoder
from vfl.models.pretrained import (
    load_pretrained,
    load_tokenizer,
    names_of,
    require_tokenizer,
    save_decoder,
)

TOKENS = [5, 17, 3, 60, 89, 0, 41, 8]
SEGMENTS = [0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_layout(tmp_path, name, parts):
    state, config, reference = write_model(tmp_path, name, parts=parts)
    model, tokens = load_pretrained(tmp_path), torch.tensor([TOKENS])
    assert not model.training
    with torch.no_grad():
        if isinstance(model, Encoder):
            found = model(tokens, torch.tensor([SEGMENTS]))[0]
            assert (found - reference(state, config, TOKENS, SEGMENTS)).abs().max() < 1e-5
        else:
            found = model(tokens)[0]
            assert (found - reference(state, config, TOKENS)).abs().max() < 1e-4
            assert model.shape.tied == (model.head.weight is model.tokens.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_decoder_comes_back(tmp_path, tied):
    torch.manual_seed(0)
    model = Decoder(DecoderShape(vocabulary=90, width=32, positions="rotary", tied=tied)).eval()
    save_decoder(tmp_path, model)
    found = load_pretrained(tmp_path)
    assert found.shape == model.shape
    with torch.no_grad():
        assert torch.equal(found(torch.tensor([TOKENS])), model(torch.tensor([TOKENS])))
    assert names_of(tmp_path) == {"labels": [], "end_tokens": []}
    require_tokenizer(tmp_path)  # a token is a byte there


@pytest.mark.parametrize("existed", [False, True])
def test_a_full_disk_leaves_the_earlier_model_and_no_part_of_the_new_one(tmp_path, existed):
    torch.manual_seed(0)
    shape = DecoderShape(vocabulary=90, width=32, positions="rotary")
    folder, first = tmp_path / "model", Decoder(shape).eval()
    if existed:
        save_decoder(folder, first)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # as a full disk, at 20 kB
    try:
        with pytest.raises(StorageError, match="cannot be written"):
            save_decoder(folder, Decoder(shape))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert folder.exists() == existed
    if existed:
        assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
        assert torch.equal(load_pretrained(folder).tokens.weight, first.tokens.weight)


@pytest.mark.parametrize(
    ("settings", "labels", "ends"),
    [
        ({"eos_token_id": 7}, ["no", "maybe", "yes"], [7]),
        ({"eos_token_id": [7, 9], "id2label": {"10": "z", "2": "b"}}, ["b", "z"], [7, 9]),
        ({"eos_token_id": None, "id2label": None}, [], []),
    ],
)
def test_names_of_outputs(tmp_path, settings, labels, ends):
    write_model(tmp_path, "bert")
    config = json.loads((tmp_path / "config.json").read_text()) | settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert names_of(tmp_path) == {"labels": labels, "end_tokens": ends}
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": "last"}))
    with pytest.raises(DataError, match="eos_token_id"):
        names_of(tmp_path)


def test_a_folder_of_another_layout_has_its_tokenizer(tmp_path):
    write_model(tmp_path, "gpt2")
    with pytest.raises(MissingDataError, match=r"tokenizer\.json"):
        require_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    require_tokenizer(tmp_path)


def test_weights_of_half_precision_are_read(tmp_path):
    state, config, reference = write_model(tmp_path, "llama", dtype=torch.bfloat16)
    model = load_pretrained(tmp_path)
    with torch.no_grad():
        found = model(torch.tensor([TOKENS]))[0]
    assert found.dtype == torch.float32
    assert (found - reference(state, config, TOKENS)).abs().max() < 1e-4


def test_names_of_older_files(tmp_path):
    """Without the prefix of GPT-2; "gamma" and "beta" of BERT's norms."""
    state, config, reference = write_model(tmp_path / "gpt", "gpt2")
    short = {name.removeprefix("transformer."): each for name, each in state.items()}
    save_file(short, tmp_path / "gpt" / "model.safetensors")
    with torch.no_grad():
        found = load_pretrained(tmp_path / "gpt")(torch.tensor([TOKENS]))[0]
        assert (found - reference(state, config, TOKENS)).abs().max() < 1e-4
    state, config, reference = write_model(tmp_path / "bert", "bert")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): each
        for name, each in state.items()
    }
    save_file(old, tmp_path / "bert" / "model.safetensors")
    with torch.no_grad():
        found = load_pretrained(tmp_path / "bert")(torch.tensor([TOKENS]))[0]
    assert (found - reference(state, config, TOKENS, [0] * 8)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("gpt2", {"model_type": "mamba"}, "gpt2, opt, gpt_neox, llama"),
        ("gpt2", {"model_type": ["gpt2"]}, "gpt2, opt, gpt_neox, llama"),
        ("gpt2", {"activation_function": "mish"}, "gelu_new"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"hidden_act": "mish"}, "hidden_act"),
        ("llama", {"head_dim": 32}, "shapes"),
        ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"num_hidden_layers": 3}, "encoder.layer.2"),
        ("llama", {"num_hidden_layers": 1}, "weights besides"),
        ("llama", {"hidden_size": 32}, "shapes"),
        ("llama", {"hidden_size": "wide"}, "numbers"),
        ("llama", {"rope_parameters": ["yarn"]}, "numbers"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, name, settings, told):
    write_model(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text()) | settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=told):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_files_that_are_missing_or_damaged(tmp_path, file):
    write_model(tmp_path, "gpt2")
    (tmp_path / file).write_bytes(b"{ no")
    with pytest.raises(DataError):
        load_pretrained(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(MissingDataError):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("file", ["../model-00001-of-00003.safetensors", "/etc/passwd", 3])
def test_parts_lie_in_the_folder(tmp_path, file):
    write_model(tmp_path / "model", "gpt2", parts=3)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": file}}))
    with pytest.raises(DataError, match="file names in this folder"):
        load_pretrained(tmp_path / "model")


def test_a_tokenizer_is_read(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="the extra llm is not installed")
    words = {"who": 0, "sees": 1, "the": 2, "text": 3, "?": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found.encode("who sees the text ?").ids == [0, 1, 2, 3, 4]
    assert found.decode([3, 1]) == "text sees"
    assert read_tokenizer(tmp_path).encode("who sees") == [0, 1]
    assert read_tokenizer(tmp_path).decode([3, 1]) == "text sees"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(MissingDataError):
        load_tokenizer(tmp_path)


def test_a_tokenizer_needs_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "tokenizers":
            raise ImportError
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match="llm"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(MissingPackageError, match="llm"):
        read_tokenizer(tmp_path)
