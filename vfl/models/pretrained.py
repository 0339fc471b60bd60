"""Reads transformers and tokenizers from a folder in Hugging Face's file layout, without network.

Such a folder contains `config.json`, `model.safetensors` (or several parts and an index), and
`tokenizer.json`. `vfl.models.layouts` describes the settings and weight names of each published
family. The module refuses a setting that vfl's models cannot compute, and a weight in the file that
no module of the model uses.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vfl.core.errors import (
    BadOptionError,
    DataError,
    MissingDataError,
    MissingPackageError,
    StorageError,
)
from vfl.core.registry import require
from vfl.core.storage import PRIVATE_FILE, prepared, writing
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
from vfl.models.layouts import LAYOUTS, OWN, TOWERS, Config, Layout, Names, Refused

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENVIRONMENT = "VFL_MODELS"
TOKENIZER = "tokenizer.json"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_PICTURES = "preprocessor_config.json"
_INDEX = f"{WEIGHTS}.index.json"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}", re.ASCII)
_MOST_JSON_BYTES = 1 << 24
#: Names of stored tensors that are not weights, such as masks and tables that follow from the
#: configuration.
_NO_WEIGHT = re.compile(
    r"(^|\.)((attn|attention)\.(masked_)?bias|position_ids|rotary_emb\.inv_freq)$"
)

#: Suggested fix for a model that vfl's classes cannot compute.
_ELSEWHERE = (
    "load it with the package `transformers` (AutoModel.from_pretrained): vfl.split cuts its models"
)

Part = Literal["whole", "body", "text", "vision"]
Pretrained = Decoder | Encoder | PictureEncoder | Vectors


def models_folder() -> Path:
    """Return the folder that contains all models: VFL_MODELS, or ``~/.cache/vfl/models``."""
    return Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "vfl" / "models")


def model_folder(name: str) -> Path:
    """Return the folder of a model, given its name in experiment files; a name is never a path.

    Raises:
        BadOptionError: the name contains characters that a model's name must not have.
    """
    require("pretrained", name, "a name such as reviews", bool(_NAME.fullmatch(name)))
    return models_folder() / name


def existing_model(name: str) -> Path:
    """Return the folder of a model that is on this machine.

    Raises:
        MissingDataError: this machine does not have the model.
    """
    folder = model_folder(name)
    if not (folder / CONFIG).is_file():
        raise MissingDataError(
            f"there is no pretrained model '{name}' on this machine",
            where=str(folder),
            fix=f"vfl model add SOURCE {name}; {ENVIRONMENT} names the folder of all models",
        )
    return folder


def family_of(folder: Path) -> str:
    """Return the model family: the `model_type` in a folder's configuration."""
    return str(_json(folder / CONFIG).get("model_type"))


def parts_of(folder: Path) -> tuple[Part, ...]:
    """Return ("whole",); for a CLIP model, the names of both towers (text and vision)."""
    return ("text", "vision") if family_of(folder) == "clip" else ("whole",)


@dataclass(frozen=True, eq=False)
class Described:
    """The description of a folder's model, before its weights are read.

    Attributes:
        folder: folder of the model.
        family: its `model_type`.
        layout: description of the model's family, see `vfl.models.layouts.Layout`.
        shape: the architecture.
        names: the names that the family gives the model's weights; None means that these are vfl's
            own names.
        weights: the weights in the folder's files.
        unused: name prefixes of weights that the described part of the model does not use.
    """

    folder: Path
    family: str
    layout: Layout
    shape: BlockShape
    names: Names | None
    weights: Weights
    unused: Sequence[str]

    def empty(self) -> Pretrained:
        """Return the model on torch's meta device, without values."""
        with torch.device("meta"):
            return self.layout.model(self.shape)  # type: ignore[arg-type]


def describe(folder: Path, part: Part = "whole") -> Described:
    """Describe a folder's model without its weights; `load_pretrained` explains the arguments."""
    found = _json(folder / CONFIG)
    family, settings, layout, others = _layout(folder, found, part)
    weights = Weights(folder, layout.prefixes)
    config = Config({**settings, "model_type": family}, weights.has, _pictures(folder))
    with _refusing(folder, family):
        config.require(quantization_config=None)
        shape = layout.shape(config)
        shape = shape if part == "whole" else _headless(shape)
        names = layout.names(config) if callable(layout.names) else layout.names
    heads = _HEADS if part != "whole" or _tied(shape) else ()
    return Described(
        folder, family, layout, shape, names, weights, (*layout.unused, *others, *heads)
    )


def load_pretrained(
    folder: Path, part: Part = "whole", wanted: Callable[[str], bool] | None = None
) -> Pretrained:
    """Return the model of a folder, in evaluation mode and in float32.

    The function supports the model families of `vfl.models.layouts`. The function refuses a setting
    that changes the computation and that vfl's models do not support, such as rotary positions
    stretched by "longrope"; the error names the setting.

    Args:
        folder: folder in Hugging Face's file layout.
        part: "whole" is the model with its head (last layer for tokens or classes). "body" leaves
            the head out; the folder may contain weights of any head. "text" and "vision" are the
            bodies of the two towers of a CLIP model.
        wanted: function that returns whether to read the weight with a given name. Weights that are
            not read stay on torch's meta device, so that a party loads only its own part. None
            reads all weights.

    Raises:
        MissingDataError: a file is missing.
        DataError: the model has a family, setting or weight that vfl does not support.
    """
    found = describe(folder, part)
    shape, weights, tied = found.shape, found.weights, _tied(found.shape)
    with _refusing(folder, found.family):
        model = found.empty()
        state = {
            key: _weight(key, shape, found.names, weights)
            for key in model.state_dict()
            if not (tied and key == "head.weight") and (wanted is None or wanted(key))
        }
        if tied and "tokens.weight" in state:
            state["head.weight"] = state["tokens.weight"]
        model.load_state_dict(state, assign=True, strict=wanted is None)
    if tied:
        assert isinstance(model, Decoder), "other architectures have no head of tokens"
        model.head.weight = model.tokens.weight
    if wanted is None and (left := weights.left(found.unused)):
        got = f"{len(left)} weights besides, such as {left[0]}"
        raise _refused(folder, got, f"those of {found.family}", _ELSEWHERE)
    for name, weight in state.items():
        if not weight.isfinite().all():
            raise _refused(folder / WEIGHTS, f"NaN or infinity in '{name}'", "finite weights")
    return model.eval()


def embedding_rows(folder: Path, part: Part = "body", rows: int = 4096) -> Iterator[Tensor]:
    """Yield a model's token vectors in the order of token ids, some at a time, to save memory.

    Args:
        folder: see `load_pretrained`.
        part: see `load_pretrained`.
        rows: number of vectors to yield at a time; each yielded tensor has axes (rows, width),
            float32.

    Raises:
        MissingDataError, DataError: see `load_pretrained`.
    """
    found = describe(folder, part)
    with _refusing(folder, found.family):
        name = f"{found.names.of('tokens')[0]}.weight" if found.names else "tokens.weight"
        for some in found.weights.pieces(name, rows):
            if not some.isfinite().all():
                raise _refused(folder / WEIGHTS, f"NaN or infinity in '{name}'", "finite weights")
            yield some


@contextmanager
def _refusing(folder: Path, family: str) -> Iterator[None]:
    """Turn errors in the block into one that names the missing or invalid part of the folder."""
    try:
        yield
    except KeyError as missing:
        want = f"the settings and weights of {family}"
        raise _refused(folder, f"no {missing.args[0]!r}", want, _ELSEWHERE) from None
    except Refused as problem:
        raise _refused(folder, problem.got, problem.want, _ELSEWHERE) from None
    except BadOptionError as problem:
        got, want = problem.got or "", problem.want or ""
        raise _refused(folder / CONFIG, got, want, _ELSEWHERE) from None
    except (TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError) as problem:
        want = f"numbers in {CONFIG}, and weights of their shapes"
        raise _refused(folder, type(problem).__name__, want) from problem


def save_decoder(folder: Path, model: Decoder) -> None:
    """Write a decoder's folder; weights that its head shares with the embedding are written once.

    Raises:
        StorageError: the disk is full, or the folder is not writable; an existing model stays
            unchanged.
    """
    state = {name: each.contiguous() for name, each in model.state_dict().items()}
    if model.shape.tied:
        del state["head.weight"]
    config = {"model_type": OWN, **asdict(model.shape)}
    text, existed = json.dumps(config, indent=2) + "\n", folder.exists()
    try:
        with prepared(folder / CONFIG, [text.encode()]):
            save_tensors(folder / WEIGHTS, state)
    except StorageError:
        if not existed:
            with suppress(OSError):
                folder.rmdir()
        raise


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace a file of tensors, without copying the tensors in memory.

    Raises:
        StorageError: the disk is full, or the folder is not writable; an existing file stays
            unchanged.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with writing(path):
            try:
                save_file(dict(tensors), part)
            except SafetensorError as problem:
                raise OSError(errno.EIO, str(problem)) from None
            part.chmod(PRIVATE_FILE)
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def names_of(folder: Path) -> dict[str, list[Any]]:
    """Return the names of outputs: `labels` of classes, `end_tokens` that end an answer.

    Raises:
        MissingDataError, DataError: config.json is missing, or contains invalid numbers or names.
    """
    config = _json(folder / CONFIG)
    labels, ends = config.get("id2label") or {}, config.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    try:
        ordered = [str(labels[key]) for key in sorted(labels, key=int)]
        return {"labels": ordered, "end_tokens": [int(one) for one in ends]}
    except (TypeError, ValueError):
        want = "id2label of numbers to names, eos_token_id a number"
        raise _refused(folder / CONFIG, "other settings", want) from None


def require_tokenizer(folder: Path) -> None:
    """Refuse a folder without a tokenizer, unless it has vfl's own layout.

    Raises:
        MissingDataError: the model has no tokenizer.
    """
    if _json(folder / CONFIG).get("model_type") != OWN and not (folder / TOKENIZER).is_file():
        raise _missing(folder / TOKENIZER)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the model's tokenizer, which has `encode(text).ids` and `decode(ids)`.

    Raises:
        MissingPackageError: the packages of the extra "llm" are not installed.
        MissingDataError, DataError: tokenizer.json is missing or is not a tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingPackageError(
            "a model's tokenizer needs a package that is not installed",
            want="tokenizers",
            fix="pip install 'vfl[llm]'",
        ) from None
    path = folder / TOKENIZER
    if not path.is_file():
        raise _missing(path)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as problem:  # the package raises no error class of its own
        raise _refused(path, type(problem).__name__, "the file of the tokenizers package") from None


#: Prefixes in the names of the weights of heads, which a body leaves out.
_HEADS = ("lm_head.", "embed_out.", "score.", "classifier.", "pre_classifier.", "pooler.")


def _layout(
    folder: Path, found: Mapping[str, Any], part: Part
) -> tuple[str, Mapping[str, Any], Layout, Sequence[str]]:
    """Return family, settings, layout, and name prefixes of weights of the other CLIP tower."""
    kind = found.get("model_type")
    if kind == "clip":
        if part not in TOWERS:
            raise _refused(folder, "two towers", "part 'text' or 'vision' of a CLIP")
        inside, kind, others = TOWERS[part]
        settings = found.get(inside)
        if not isinstance(settings, dict):
            raise _refused(folder / CONFIG, f"no {inside!r}", "settings of both towers")
        return kind, settings, LAYOUTS[kind], others
    layout = LAYOUTS.get(kind) if isinstance(kind, str) else None
    if layout is None:
        want = f"one of {', '.join(LAYOUTS)}"
        raise _refused(folder, f"model_type {kind!r}", want, _ELSEWHERE)
    return str(kind), found, layout, ()


def _headless(shape: BlockShape) -> BlockShape:
    """Return the shape without a head; a decoder's head then shares the embedding's weights."""
    if isinstance(shape, EncoderShape | PictureShape):
        return replace(shape, classes=0)
    if isinstance(shape, VectorShape):
        return shape
    assert isinstance(shape, DecoderShape), "the third kind"
    return replace(shape, tied=True, head_bias=False)


def _tied(shape: BlockShape) -> bool:
    return isinstance(shape, DecoderShape) and not isinstance(shape, EncoderShape) and shape.tied


def _weight(key: str, shape: BlockShape, names: Names | None, weights: Weights) -> Tensor:
    """Return a weight under vfl's name, made from weights that have the family's names."""
    if names is None:
        return weights.take(key)
    module, _, kind = key.rpartition(".") if "." in key else (key, "", "weight")
    linear = module.startswith("layers.") and module.endswith(("_in", "_out"))
    turned = linear and names.turned
    parts = []
    for name in names.of(module):
        if linear and kind == "bias" and not weights.has(f"{name}.bias"):
            parts.append(torch.zeros(weights.outputs(name, turned=turned)))
        else:
            part = weights.take_of(name, kind)
            parts.append(part.t().contiguous() if turned and kind == "weight" else part)
    made = parts[0] if len(parts) == 1 else torch.cat(parts)  # a single weight is not copied
    if names.plus_one and module.endswith("norm"):
        made = made + 1
    if names.interleaved and module.endswith("attention_in"):
        by_head = made.view(shape.heads, 3, shape.head_width, *made.shape[1:])
        made = by_head.transpose(0, 1).reshape(made.shape)
    if module == "positions":
        made = made.reshape(-1, shape.width)[names.skipped :]
    return made.flatten() if module == "first" else made


class Weights:
    """Tensors of a folder by name; each can be read once.

    Args:
        folder: folder with the files of weights.
        prefixes: prefixes to remove from the tensors' names.
    """

    def __init__(self, folder: Path, prefixes: Sequence[str]) -> None:
        files = {WEIGHTS}
        if not (folder / WEIGHTS).is_file() and (folder / _INDEX).is_file():
            listed = _json(folder / _INDEX).get("weight_map")
            files = set(listed.values()) if isinstance(listed, dict) else set()
            if not files or not all(
                isinstance(one, str) and Path(one).name == one for one in files
            ):
                raise _refused(folder / _INDEX, "another weight_map", "file names in this folder")
        self._files: dict[str, tuple[Any, str]] = {}
        self._path_of: dict[str, Path] = {}
        self._axes: dict[str, torch.Size] = {}
        self._paths = [folder / file for file in sorted(files)]
        for file in sorted(files):
            if not (folder / file).is_file():
                raise _missing(folder / file)
            try:
                opened = safe_open(folder / file, "pt")
                for name in opened.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                    self._files[_without(name, prefixes)] = opened, name
                    self._path_of[_without(name, prefixes)] = folder / file
            except SafetensorError as problem:
                raise _refused(folder / file, type(problem).__name__, "safetensors") from None

    @property
    def file_bytes(self) -> int:
        """Return the total size of the files in bytes."""
        return sum(path.stat().st_size for path in self._paths)

    def has(self, name: str) -> bool:
        """Return whether the files have a weight with this name that was not taken before."""
        return name in self._files

    def take(self, name: str) -> Tensor:
        """Return a weight in float32; each weight can be taken only once."""
        opened, whole = self._files.pop(name)
        found: Tensor = opened.get_tensor(whole).float()
        return found

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """Yield a weight in float32, some rows at a time; each weight can be taken only once."""
        opened, whole = self._files.pop(name)
        path = self._path_of[name]
        for start in range(0, opened.get_slice(whole).get_shape()[0], rows):
            # The file is opened again for each piece, because the pages that were read stay in
            # memory as long as a memory-mapped file is open.
            with safe_open(path, "pt") as again:
                yield again.get_slice(whole)[start : start + rows].float()

    def take_of(self, module: str, kind: str) -> Tensor:
        """Return a module's weight or bias; older files name these "gamma" and "beta".

        Raises:
            KeyError: the files have no such tensor.
        """
        older = {"weight": "gamma", "bias": "beta"}
        for name in (f"{module}.{kind}", f"{module}.{older[kind]}", module):
            if self.has(name):
                found = self.take(name)
                self._axes[module] = found.shape
                return found
        raise KeyError(f"{module}.{kind}")

    def outputs(self, module: str, *, turned: bool) -> int:
        """Return the number of outputs of a linear layer whose weight was taken before."""
        return self._axes[module][1 if turned else 0]

    def left(self, unused: Sequence[str]) -> list[str]:
        """Return names of weights that were not taken and begin with none of these prefixes."""
        return sorted(
            name
            for name in self._files
            if not name.startswith(tuple(unused)) and not _NO_WEIGHT.search(name)
        )


def _without(name: str, prefixes: Sequence[str]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _pictures(folder: Path) -> Mapping[str, Any]:
    path = folder / _PICTURES
    return _json(path) if path.is_file() else {}


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
    want = f"{CONFIG}, {WEIGHTS} and {TOKENIZER}, as Hugging Face lays them out"
    return MissingDataError("a model's file is missing", where=str(path), want=want)


def _refused(where: Path, got: str, want: str, fix: str | None = None) -> DataError:
    return DataError("this model is not supported", where=str(where), got=got, want=want, fix=fix)
