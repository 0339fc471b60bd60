"""A decoder cut in two or three: embedding and first blocks, the blocks above, and a head.

    words -> DecoderFront -- cut, a vector a word --> DecoderMiddle -- one vector --> head

The parts are those of one `vfl.models.decoder.Decoder` with rotary positions and RMSNorm, begun
from its pretrained weights or anew, and fine-tuned whole or by low-rank adapters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from vfl.core.errors import MissingDataError, SpecError, WidthError
from vfl.core.registry import MOST_WEIGHT, require, require_range
from vfl.core.storage import Seal, load_weights, save_weights
from vfl.models.base import MOST_NUMBERS, Bottom, Shape, Top, sequence_steps, whole_numbers
from vfl.models.decoder import Cache, Decoder, DecoderLayer, DecoderShape
from vfl.models.lora import LoRAEmbedding, adapt

ENVIRONMENT = "VFL_MODELS"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_MOST_LAYERS, _MOST_TOKENS = 64, 2**13


class _Parts:
    """Options that all parts of one decoder share.

    Args:
        words: numbers a word may have, padding and the unknown word included.
        tokens: numbers of a word's vector.
        layers: blocks of the whole decoder.
        heads: of attention.
        front: blocks below the cut.
        pretrained: name of weights that `save_pretrained` left on this machine; "none" starts anew.
        rank: of the low-rank adapters; 0 trains every weight.
        alpha: scale of the adapters.

    Raises:
        BadOptionError: an option out of range.
    """

    def __init__(
        self,
        words: int = 5000,
        tokens: int = 64,
        layers: int = 6,
        heads: int = 4,
        front: int = 2,
        pretrained: str = "none",
        rank: int = 0,
        alpha: float = 8.0,
    ) -> None:
        require_range("words", words, 2, MOST_NUMBERS)
        require_range("tokens", tokens, 2, _MOST_TOKENS)
        require_range("layers", layers, 1, _MOST_LAYERS)
        require_range("front", front, 0, layers)
        require_range("rank", rank, 0, tokens)
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        _file(pretrained)
        self.shape = decoder_shape(words, tokens, layers, heads)
        self.front, self.pretrained, self.rank, self.alpha = front, pretrained, rank, alpha

    def decoder(self) -> Decoder:
        """The whole, for one of its parts to be taken from."""
        model = Decoder(self.shape)
        begun_anew = self.pretrained == "none" or model.tokens.weight.is_meta
        return model if begun_anew else load_pretrained(self.pretrained, model)

    def begun(self, part: nn.Module) -> nn.Module:
        """The part as training finds it."""
        return adapt(part, self.rank, self.alpha) if self.rank else part

    def steps(self, width: int, name: str) -> int:
        """Words behind a cut of some width.

        Raises:
            WidthError: it is no whole number of vectors.
        """
        steps, rest = divmod(width, self.shape.width)
        if rest or not steps:
            raise WidthError(
                f"'{name}' has a vector of {self.shape.width} numbers for each word",
                got=f"width {width}",
                want=f"a multiple of {self.shape.width}",
            )
        return steps


class DecoderFront(_Parts, Bottom):
    """Words as vectors through the first blocks; the cut is every word's vector, one after another.

    A cut of fewer vectors than a row has words is about the row's first words.

    >>> module = DecoderFront(words=50, tokens=8, layers=3, heads=2, front=1).build((5,), 40)
    >>> import torch
    >>> module(torch.tensor([[3.0, 1.0, 4.0, 1.0, 5.0]])).shape
    torch.Size([1, 40])
    """

    def build(self, shape: Shape, width: int) -> nn.Module:
        words, steps = sequence_steps(shape, "decoder_front"), self.steps(width, "decoder_front")
        if steps > words:
            raise WidthError(
                "bottom 'decoder_front' sends a vector for each word",
                got=f"width {width} for {words} words",
                want=f"width {words * self.shape.width} or less",
            )
        whole = self.decoder()
        return self.begun(Front(whole.tokens, whole.layers[: self.front], steps))


class DecoderMiddle(_Parts, Bottom):
    """The other blocks and the last norm; what goes on is the mean over all words.

    It takes a merged cut of one party, as the party in the middle of a U-shape does.

    >>> module = DecoderMiddle(words=50, tokens=8, layers=3, heads=2, front=1).build((40,), 8)
    >>> import torch
    >>> module(torch.zeros(2, 40)).shape
    torch.Size([2, 8])
    """

    def build(self, shape: Shape, width: int) -> nn.Module:
        self.steps(sequence_steps(shape, "decoder_middle"), "decoder_middle")
        if width != self.shape.width:
            raise WidthError(
                "'decoder_middle' gives one vector a text",
                got=f"width {width}",
                want=f"width {self.shape.width}",
            )
        whole = self.decoder()
        return self.begun(Middle(whole.layers[self.front :], whole.norm, self.shape.width))


class DecoderTop(_Parts, Top):
    """`DecoderMiddle` and a linear head, at one party.

    >>> module = DecoderTop(words=50, tokens=8, layers=3, heads=2, front=1).build(40, 2)
    >>> import torch
    >>> module(torch.zeros(2, 40)).shape
    torch.Size([2, 2])
    """

    def build(self, width: int, outputs: int) -> nn.Module:
        self.steps(width, "decoder")
        whole = self.decoder()
        middle = self.begun(Middle(whole.layers[self.front :], whole.norm, self.shape.width))
        return nn.Sequential(middle, nn.Linear(self.shape.width, outputs))


class Front(nn.Module):
    """What `DecoderFront` builds; an attacker that has it runs its parts one by one."""

    def __init__(
        self, words: nn.Embedding | LoRAEmbedding, layers: Iterable[nn.Module], steps: int
    ) -> None:
        super().__init__()
        self.words, self.layers, self.steps = words, nn.ModuleList(layers), steps

    def forward(self, rows: Tensor) -> Tensor:
        """Whole numbers as float32 in, axes (rows, words); (rows, steps x tokens) out.

        Raises:
            SpecError: a number is no word's.
        """
        most, first = self.words.num_embeddings - 1, rows[:, : self.steps]
        numbers = whole_numbers(first, most, "decoder_front", "words")
        return self.above(self.words(numbers)).flatten(1)

    def above(self, vectors: Tensor, cache: Cache | None = None) -> Tensor:
        """The blocks alone; axes (rows, words, tokens) in and out.

        Args:
            vectors: words as vectors.
            cache: keys and values of earlier words, as of `Decoder.forward`.
        """
        return _through(self.layers, vectors, [] if cache is None else cache)


class Middle(nn.Module):
    """What `DecoderMiddle` builds."""

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module, width: int) -> None:
        super().__init__()
        self.layers, self.norm, self.width = nn.ModuleList(layers), norm, width

    def forward(self, cut: Tensor) -> Tensor:
        """Axes (rows, words x tokens) in, (rows, tokens) out."""
        vectors = cut.view(len(cut), -1, self.width)
        mean: Tensor = self.norm(_through(self.layers, vectors, [])).mean(1)
        return mean


def _through(layers: nn.ModuleList, x: Tensor, cache: Cache) -> Tensor:
    start = cache[0][0].shape[2] if cache else 0
    for index, layer in enumerate(layers):
        assert isinstance(layer, DecoderLayer), "blocks of a decoder"
        x, kept = layer(x, start, cache[index] if index < len(cache) else None)
        cache[index : index + 1] = [kept]
    return x


def decoder_shape(words: int, tokens: int, layers: int, heads: int) -> DecoderShape:
    """The architecture whose parts stand in this file.

    Raises:
        BadOptionError: the heads do not divide a vector.
    """
    return DecoderShape(
        vocabulary=words,
        width=tokens,
        layers=layers,
        heads=heads,
        positions="rotary",
        norm="rms",
        bias=False,
        context=65536,
    )


def models_folder() -> Path:
    """Where pretrained weights lie: the environment's VFL_MODELS, else ``~/.cache/vfl/models``."""
    return Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "vfl" / "models")


def save_pretrained(name: str, model: Decoder) -> Path:
    """Keep a decoder's weights on this machine under a name; the file."""
    path = _file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_weights(path, model.state_dict(), _seal(name))
    return path


def load_pretrained(name: str, model: Decoder) -> Decoder:
    """The model with the weights that `save_pretrained` kept under a name.

    Raises:
        MissingDataError: there are none.
        SpecError: they are of another architecture.
        RunFolderError: the file is damaged.
    """
    path = _file(name)
    if not path.is_file():
        raise MissingDataError(
            f"there are no pretrained weights '{name}'",
            where=str(path),
            fix=f"python examples/language/pretrain.py, or {ENVIRONMENT} as their folder",
        )
    try:
        model.load_state_dict(load_weights(path, _seal(name)))
    except RuntimeError:
        shape = model.shape
        raise SpecError(
            f"the pretrained weights '{name}' are of another architecture",
            where=str(path),
            want=f"{shape.vocabulary} words, {shape.layers} layers of {shape.width}",
        ) from None
    return model


def _file(name: str) -> Path:
    require("pretrained", name, "a name such as reviews", bool(_NAME.fullmatch(name)))
    return models_folder() / f"{name}.safetensors"


def _seal(name: str) -> Seal:
    return Seal("pretrained decoder", "none", name)
