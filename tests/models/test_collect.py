"""Models from files that users have."""

import json
import sys
import types
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from model_folders import write_model

from vfl.core.errors import DataError, MissingDataError, MissingPackageError, UserError
from vfl.models.collect import collect
from vfl.models.pretrained import describe, load_pretrained, load_tokenizer

TOKENS = torch.tensor([[5, 17, 3, 60, 89, 0, 41, 8]])
BLOCKS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name):
    if ".layers." not in name:
        return f"{TOP[name.removesuffix('.weight')]}.weight"
    _, _, number, rest = name.split(".", 3)
    return f"blk.{number}.{BLOCKS[rest.removesuffix('.weight')]}.weight"


def in_turn(weight, heads):
    """Rows of a rotary head as llama.cpp has them: one of each half in turn."""
    rows = [
        row
        for head in weight.reshape(heads, 2, -1, weight.shape[1])
        for pair in zip(head[0], head[1], strict=True)
        for row in pair
    ]
    return np.stack(rows)


def write_gguf(path, state, config, quantised=(), architecture="llama", pre="gpt-2", words=()):
    gguf = pytest.importorskip("gguf", reason="the extra llm is not installed")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = [*words, *(f"w{number}" for number in range(config["vocab_size"] - len(words)))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(7)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in state.items():
        values, part = weight.numpy(), name.split(".")[-2]
        if part in heads and architecture == "llama":
            values = in_turn(values, heads[part])
        if part in quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_model_it_was_made_from(tmp_path):
    state, config, _ = write_model(tmp_path / "model", "llama")
    write_gguf(tmp_path / "m.gguf", state, config)
    collect(str(tmp_path / "m.gguf"), tmp_path / "found")
    with torch.no_grad():
        want = load_pretrained(tmp_path / "model")(TOKENS)
        torch.testing.assert_close(load_pretrained(tmp_path / "found")(TOKENS), want)
    assert json.loads((tmp_path / "found" / "config.json").read_text())["eos_token_id"] == 7


def test_quantised_weights_become_numbers(tmp_path):
    state, config, _ = write_model(
        tmp_path / "model", "llama, tied, with biases, one group", attention_bias=False
    )
    write_gguf(tmp_path / "m.gguf", state, config, quantised=("gate_proj", "o_proj"))
    collect(str(tmp_path / "m.gguf"), tmp_path / "found")
    want, got = (load_pretrained(tmp_path / name).state_dict() for name in ("model", "found"))
    for name, weight in want.items():
        quantised = name.endswith(("mlp_in.weight", "attention_out.weight"))
        step = float(weight.abs().max()) / 127
        assert (got[name] - weight).abs().max() <= (step if quantised else 1e-6)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_the_tokenizer_of_a_gguf_file(tmp_path, pre):
    pytest.importorskip("tokenizers", reason="the extra llm is not installed")
    state, config, _ = write_model(tmp_path / "model", "llama")
    words = ["<end>", "a", "b", "ab", "c", "abc", "Ġ", "1", "2"]
    write_gguf(tmp_path / "m.gguf", state, config, pre=pre, words=words)
    collect(str(tmp_path / "m.gguf"), tmp_path / "found")
    reader = load_tokenizer(tmp_path / "found")
    assert reader.encode("abc ab12<end>").tokens == ["abc", "Ġ", "ab", "1", "2", "<end>"]
    assert reader.decode(reader.encode("abc ab12").ids) == "abc ab12"


def test_other_gguf_files_are_refused_by_name(tmp_path):
    state, config, _ = write_model(tmp_path / "model", "llama")
    write_gguf(tmp_path / "m.gguf", state, config, architecture="mamba")
    with pytest.raises(DataError, match="architecture 'mamba'"):
        collect(str(tmp_path / "m.gguf"), tmp_path / "found")
    (tmp_path / "n.gguf").write_bytes(b"no")
    with pytest.raises(DataError, match="GGUF"):
        collect(str(tmp_path / "n.gguf"), tmp_path / "found")
    assert not list(tmp_path.glob("*found*"))


def test_a_file_without_its_reader(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(MissingPackageError, match=r"vfl\[llm\]"):
        collect(str(tmp_path / "m.gguf"), tmp_path / "found")


def test_an_archive_gives_the_files_of_a_model_and_no_others(tmp_path):
    write_model(tmp_path / "model", "bert")
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        for file in (tmp_path / "model").iterdir():
            archive.write(file, f"inner/{file.name}")
        archive.writestr("inner/../../tokenizer.json", "{}")
        archive.writestr("inner/run.py", "print(1)")
        archive.writestr("inner/pooling/config.json", "{}")
    collect(str(tmp_path / "m.zip"), tmp_path / "found")
    assert sorted(each.name for each in (tmp_path / "found").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert describe(tmp_path / "found").family == "bert"


def test_word_vectors_as_text(tmp_path):
    pytest.importorskip("tokenizers", reason="the extra llm is not installed")
    (tmp_path / "v.txt").write_text("the 1 2\nfilm -1 .5\n! 0 3\n")
    collect(str(tmp_path / "v.txt"), tmp_path / "found")
    ids = load_tokenizer(tmp_path / "found").encode("The film glows!").ids
    vectors = load_pretrained(tmp_path / "found", "body").hidden(torch.tensor([ids]))
    assert vectors[0].tolist() == [[1, 2], [-1, 0.5], [0, 0], [0, 3]]
    (tmp_path / "w.vec").write_text("2 2\nthe 1 2\nsecret 1\n")
    with pytest.raises(DataError, match="line 3") as problem:
        collect(str(tmp_path / "w.vec"), tmp_path / "other")
    assert "secret" not in str(problem.value)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package 'shipped' that ships word vectors as an array and words."""
    home = tmp_path / "site" / "shipped"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("raise SystemExit('its code runs')")
    np.save(home / "v.npy", np.asfortranarray(np.arange(6, dtype=np.float32).reshape(3, 2)))
    pq.write_table(pa.table({"word": ["a", "B", "a"]}), home / "words.parquet")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return home


def test_a_package_gives_the_model_it_ships_and_runs_no_code(tmp_path, package):
    collect("package:shipped", tmp_path / "found")
    table = load_pretrained(tmp_path / "found", "body").tokens.weight
    assert table.tolist() == [[0, 1], [2, 3], [4, 5], [0, 0]]
    vocabulary = json.loads((tmp_path / "found" / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary == {"a": 0, "B": 1, "<unknown>": 3}
    np.save(package / "w.npy", np.zeros((1, 2)))
    with pytest.raises(DataError, match=r"v\.npy, w\.npy"):
        collect("package:shipped", tmp_path / "other")
    with pytest.raises(MissingPackageError, match="pip install"):
        collect("package:not_here", tmp_path / "other")


def test_the_hub_is_asked_for_files_of_models_alone(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(name, local_dir, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        write_model(local_dir, "gpt2")

    module = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    collect("hub:someone/model", tmp_path / "found")
    assert asked["name"] == "someone/model"
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in asked["patterns"])
    assert describe(tmp_path / "found").family == "gpt2"


@pytest.mark.parametrize("source", ["nothing.gguf", "nothing", "x.py"])
def test_no_model_leaves_no_folder(tmp_path, source):
    (tmp_path / "x.py").write_text("")
    with pytest.raises((MissingDataError, DataError)):
        collect(str(tmp_path / source), tmp_path / "found")
    assert not list(tmp_path.glob("*found*"))


@pytest.mark.parametrize(
    "change", [{"model_type": "mamba"}, {"scale_attn_by_inverse_layer_idx": True}]
)
def test_a_model_that_cannot_be_computed_is_not_added(tmp_path, change):
    write_model(tmp_path / "model", "gpt2")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(DataError, match="not supported") as refused:
        collect(str(tmp_path / "model"), tmp_path / "found")
    assert refused.value.where == str(tmp_path / "model")
    assert "vfl.split" in refused.value.fix
    assert not list(tmp_path.glob("*found*"))


def test_a_model_is_never_replaced(tmp_path):
    write_model(tmp_path / "model", "gpt2")
    collect(str(tmp_path / "model"), tmp_path / "found")
    with pytest.raises(UserError, match="already"):
        collect(str(tmp_path / "model"), tmp_path / "found")
