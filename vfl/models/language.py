"""A decoder in two or three parts: embedding and first blocks, further blocks, and a head.

    words -> DecoderFront -- cut, a vector a word --> DecoderMiddle -- one vector --> head

All blocks are blocks of `vfl.models.decoder.Decoder`. Pretrained weights of all parts come from one
decoder (any that `vfl.models.pretrained` reads); random weights are drawn for each part. Training
changes all weights, or only low-rank adapters of frozen weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from vfl.core.errors import BadOptionError, SpecError, WidthError
from vfl.core.registry import MOST_WEIGHT, require, require_choice, require_range
from vfl.models.base import MOST_NUMBERS, Bottom, Shape, Top, sequence_steps, whole_numbers
from vfl.models.decoder import Decoder, DecoderShape, KeyValues, checkpointed
from vfl.models.lora import LoRAEmbedding, QuantisedEmbedding, adapt
from vfl.models.pretrained import (
    TOKENIZER,
    describe,
    embedding_rows,
    existing_model,
    load_pretrained,
    model_folder,
    save_decoder,
)

_MOST_LAYERS, _MOST_TOKENS = 64, 2**13


class _Parts:
    """Options that all parts of a decoder share.

    A size of 0 is the pretrained model's size; without a pretrained model, it means 5,000 words,
    vectors of width 64, 6 blocks and 4 heads.

    Args:
        words: number of different words, including the padding word and the unknown word.
        tokens: width of a word's vector.
        layers: number of blocks in the whole decoder.
        heads: number of attention heads.
        front: number of blocks before the cut.
        pretrained: name of a model on this machine (see `vfl model list`); "none" starts with
            random weights.
        rank: rank of the low-rank adapters; 0 trains every weight.
        alpha: scale of the low-rank adapters' output.
        bits: number of bits per frozen weight beside the adapters: 32, 8, or 4 (Dettmers et al.
            2023).
        checkpoint: whether the backward pass computes the blocks' activations again, which saves
            memory (Chen et al. 2016).

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        words: int = 0,
        tokens: int = 0,
        layers: int = 0,
        heads: int = 0,
        front: int = 2,
        pretrained: str = "none",
        rank: int = 0,
        alpha: float = 8.0,
        bits: int = 32,
        checkpoint: bool = False,
    ) -> None:
        require_choice("bits", str(bits), ("32", "8", "4"))
        require("rank", rank, "at least 1 where bits are 8 or 4", bits == 32 or rank > 0)
        require_range("words", words, 0, MOST_NUMBERS)
        require_range("tokens", tokens, 0, _MOST_TOKENS)
        require_range("layers", layers, 0, _MOST_LAYERS)
        require_range("heads", heads, 0, _MOST_TOKENS)
        require_range("front", front, 0, layers or _MOST_LAYERS)
        require_range("rank", rank, 0, tokens or _MOST_TOKENS)
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        model_folder(pretrained)
        self._sizes = {"vocabulary": words, "width": tokens, "layers": layers, "heads": heads}
        self.front, self.pretrained, self.rank, self.alpha = front, pretrained, rank, alpha
        self.bits, self.checkpoint = bits, checkpoint

    @cached_property
    def shape(self) -> DecoderShape:
        """Return the decoder's architecture; a pretrained decoder's folder states it.

        Raises:
            MissingDataError: this machine does not have the pretrained model.
            SpecError: the model's sizes differ from the options, or the model is not a decoder.
            BadOptionError: the model has fewer blocks than `front`.
        """
        given = {name: size for name, size in self._sizes.items() if size}
        if self.pretrained == "none":
            defaults = {"vocabulary": 5000, "width": 64, "layers": 6, "heads": 4}
            return decoder_shape(*(defaults | given).values())
        folder = existing_model(self.pretrained)
        shape = describe(folder, "body").shape
        if isinstance(shape, DecoderShape) and (folder / TOKENIZER).is_file():
            shape = replace(shape, vocabulary=shape.vocabulary + 1)  # word number 0 is padding
        got = {name: getattr(shape, name, 0) for name in self._sizes}
        if type(shape) is not DecoderShape or got | given != got:
            raise SpecError(
                f"the pretrained weights '{self.pretrained}' are of another architecture",
                where=str(folder),
                got=", ".join(f"{name} {size}" for name, size in got.items()),
                want=", ".join(f"{name} {size}" for name, size in given.items()) or "a decoder",
            )
        if self.front > shape.layers:
            raise BadOptionError(
                "the model has fewer blocks", where="option 'front'", want=f"at most {shape.layers}"
            )
        return shape

    def decoder(self, first: int, last: int) -> Decoder:
        """Return a decoder with weights of blocks `first` to `last - 1` and layers beside them.

        With block 0 come the embedding and the positions; with the last block comes the final norm.
        The function does not read a pretrained decoder's other weights.
        """
        on_meta = torch.empty(0).is_meta
        if self.pretrained == "none" or on_meta:
            return Decoder(self.shape)

        def wanted(name: str) -> bool:
            kind, _, rest = name.partition(".")
            if kind == "layers":
                return first <= int(rest.partition(".")[0]) < last
            return (
                last == self.shape.layers if kind == "norm" else kind == "positions" and not first
            )

        model = load_pretrained(existing_model(self.pretrained), "body", wanted)
        assert isinstance(model, Decoder), "its shape is a decoder's"
        if first == 0:
            model.tokens = self._words(model.shape.vocabulary)
        return model.train()

    def _words(self, tokens: int) -> nn.Embedding:
        """Return the pretrained embedding; with a tokenizer, word n + 1 is its token n."""
        words, width = self.shape.vocabulary, self.shape.width
        quantised = QuantisedEmbedding(words, width) if self.bits != 32 else None
        table = torch.zeros(0 if quantised else words, width)
        start = words - tokens
        for some in embedding_rows(existing_model(self.pretrained)):
            if quantised:
                quantised.write(start, some)
            else:
                table[start : start + len(some)] = some
            start += len(some)
        # The annotation also covers the quantised embedding, because both modules return vectors.
        return quantised or nn.Embedding(words, width, _weight=table)  # type: ignore[return-value]

    def begun(self, part: nn.Module) -> nn.Module:
        """Return a part of the decoder in the state in which training starts."""
        part = checkpointed(part) if self.checkpoint else part
        return adapt(part, self.rank, self.alpha, self.bits) if self.rank else part

    def steps(self, width: int, name: str) -> int:
        """Return how many words' vectors a cut of this width contains.

        Raises:
            WidthError: the width is not a multiple of the width of a word's vector.
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
    """Runs word vectors through the first blocks; the cut concatenates the vectors of all words.

    If the cut is too narrow for all words of a row, it contains only the vectors of the row's first
    words.

    >>> module = DecoderFront(words=50, tokens=8, layers=3, heads=2, front=1).build((5,), 40)
    >>> import torch
    >>> module(torch.tensor([[3.0, 1.0, 4.0, 1.0, 5.0]])).shape
    torch.Size([1, 40])
    """

    def tokens_read(self, shape: Shape, width: int) -> int:
        return sequence_steps(shape, "decoder_front")

    def build(self, shape: Shape, width: int) -> nn.Module:
        words, steps = sequence_steps(shape, "decoder_front"), self.steps(width, "decoder_front")
        if steps > words:
            raise WidthError(
                "bottom 'decoder_front' sends a vector for each word",
                got=f"width {width} for {words} words",
                want=f"width {words * self.shape.width} or less",
            )
        whole = self.decoder(0, self.front)
        positions = whole.positions if whole.shape.positions == "learned" else None
        scale = whole.shape.embedding_scale
        return self.begun(Front(whole.tokens, whole.layers[: self.front], steps, positions, scale))


class DecoderMiddle(_Parts, Bottom):
    """Runs the further blocks and the final norm; the output is the mean vector over all words.

    The input of `DecoderMiddle` is the merged cut of a single feature party, for example at the
    server of a U-shape.

    >>> module = DecoderMiddle(words=50, tokens=8, layers=3, heads=2, front=1).build((40,), 8)
    >>> import torch
    >>> module(torch.zeros(2, 40)).shape
    torch.Size([2, 8])
    """

    def build(self, shape: Shape, width: int) -> nn.Module:
        self.steps(sequence_steps(shape, "decoder_middle"), "decoder_middle")
        if width != self.shape.width:
            raise WidthError(
                "'decoder_middle' returns one vector per text",
                got=f"width {width}",
                want=f"width {self.shape.width}",
            )
        whole = self.decoder(self.front, self.shape.layers)
        return self.begun(Middle(whole.layers[self.front :], whole.norm, self.shape.width))


class DecoderTop(_Parts, Top):
    """`DecoderMiddle` and a linear head after it, both at one party.

    >>> module = DecoderTop(words=50, tokens=8, layers=3, heads=2, front=1).build(40, 2)
    >>> import torch
    >>> module(torch.zeros(2, 40)).shape
    torch.Size([2, 2])
    """

    def build(self, width: int, outputs: int) -> nn.Module:
        self.steps(width, "decoder")
        whole = self.decoder(self.front, self.shape.layers)
        middle = self.begun(Middle(whole.layers[self.front :], whole.norm, self.shape.width))
        return nn.Sequential(middle, nn.Linear(self.shape.width, outputs))


class Front(nn.Module):
    """The module that `DecoderFront` builds; an attack can run its parts separately.

    Args:
        words: embedding that maps word numbers to vectors.
        layers: the first blocks.
        steps: number of words whose vectors a cut contains.
        positions: learned position vectors, if the model has them.
        scale: factor by which word vectors are multiplied.
    """

    def __init__(
        self,
        words: nn.Embedding | LoRAEmbedding,
        layers: Iterable[nn.Module],
        steps: int,
        positions: nn.Embedding | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.words, self.layers, self.steps = words, nn.ModuleList(layers), steps
        self.positions, self.scale = positions, scale

    def forward(self, rows: Tensor) -> Tensor:
        """Return the cut, axes (rows, steps x vector width), for word numbers, axes (rows, words).

        Raises:
            SpecError: a word number is outside the vocabulary.
        """
        most, first = self.words.num_embeddings - 1, rows[:, : self.steps]
        numbers = whole_numbers(first, most, "decoder_front", "words")
        return self.above(self.words(numbers)).flatten(1)

    def above(self, vectors: Tensor, cache: Sequence[KeyValues] | None = None) -> Tensor:
        """Add positions to word vectors, axes (rows, words, vector width), and run the blocks.

        Args:
            vectors: word vectors, axes (rows, words, vector width).
            cache: keys and values of earlier words for each block, which the function changes in
                place.
        """
        if self.scale != 1:
            vectors = vectors * self.scale
        if self.positions is not None:
            start = cache[0].steps if cache else 0
            steps = torch.arange(start, start + vectors.shape[1], device=vectors.device)
            vectors = vectors + self.positions(steps)
        return _through(self.layers, vectors, cache)


class Middle(nn.Module):
    """The module that `DecoderMiddle` builds."""

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module, width: int) -> None:
        super().__init__()
        self.layers, self.norm, self.width = nn.ModuleList(layers), norm, width

    def forward(self, cut: Tensor) -> Tensor:
        """Return mean vectors, axes (rows, width), of a cut, axes (rows, words x width)."""
        vectors = cut.view(len(cut), -1, self.width)
        mean: Tensor = self.norm(_through(self.layers, vectors)).mean(1)
        return mean


def _through(layers: nn.ModuleList, x: Tensor, cache: Sequence[KeyValues] | None = None) -> Tensor:
    for index, layer in enumerate(layers):
        x = layer(x, cache[index] if cache else None)
    return x


def decoder_shape(words: int, tokens: int, layers: int, heads: int) -> DecoderShape:
    """Return the architecture of a decoder with these sizes.

    Raises:
        BadOptionError: the number of heads does not divide the vectors' width.
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


def save_pretrained(name: str, model: Decoder) -> Path:
    """Store a decoder on this machine under a name, and return its folder."""
    folder = model_folder(name)
    save_decoder(folder, model)
    return folder
