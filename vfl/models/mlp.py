"""A multi-layer perceptron as bottom."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import nn

from vfl.models.base import Bottom, Shape
from vfl.models.parts import (
    Activation,
    check_dropout,
    hidden_layers,
    make_activation,
    parse_sizes,
)
from vfl.options import require_choice

Last = Literal["relu", "leaky_relu", "batch_norm_relu", "none"]


class MLPBottom(Bottom):
    """Linear layers with an activation after each hidden one; pictures are flattened.

    Args:
        hidden: sizes joined by dashes; "none" leaves one linear layer.
        activation: relu, leaky_relu, gelu, silu, tanh or sigmoid.
        batch_norm: normalise each hidden layer over the batch before its activation (Ioffe and
            Szegedy 2015, Algorithm 1); training batches then need two rows.
        dropout: probability after each hidden activation, 0 to below 1.
        last: "relu" makes the cut non-negative; "batch_norm_relu" normalises it before, which keeps
            columns of the cut from falling silent; "leaky_relu" leaves a little below zero.

    >>> module = MLPBottom(hidden="16").build(shape=(4,), width=8)
    >>> sum(p.numel() for p in module.parameters())  # 5 * 16 + 17 * 8
    216

    Raises:
        BadOptionError: an option out of range.
    """

    def __init__(
        self,
        hidden: str = "64-32",
        activation: Activation = "relu",
        batch_norm: bool = False,
        dropout: float = 0.0,
        last: Last = "none",
    ) -> None:
        self.hidden = parse_sizes(hidden, "hidden")
        make_activation(activation)
        require_choice("last", last, get_args(Last))
        self.activation = activation
        self.batch_norm = batch_norm
        self.dropout = check_dropout(dropout)
        self.last = last

    def build(self, shape: Shape, width: int) -> nn.Module:
        inputs = math.prod(shape)
        layers = hidden_layers(inputs, self.hidden, self.activation, self.batch_norm, self.dropout)
        layers.append(nn.Linear(self.hidden[-1] if self.hidden else inputs, width))
        if self.last == "batch_norm_relu":
            layers.append(nn.BatchNorm1d(width))
        if self.last != "none":
            layers.append(nn.LeakyReLU() if self.last == "leaky_relu" else nn.ReLU())
        return nn.Sequential(nn.Flatten(), *layers)
