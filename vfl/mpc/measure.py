"""One workload at the three parties: prepared once, then executed; bytes, hops, time and error."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vfl.mpc.channel import bytes_by_phase
from vfl.mpc.network import Network
from vfl.mpc.party import Party
from vfl.mpc.permuted import function
from vfl.mpc.rules import P0, P1, Rules
from vfl.mpc.shares import SharedTensor
from vfl.mpc.trio import Trio
from vfl.mpc.workloads import LEARNING_RATE, Example, Workload, workload_named


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
        inputs = example.inputs if example else None
        if workload.function:
            self._inputs = self._owned(P0, (workload.rows,), inputs, "inputs")
            return
        self._inputs = self._columns(inputs)
        weights = example.weights if example and party.role == P1 else None
        self._network = Network.share(party, workload.layers, P1, weights)
        targets = example.targets if example else None
        bits = party.rules.delta_bits
        self._targets = self._owned(P1, (workload.rows, 1), targets, "targets", bits)
        if inputs_opened:
            (self._inputs,) = party.open(self._inputs, phase="setup")
        if weights_opened:
            self._network.open(party, phase="setup")

    def deal_ahead(self) -> None:
        """Let P2 deal what `execute` will need, where the mode can."""

        def follow(party: Party) -> None:
            self._copy_for(party).execute()

        self._party.deal(follow)

    def execute(self) -> SharedTensor | None:
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

    def results(self, outputs: SharedTensor | None) -> dict[str, Tensor]:
        """What came out, revealed to P1 for comparison."""
        if outputs is None:
            assert self._network is not None, "a network was trained"
            return self._network.reveal(self._party, P1)
        found = self._party.reveal(outputs, P1, "outputs")
        return {} if found is None else {"": found}

    def _columns(self, inputs: Tensor | None) -> SharedTensor:
        """Half of the columns are P0's, half P1's, as in a federation by columns."""
        rows, width = self._workload.rows, self._workload.widths[0]
        half = -(-width // 2)
        left = self._owned(P0, (rows, half), None if inputs is None else inputs[:, :half], "inputs")
        rest = None if inputs is None else inputs[:, half:]
        return left.beside(self._owned(P1, (rows, width - half), rest, "inputs"))

    def _owned(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> SharedTensor:
        own = values if self._party.role == owner else None
        return self._party.share(owner, shape, own, where, bits)

    def _copy_for(self, party: Party) -> Seat:
        seat = Seat(party, self._workload, None)
        seat._inputs = self._inputs
        if self._network is not None:
            seat._targets = self._targets
            seat._network = Network(self._network.layers, self._network.weights)
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
