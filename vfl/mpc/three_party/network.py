"""Private inference and training of fully connected networks: one program for three parties.

The algorithms are 5.3 and 5.4 of the thesis (2025), with corrections: a gradient is computed before
its weights are updated, the slope (derivative) multiplies the gradient instead of replacing it, and
the update is subtracted. On shares, multiplying by the learning rate is a product with a public
integer, followed by a truncation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from vfl.core.errors import BadOptionError
from vfl.mpc.permuted import function
from vfl.mpc.ring import inner, matmul, require_integer_bits
from vfl.mpc.rules import Rules
from vfl.mpc.shares import SharedTensor, Truncation
from vfl.mpc.three_party.party import Party, Question

Loss = Literal["cross_entropy", "squared"]
#: Number of bits of the integer that represents the learning rate divided by the batch size.
_RATE_BITS = 10
#: Largest number of bits of a truncated value (zmax, see `Truncation`); with more bits, the ring
#: has no space to move a share by a quarter.
_MOST_ZMAX_BITS = 61


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer and the function after it; all parties know this structure.

    Attributes:
        inputs, outputs: numbers of input and output columns.
        function: name of the element-wise function after the layer; "" if there is none.
        bias: whether the layer has a bias.

    If another party describes a layer, the ranges of these numbers are checked.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    inputs: Annotated[int, Field(ge=1, lt=2**32)]
    outputs: Annotated[int, Field(ge=1, lt=2**32)]
    function: Annotated[str, Field(max_length=32)] = ""
    bias: bool = True


def weight_shapes(layers: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
    """Return each weight's axes: "0.weight" (inputs, outputs), "0.bias" (outputs,), "1.weight".

    >>> weight_shapes([Layer(3, 2), Layer(2, 1, bias=False)])
    {'0.weight': (3, 2), '0.bias': (2,), '1.weight': (2, 1)}
    """
    found: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        found[f"{index}.weight"] = layer.inputs, layer.outputs
        if layer.bias:
            found[f"{index}.bias"] = (layer.outputs,)
    return found


@dataclass(slots=True)
class Pass:
    """Values of a forward pass that the backward pass needs, one of each kind per layer."""

    inputs: list[SharedTensor]
    sums: list[SharedTensor]
    slopes: list[SharedTensor | None]
    output: SharedTensor


class Network:
    """One party's part of a network whose weights are shared.

    Args:
        layers: layers of the network.
        weights: shared weights, by the names of `weight_shapes`.
    """

    def __init__(self, layers: Sequence[Layer], weights: Mapping[str, SharedTensor]) -> None:
        self.layers = tuple(layers)
        self.weights = dict(weights)

    @classmethod
    def share(
        cls,
        party: Party,
        layers: Sequence[Layer],
        owner: int,
        values: Mapping[str, Tensor] | None,
    ) -> Network:
        """Share the weights that one party owns.

        Args:
            party: this party.
            layers: layers of the network.
            owner: role number of the party that has the weights.
            values: the weights at their owner, named as in `weight_shapes`; None elsewhere.

        Raises:
            RingRangeError: a weight does not fit into the ring; the error names the layer.
        """
        weights = {
            name: party.share(
                owner, shape, values[name] if values else None, name, scale="the weights"
            ).alone()
            for name, shape in weight_shapes(layers).items()
        }
        return cls(layers, weights)

    def plus(self, other: Network) -> Network:
        """Return a network whose weights are the sums of the weights of two networks."""
        weights = {name: one.plus(other.weights[name]) for name, one in self.weights.items()}
        return Network(self.layers, weights)

    def open(self, party: Party, phase: str = "online") -> None:
        """Open the weight matrices of all layers under masks, in one message.

        A matrix is opened again only after it has changed.
        """
        self._opened(party.open(*self._matrices(), phase=phase))

    def _matrices(self) -> list[SharedTensor]:
        """Return the weight matrices of all layers, without biases."""
        return [self.weights[f"{index}.weight"] for index in range(len(self.layers))]

    def _opened(self, weights: Sequence[SharedTensor]) -> None:
        self.weights |= {f"{index}.weight": weight for index, weight in enumerate(weights)}

    @torch.inference_mode()
    def infer(self, party: Party, inputs: SharedTensor) -> SharedTensor:
        """Return the shared outputs for shared inputs of axes (rows, columns); algorithm 5.3."""
        with party.pipelined():
            return self._forward(party, inputs, 0).output

    def check_outputs(self, rules: Rules, outputs: Tensor) -> None:
        """Refuse outputs beyond a limit after they are disclosed.

        If the last layer has a function, P2 has already checked them.

        Raises:
            RingRangeError: an output exceeds the range of divisions, or may have wrapped around in
                the ring.
        """
        last = len(self.layers) - 1
        if not self.layers[last].function:
            room = rules.magnitude_bits if rules.mode == "thesis" else rules.sum_bits
            require_integer_bits(outputs, room, rules.bits, f"outputs of {_named(last)}")

    def reveal(self, party: Party, to: int) -> dict[str, Tensor]:
        """Reveal the weights to one party, named as in `share`; others get an empty dictionary."""
        found = {name: party.reveal(each, name, to) for name, each in self.weights.items()}
        return {name: value for name, value in found.items() if value is not None}

    @torch.inference_mode()
    def train_step(
        self,
        party: Party,
        inputs: SharedTensor,
        targets: SharedTensor,
        loss: Loss,
        learning_rate: float,
    ) -> None:
        """Run one step of gradient descent on shares; algorithm 5.4.

        Args:
            party: this party.
            inputs: shared inputs, axes (rows, columns).
            targets: shared targets with `delta_bits` fraction bits, axes (rows, outputs).
            loss: "cross_entropy" after a sigmoid, or "squared": the mean over rows of the squared
                error, which is summed over outputs.
            learning_rate: factor of the mean gradient; it is rounded to about three significant
                digits.

        Raises:
            BadOptionError: the batch has too many rows for the numbers of bits in the rules.
            RingRangeError: a value is too large for the ring; P2's error names the layer.
        """
        require_rows(party.rules, inputs.shape[0])
        with party.pipelined():
            last = len(self.layers) - 1
            sloped = last if loss == "cross_entropy" else last + 1
            kept = self._forward(party, inputs, sloped, party.rules.delta_bits)
            delta = self._output_delta(party, kept, targets, loss)
            rate = learning_rate * (2 if loss == "squared" else 1) / inputs.shape[0]
            for index in reversed(range(len(self.layers))):
                (delta,) = party.open(delta)
                below = self._delta_below(party, kept, delta, index) if index else None
                self._descend(party, kept.inputs[index], delta, index, rate, loss)
                if below is not None:
                    delta = below

    def _forward(self, party: Party, inputs: SharedTensor, sloped: int, bits: int = -1) -> Pass:
        """Run the forward pass on shares; return the values that the backward pass needs.

        Args:
            party: this party.
            inputs: shared inputs, axes (rows, columns).
            sloped: number of layers, from the first on, for which fast mode requests slopes
                (derivatives) together with function values.
            bits: fraction bits of the last function's values.
        """
        kept, fast = Pass([], [], [], inputs), party.rules.mode == "fast"
        first, *rest = self._matrices()
        # One message opens all tensors that are known before the first layer.
        values, *weights = party.open(inputs, first.facing(inputs), *rest)
        self._opened(weights)
        pending: Question | None = None
        for index, (layer, weight) in enumerate(zip(self.layers, weights, strict=True)):
            (values,) = party.open(values)
            kept.inputs.append(values)
            # In fast mode, P2 reads sums with twice the usual number of fraction bits.
            truncations = () if fast else self._truncations(party, 2 * party.rules.bits)
            sums, _ = party.multiply(values, weight, matmul, truncations, where=_named(index))
            if (bias := self.weights.get(f"{index}.bias")) is not None:
                sums = sums.plus(bias.finer(sums.bits))
            kept.sums.append(sums)
            last = index == len(self.layers) - 1
            asked = None
            if layer.function:
                asked = party.ask(
                    sums,
                    function(layer.function),
                    _named(index),
                    value=True,
                    slope=fast and index < sloped,
                    bits=bits if last else -1,
                )
            # While P2 computes, receive P2's remaining answers about the previous layer.
            self._take_slope(party, kept, pending)
            pending = asked
            kept.slopes.append(None)
            if asked is not None:
                values = party.answer(asked)
            elif last or sums.bits <= party.rules.bits:
                values = sums
            else:
                values = party.truncate(sums, self._truncations(party, sums.bits), _named(index))
        self._take_slope(party, kept, pending)
        kept.output = values
        return kept

    @staticmethod
    def _take_slope(party: Party, kept: Pass, asked: Question | None) -> None:
        """Receive and open the derivative of the latest layer's function, if it was requested.

        The method runs at a time when the party would wait anyway.
        """
        if asked is not None and len(asked.bits) > 1:
            (kept.slopes[-1],) = party.open(party.answer(asked, 1))

    def _output_delta(
        self, party: Party, kept: Pass, targets: SharedTensor, loss: Loss
    ) -> SharedTensor:
        """Return each row's gradient at the last function's input, not divided by the row count."""
        last = len(self.layers) - 1
        delta = kept.output.minus(targets.finer(kept.output.bits))
        named = self.layers[last].function
        if delta.bits > party.rules.delta_bits:
            shift = delta.bits - party.rules.delta_bits
            # Outputs and targets are below 2^magnitude_bits in magnitude, so their difference is
            # below twice that.
            truncations = (Truncation(shift, party.rules.zmax_bits(delta.bits) + 1),)
            delta = party.truncate(delta, truncations, f"gradient of {_named(last)}")
        if loss == "cross_entropy" or not named:
            return delta
        return self._times_slope(party, delta, self._slope(party, kept, last), last)

    def _slope(self, party: Party, kept: Pass, index: int) -> SharedTensor:
        """Return the slope (derivative) of a layer's function.

        If no earlier call requested the slope, request it now.
        """
        slope = kept.slopes[index]
        if slope is not None:
            return slope
        asked = function(self.layers[index].function)
        return party.apply(kept.sums[index], asked, _named(index), value=False, slope=True)[0]

    def _delta_below(
        self, party: Party, kept: Pass, delta: SharedTensor, index: int
    ) -> SharedTensor:
        """Return the gradient at the input of the function in the previous layer."""
        weight = self.weights[f"{index}.weight"].transposed()
        slope = kept.slopes[index - 1]
        # Slopes of 0 and 1 leave the number of fraction bits unchanged, so one division serves both
        # products.
        whole = slope is not None and slope.bits == 0
        truncations = () if whole else self._truncations(party, delta.bits + weight.bits)
        where = f"gradient of {_named(index)}"
        below, _ = party.multiply(delta, weight, matmul, truncations, where=where)
        if not self.layers[index - 1].function:
            return below
        return self._times_slope(party, below, self._slope(party, kept, index - 1), index - 1)

    def _times_slope(
        self, party: Party, delta: SharedTensor, slope: SharedTensor, index: int
    ) -> SharedTensor:
        delta, slope = party.open(delta, slope)
        bits = delta.bits + slope.bits
        truncations = self._truncations(party, bits, bits - party.rules.delta_bits)
        where = f"slope of {_named(index)}"
        found, _ = party.multiply(delta, slope, torch.mul, truncations, where=where)
        return found

    def _descend(
        self,
        party: Party,
        inputs: SharedTensor,
        delta: SharedTensor,
        index: int,
        rate: float,
        loss: Loss,
    ) -> None:
        rules, last = party.rules, index == len(self.layers) - 1
        weight, bias = f"{index}.weight", f"{index}.bias"
        more = gradient_bits(rules, last=last, squared=loss == "squared")
        truncations = learning_rate_truncations(rules, inputs.shape[0], delta.bits, rate, more)
        beside = None
        if bias in self.weights:
            beside = delta.row_sum().finer(delta.bits + inputs.bits)
        where = f"update of {_named(index)}"
        step, bias_step = party.multiply(
            inputs, delta, inner, truncations, beside=beside, where=where
        )
        self.weights[weight] = self.weights[weight].minus(step)
        if bias_step is not None:
            self.weights[bias] = self.weights[bias].minus(bias_step)

    @staticmethod
    def _truncations(party: Party, bits: int, shift: int | None = None) -> tuple[Truncation, ...]:
        """Return the division to apply to a product with this number of fraction bits.

        By default, the product then has the number of fraction bits in the rules.
        """
        shift = party.rules.bits if shift is None else shift
        return (Truncation(shift, party.rules.zmax_bits(bits)),)


def share_targets(
    party: Party, owner: int, shape: Sequence[int], values: Tensor | None
) -> SharedTensor:
    """Share targets, axes (rows, outputs), with the fraction bits that `Network.train_step` needs.

    The first gradient, outputs minus targets, is divided without a message to P2, so P2 cannot
    check its range. The function therefore checks the range of the targets.

    Raises:
        RingRangeError: a target is too large.
    """
    bits = party.rules.delta_bits
    return party.share(owner, shape, values, "targets", bits, "the labels")


def _named(index: int) -> str:
    return f"layer {index}"


def fixed_point_rate(rate: float) -> tuple[int, int]:
    """Return integers `times` and `shift` for which times / 2^shift is close to the rate.

    >>> fixed_point_rate(0.1 / 128)
    (819, 20)
    """
    shift = max(1, _RATE_BITS - math.frexp(rate)[1])
    return round(rate * 2**shift), shift


def learning_rate_truncations(
    rules: Rules, rows: int, bits: int, rate: float, gradient_bits: int = 0
) -> tuple[Truncation, Truncation]:
    """Return two truncations: of the product's fraction bits, and of the product with the rate.

    The truncated value is a sum over rows of columns times gradients; columns are below
    2^magnitude_bits in magnitude.

    Args:
        rules: rules of the computation, equal at all parties.
        rows: batch size.
        bits: fraction bits of the gradients.
        rate: learning rate divided by the batch size.
        gradient_bits: number b for which gradients are below 2^b in magnitude; the size of the ring
            limits it.
    """
    times, shift = fixed_point_rate(rate)
    magnitude = rules.magnitude_bits + _sum_bits(rows) + gradient_bits
    first = Truncation(bits, min(rules.bits + bits + magnitude, _MOST_ZMAX_BITS))
    most = min(rules.bits + magnitude + _RATE_BITS, _MOST_ZMAX_BITS)
    return first, Truncation(shift, most, times, rate=True)


def gradient_bits(rules: Rules, *, last: bool, squared: bool) -> int:
    """Return a number b for which the gradients at a function's input are below 2^b in magnitude.

    After a sigmoid, outputs minus targets are below 1; with squared loss, outputs and targets are
    below 2^magnitude_bits in magnitude. The gradients of a hidden layer are sums over weights;
    their only bound is the range of the division.

    Args:
        rules: rules of the computation, equal at all parties.
        last: whether the function belongs to the last layer.
        squared: whether the loss is the squared error; otherwise it is the cross entropy after a
            sigmoid.
    """
    if squared:
        return rules.magnitude_bits + 1
    return 0 if last else rules.magnitude_bits


def require_rows(rules: Rules, rows: int) -> None:
    """Refuse a batch whose gradients below 1 could add up to more than a division allows.

    Raises:
        BadOptionError: the batch has too many rows for the numbers of bits in the rules.
    """
    room = _MOST_ZMAX_BITS - rules.bits - rules.delta_bits - rules.magnitude_bits
    if _sum_bits(rows) > room:
        raise BadOptionError(
            "sums over this number of rows do not fit the ring",
            where="rows of a batch",
            got=f"{rows}, with {rules.bits} bits, {rules.delta_bits} delta_bits and "
            f"{rules.magnitude_bits} magnitude_bits",
            want=f"at most {2**room} rows" if room >= 0 else "fewer bits",
            fix="lower magnitude_bits and scale the columns, or lower delta_bits or the batch size",
        )


def _sum_bits(rows: int) -> int:
    """Return the number of bits by which a sum over rows may exceed its largest term.

    >>> _sum_bits(1), _sum_bits(128), _sum_bits(129)
    (0, 7, 8)
    """
    return (rows - 1).bit_length()
