"""The workloads of Tables 5.2 and 5.3 (thesis, 2025) and element-wise functions, at one party.

DNN1 is 100-50-1 and DNN2 1000-500-1, with ReLU inside and a sigmoid at the end. A measurement
prepares once and then executes; what each sends is counted apart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from vfl.errors import UnknownNameError, nearest
from vfl.mpc.functions import function
from vfl.mpc.network import Layer, Network, whole_rate
from vfl.mpc.party import Party
from vfl.mpc.rules import P0, P1, Rules
from vfl.mpc.shares import Shared
from vfl.mpc.traffic import bytes_by_phase
from vfl.mpc.trio import Trio

LEARNING_RATE = 0.1
_MODELS = {"lr100": (100, 1), "lr1000": (1000, 1), "dnn1": (100, 50, 1), "dnn2": (1000, 500, 1)}


@dataclass(frozen=True, slots=True)
class Workload:
    """One thing to measure.

    Attributes:
        name: such as lr100-b64-inference or gelu-1k.
        rows: of the batch; elements of an element-wise function.
        widths: of the network; empty for an element-wise function.
        training: a step instead of an inference.
        function: the element-wise function; "" for a network.
    """

    name: str
    rows: int
    widths: tuple[int, ...] = ()
    training: bool = False
    function: str = ""

    @property
    def layers(self) -> list[Layer]:
        """The network's structure."""
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
        Workload("rsqrt-128", 128, function="rsqrt"),
    )
}


@dataclass(frozen=True, slots=True)
class Example:
    """Inputs, weights and targets of a workload, the same from the same seed.

    Attributes:
        inputs: normal; 2 times that for GeLU, log-uniform on [0.01, 300] for 1/sqrt.
        weights: normal over the square root of the width, named as in `Network.share`.
        targets: coins; empty where nothing is trained.
        wanted: what the workload should give, in float64: outputs, or weights after the step.
    """

    inputs: Tensor
    weights: Mapping[str, Tensor]
    targets: Tensor
    wanted: Mapping[str, Tensor]

    @classmethod
    def of(cls, workload: Workload, seed: int = 0) -> Example:
        """Draw it."""
        source = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64)

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


class Seat:
    """One party's part in a workload.

    Args:
        party: with keys agreed.
        workload: the same at all parties.
        example: at P0 and P1, who own inputs, and weights and targets; None at P2.
    """

    def __init__(self, party: Party, workload: Workload, example: Example | None) -> None:
        self._party = party
        self._workload = workload
        self._example = example
        self._network: Network | None = None

    def prepare(self, *, inputs_opened: bool = True, weights_opened: bool = False) -> None:
        """Share what there is, and open what is opened before; counted as setup."""
        party, workload, example = self._party, self._workload, self._example
        shape = (workload.rows, *workload.widths[:1])
        self._inputs = self._owned(P0, shape, example.inputs if example else None, "inputs")
        if workload.function:
            return
        weights = example.weights if example and party.role == P1 else None
        self._network = Network.share(party, workload.layers, P1, weights)
        targets = example.targets if example else None
        self._targets = self._owned(P1, (workload.rows, 1), targets, "targets")
        if inputs_opened:
            (self._inputs,) = party.open(self._inputs, phase="setup")
        if weights_opened:
            self._network.open(party, phase="setup")

    def deal_ahead(self) -> None:
        """Let P2 deal what `execute` will need, where the mode can."""
        blank = self if self._party.role == 2 else self._shape_only()

        def follow(party: Party) -> None:
            blank._copy_for(party).execute()

        self._party.deal(follow)

    def execute(self) -> Shared | None:
        """The workload itself; the shared outputs, or None after a training step."""
        party, workload = self._party, self._workload
        if workload.function:
            asked = function(workload.function)
            return party.apply(self._inputs, asked, workload.name, value=True, slope=False)[0]
        assert self._network is not None, "prepared before"
        if not workload.training:
            return self._network.infer(party, self._inputs)
        self._network.train_step(party, self._inputs, self._targets, "cross_entropy", LEARNING_RATE)
        return None

    def results(self, outputs: Shared | None) -> dict[str, Tensor]:
        """What came out, revealed to P1 for comparison."""
        if outputs is None:
            assert self._network is not None, "a network was trained"
            return self._network.reveal(self._party, P1)
        found = self._party.reveal(outputs, P1, "outputs")
        return {} if found is None else {"": found}

    def _owned(self, owner: int, shape: Sequence[int], values: Tensor | None, where: str) -> Shared:
        own = values if self._party.role == owner else None
        return self._party.share(owner, shape, own, where)

    def _copy_for(self, party: Party) -> Seat:
        seat = Seat(party, self._workload, None)
        seat._inputs = self._inputs
        if self._network is not None:
            seat._targets = self._targets
            seat._network = Network(self._network.layers, self._network.weights)
        return seat

    def _shape_only(self) -> Seat:
        seat = self._copy_for(self._party)
        seat._inputs = self._inputs.shape_only()
        if self._network is not None:
            seat._targets = self._targets.shape_only()
            seat._network = self._network.shape_only()
        return seat


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload in one mode.

    Attributes:
        bytes_setup, bytes_offline, bytes_online: of all parties, frame headers included.
        hops: messages one after the other on the critical path, without the revealing.
        milliseconds: wall time of the three threads.
        max_error: against float64 in clear; of outputs, or of weights after the step.
    """

    workload: str
    system: str
    bytes_setup: int
    bytes_offline: int
    bytes_online: int
    hops: int
    milliseconds: float
    max_error: float


def measure(
    name: str,
    rules: Rules,
    *,
    inputs_opened: bool = True,
    weights_opened: bool = False,
    ahead: bool = False,
    seed: int = 0,
) -> Measurement:
    """Run a workload once in this process, three threads.

    Args:
        name: of `WORKLOADS`.
        rules: with the mode.
        inputs_opened: fast mode: whether the inputs were opened before, as over many epochs.
        weights_opened: fast mode: whether the weights were, as in a service.
        ahead: fast mode: whether P2 deals before the clock starts.
        seed: of the example.

    Raises:
        UnknownNameError: no workload of that name.
    """
    workload = workload_named(name)
    example = Example.of(workload, seed)
    with Trio(rules, {"workload": name}) as trio:
        seats = [
            Seat(party, workload, example if party.role < 2 else None) for party in trio.parties
        ]
        trio.run(
            lambda party: seats[party.role].prepare(
                inputs_opened=inputs_opened, weights_opened=weights_opened
            )
        )
        before = bytes_by_phase(trio.traffic())
        if ahead:
            trio.run(lambda party: seats[party.role].deal_ahead())
        trio.hops()
        started = time.perf_counter()
        outputs = trio.run(lambda party: seats[party.role].execute())
        milliseconds = 1000 * (time.perf_counter() - started)
        hops = trio.hops()
        after = bytes_by_phase(trio.traffic())
        found = trio.run(lambda party: seats[party.role].results(outputs[party.role]))[P1]
    error = max(float((found[key] - value).abs().max()) for key, value in example.wanted.items())
    return Measurement(
        name,
        rules.mode,
        after["setup"],
        after["offline"] - before["offline"],
        after["online"] - before["online"],
        hops,
        milliseconds,
        error,
    )


def workload_named(name: str) -> Workload:
    """The workload of a name.

    Raises:
        UnknownNameError: none has it, with the nearest.
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
    times, shift = whole_rate(LEARNING_RATE / workload.rows)
    return {
        name: value.detach() - times / 2**shift * gradient
        for (name, value), gradient in zip(own.items(), gradients, strict=True)
    }
