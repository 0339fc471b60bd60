"""Pieces that several models share: sizes spelt with dashes, activations, a stack of layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from torch import nn

from vfl.errors import BadOptionError, SpecError, nearest
from vfl.models.base import Shape

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


def parse_sizes(text: str, option: str) -> tuple[int, ...]:
    """Layer sizes joined by dashes; "none" or nothing is no layer.

    >>> parse_sizes("64-32", "hidden")
    (64, 32)
    >>> parse_sizes("none", "hidden")
    ()

    Raises:
        BadOptionError: anything else, zero included.
    """
    if text in ("", "none"):
        return ()
    if not _SIZES.fullmatch(text):
        raise BadOptionError(
            f"{option} is not a list of sizes", got=text, want="sizes such as 64-32, or none"
        )
    return tuple(int(size) for size in text.split("-"))


def make_activation(name: Activation) -> nn.Module:
    """A new activation.

    Raises:
        BadOptionError: an unknown name, with the nearest known one.
    """
    if name not in _ACTIVATIONS:
        known = get_args(Activation)
        raise BadOptionError(
            f"no activation is called '{name}'", want=", ".join(known), fix=nearest(name, known)
        )
    return _ACTIVATIONS[name]()


def check_dropout(dropout: float) -> float:
    """`dropout` itself.

    Raises:
        BadOptionError: it is no probability below 1.
    """
    if not 0 <= dropout < 1:
        raise BadOptionError(
            "dropout is not a probability", got=f"{dropout:g}", want="at least 0 and below 1"
        )
    return dropout


def hidden_layers(
    inputs: int,
    hidden: Sequence[int],
    activation: Activation,
    batch_norm: bool = False,
    dropout: float = 0.0,
) -> list[nn.Module]:
    """Linear, batch norm, activation and dropout for each hidden size, as far as asked for."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers.append(nn.Linear(inputs, size))
        if batch_norm:
            layers.append(nn.BatchNorm1d(size))
        layers.append(make_activation(activation))
        if dropout:
            layers.append(nn.Dropout(dropout))
        inputs = size
    return layers


def picture_axes(shape: Shape, name: str) -> tuple[int, int, int]:
    """The axes (channels, height, width) of one row.

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
