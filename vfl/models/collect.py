"""Creates folders of pretrained models from GGUF files, archives, packages or a model hub.

All models are converted to the file layout of Hugging Face, which `vfl.models.pretrained` reads.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from vfl.core.errors import DataError, MissingDataError, MissingPackageError, UserError
from vfl.core.storage import write_text, writing
from vfl.models.layouts import VECTORS
from vfl.models.pretrained import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    describe,
    parts_of,
    save_tensors,
)

#: Names of a model's files in the layout of Hugging Face; vfl uses no other files.
_FILES = re.compile(
    r"config\.json|preprocessor_config\.json|tokenizer\.json|model[\w.-]*\.safetensors|"
    r"model\.safetensors\.index\.json",
    re.ASCII,
)
_HUB, _PACKAGE = "hub:", "package:"
_PART_BYTES = 1 << 24


def collect(source: str, folder: Path) -> None:
    """Store a model in a new folder, in the file layout of Hugging Face.

    Args:
        source: a folder in the layout of Hugging Face, a ``.gguf`` file, or a ``.zip`` archive.
            Word vectors are a text (``.txt``, ``.vec``), or an array (``.npy``) with a Parquet file
            of words in the same folder. The source can also be ``package:NAME`` for an installed
            package that contains a model in one of these forms, or ``hub:ORG/NAME`` for a model on
            the hub. Only sources with ``hub:`` use the network.
        folder: the new folder for the model.

    Raises:
        MissingDataError: the source does not exist, or a file of its model is missing.
        MissingPackageError: the package that reads this source is not installed.
        DataError: the source contains no model, or a model of an unsupported family.
        StorageError: the disk is full.
        UserError: the folder already exists.
    """
    if folder.exists():
        raise UserError("a model of this name exists already", where=str(folder))
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        with writing(folder):
            _collect(source, part)
        _require_supported(source, part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _require_supported(source: str, folder: Path) -> None:
    try:
        for part in parts_of(folder):
            describe(folder, part)
    except DataError as problem:
        problem.where = source
        raise


def _collect(source: str, folder: Path) -> None:
    if source.startswith(_HUB):
        _of_hub(source.removeprefix(_HUB), folder)
        return
    path = _of_package(source.removeprefix(_PACKAGE)) if source.startswith(_PACKAGE) else None
    path = path or Path(source)
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if _FILES.fullmatch(file.name):
                shutil.copyfile(file, folder / file.name)
    elif not path.is_file():
        raise MissingDataError("this model does not exist", where=str(path), want=_WANTED)
    elif path.suffix == ".gguf":
        _of_gguf(path, folder)
    elif path.suffix == ".zip":
        _of_archive(path, folder)
    elif path.suffix in (".txt", ".vec"):
        _write_vectors(*_read_vectors(path), folder)
    elif path.suffix == ".npy":
        _write_vectors(*_read_arrays(path), folder)
    else:
        raise DataError("this file is not a model", where=str(path), want=_WANTED)
    if not (folder / CONFIG).is_file():
        raise DataError(
            "this source contains no model", where=str(path), want=f"{CONFIG} and {WEIGHTS}"
        )


_WANTED = "a folder, a .gguf, .zip, .txt, .vec or .npy file, package:NAME or hub:ORG/NAME"


def _of_archive(path: Path, folder: Path) -> None:
    """Extract a model's files from its folder in an archive; the files keep their names."""
    try:
        with zipfile.ZipFile(path) as archive:
            configs = [each for each in archive.namelist() if PurePosixPath(each).name == CONFIG]
            # The model's configuration is the one in the folder closest to the archive's root.
            root = min(configs, key=lambda name: name.count("/"), default="")
            home = PurePosixPath(root).parent
            for member in archive.infolist():
                name = PurePosixPath(member.filename)
                if name.parent == home and _FILES.fullmatch(name.name):
                    with archive.open(member) as found, (folder / name.name).open("wb") as file:
                        shutil.copyfileobj(found, file, _PART_BYTES)
    except (OSError, zipfile.BadZipFile) as problem:
        raise DataError(
            "this archive cannot be read", where=str(path), got=type(problem).__name__
        ) from None


def _of_package(name: str) -> Path:
    """Return the path of the only model in a package; none of the package's code runs."""
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise MissingPackageError(
            "this package is not installed", got=name, fix=f"pip install --no-deps {name}"
        )
    root = Path(next(iter(found.submodule_search_locations)))
    models = [each for kind in ("gguf", "zip", "npy") for each in root.rglob(f"*.{kind}")]
    models += [each.parent for each in root.rglob(CONFIG)]
    if len(models) != 1:
        names = ", ".join(sorted(each.name for each in models)) or "none"
        raise DataError(
            "this package does not ship one model", where=name, got=names, want="one model"
        )
    return models[0]


def _of_hub(name: str, folder: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingPackageError(
            "the hub needs a package that is not installed",
            want="huggingface_hub",
            fix="pip install huggingface_hub, or download the folder by other means",
        ) from None
    patterns = [CONFIG, "preprocessor_config.json", TOKENIZER, "model*.safetensors", "*.index.json"]
    try:
        snapshot_download(name, local_dir=folder, allow_patterns=patterns)
    except Exception as problem:  # exceptions of many unrelated classes
        raise MissingDataError(
            "the hub did not return this model", where=name, got=type(problem).__name__
        ) from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)


# Word vectors: a table with one vector per row, and a list of words in the same order.


def _read_vectors(path: Path) -> tuple[list[str], np.ndarray]:
    """Read a word and its vector per line; word2vec files have both sizes in the first line."""
    words: list[str] = []
    rows: list[np.ndarray] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            word, *numbers = line.rstrip().split(" ")
            if number == 1 and len(numbers) == 1:
                continue
            try:
                vector = np.array(numbers, dtype=np.float32)
            except ValueError:
                vector = np.empty(0, np.float32)
            if not len(vector) or (rows and len(vector) != len(rows[0])):
                raise DataError(
                    "this line is not a word with its vector",
                    where=f"{path}, line {number}",
                    want="a word and as many numbers as in the first line, separated by spaces",
                )
            words.append(word)
            rows.append(vector)
    if not rows:
        raise DataError("this file contains no words", where=str(path))
    return words, np.stack(rows)


def _read_arrays(path: Path) -> tuple[list[str], np.ndarray]:
    """Read an array of vectors, and the words from the only Parquet file in the same folder."""
    beside = sorted(path.parent.glob("*.parquet"))
    vectors = np.load(path, allow_pickle=False, mmap_mode="r")
    words = pq.read_table(beside[0]).column(0).to_pylist() if len(beside) == 1 else []
    if vectors.ndim != 2 or len(words) != len(vectors):
        raise DataError(
            "words and vectors do not match",
            where=str(path),
            got=f"{len(words)} words, vectors of axes {vectors.shape}",
            want="one Parquet file beside the array; its first column has one word in each row",
        )
    return words, np.asarray(vectors, dtype=np.float32)


def _write_vectors(words: Sequence[str], vectors: np.ndarray, folder: Path) -> None:
    """Write the model's folder; after all words, a vector of zeros stands for unknown words."""
    numbers = {word: number for number, word in reversed(list(enumerate(words)))}
    table = np.ascontiguousarray(np.concatenate([vectors, np.zeros_like(vectors[:1])]))
    lower = all(word == word.lower() for word in words)
    unknown = _UNKNOWN
    while unknown in numbers:
        unknown = f"<{unknown}>"
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": {"type": "Lowercase"} if lower else None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {
            "type": "WordLevel", "vocab": numbers | {unknown: len(words)}, "unk_token": unknown,
        },
    }  # fmt: skip
    config = {"model_type": VECTORS, "vocabulary": len(table), "width": table.shape[1]}
    save_tensors(folder / WEIGHTS, {"tokens.weight": torch.from_numpy(table)})
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    write_text(folder / TOKENIZER, json.dumps(tokenizer))


_UNKNOWN = "<unknown>"

# GGUF: the file format of llama.cpp, which contains settings, a tokenizer and quantised weights.

_GGUF_BLOCKS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)", re.ASCII)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Patterns that split texts into words, by the name that GGUF gives the byte-pair tokenizer; ""
#: splits as GPT-2 does.
_SPLITS = {
    "default": "",
    "gpt-2": "",
    "smollm": "digits",
    "llama-bpe": _WORDS.replace("DIGITS", r"\p{N}{1,3}"),
    "qwen2": _WORDS.replace("DIGITS", r"\p{N}"),
}
_CONTROL = 3


def _of_gguf(path: Path, folder: Path) -> None:
    try:
        import gguf
    except ImportError:
        raise MissingPackageError(
            "GGUF files need a package that is not installed",
            want="gguf",
            fix="pip install 'vfl[llm]'",
        ) from None
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as problem:
        raise DataError(
            "this GGUF file cannot be read", where=str(path), got=type(problem).__name__
        ) from None
    settings = {name: field.contents() for name, field in reader.fields.items()}
    try:
        config = _gguf_config(settings)
        state = {
            _gguf_name(each.name): _gguf_weight(
                each.name, torch.from_numpy(_dequantised(gguf, each)), config
            )
            for each in reader.tensors
        }
        tokenizer = _gguf_tokenizer(settings)
    except KeyError as missing:
        raise DataError(
            "this GGUF file is not supported",
            where=str(path),
            got=str(missing.args[0]),
            want=f"a decoder of {', '.join(_GGUF_FAMILIES)}",
        ) from None
    config["tie_word_embeddings"] = "lm_head.weight" not in state
    save_tensors(folder / WEIGHTS, state)
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    if tokenizer:
        write_text(folder / TOKENIZER, json.dumps(tokenizer))


def _dequantised(gguf: Any, tensor: Any) -> np.ndarray:
    """Return a tensor's weights as float32, with the order of axes of torch."""
    found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return np.array(found, dtype=np.float32).reshape(tuple(int(n) for n in tensor.shape[::-1]))


def _gguf_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a GGUF file in the form of `config.json`.

    Raises:
        KeyError: the family is unknown, or a setting is missing; the error names the family or
            setting.
    """
    family = settings["general.architecture"]
    if family not in _GGUF_FAMILIES:
        raise KeyError(f"architecture '{family}'")
    own = {
        name.removeprefix(f"{family}."): value
        for name, value in settings.items()
        if name.startswith(f"{family}.")
    }
    if own.get("rope.scaling.type", "none") != "none":
        raise KeyError("scaled rotary positions")
    width, heads = int(own["embedding_length"]), int(own["attention.head_count"])
    return {
        "model_type": family,
        "hidden_size": width,
        "num_hidden_layers": int(own["block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(own.get("attention.head_count_kv", heads)),
        "head_dim": int(own.get("attention.key_length", width // heads)),
        "intermediate_size": int(own["feed_forward_length"]),
        "max_position_embeddings": int(own["context_length"]),
        "rms_norm_eps": float(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(own.get("rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "vocab_size": len(settings["tokenizer.ggml.tokens"]),
        "eos_token_id": settings.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": settings.get("tokenizer.ggml.bos_token_id"),
    }


def _gguf_name(name: str) -> str:
    if found := _GGUF_BLOCK.fullmatch(name):
        return f"model.layers.{found[1]}.{_GGUF_BLOCKS[found[2]]}.{found[3]}"
    module, _, kind = name.rpartition(".")
    return f"{_GGUF_TOP[module]}.{kind}"


def _gguf_weight(name: str, weight: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Reorder LLaMA's query and key weights: GGUF interleaves the two halves of each head."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    found = _GGUF_BLOCK.fullmatch(name)
    if config["model_type"] != "llama" or not found or found[2] not in heads:
        return weight
    turned = weight.view(heads[found[2]], -1, 2, *weight.shape[1:]).transpose(1, 2)
    return turned.reshape(weight.shape).contiguous()


def _gguf_tokenizer(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `tokenizer.json` for a byte-pair tokenizer; None for any other kind of tokenizer."""
    split = _SPLITS.get(settings.get("tokenizer.ggml.pre", "default"))
    if settings.get("tokenizer.ggml.model") != "gpt2" or split is None:
        return None
    tokens: Sequence[str] = settings["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = settings.get("tokenizer.ggml.token_type", [1] * len(tokens))
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    words: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
        "": lambda: [bytes_of | {"use_regex": True}],
        "digits": lambda: [
            {"type": "Digits", "individual_digits": True},
            bytes_of | {"use_regex": True},
        ],
    }
    pattern = {
        "type": "Split",
        "pattern": {"Regex": split},
        "behavior": "Isolated",
        "invert": False,
    }
    steps = words[split]() if split in words else [pattern, bytes_of | {"use_regex": False}]
    special = [
        {
            "id": number, "content": token, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": bytes_of | {"use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": settings["tokenizer.ggml.merges"],
        },
    }  # fmt: skip
