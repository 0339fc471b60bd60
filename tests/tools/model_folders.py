"""Small models of random weights in the Hugging Face layout, and plain references of them.

The references read the files' own tensors and follow the papers' formulas, token by token and head
by head; nothing of `vfl` is in them.
"""

import json
import math

import torch
from safetensors.torch import save_file

TANH = math.sqrt(2 / math.pi)
COMMON = {"vocab_size": 90}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 500.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "id2label": {"0": "no", "1": "maybe", "2": "yes"},
}


def draw(source, *shape):
    return torch.randn(*shape, generator=source) / math.sqrt(shape[-1])


def gpt2(source, config):
    width = config["n_embd"]
    inner = config.get("n_inner") or 4 * width
    state = {
        "transformer.wte.weight": draw(source, config["vocab_size"], width) * 8,
        "transformer.wpe.weight": draw(source, config["n_positions"], width),
    }
    for name in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"):
        state[f"transformer.{name}.weight"] = 1 + draw(source, width)
        state[f"transformer.{name}.bias"] = draw(source, width)
    for layer in range(2):
        for name, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, inner),
            ("mlp.c_proj", inner, width),
        ):
            state[f"transformer.h.{layer}.{name}.weight"] = draw(source, outputs, inputs).t()
            state[f"transformer.h.{layer}.{name}.bias"] = draw(source, outputs)
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    if config.get("tie_word_embeddings") is False:
        state["lm_head.weight"] = draw(source, config["vocab_size"], width) * 3
    return state


def llama(source, config):
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    state = {"model.embed_tokens.weight": draw(source, config["vocab_size"], width) * 8}
    state["model.norm.weight"] = 1 + draw(source, width)
    for layer in range(2):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{name}.{norm}.weight"] = 1 + draw(source, width)
        for part, inputs, outputs in (
            ("self_attn.q_proj", width, width),
            ("self_attn.k_proj", width, keys),
            ("self_attn.v_proj", width, keys),
            ("self_attn.o_proj", width, width),
            ("mlp.gate_proj", width, inner),
            ("mlp.up_proj", width, inner),
            ("mlp.down_proj", inner, width),
        ):
            state[f"{name}.{part}.weight"] = draw(source, outputs, inputs)
            if config.get("attention_bias") and "self_attn" in part:
                state[f"{name}.{part}.bias"] = draw(source, outputs)
    if not config.get("tie_word_embeddings"):
        state["lm_head.weight"] = draw(source, config["vocab_size"], width) * 3
    return state


def bert(source, config):
    width, inner = config["hidden_size"], config["intermediate_size"]
    state = {}

    def linear(name, inputs, outputs):
        state[f"{name}.weight"] = draw(source, outputs, inputs)
        state[f"{name}.bias"] = draw(source, outputs)

    def norm(name):
        state[f"{name}.weight"] = 1 + draw(source, width)
        state[f"{name}.bias"] = draw(source, width)

    for name, rows in (("word", config["vocab_size"]), ("position", 32), ("token_type", 2)):
        state[f"bert.embeddings.{name}_embeddings.weight"] = draw(source, rows, width) * 8
    norm("bert.embeddings.LayerNorm")
    for layer in range(2):
        name = f"bert.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            linear(f"{name}.attention.self.{part}", width, width)
        linear(f"{name}.attention.output.dense", width, width)
        norm(f"{name}.attention.output.LayerNorm")
        linear(f"{name}.intermediate.dense", width, inner)
        linear(f"{name}.output.dense", inner, width)
        norm(f"{name}.output.LayerNorm")
    linear("bert.pooler.dense", width, width)
    linear("classifier", width, len(config["id2label"]))
    return state


def layer_norm(x, weight, bias, epsilon):
    centred = x - x.mean()
    return centred / (centred.pow(2).mean() + epsilon).sqrt() * weight + bias


def rms_norm(x, weight, epsilon):
    return x / (x.pow(2).mean() + epsilon).sqrt() * weight


def attend(queries, keys, values, heads, seen):
    """Of lists of vectors, step by step; `seen` gives how many a step looks at."""
    size, found = len(queries[0]) // heads, []
    share = heads // (len(keys[0]) // size)
    for step, q in enumerate(queries):
        parts = []
        for head in range(heads):
            own = q[head * size : (head + 1) * size]
            group = slice(head // share * size, (head // share + 1) * size)
            scores = torch.stack([own @ k[group] / math.sqrt(size) for k in keys[: seen(step)]])
            chances = (scores - scores.max()).exp()
            chances = chances / chances.sum()
            parts.append(sum(p * v[group] for p, v in zip(chances, values, strict=False)))
        found.append(torch.cat(parts))
    return found


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(TANH * (x + 0.044715 * x**3)))


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gpt2_reference(state, config, tokens):
    get = lambda name: state[f"transformer.{name}"].double()  # noqa: E731
    line = lambda x, name: x @ get(f"{name}.weight") + get(f"{name}.bias")  # noqa: E731
    norm = lambda x, name: layer_norm(x, get(f"{name}.weight"), get(f"{name}.bias"), 1e-5)  # noqa: E731
    xs = [get("wte.weight")[token] + get("wpe.weight")[step] for step, token in enumerate(tokens)]
    for layer in range(2):
        name = f"h.{layer}"
        parts = [line(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn").chunk(3) for x in xs]
        mixed = attend(*zip(*parts, strict=True), config["n_head"], lambda step: step + 1)
        xs = [x + line(each, f"{name}.attn.c_proj") for x, each in zip(xs, mixed, strict=True)]
        inner = [gelu_tanh(line(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")) for x in xs]
        xs = [x + line(each, f"{name}.mlp.c_proj") for x, each in zip(xs, inner, strict=True)]
    head = state.get("lm_head.weight", state["transformer.wte.weight"]).double()
    return torch.stack([head @ norm(x, "ln_f") for x in xs])


def turned(vector, step, size, config):
    """Rotary positions, pair by pair: a number of the first half with its like of the second."""
    found, rope = vector.clone(), config.get("rope_parameters") or {}
    for head in range(0, len(vector), size):
        for pair in range(size // 2):
            speed = 500.0 ** (-2 * pair / size)
            if rope.get("rope_type") == "llama3":
                wave, trained = 2 * math.pi / speed, rope["original_max_position_embeddings"]
                if wave > trained / rope["low_freq_factor"]:
                    speed = speed / rope["factor"]
                elif wave >= trained / rope["high_freq_factor"]:
                    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
                    smooth = (trained / wave - low) / (high - low)
                    speed = (1 - smooth) * speed / rope["factor"] + smooth * speed
            a, b = vector[head + pair], vector[head + pair + size // 2]
            cos, sin = math.cos(step * speed), math.sin(step * speed)
            found[head + pair] = a * cos - b * sin
            found[head + pair + size // 2] = b * cos + a * sin
    return found


def llama_reference(state, config, tokens):
    get = lambda name: state[f"model.{name}"].double()  # noqa: E731
    heads = config["num_attention_heads"]
    size = config["hidden_size"] // heads

    def line(x, name):
        found = get(f"{name}.weight") @ x
        return found + get(f"{name}.bias") if f"model.{name}.bias" in state else found

    xs = [get("embed_tokens.weight")[token] for token in tokens]
    for layer in range(2):
        name = f"layers.{layer}"
        normed = [rms_norm(x, get(f"{name}.input_layernorm.weight"), 1e-6) for x in xs]
        q, k, v = ([line(x, f"{name}.self_attn.{each}_proj") for x in normed] for each in "qkv")
        q, k = ([turned(x, step, size, config) for step, x in enumerate(each)] for each in (q, k))
        mixed = attend(q, k, v, heads, lambda step: step + 1)
        xs = [x + line(each, f"{name}.self_attn.o_proj") for x, each in zip(xs, mixed, strict=True)]
        for step, x in enumerate(xs):
            each = rms_norm(x, get(f"{name}.post_attention_layernorm.weight"), 1e-6)
            gate, up = (line(each, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            xs[step] = x + line(gate / (1 + (-gate).exp()) * up, f"{name}.mlp.down_proj")
    head = state.get("lm_head.weight", state["model.embed_tokens.weight"]).double()
    return torch.stack([head @ rms_norm(x, get("norm.weight"), 1e-6) for x in xs])


def bert_reference(state, config, tokens, segments):
    get = lambda name: state[name].double()  # noqa: E731
    line = lambda x, name: get(f"{name}.weight") @ x + get(f"{name}.bias")  # noqa: E731
    norm = lambda x, name: layer_norm(x, get(f"{name}.weight"), get(f"{name}.bias"), 1e-12)  # noqa: E731
    word, place, kind = (
        get(f"bert.embeddings.{name}_embeddings.weight")
        for name in ("word", "position", "token_type")
    )
    xs = [
        norm(word[token] + place[step] + kind[segment], "bert.embeddings.LayerNorm")
        for step, (token, segment) in enumerate(zip(tokens, segments, strict=True))
    ]
    for layer in range(2):
        name = f"bert.encoder.layer.{layer}"
        q, k, v = (
            [line(x, f"{name}.attention.self.{part}") for x in xs]
            for part in ("query", "key", "value")
        )
        mixed = attend(q, k, v, config["num_attention_heads"], lambda step: len(xs))
        for step, (x, each) in enumerate(zip(xs, mixed, strict=True)):
            out = line(each, f"{name}.attention.output.dense")
            x = norm(x + out, f"{name}.attention.output.LayerNorm")
            inner = gelu(line(x, f"{name}.intermediate.dense"))
            xs[step] = norm(x + line(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    return line(torch.tanh(line(xs[0], "bert.pooler.dense")), "classifier")


MODELS = {
    "gpt2": (GPT2, gpt2, gpt2_reference),
    "gpt2, a head and an MLP of its own": (
        GPT2 | {"tie_word_embeddings": False, "n_inner": 96},
        gpt2,
        gpt2_reference,
    ),
    "llama": (LLAMA, llama, llama_reference),
    "llama, tied, with biases, one group": (
        LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
        llama,
        llama_reference,
    ),
    "llama 3": (LLAMA | {"rope_parameters": LLAMA3}, llama, llama_reference),
    "bert": (BERT, bert, bert_reference),
}


def write_model(folder, name, seed=0, parts=1, dtype=torch.float32, **settings):
    """Files of a model; its tensors, its settings and its reference."""
    config, make, reference = MODELS[name]
    config = COMMON | config | settings
    state = {
        key: each.contiguous().to(dtype)
        for key, each in make(torch.Generator().manual_seed(seed), config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if parts == 1:
        save_file(state, folder / "model.safetensors")
    else:
        names = [f"model-{part + 1:05d}-of-{parts:05d}.safetensors" for part in range(parts)]
        files = {key: names[index % parts] for index, key in enumerate(state)}
        for file in names:
            save_file({k: state[k] for k in state if files[k] == file}, folder / file)
        index = json.dumps({"metadata": {}, "weight_map": files})
        (folder / "model.safetensors.index.json").write_text(index)
    return state, config, reference
