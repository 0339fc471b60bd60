"""The contract of bottom and top of a split network, and functions that models share.

Hyper-parameters are the constructor's arguments; `build` receives sizes that depend on data.
Initial weights are drawn from torch's global generator, so callers build inside `seeds.scoped`.
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
    """A recipe for the half a feature party owns."""

    @abstractmethod
    def build(self, shape: Shape, width: int) -> nn.Module:
        """A new bottom with fresh weights.

        Args:
            shape: axes of one row without the rows axis: (columns,) or (channels, height, width).
            width: columns of the cut.

        Returns:
            A module from axes (rows, *shape), float32, to axes (rows, width).

        Raises:
            SpecError: this bottom does not accept rows of that shape, or cannot produce that width.
        """

    def tokens_read(self, shape: Shape, width: int) -> int:
        """Return how many first values of a row are read as numbers of tokens; arguments as above.

        All other values are read as numbers.
        """
        return 0


class FixedBottom(Bottom):
    """A bottom without weights: a publicly known function that does not depend on data."""

    @abstractmethod
    def columns(self, shape: Shape) -> int:
        """Return the only width that the bottom can produce for rows of that shape.

        Raises:
            SpecError: the bottom does not accept rows of that shape.
        """

    def features(self, inputs: Tensor) -> Tensor:
        """Return outputs, axes (rows, columns), of rows of axes (rows, *shape), in parts."""
        shape = tuple(inputs.shape[1:])
        module = self.build(shape, self.columns(shape))
        with torch.no_grad():
            return torch.cat([module(part.float()) for part in torch.split(inputs, _ROWS_AT_ONCE)])


class Merger(ABC):
    """A recipe for the module that merges all parties' cuts at the receiving party."""

    @abstractmethod
    def width(self, widths: Sequence[int]) -> int:
        """Return the number of columns of the merged cut.

        Args:
            widths: widths of the parties' cuts, in merge order.

        Raises:
            SpecError: cuts of these widths cannot be merged.
        """

    def blocks(self, widths: Sequence[int]) -> list[int]:
        """Return the widths of consecutive columns of the merged cut, each from one party.

        Args:
            widths: widths of the parties' cuts, in merge order.

        Returns:
            There is one width for each party, or the total width if a column mixes parties.
        """
        return [self.width(widths)]

    @abstractmethod
    def build(self, widths: Sequence[int]) -> nn.Module:
        """Build a new module; its own weights are untrained, and train with the top.

        Returns:
            The result is a module from cuts of axes (rows, width of each), one argument per party
            in merge order, to axes (rows, width). No row's result depends on other rows.

        Raises:
            SpecError: see `width`.
        """


class Top(ABC):
    """A recipe for the half the label party owns."""

    @abstractmethod
    def build(self, width: int, outputs: int) -> nn.Module:
        """A new top with fresh weights.

        Args:
            width: columns of the merged cut.
            outputs: columns of the result: classes, or 1 for a single logit or a regression.

        Returns:
            A module from axes (rows, width) to axes (rows, outputs), without a final activation.
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
#: Largest number of layers in a stack, and of units in one; larger numbers are a mistake or an
#: attack.
MOST_LAYERS = 32
MOST_UNITS = 2**20
#: Range of integers that float32 represents exactly, and the largest number of values per integer.
MOST_NUMBERS = 2**24
MOST_EMBEDDING = 2**14
_ROWS_AT_ONCE = 512


def parse_sizes(text: str, option: str) -> tuple[int, ...]:
    """Parse layer sizes joined by dashes; "none" or an empty text means no layer.

    >>> parse_sizes("64-32", "hidden")
    (64, 32)
    >>> parse_sizes("none", "hidden")
    ()

    Raises:
        BadOptionError: the text is not a list of sizes from 1 up, or has too many layers or too
            large ones.
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
    """A new activation.

    Raises:
        BadOptionError: the name is unknown; the error names the nearest known one.
    """
    require_choice("activation", name, get_args(Activation))
    return _ACTIVATIONS[name]()


def check_dropout(dropout: float) -> float:
    """Return `dropout` after a check.

    Raises:
        BadOptionError: `dropout` is not a probability below 1.
    """
    require("dropout", f"{dropout:g}", "at least 0 and below 1", 0 <= dropout < 1)
    return dropout


def check_size(size: int, option: str, most: int = MOST_UNITS) -> int:
    """Return `size` after a check.

    Raises:
        BadOptionError: `size` is below 1 or above `most`.
    """
    require_range(option, size, 1, most)
    return size


def picture_axes(shape: Shape, name: str) -> tuple[int, int, int]:
    """Return the axes (channels, height, width) of one row.

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
    """Return the number of steps of one row.

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
    """Return numbers of words or items as int64, of any axes; inputs are always float32.

    Args:
        rows: the numbers.
        most: the largest known number.
        name: the bottom, for the message.
        option: name of the option that sets `most`.

    Raises:
        SpecError: a number below 0, above `most`, or not whole; the message contains no such
            number.
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
    """Refuse a bottom that would read other columns as tokens, or tokens as numbers.

    Args:
        bottom: module that reads the rows.
        shape: axes of one row.
        width: columns of the cut.
        tokens: number of leading values of a row that are tokens; None if unknown.

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
        fix=f"set tokens={tokens} of the bottom" if tokens
        else "name a tokenizer (data.tokenizer) and give columns of texts, or take another bottom",
    )  # fmt: skip


class JointBottom(nn.Module):
    """Several bottoms as one; flat rows contain the parties' columns one after another.

    Args:
        bottoms: bottoms in the order of their columns; they are not changed.
        shapes: axes of one row of each.
        merger: module that merges their outputs to one cut, from `Merger.build`.

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
        """The merged cut, axes (rows, width), of rows with axes (rows, columns)."""
        cut: Tensor = self.merger(*(bottom(part) for bottom, part in self.parts(rows)))
        return cut

    def parts(self, rows: Tensor) -> Iterator[tuple[nn.Module, Tensor]]:
        """Return each bottom with its party's columns of whole rows."""
        columns = torch.split(rows, [math.prod(shape) for shape in self.shapes], 1)
        for bottom, part, shape in zip(self.bottoms, columns, self.shapes, strict=True):
            yield bottom, part.reshape(-1, *shape)

    def each(self, change: Callable[[nn.Module], nn.Module]) -> JointBottom:
        """Return a copy in which other modules replace the bottoms."""
        return JointBottom([change(one) for one in self.bottoms], self.shapes, self.merger)


def channels_last(module: nn.Module) -> nn.Module:
    """Return the model with a filter layout in which convolutions take two thirds of the time."""
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
