"""Multi-layer perceptrons as bottom and top; without hidden layers, a single linear layer."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import nn

from vfl.core.errors import WidthError
from vfl.core.registry import require_choice
from vfl.models.base import (
    Activation,
    Bottom,
    FixedBottom,
    Shape,
    Top,
    check_dropout,
    make_activation,
    parse_sizes,
)

Last = Literal["relu", "leaky_relu", "batch_norm_relu", "none"]


class Layers:
    """Options of a perceptron, from which it builds its layers; see `MLPTop`."""

    def __init__(
        self, hidden: str, activation: Activation, batch_norm: bool, dropout: float
    ) -> None:
        self.hidden = parse_sizes(hidden, "hidden")
        make_activation(activation)
        self.activation = activation
        self.batch_norm = batch_norm
        self.dropout = check_dropout(dropout)

    def layers(self, inputs: int, outputs: int) -> list[nn.Module]:
        """Return the hidden layers, and then a linear layer to the outputs."""
        layers: list[nn.Module] = []
        for size in self.hidden:
            layers.append(nn.Linear(inputs, size))
            if self.batch_norm:
                layers.append(nn.BatchNorm1d(size))
            layers.append(make_activation(self.activation))
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            inputs = size
        return [*layers, nn.Linear(inputs, outputs)]


class MLPBottom(Layers, Bottom):
    """Linear layers with an activation after each hidden layer; pictures are flattened.

    Args:
        hidden: sizes of the hidden layers, separated by dashes; "none" gives a single linear layer.
        activation: relu, leaky_relu, gelu, silu, tanh or sigmoid.
        batch_norm: whether to normalise each hidden layer over the batch before its activation
            (Ioffe and Szegedy 2015, Algorithm 1); then a training batch needs at least two rows.
        dropout: dropout probability after each hidden activation, from 0 to below 1.
        last: activation after the last layer, which gives the cut: "relu" makes it non-negative;
            "batch_norm_relu" normalises before the ReLU, so that no column is always zero;
            "leaky_relu" keeps small negative values.

    >>> module = MLPBottom(hidden="16").build(shape=(4,), width=8)
    >>> sum(p.numel() for p in module.parameters())  # 5 * 16 + 17 * 8
    216

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        hidden: str = "64-32",
        activation: Activation = "relu",
        batch_norm: bool = False,
        dropout: float = 0.0,
        last: Last = "none",
    ) -> None:
        super().__init__(hidden, activation, batch_norm, dropout)
        require_choice("last", last, get_args(Last))
        self.last = last

    def build(self, shape: Shape, width: int) -> nn.Module:
        layers = [nn.Flatten(), *self.layers(math.prod(shape), width)]
        if self.last == "batch_norm_relu":
            layers.append(nn.BatchNorm1d(width))
        if self.last != "none":
            layers.append(nn.LeakyReLU() if self.last == "leaky_relu" else nn.ReLU())
        return nn.Sequential(*layers)


class MLPTop(Layers, Top):
    """Linear layers with an activation after each hidden layer, and a linear output layer.

    Args:
        hidden: sizes of the hidden layers, separated by dashes; "none" gives a single linear layer.
        activation: relu, leaky_relu, gelu, silu, tanh or sigmoid.
        batch_norm: whether to normalise each hidden layer over the batch before its activation.
        dropout: dropout probability after each hidden activation, from 0 to below 1.

    >>> module = MLPTop(hidden="64").build(width=16, outputs=10)
    >>> sum(p.numel() for p in module.parameters())  # 17 * 64 + 65 * 10
    1738

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        hidden: str = "64",
        activation: Activation = "relu",
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(hidden, activation, batch_norm, dropout)

    def build(self, width: int, outputs: int) -> nn.Module:
        return nn.Sequential(*self.layers(width, outputs))


class LinearTop(Top):
    """Logistic or linear regression on the merged cut.

    >>> sum(p.numel() for p in LinearTop().build(width=16, outputs=10).parameters())
    170
    """

    def build(self, width: int, outputs: int) -> nn.Module:
        return nn.Linear(width, outputs)


class IdentityBottom(FixedBottom):
    """Sends the flattened row unchanged; for the label party's own columns, or as a baseline.

    This bottom hides nothing, because the receiver of its cut has the raw columns.

    >>> import torch
    >>> IdentityBottom().build(shape=(1, 2, 2), width=4)(torch.ones(3, 1, 2, 2)).shape
    torch.Size([3, 4])
    """

    def columns(self, shape: Shape) -> int:
        return math.prod(shape)

    def build(self, shape: Shape, width: int) -> nn.Module:
        columns = self.columns(shape)
        if columns != width:
            raise WidthError(
                "bottom 'identity' cannot change the width of a row",
                got=f"width {width} for rows of shape {shape}",
                want=f"width {columns}",
                fix=f"set width to {columns}, or use mlp:hidden=none",
            )
        return nn.Flatten()


class IdentityTop(Top):
    """Takes the merged cut as outputs; with `merge = "sum"`, parties add up their logits.

    Every party that receives a gradient from this top can compute the labels from it, as the attack
    `direct_label` does.

    >>> IdentityTop().build(width=3, outputs=3)
    Identity()
    """

    def build(self, width: int, outputs: int) -> nn.Module:
        if width != outputs:
            raise WidthError(
                "top 'identity' cannot change the width of the merged cut",
                got=f"width {width} for {outputs} outputs",
                want=f"width {outputs}",
                fix=f"set the parties' width to {outputs} with merge = sum, or use linear",
            )
        return nn.Identity()
