"""A pretrained model as a bottom: its hidden states are the features, pooled or for each token."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.errors import BadOptionError, DataError, SpecError, WidthError
from vfl.core.registry import MOST_WEIGHT, require, require_choice, require_range
from vfl.core.storage import PRIVATE_FILE, locked
from vfl.models.base import Bottom, Shape, picture_axes, sequence_steps, whole_numbers
from vfl.models.decoder import (
    BlockShape,
    Decoder,
    DecoderShape,
    PictureEncoder,
    PictureShape,
    VectorShape,
    checkpointed,
)
from vfl.models.lora import adapt
from vfl.models.pretrained import (
    TOKENIZER,
    Described,
    Part,
    Pretrained,
    describe,
    existing_model,
    load_pretrained,
    load_tokenizer,
    models_folder,
)

Pool = Literal["mean", "max", "first", "last", "tokens"]
_POOLS = ("mean", "max", "first", "last", "tokens")
_PARTS = ("body", "text", "vision")
#: Size limit of the cache for features of a frozen model; without the cache, each epoch computes
#: the features again.
MOST_KEPT_BYTES = 1 << 30
#: Subfolder of `models_folder` for features on disk; it begins with a dot, as no model's name does.
_ON_DISK, _ROWS, _PATIENCE_S = ".features", "rows.bin", 60.0
_KEY_BYTES, _CHECK_BYTES = 16, 8
_MOST_LETTERS = 1000


@dataclass(frozen=True)
class Question:
    """A question to a decoder, which the bottom appends to each text.

    Attributes:
        tail: number of tokens, up to the last one, that the decoder reads of a text; 0 reads all.
        prompt: tokens that are appended to each text.
        answers: tokens whose logits after the question are the features; if empty, the features are
            hidden states.
    """

    tail: int = 0
    prompt: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()

    def steps(self, steps: int) -> int:
        """Return the number of tokens that the model reads for a row of `steps` tokens."""
        return min(steps, self.tail or steps) + len(self.prompt)

    def put(self, tokens: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens to read, and a mask of tokens that are not padding; axes (rows, steps).

        >>> tokens = torch.tensor([[5, 6, 7], [8, 0, 0]])
        >>> Question(tail=2, prompt=(9,)).put(tokens, tokens > 0)[0].tolist()
        [[6, 7, 9], [8, 9, 0]]
        """
        if not self.tail and not self.prompt:
            return tokens, real
        read = min(tokens.shape[1], self.tail or tokens.shape[1])
        places = torch.arange(read + len(self.prompt), device=tokens.device)
        counts = real.sum(1, keepdim=True)
        kept = counts.clamp(max=read)
        wanted = (counts - kept + places).clamp(max=tokens.shape[1] - 1)
        found = torch.where(places < kept, tokens.gather(1, wanted), 0)
        if self.prompt:
            prompt = torch.tensor(self.prompt, device=tokens.device).expand(len(tokens), -1)
            found = found.scatter(1, kept + places[: len(self.prompt)], prompt)
        return found, places < kept + len(self.prompt)


class PretrainedBottom(Bottom):
    """A pretrained model up to one of its blocks, and a linear layer from its states to the cut.

    If the width of the cut equals the number of features, there is no linear layer.

    A text is a row of numbers, where 0 is padding and n + 1 stands for the tokenizer's token n (see
    `data.tokenizer`). Pictures are resized to the model's size. The saved weights of a run contain
    a frozen model's digest in place of the model. So each party that runs the bottom needs the same
    model under the same name. Features of a frozen model are cached in memory up to a
    limit (and on disk with `keep=disk`), so the model computes only rows that are not cached.

    With `pool` "mean" or "max", a text longer than the model's context is divided into windows of
    the context's length; with any other `pool`, such texts are refused.

    A decoder can answer a question. For example, with ``prompt=All in all the film was`` and
    ``words=good-bad``, a text's features are the logits of the two answers (Brown et al. 2020,
    section 2.1). These logits are few and informative features, so noise on gradients costs little
    accuracy.

    Args:
        name: name of a model in this machine's folder of models (see `vfl model list`), never a
            path.
        layer: number of blocks of the model to run; 0 returns the embedding, -1 runs all blocks and
            the final norm.
        pool: pooling over a row's tokens: "mean", "max", the "first" or the "last" token, or the
            concatenation of all "tokens".
        part: tower of a CLIP model: "text" or "vision".
        norm: whether to scale each row's features to mean 0 and standard deviation 1 (Ba et al.
            2016, without weights), because the features of published models differ by orders of
            magnitude.
        rank: rank of trainable low-rank adapters (Hu et al. 2022); 0 freezes the model.
        alpha: scale of the adapters' output (alpha in Hu et al. 2022).
        tail: number of tokens, up to the last one, that the model reads of a row; 0 reads all.
        tokens: number of values at the beginning of a row that are tokens (`data.length`), if other
            columns follow them. The linear layer reads the other columns together with the
            features. 0 means that all values are tokens.
        prompt: text, such as a question, that is appended to each row as a new paragraph.
        words: answers to the question, separated by dashes, each of one token. The features are the
            logits of these answers after the last token. The option `words` needs a decoder,
            pool=last and layer=-1.
        precision: "bfloat16" computes a frozen model in automatic mixed precision.
        keep: where to cache a frozen model's features: in "memory", or on "disk", in private files
            in the folder of models, whose keys follow from the content of each row. `vfl forget`
            does not erase these files; delete the subfolder ``.features`` to erase them.
        checkpoint: whether the backward pass computes the blocks' activations again, which saves
            memory (Chen et al. 2016).

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        name: str,
        layer: int = -1,
        pool: Pool = "mean",
        part: Part = "body",
        norm: bool = True,
        rank: int = 0,
        alpha: float = 8.0,
        tail: int = 0,
        prompt: str = "",
        words: str = "",
        precision: Literal["float32", "bfloat16"] = "float32",
        keep: Literal["memory", "disk"] = "memory",
        checkpoint: bool = False,
        tokens: int = 0,
    ) -> None:
        require_range("tokens", tokens, 0, 1 << 16)
        require_range("tail", tail, 0, 1 << 16)
        for option, text in (("prompt", prompt), ("words", words)):
            require(option, f"{len(text)} letters", "at most 1,000", len(text) <= _MOST_LETTERS)
        require("words", words, "pool=last and layer=-1 with 'words'", not words or (
            pool == "last" and layer == -1
        ))  # fmt: skip
        require_choice("precision", precision, ("float32", "bfloat16"))
        require_choice("keep", keep, ("memory", "disk"))
        require("keep", keep, "memory where adapters train", keep == "memory" or rank == 0)
        self.tail, self.prompt, self.words, self.tokens = tail, prompt, words, tokens
        self.precision, self.keep, self.checkpoint = precision, keep, checkpoint
        require_range("layer", layer, -1, 1024)
        require_choice("pool", pool, _POOLS)
        require_choice("part", part, _PARTS)
        require_range("rank", rank, 0, 4096)
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        self.name, self.layer, self.pool, self.part = name, layer, pool, part
        self.norm, self.rank, self.alpha = norm, rank, alpha

    def columns(self, shape: Shape) -> int:
        """Return the number of features of a row, which are the linear layer's inputs.

        Args:
            shape: axes of one row, without the rows axis.

        Raises:
            SpecError: this bottom cannot read rows of this shape.
        """
        return self._described(self._read(shape))[2] + self._beside(shape)

    def build(self, shape: Shape, width: int) -> nn.Module:
        found, question, made = self._described(self._read(shape))
        on_meta = torch.empty(0).is_meta
        model = found.empty() if on_meta else load_pretrained(found.folder, self._part)
        model = checkpointed(model) if self.checkpoint else model  # type: ignore[assignment]
        features = Features(
            adapt(model, self.rank, self.alpha) if self.rank else model,  # type: ignore[arg-type]
            layer=None if self.layer < 0 else self.layer,
            pool=self.pool,
            shift=int((found.folder / TOKENIZER).is_file()),
            frozen=not self.rank,
            question=question,
            bfloat16=self.precision == "bfloat16",
            on_disk=self.keep == "disk" and not on_meta,
        )
        norm = nn.LayerNorm(made, elementwise_affine=False) if self.norm else nn.Identity()
        below: list[nn.Module] = [features, norm]
        if beside := self._beside(shape):
            below, made = [_Beside(nn.Sequential(*below), self.tokens)], made + beside
        return nn.Sequential(*below, nn.Identity() if made == width else nn.Linear(made, width))

    def tokens_read(self, shape: Shape, width: int) -> int:
        described = describe(existing_model(self.name), self._part)
        return 0 if isinstance(described.shape, PictureShape) else self._read(shape)[0]

    def _read(self, shape: Shape) -> Shape:
        """Return the axes of the part of a row that the model reads, at the row's beginning."""
        if not self.tokens:
            return shape
        steps = sequence_steps(shape, "pretrained")
        require(
            "tokens", self.tokens, f"at most {steps}, the values of a row", self.tokens <= steps
        )
        return (self.tokens,)

    def _beside(self, shape: Shape) -> int:
        """Return the number of a row's values that are not tokens."""
        return shape[0] - self.tokens if self.tokens else 0

    @property
    def _part(self) -> Part:
        return "whole" if self.words and self.part == "body" else self.part

    def _described(self, shape: Shape) -> tuple[Described, Question, int]:
        """Return the model's description without weights, the question, and the feature count."""
        folder = existing_model(self.name)
        found = describe(folder, self._part)
        of = found.shape
        require_range("layer", self.layer, -1, of.layers)
        question = self._question(folder, of)
        if isinstance(of, PictureShape):
            picture_axes(shape, "pretrained")
            steps = (of.size // of.patch) ** 2 + 1
        else:
            assert isinstance(of, DecoderShape | VectorShape), "of texts"
            steps = question.steps(sequence_steps(shape, "pretrained"))
            if steps > of.context and self.pool not in ("mean", "max"):
                raise WidthError(
                    f"pool '{self.pool}' takes rows of one window",
                    got=f"{steps} tokens a row",
                    want=f"at most {of.context} tokens, or pool=mean",
                )
        made = of.width * (steps if self.pool == "tokens" else 1)
        return found, question, len(question.answers) or made

    def _question(self, folder: Path, shape: BlockShape) -> Question:
        """Return the question, with prompt and answers converted to tokens.

        Raises:
            BadOptionError: an answer has more than one token, or the model is not a decoder.
        """
        if not (self.prompt or self.words):
            return Question(self.tail)
        option = "words" if self.words else "prompt"
        require(option, type(shape).__name__, "a decoder's name", type(shape) is DecoderShape)
        tokenizer = load_tokenizer(folder)

        def tokens(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        answers = []
        for word in filter(None, self.words.split("-")):
            ids = tokens(f" {word.strip()}")
            if len(ids) != 1:
                raise BadOptionError(
                    "an answer must be one token", where="option 'words'", got=word,
                    want="words that are one token of the tokenizer",
                )  # fmt: skip
            answers += ids
        prompt = tokens(f"\n\n{self.prompt.strip()}") if self.prompt else []
        return Question(self.tail, tuple(prompt), tuple(answers))


def features_folder() -> Path:
    """Return the folder of the features that bottoms with `keep=disk` have cached."""
    return models_folder() / _ON_DISK


class _Kept:
    """A frozen model with its cache of features; copies of a bottom share both.

    Args:
        model: the frozen model.
        reading: other settings on which the features depend; None caches features in memory only.
    """

    def __init__(self, model: Pretrained, reading: str | None = None) -> None:
        self.model = model.requires_grad_(requires_grad=False)
        self.features: dict[bytes, Tensor] = {}
        self.bytes = 0
        self.digest = _digest(model)
        self._folder: Path | None = None
        if reading is not None:
            name = hashlib.sha256(self.digest + reading.encode()).hexdigest()[:32]
            self._folder = features_folder() / name
            with locked(self._folder, _PATIENCE_S):
                path = self._folder / _ROWS
                end = 0
                for key, features, end in _records(path):  # noqa: B007
                    self.add(key, features)
                if path.is_file():  # the incomplete record of a process that was killed
                    os.truncate(path, end)

    def __deepcopy__(self, memo: dict[int, object]) -> _Kept:
        return self

    def add(self, key: bytes, features: Tensor) -> None:
        size = features.numel() * features.element_size()
        if self.bytes + size <= MOST_KEPT_BYTES and key not in self.features:
            self.features[key] = features
            self.bytes += size

    def add_new(self, computed: Mapping[bytes, Tensor]) -> None:
        """Cache the features of new rows, also on disk if requested."""
        before = len(self.features)
        for key, features in computed.items():
            self.add(key, features.clone())
        if self._folder is not None and len(self.features) > before:
            with locked(self._folder, _PATIENCE_S):
                handle = os.open(
                    self._folder / _ROWS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE
                )
                with os.fdopen(handle, "ab") as file:
                    file.write(b"".join(_record(*each) for each in computed.items()))


def _record(key: bytes, features: Tensor) -> bytes:
    """Return key and features as bytes with a checksum, by which incomplete records are found."""
    content = key + features.contiguous().numpy().astype("<f4").tobytes()
    size = len(content).to_bytes(4, "little")
    return size + content + hashlib.blake2b(content, digest_size=_CHECK_BYTES).digest()


def _records(path: Path) -> Iterator[tuple[bytes, Tensor, int]]:
    """Yield key, features and end position of each record in a file, up to a damaged record."""
    content = path.read_bytes() if path.is_file() else b""
    at = 0
    while at + 4 <= len(content):
        end = at + 4 + int.from_bytes(content[at : at + 4], "little")
        record, check = content[at + 4 : end], content[end : end + _CHECK_BYTES]
        if hashlib.blake2b(record, digest_size=_CHECK_BYTES).digest() != check:
            return
        numbers = np.frombuffer(record[_KEY_BYTES:], "<f4").astype(np.float32)
        at = end + _CHECK_BYTES
        yield record[:_KEY_BYTES], torch.from_numpy(numbers), at


class _Beside(nn.Module):
    """Applies a module to the first values of each row, and appends the row's other values."""

    def __init__(self, module: nn.Module, first: int) -> None:
        super().__init__()
        self.module, self._first = module, first

    def forward(self, rows: Tensor) -> Tensor:
        """Return features and the other values, axes (rows, features + other values)."""
        return torch.cat([self.module(rows[:, : self._first]), rows[:, self._first :]], 1)


class Features(nn.Module):
    """The module that `PretrainedBottom` builds before its linear layer.

    Args:
        model: the model without its head.
        layer: number of blocks to run, see `PretrainedBottom`; None means all blocks and the final
            norm (-1 there).
        pool: see `PretrainedBottom`.
        shift: offset between the numbers in rows and the tokenizer's token ids: 1 if 0 is padding.
        frozen: whether the model is frozen, so that this module's weights do not include it.
        question: question appended to each text.
        bfloat16: whether a frozen model computes in automatic mixed precision.
        on_disk: whether to cache features of a frozen model also on disk.
    """

    def __init__(
        self,
        model: Pretrained,
        *,
        layer: int | None,
        pool: Pool,
        shift: int,
        frozen: bool,
        question: Question = Question(),
        bfloat16: bool = False,
        on_disk: bool = False,
    ) -> None:
        super().__init__()
        self._layer, self._pool, self._shift = layer, pool, shift
        self._question, self._bfloat16 = question, bfloat16
        reading = repr((layer, pool, shift, question, bfloat16)) if on_disk else None
        self._kept = _Kept(model, reading) if frozen else None
        self.model = None if frozen else model
        weights = sum(each.numel() for each in model.parameters())
        if frozen and next(model.parameters()).is_meta:
            # `footprint` counts only the tensors that are registered in a module; a frozen model is
            # not registered.
            self.register_buffer("weights", torch.empty(weights, device="meta"), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return features, axes (rows, features), of token rows or pictures."""
        if self._kept is None:
            assert self.model is not None, "one of both"
            return self._computed(self.model, rows)
        kept = self._kept
        if rows.is_meta or torch.compiler.is_exporting():  # an exported program has no cache
            return self._computed(kept.model, rows)
        keys = [hashlib.blake2b(each.numpy().tobytes(), digest_size=16).digest()
                for each in rows.detach().cpu().contiguous()]  # fmt: skip
        new = {key: index for index, key in enumerate(keys) if key not in kept.features}
        computed: dict[bytes, Tensor] = {}
        if new:
            model = kept.model.to(rows.device)
            kind = rows.device.type
            with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=self._bfloat16):
                found = self._computed(model, rows[list(new.values())]).float().cpu()
            computed = dict(zip(new, found.unbind(), strict=True))
            kept.add_new(computed)
        made = [computed[key] if key in computed else kept.features[key] for key in keys]
        return torch.stack(made).to(rows.device)

    def get_extra_state(self) -> Tensor:
        """Return a digest of the frozen model, which saved weights lack; empty if not frozen."""
        digest = self._kept.digest if self._kept else b""
        return torch.tensor(list(digest), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse weights that were trained with another frozen model.

        Raises:
            DataError: the frozen model differs from the model with which the weights were trained.
        """
        if not torch.equal(state.cpu(), self.get_extra_state()):
            raise DataError(
                "the pretrained model on this machine is not the one of this run",
                want="the model that the run was trained with, under the same name",
                fix="vfl model list",
            )

    def _computed(self, model: Pretrained, rows: Tensor) -> Tensor:
        if isinstance(model, PictureEncoder):
            size = model.shape.size
            if rows.shape[-1] != size or rows.shape[-2] != size:
                rows = F.interpolate(rows, (size, size), mode="bilinear", antialias=True)
            hidden = model.hidden(rows, self._layer)
            return self._pooled(hidden, torch.ones(hidden.shape[:2], device=rows.device))
        most = model.shape.vocabulary - 1 + self._shift
        try:
            numbers = whole_numbers(rows, most, "pretrained", "tokens")
        except SpecError as problem:
            problem.fix = (
                "rows of the model's own tokens (data.tokenizer); where other columns follow the "
                "tokens, tokens=N with N of data.length"
            )
            raise
        real = numbers > 0 if self._shift else torch.ones_like(numbers, dtype=torch.bool)
        tokens, real = self._question.put((numbers - self._shift).clamp(min=0), real)
        window = model.shape.context
        hidden = torch.cat(
            [
                model.hidden(part, self._layer, _some(mask))
                for part, mask in zip(_windows(tokens, window), _windows(real, window), strict=True)
            ],
            1,
        )
        pooled = self._pooled(hidden, real.float())
        if answers := list(self._question.answers):
            assert isinstance(model, Decoder), "the option is refused beside others"
            bias = None if model.head.bias is None else model.head.bias[answers]
            return F.linear(pooled, model.head.weight[answers], bias)
        return pooled

    def _pooled(self, hidden: Tensor, real: Tensor) -> Tensor:
        """Pool hidden states, axes (rows, tokens, width), to features, axes (rows, features)."""
        if self._pool == "tokens":
            return hidden.flatten(1)
        if self._pool == "first":
            return hidden[:, 0]
        if self._pool == "last":
            last = (real.sum(1).long() - 1).clamp(min=0)
            return hidden[torch.arange(len(hidden), device=hidden.device), last]
        if self._pool == "max":
            empty = real.sum(1) == 0
            best = hidden.masked_fill(real[..., None] == 0, -math.inf).amax(1)
            return best.masked_fill(empty[:, None], 0.0)
        counts = real.sum(1, keepdim=True).clamp(min=1)
        return (hidden * real[..., None]).sum(1) / counts


def _windows(tokens: Tensor, window: int) -> tuple[Tensor, ...]:
    return torch.split(tokens, window, 1)


def _some(real: Tensor) -> Tensor:
    """Return `real`, with the first token marked in rows without tokens: empty attention is NaN."""
    return torch.cat([real[:, :1] | ~real.any(1, keepdim=True), real[:, 1:]], 1)


def _digest(model: Pretrained) -> bytes:
    found = hashlib.sha256()
    for name, weight in model.state_dict().items():
        found.update(name.encode())
        if not weight.is_meta:
            found.update(weight.contiguous().numpy().tobytes())
    return found.digest()
