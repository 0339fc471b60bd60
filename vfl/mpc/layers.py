"""What a network is made of, as all parties know it, and the shared weights of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from vfl.mpc.shares import Shared


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer and the function after it; known to all parties.

    Attributes:
        inputs, outputs: widths.
        function: name of the element-wise function; "" for none.
        bias: whether it has one.
    """

    inputs: int
    outputs: int
    function: str = ""
    bias: bool = True


@dataclass(frozen=True, slots=True)
class Weights:
    """Shared weights of one layer: axes (inputs, outputs) and (outputs,)."""

    weight: Shared
    bias: Shared | None

    def plus(self, other: Weights) -> Weights:
        """The sum of two layers' weights."""
        biases = self.bias, other.bias
        bias = None if biases[0] is None or biases[1] is None else biases[0].plus(biases[1])
        return Weights(self.weight.plus(other.weight), bias)
