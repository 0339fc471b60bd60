"""Private inference and training of fully connected networks, as one program for three parties.

Corrected algorithms 5.3 and 5.4 (thesis, 2025): a gradient is taken before its weights are
updated, the slope multiplies the gradient instead of replacing it, and weights descend. The
learning rate on shares is a public whole factor and a truncation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vfl.core.errors import BadOptionError
from vfl.mpc.party import Party, Question
from vfl.mpc.permuted import function
from vfl.mpc.ring import inner, matmul, require_room
from vfl.mpc.rules import Rules
from vfl.mpc.shares import SharedTensor, Truncation

Loss = Literal["cross_entropy", "squared"]
#: Bits of the whole number that stands for learning rate over rows.
_RATE_BITS = 10
#: Beyond it a quarter of the ring is no longer room enough to move a share.
_MOST_ZMAX_BITS = 61


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

    weight: SharedTensor
    bias: SharedTensor | None

    def plus(self, other: Weights) -> Weights:
        """The sum of two layers' weights."""
        biases = self.bias, other.bias
        bias = None if biases[0] is None or biases[1] is None else biases[0].plus(biases[1])
        return Weights(self.weight.plus(other.weight), bias)


@dataclass(slots=True)
class Pass:
    """What a forward pass keeps for the backward one, a layer each; what P2 has yet to answer."""

    inputs: list[SharedTensor]
    sums: list[SharedTensor]
    slopes: list[SharedTensor | None]
    output: SharedTensor
    asked: Question | None = None


class Network:
    """The same network at one of the three parties.

    Args:
        layers: its structure.
        weights: its shared weights.
    """

    def __init__(self, layers: Sequence[Layer], weights: Sequence[Weights]) -> None:
        self.layers = tuple(layers)
        self.weights = list(weights)

    @classmethod
    def share(
        cls,
        party: Party,
        layers: Sequence[Layer],
        owner: int,
        values: Mapping[str, Tensor] | None,
    ) -> Network:
        """Share the weights of their owner.

        Args:
            party: this one.
            layers: the structure.
            owner: whose weights they are.
            values: at the owner "0.weight" of axes (inputs, outputs), "0.bias", "1.weight", ...

        Raises:
            RingRangeError: a weight does not fit; it names the layer.
        """

        def one(name: str, *shape: int) -> SharedTensor:
            own = values[name] if values else None
            return party.share_bounded(owner, shape, own, name, "the weights")

        shared = []
        for index, layer in enumerate(layers):
            weight = one(f"{index}.weight", layer.inputs, layer.outputs).alone()
            bias = one(f"{index}.bias", layer.outputs) if layer.bias else None
            shared.append(Weights(weight, bias))
        return cls(layers, shared)

    def plus(self, other: Network) -> Network:
        """The network whose weights are the sums of two networks' of one structure."""
        weights = [one.plus(two) for one, two in zip(self.weights, other.weights, strict=True)]
        return Network(self.layers, weights)

    def open(self, party: Party, phase: str = "online") -> None:
        """Open all weights in one message, so that they are not sent again until they change."""
        opened = party.open(*(each.weight for each in self.weights), phase=phase)
        self.weights = [
            replace(each, weight=weight) for each, weight in zip(self.weights, opened, strict=True)
        ]

    @torch.inference_mode()
    def infer(self, party: Party, inputs: SharedTensor) -> SharedTensor:
        """The shared outputs for shared inputs of axes (rows, columns); algorithm 5.3."""
        return self._forward(party, inputs, 0).output

    def check_outputs(self, rules: Rules, outputs: Tensor) -> None:
        """Refuse revealed outputs that were too large; those of a last function P2 has checked.

        Raises:
            RingRangeError: one is larger than what is divided, or near enough to have wrapped.
        """
        last = len(self.layers) - 1
        if not self.layers[last].function:
            room = rules.magnitude_bits if rules.mode == "thesis" else rules.sum_bits
            require_room(outputs, room, rules.bits, f"outputs of {_named(last)}")

    def reveal(self, party: Party, to: int) -> dict[str, Tensor]:
        """The weights in clear at one party, named as in `share`; empty elsewhere."""
        found: dict[str, Tensor | None] = {}
        for index, each in enumerate(self.weights):
            found[f"{index}.weight"] = party.reveal(each.weight, to, f"{index}.weight")
            if each.bias is not None:
                found[f"{index}.bias"] = party.reveal(each.bias, to, f"{index}.bias")
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
        """One step of gradient descent; algorithm 5.4.

        Args:
            party: this one.
            inputs: axes (rows, columns).
            targets: axes (rows, outputs), shared with the rules' `delta_bits`.
            loss: "cross_entropy" after a sigmoid, or "squared": the mean over rows of the squared
                error summed over outputs.
            learning_rate: of the mean gradient; rounded to about three decimal indices.

        Raises:
            BadOptionError: a batch of too many rows for the rules' bits.
            RingRangeError: a value is too large; P2 names its layer.
        """
        require_rows(party.rules, inputs.shape[0])
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
        """The forward pass.

        Args:
            party: this one.
            inputs: axes (rows, columns).
            sloped: fast mode asks for the slopes of so many first layers with their values.
            bits: fraction bits of the last function's values.
        """
        kept = Pass([], [], [], inputs)
        first, *rest = (each.weight for each in self.weights)
        # One message for all that is known already.
        opened = party.open(inputs, first.facing(inputs), *rest)
        values, weights = opened[0], opened[1:]
        self.weights = [
            replace(each, weight=weight) for each, weight in zip(self.weights, weights, strict=True)
        ]
        for index, (layer, each) in enumerate(zip(self.layers, self.weights, strict=True)):
            (values,) = party.open(values)
            kept.inputs.append(values)
            sums, _ = party.multiply(
                values, each.weight, matmul, self._forward_truncations(party), where=_named(index)
            )
            if each.bias is not None:
                sums = sums.plus(each.bias.finer(sums.bits))
            kept.sums.append(sums)
            last = index == len(self.layers) - 1
            asked = self._ask(party, layer, sums, index, index < sloped, bits if last else -1)
            # While P2 computes, what it said of the layer before besides its values.
            self._take_slope(party, kept)
            kept.asked = asked
            values = self._plain(party, sums, index) if asked is None else party.answer(asked)
            kept.slopes.append(None)
        self._take_slope(party, kept)
        kept.output = values
        return kept

    def _ask(
        self, party: Party, layer: Layer, sums: SharedTensor, index: int, sloped: bool, bits: int
    ) -> Question | None:
        """Ask for a layer's function, and with it for its slope; None where there is none."""
        if not layer.function:
            return None
        both = sloped and party.rules.mode == "fast"
        asked = function(layer.function)
        return party.ask(sums, asked, _named(index), value=True, slope=both, bits=bits)

    def _take_slope(self, party: Party, kept: Pass) -> None:
        """The last layer's slope, if it was asked for, opened while nothing else is to be done."""
        if kept.asked is not None and len(kept.asked.bits) > 1:
            (kept.slopes[-1],) = party.open(party.answer(kept.asked, 1))
        kept.asked = None

    def _plain(self, party: Party, sums: SharedTensor, index: int) -> SharedTensor:
        """What a layer without a function gives the next one."""
        if index < len(self.layers) - 1 and sums.bits > party.rules.bits:
            return party.truncate(sums, self._truncations(party, sums.bits), _named(index))
        return sums

    def _output_delta(
        self, party: Party, kept: Pass, targets: SharedTensor, loss: Loss
    ) -> SharedTensor:
        """The gradient before the last function, summed over rows instead of averaged."""
        last = len(self.layers) - 1
        delta = kept.output.minus(targets.finer(kept.output.bits))
        named = self.layers[last].function
        if delta.bits > party.rules.delta_bits:
            shift = delta.bits - party.rules.delta_bits
            # Outputs and targets are below 2^magnitude_bits, their difference below twice that.
            truncations = (Truncation(shift, party.rules.zmax_bits(delta.bits) + 1),)
            delta = party.truncate(delta, truncations, f"gradient of {_named(last)}")
        if loss == "cross_entropy" or not named:
            return delta
        return self._times_slope(party, delta, self._slope(party, kept, last), last)

    def _slope(self, party: Party, kept: Pass, index: int) -> SharedTensor:
        """The slope of a layer's function: asked for before, or now."""
        slope = kept.slopes[index]
        if slope is not None:
            return slope
        asked = function(self.layers[index].function)
        return party.apply(kept.sums[index], asked, _named(index), value=False, slope=True)[0]

    def _delta_below(
        self, party: Party, kept: Pass, delta: SharedTensor, index: int
    ) -> SharedTensor:
        """The gradient before the function of the layer below."""
        weight = self.weights[index].weight.transposed()
        slope = kept.slopes[index - 1]
        # Slopes of 0 and 1 leave the scale as it is, so one division serves both products.
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
        each, rules = self.weights[index], party.rules
        last = index == len(self.layers) - 1
        more = gradient_bits(rules, last=last, squared=loss == "squared")
        truncations = learning_rate_truncations(rules, inputs.shape[0], delta.bits, rate, more)
        beside = None
        if each.bias is not None:
            beside = delta.row_sum().finer(delta.bits + inputs.bits)
        step, bias_step = party.multiply(
            inputs,
            delta,
            inner,
            truncations,
            beside=beside,
            where=f"update of {_named(index)}",
        )
        bias = each.bias
        if bias is not None and bias_step is not None:
            bias = bias.minus(bias_step)
        self.weights[index] = Weights(each.weight.minus(step), bias)

    def _forward_truncations(self, party: Party) -> tuple[Truncation, ...]:
        """In fast mode P2 reads sums of twice the fraction bits."""
        fast = party.rules.mode == "fast"
        return () if fast else self._truncations(party, 2 * party.rules.bits)

    @staticmethod
    def _truncations(party: Party, bits: int, shift: int | None = None) -> tuple[Truncation, ...]:
        """One division of a product with so many fraction bits; by those of the rules."""
        shift = party.rules.bits if shift is None else shift
        return (Truncation(shift, party.rules.zmax_bits(bits)),)


def share_targets(
    party: Party, owner: int, shape: Sequence[int], values: Tensor | None
) -> SharedTensor:
    """Targets of axes (rows, outputs) as `Network.train_step` wants them.

    The first gradient is outputs minus targets, which is divided, and no function shows it to P2.

    Raises:
        RingRangeError: a target is too large.
    """
    bits = party.rules.delta_bits
    return party.share_bounded(owner, shape, values, "targets", "the labels", bits)


def _named(index: int) -> str:
    return f"layer {index}"


def fixed_point_rate(rate: float) -> tuple[int, int]:
    """Factor and shift that stand for a rate: about rate = times / 2^shift.

    >>> fixed_point_rate(0.1 / 128)
    (819, 20)
    """
    shift = max(1, _RATE_BITS - math.frexp(rate)[1])
    return round(rate * 2**shift), shift


def learning_rate_truncations(
    rules: Rules, rows: int, bits: int, rate: float, gradient_bits: int = 0
) -> tuple[Truncation, Truncation]:
    """First the product's own fraction, then rate = times / 2^shift.

    A sum over rows of columns, below 2^magnitude_bits each, times gradients is what is divided.

    Args:
        rules: the same at all parties.
        rows: of the batch.
        bits: of the gradients' fraction.
        rate: learning rate over rows.
        gradient_bits: gradients are below 2 to this; as far as the ring has room.
    """
    times, shift = fixed_point_rate(rate)
    magnitude = rules.magnitude_bits + _sum_bits(rows) + gradient_bits
    first = Truncation(bits, min(rules.bits + bits + magnitude, _MOST_ZMAX_BITS))
    most = min(rules.bits + magnitude + _RATE_BITS, _MOST_ZMAX_BITS)
    return first, Truncation(shift, most, times, rate=True)


def gradient_bits(rules: Rules, *, last: bool, squared: bool) -> int:
    """Gradients before a layer's function are below 2 to this.

    Behind a sigmoid outputs minus targets are below 1; for squared loss both are below
    2^magnitude_bits. Gradients of a hidden layer are sums over weights, and may be as large as
    what they were divided as.

    Args:
        rules: the same at all parties.
        last: whether it is the last layer.
        squared: whether the loss is; else it is cross entropy behind a sigmoid.
    """
    if squared:
        return rules.magnitude_bits + 1
    return 0 if last else rules.magnitude_bits


def require_rows(rules: Rules, rows: int) -> None:
    """Refuse a batch over which even gradients below 1 could add up to more than is divided.

    Raises:
        BadOptionError: there are too many rows for so many bits.
    """
    room = _MOST_ZMAX_BITS - rules.bits - rules.delta_bits - rules.magnitude_bits
    if _sum_bits(rows) > room:
        raise BadOptionError(
            "sums over so many rows do not fit the ring",
            where="rows of a batch",
            got=f"{rows}, with {rules.bits} bits, {rules.delta_bits} delta_bits and "
            f"{rules.magnitude_bits} magnitude_bits",
            want=f"at most {2**room} rows" if room >= 0 else "fewer bits",
            fix="lower magnitude_bits and scale the columns, or lower delta_bits or the rows",
        )


def _sum_bits(rows: int) -> int:
    """Bits that a sum over rows may have more than its largest part.

    >>> _sum_bits(1), _sum_bits(128), _sum_bits(129)
    (0, 7, 8)
    """
    return (rows - 1).bit_length()
