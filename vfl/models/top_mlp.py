"""A multi-layer perceptron as top."""

from __future__ import annotations

from torch import nn

from vfl.models.base import Top
from vfl.models.parts import (
    Activation,
    check_dropout,
    hidden_layers,
    make_activation,
    parse_sizes,
)


class MLPTop(Top):
    """Linear layers with an activation after each hidden one, and a linear output.

    Args:
        hidden: sizes joined by dashes; "none" leaves one linear layer.
        activation: relu, leaky_relu, gelu, silu, tanh or sigmoid.
        batch_norm: normalise each hidden layer over the batch before its activation.
        dropout: probability after each hidden activation, 0 to below 1.

    >>> module = MLPTop(hidden="64").build(width=16, outputs=10)
    >>> sum(p.numel() for p in module.parameters())  # 17 * 64 + 65 * 10
    1738

    Raises:
        BadOptionError: an option out of range.
    """

    def __init__(
        self,
        hidden: str = "64",
        activation: Activation = "relu",
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        self.hidden = parse_sizes(hidden, "hidden")
        make_activation(activation)
        self.activation = activation
        self.batch_norm = batch_norm
        self.dropout = check_dropout(dropout)

    def build(self, width: int, outputs: int) -> nn.Module:
        layers = hidden_layers(width, self.hidden, self.activation, self.batch_norm, self.dropout)
        output = nn.Linear(self.hidden[-1] if self.hidden else width, outputs)
        return nn.Sequential(*layers, output)
