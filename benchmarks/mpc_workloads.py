"""The workloads of Tables 5.2 and 5.3 (thesis, 2025), and element-wise functions.

DNN1 has layers of widths 100-50-1 and DNN2 of 1000-500-1, with ReLU inside and a sigmoid at the
end. The network for images is the network of CrypTen's tutorial 7 with ten classes: 16 filters of 5
x 5, ReLU, max pooling of 2 x 2, a layer of width 100, ReLU, and a layer of width 10.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import binary_cross_entropy_with_logits

from vfl.core.errors import UnknownNameError, nearest
from vfl.mpc.permuted import function
from vfl.mpc.three_party.network import Layer, fixed_point_rate

LEARNING_RATE = 0.1
_MODELS = {"lr100": (100, 1), "lr1000": (1000, 1), "dnn1": (100, 50, 1), "dnn2": (1000, 500, 1)}


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload that the benchmark measures.

    Attributes:
        name: name, such as lr100-b64-inference or gelu-1k.
        rows: number of rows of the batch, or of elements of an element-wise function.
        widths: widths of the network's layers; empty for an element-wise function.
        training: whether the workload is a training step; otherwise it is an inference.
        function: name of the element-wise function; "" for a network.
    """

    name: str
    rows: int
    widths: tuple[int, ...] = ()
    training: bool = False
    function: str = ""

    @property
    def layers(self) -> list[Layer]:
        """Return the layers of the network."""
        last = len(self.widths) - 2
        return [
            Layer(inputs, outputs, "sigmoid" if index == last else "relu")
            for index, (inputs, outputs) in enumerate(
                zip(self.widths, self.widths[1:], strict=False)
            )
        ]


WORKLOADS = {
    each.name: each
    for each in (
        *(
            Workload(f"{name}-b{rows}-{'training' if training else 'inference'}", *rest)
            for name, widths in _MODELS.items()
            for rows in (64, 128)
            for training in (False, True)
            for rest in [(rows, widths, training)]
        ),
        *(
            Workload(f"{name}-{label}", count, function=name)
            for name in ("relu", "gelu")
            for label, count in (("1k", 1000), ("100k", 100_000))
        ),
        *(Workload(f"rsqrt-{count}", count, function="rsqrt") for count in (1, 16, 32, 64, 128)),
        *(Workload(f"cnn-b{rows}-inference", rows, function="cnn") for rows in (1, 16)),
    )
}


@dataclass(frozen=True, slots=True)
class Example:
    """Inputs, weights and targets of a workload; the same seed gives the same values.

    Attributes:
        inputs: normal numbers; for GeLU twice as large, and for 1/sqrt log-uniform on [0.01, 300].
        weights: normal numbers divided by the square root of the width, with names as in
            `Network.share`.
        targets: random labels 0 and 1; empty without training.
        wanted: expected results in float64: the outputs, or the weights after the step.
    """

    inputs: Tensor
    weights: Mapping[str, Tensor]
    targets: Tensor
    wanted: Mapping[str, Tensor]

    @classmethod
    def of(cls, workload: Workload, seed: int = 0) -> Example:
        """Draw the example of a workload."""
        source = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64)

        if workload.function == "cnn":
            shapes = {"conv": (16, 1, 5, 5), "first": (2304, 100), "second": (100, 10)}
            kept = {
                name: normal(*shape)
                / math.sqrt(math.prod(shape[1:] if name == "conv" else shape[:1]))
                for name, shape in shapes.items()
            }
            images = normal(workload.rows, 1, 28, 28).abs().clamp(max=1)
            return cls(images, kept, images[:0], {"": image_scores(images, kept)})
        if workload.function:
            inputs = normal(workload.rows) * (2 if workload.function == "gelu" else 1)
            if workload.function == "rsqrt":
                uniform = torch.rand(workload.rows, generator=source, dtype=torch.float64)
                inputs = 0.01 * 30_000**uniform
            return cls(inputs, {}, inputs[:0], {"": function(workload.function).value(inputs)})
        weights: dict[str, Tensor] = {}
        for index, layer in enumerate(workload.layers):
            weights[f"{index}.weight"] = normal(layer.inputs, layer.outputs) / layer.inputs**0.5
            weights[f"{index}.bias"] = 0.1 * normal(layer.outputs)
        inputs = normal(workload.rows, workload.widths[0])
        targets = torch.randint(0, 2, (workload.rows, 1), generator=source).double()
        return cls(inputs, weights, targets, _in_clear(workload, inputs, weights, targets))


def image_scores(images: Any, weights: Mapping[str, Any]) -> Any:
    """Return the scores of the network for images, for torch tensors or shared tensors."""
    found = functional.max_pool2d(torch.relu(functional.conv2d(images, weights["conv"])), 2)
    return torch.relu(found.flatten(1) @ weights["first"]) @ weights["second"]


def workload_named(name: str) -> Workload:
    """Return the workload with this name.

    Raises:
        UnknownNameError: no workload has this name; the error suggests the nearest.
    """
    if name not in WORKLOADS:
        raise UnknownNameError(
            f"no workload is called '{name}'",
            want=", ".join(WORKLOADS),
            fix=nearest(name, WORKLOADS),
        )
    return WORKLOADS[name]


def _in_clear(
    workload: Workload, inputs: Tensor, weights: Mapping[str, Tensor], targets: Tensor
) -> dict[str, Tensor]:
    own = {name: value.clone().requires_grad_() for name, value in weights.items()}
    values = inputs
    for index, layer in enumerate(workload.layers):
        values = values @ own[f"{index}.weight"] + own[f"{index}.bias"]
        if layer.function == "relu":
            values = torch.relu(values)
    if not workload.training:
        return {"": torch.sigmoid(values).detach()}
    loss = binary_cross_entropy_with_logits(values, targets, reduction="sum")
    gradients = torch.autograd.grad(loss, list(own.values()))
    times, shift = fixed_point_rate(LEARNING_RATE / workload.rows)
    return {
        name: value.detach() - times / 2**shift * gradient
        for (name, value), gradient in zip(own.items(), gradients, strict=True)
    }
