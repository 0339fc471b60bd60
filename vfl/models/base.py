"""The contracts of a split network's bottom, merger and top, and functions that they share.

Hyper-parameters are the constructor's arguments; `build` receives the sizes that depend on the
data. Initial weights come from torch's global generator, so callers must call `build` within
`seeds.scoped`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vfl.core.errors import BadOptionError, SpecError
from vfl.core.registry import require, require_choice, require_range

Shape = tuple[int, ...]


class Bottom(ABC):
    """Base class of bottoms; an object holds a bottom's options and builds its modules."""

    @abstractmethod
    def build(self, shape: Shape, width: int) -> nn.Module:
        """Build a new bottom with initial weights.

        Args:
            shape: axes of one row, without the rows axis: (columns,) or (channels, height, width).
            width: width of the cut.

        Returns:
            A module that maps float32 rows, axes (rows, *shape), to cuts, axes (rows, width).

        Raises:
            SpecError: this bottom cannot read rows of this shape, or cannot produce this width.
        """

    def tokens_read(self, shape: Shape, width: int) -> int:
        """Return how many values, at the beginning of a row, the bottom reads as token ids.

        The bottom reads all other values as numbers. The arguments are those of `build`.
        """
        return 0


class FixedBottom(Bottom):
    """A bottom without weights: a public function that does not depend on other data."""

    @abstractmethod
    def columns(self, shape: Shape) -> int:
        """Return the only width of cut that the bottom can produce for rows of this shape.

        Raises:
            SpecError: the bottom cannot read rows of this shape.
        """

    def features(self, inputs: Tensor) -> Tensor:
        """Return outputs, axes (rows, columns), for rows (rows, *shape), computed in pieces."""
        shape = tuple(inputs.shape[1:])
        module = self.build(shape, self.columns(shape))
        with torch.no_grad():
            return torch.cat([module(part.float()) for part in torch.split(inputs, _ROWS_AT_ONCE)])


class Merger(ABC):
    """Base class of mergers; an object builds the module that merges the cuts of all parties."""

    @abstractmethod
    def width(self, widths: Sequence[int]) -> int:
        """Return the width of the merged cut.

        Args:
            widths: widths of the parties' cuts, in the order in which they are merged.

        Raises:
            SpecError: cuts of these widths cannot be merged.
        """

    def blocks(self, widths: Sequence[int]) -> list[int]:
        """Return the widths of the parts of the merged cut; each part results from one party's cut.

        Args:
            widths: widths of the parties' cuts, in the order in which they are merged.

        Returns:
            One width for each party, in the same order; only the total width if a column of the
            merged cut mixes several parties' cuts.
        """
        return [self.width(widths)]

    @abstractmethod
    def build(self, widths: Sequence[int]) -> nn.Module:
        """Build a new module; if it has weights, these are untrained, and train with the top.

        Returns:
            A module with one argument for each party's cut, in the order of `widths`, each of axes
            (rows, width of this cut). The module returns the merged cut, axes (rows, width). Each
            row of the merged cut depends only on the same row of the parties' cuts.

        Raises:
            SpecError: see `width`.
        """


class Top(ABC):
    """Base class of tops; an object holds a top's options and builds its modules."""

    @abstractmethod
    def build(self, width: int, outputs: int) -> nn.Module:
        """Build a new top with initial weights.

        Args:
            width: width of the merged cut.
            outputs: number of outputs: the number of classes, or 1 for a single logit or for a
                regression.

        Returns:
            A module that maps axes (rows, width) to axes (rows, outputs), without a final
            activation.
        """


Activation = Literal["relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid"]

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}
_SIZES = re.compile(r"[1-9][0-9]*(-[1-9][0-9]*)*", re.ASCII)
#: Largest allowed number of layers in a stack, and of units in a layer. A larger number is a
#: mistake, or comes from an attacker.
MOST_LAYERS = 32
MOST_UNITS = 2**20
#: Number of consecutive integers that float32 represents exactly, and largest width of an integer's
#: embedding.
MOST_NUMBERS = 2**24
MOST_EMBEDDING = 2**14
_ROWS_AT_ONCE = 512


def parse_sizes(text: str, option: str) -> tuple[int, ...]:
    """Parse layer sizes that dashes separate; "none" or an empty text means no layer.

    >>> parse_sizes("64-32", "hidden")
    (64, 32)
    >>> parse_sizes("none", "hidden")
    ()

    Raises:
        BadOptionError: the text is not a list of positive sizes, or has too many layers or too
            large sizes.
    """
    if text in ("", "none"):
        return ()
    if not _SIZES.fullmatch(text):
        raise BadOptionError(
            f"{option} is not a list of sizes", got=text, want="sizes such as 64-32, or none"
        )
    sizes = text.split("-")
    require(option, f"{len(sizes)} layers", f"at most {MOST_LAYERS}", len(sizes) <= MOST_LAYERS)
    return tuple(check_size(int(size), option) for size in sizes)


def make_activation(name: Activation) -> nn.Module:
    """Return a new activation module.

    Raises:
        BadOptionError: the name is unknown; the error suggests the most similar known name.
    """
    require_choice("activation", name, get_args(Activation))
    return _ACTIVATIONS[name]()


def check_dropout(dropout: float) -> float:
    """Return `dropout` if it is a probability below 1.

    Raises:
        BadOptionError: `dropout` is not a probability below 1.
    """
    require("dropout", f"{dropout:g}", "at least 0 and below 1", 0 <= dropout < 1)
    return dropout


def check_size(size: int, option: str, most: int = MOST_UNITS) -> int:
    """Return `size` if it is from 1 to `most`.

    Raises:
        BadOptionError: `size` is below 1 or above `most`.
    """
    require_range(option, size, 1, most)
    return size


def picture_axes(shape: Shape, name: str) -> tuple[int, int, int]:
    """Return the axes (channels, height, width) of one row's picture.

    Raises:
        SpecError: the rows are not pictures.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise SpecError(
            f"bottom '{name}' takes pictures",
            got=f"rows of shape {shape}",
            want="(channels, height, width)",
            fix="use mlp for plain columns, or give the table a picture shape",
        )
    channels, height, width = shape
    return channels, height, width


def sequence_steps(shape: Shape, name: str) -> int:
    """Return the number of elements (steps) in one row's sequence.

    Raises:
        SpecError: the rows are pictures.
    """
    if len(shape) != 1:
        raise SpecError(
            f"bottom '{name}' takes rows of whole numbers",
            got=f"rows of shape {shape}",
            want="(steps,)",
            fix="use cnn or resnet20 for pictures",
        )
    return shape[0]


def whole_numbers(rows: Tensor, most: int, name: str, option: str) -> Tensor:
    """Return word or item numbers as int64, with unchanged axes; the inputs are always float32.

    Args:
        rows: the numbers.
        most: the largest word or item number that the bottom accepts.
        name: name of the bottom, for the error text.
        option: name of the option that sets `most`, for the error text.

    Raises:
        SpecError: a number is below 0, above `most`, or not an integer; the error does not contain
            the number.
    """
    if rows.is_meta or torch.compiler.is_exporting() or not rows.numel():  # shapes alone
        return rows.long()
    if not (rows.min() >= 0 and rows.max() <= most and torch.equal(rows, rows.floor())):
        raise SpecError(
            f"a row has a number that bottom '{name}' does not know",
            want=f"whole numbers from 0 to {most}",
            fix=f"give '{name}' a larger '{option}', or inputs that are numbers of {option}",
        )
    return rows.long()


def require_tokens(bottom: Bottom, shape: Shape, width: int, tokens: int | None) -> None:
    """Refuse a bottom that would read other columns as token ids, or token ids as plain numbers.

    Args:
        bottom: the bottom that reads the rows.
        shape: axes of one row.
        width: width of the cut.
        tokens: number of values at the beginning of a row that are token ids; None if unknown.

    Raises:
        SpecError: it would.
    """
    read = bottom.tokens_read(shape, width)
    if tokens is None or read in (0, tokens):
        return
    raise SpecError(
        "this bottom would read other columns as tokens" if read > tokens
        else "this bottom would read tokens as measurements",
        got=f"rows of {tokens} tokens and {math.prod(shape) - tokens} other values",
        want=f"{read} tokens",
        fix=f"the bottom pretrained with tokens={tokens}; others read whole rows" if tokens
        else "name a tokenizer (data.tokenizer) and give columns of texts, or take another bottom",
    )  # fmt: skip


class JointBottom(nn.Module):
    """Several bottoms as one module; a flat row contains the columns of one party after another.

    Args:
        bottoms: bottoms, in the order of their columns in a flat row; the class does not change
            them.
        shapes: for each bottom, the axes of one row of its inputs.
        merger: module, built by `Merger.build`, that merges the bottoms' outputs to one cut.

    >>> from vfl.models.mergers import Concat
    >>> concat = Concat().build([3, 4])
    >>> both = JointBottom([nn.Linear(2, 3), nn.Flatten()], [(2,), (1, 1, 4)], concat)
    >>> both(torch.zeros(5, 6)).shape
    torch.Size([5, 7])
    """

    def __init__(
        self, bottoms: Sequence[nn.Module], shapes: Sequence[Shape], merger: nn.Module
    ) -> None:
        super().__init__()
        self.bottoms, self.shapes, self.merger = nn.ModuleList(bottoms), shapes, merger

    def forward(self, rows: Tensor) -> Tensor:
        """Return the merged cut, axes (rows, width), for flat rows, axes (rows, columns)."""
        cut: Tensor = self.merger(*(bottom(part) for bottom, part in self.parts(rows)))
        return cut

    def parts(self, rows: Tensor) -> Iterator[tuple[nn.Module, Tensor]]:
        """Yield each bottom together with its party's columns of some flat rows."""
        columns = torch.split(rows, [math.prod(shape) for shape in self.shapes], 1)
        for bottom, part, shape in zip(self.bottoms, columns, self.shapes, strict=True):
            yield bottom, part.reshape(-1, *shape)

    def each(self, change: Callable[[nn.Module], nn.Module]) -> JointBottom:
        """Return a copy in which `change` has replaced each bottom by another module."""
        return JointBottom([change(one) for one in self.bottoms], self.shapes, self.merger)


def channels_last(module: nn.Module) -> nn.Module:
    """Return the model in a memory format in which convolutions take a third less time."""
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
