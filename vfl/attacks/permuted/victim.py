"""A private network that computes for real, and what reached P2 on its links meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from vfl.core.frame import Frame, Link
from vfl.mpc import Layer, Network, Party, Rules, Trio
from vfl.mpc.channel import Leak
from vfl.mpc.network import Loss
from vfl.mpc.permuted import EXPECTED_CARRY, from_upper_40_bits, function
from vfl.mpc.ring import decode
from vfl.mpc.rules import P0, P1, P2


class _Tapped:
    """A link that keeps the payloads its own end receives."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.received: list[bytes] = []

    def send(self, frame: Frame) -> None:
        self._link.send(frame)

    def receive(self) -> Frame:
        frame = self._link.receive()
        self.received.append(bytes(frame.payload))
        return frame

    def close(self) -> None:
        self._link.close()


class Victim:
    """Three parties in threads: P0 owns the inputs, P1 weights and targets, P2 is curious.

    A context manager. P2's links are tapped after the keys are agreed; all it receives then are
    the two permuted shares of each question, which it adds as the protocol does.

    Args:
        layers: the network.
        values: its weights; "0.weight" of axes (inputs, outputs), "0.bias", ...
        rules: of the computation.
    """

    def __init__(self, layers: Sequence[Layer], values: Mapping[str, Tensor], rules: Rules) -> None:
        self.layers, self.rules = tuple(layers), rules
        self._trio = Trio(rules)
        self._networks = self._trio.run(
            lambda party: Network.share(party, layers, P1, values if party.role == P1 else None)
        )
        channels = self._trio.parties[P2].channels
        self._taps = [_Tapped(channels[holder].link) for holder in (P0, P1)]
        for holder, tap in zip((P0, P1), self._taps, strict=True):
            channels[holder].link = tap

    def infer(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The outputs, and what P2 saw: one axis of values a question, layer after layer."""

        def program(party: Party) -> Tensor | None:
            own = inputs if party.role == P0 else None
            shared = party.share(P0, inputs.shape, own, "inputs")
            outputs = self._networks[party.role].infer(party, shared)
            return party.reveal(outputs, P0, "outputs")

        outputs, seen = self._watched(program)
        assert outputs is not None, "P0 receives the outputs"
        return outputs, seen

    def train_step(
        self, inputs: Tensor, targets: Tensor, loss: Loss, learning_rate: float
    ) -> list[Tensor]:
        """What P2 saw of one step: values layer after layer, then those asked for slopes."""

        def program(party: Party) -> None:
            role = party.role
            rows = party.share(P0, inputs.shape, inputs if role == P0 else None, "inputs")
            own, bits = targets if role == P1 else None, party.rules.delta_bits
            wanted = party.share(P1, targets.shape, own, "targets", bits)
            self._networks[role].train_step(party, rows, wanted, loss, learning_rate)

        return self._watched(program)[1]

    def weights(self) -> dict[str, Tensor]:
        """The weights of now, for who gives scores and for attackers that are told them."""
        return self._trio.run(lambda party: self._networks[party.role].reveal(party, P1))[P1]

    def leaks(self) -> list[Leak]:
        """What the ledgers of the parties counted."""
        return self._trio.leaks()

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *error: object) -> None:
        self._trio.close()

    def _watched(
        self, program: Callable[[Party], Tensor | None]
    ) -> tuple[Tensor | None, list[Tensor]]:
        found = self._trio.run(program)[P0]
        pairs = list(zip(*(tap.received for tap in self._taps), strict=True))
        for tap in self._taps:
            tap.received.clear()
        return found, [self._read(first, second) for first, second in pairs]

    def _read(self, first: bytes, second: bytes) -> Tensor:
        """Both shares of one question added, as P2 does."""
        if self.rules.mode == "fast":
            words = (
                from_upper_40_bits(memoryview(first))
                + from_upper_40_bits(memoryview(second))
                + EXPECTED_CARRY
            )
            return decode(words, 2 * self.rules.bits)
        shares = [torch.frombuffer(bytearray(each), dtype=torch.int64) for each in (first, second)]
        return decode(shares[0] + shares[1], self.rules.bits)


def drawn_weights(
    layers: Sequence[Layer], draw: torch.Generator, bits: int = 20
) -> dict[str, Tensor]:
    """Normal weights of the usual scale (He et al. 2015, eq 10) that shares hold exactly."""
    found = {}
    for index, layer in enumerate(layers):
        weight = torch.randn(layer.inputs, layer.outputs, generator=draw, dtype=torch.float64)
        found[f"{index}.weight"] = on_grid(weight * (2 / layer.inputs) ** 0.5, bits)
        if layer.bias:
            found[f"{index}.bias"] = torch.zeros(layer.outputs, dtype=torch.float64)
    return found


def on_grid(values: Tensor, bits: int = 20) -> Tensor:
    """The nearest multiples of 2^-bits, which shares of as many fraction bits hold exactly.

    >>> on_grid(torch.tensor([0.3]), bits=2).item()
    0.25
    """
    scale: float = 2.0**bits
    return (values * scale).round() / scale


def plain_sums(
    layers: Sequence[Layer], weights: Mapping[str, Tensor], inputs: Tensor
) -> list[Tensor]:
    """The values before each function in clear, axes (rows, outputs) each."""
    found, values = [], inputs
    for index, layer in enumerate(layers):
        sums = values @ weights[f"{index}.weight"]
        if layer.bias:
            sums = sums + weights[f"{index}.bias"]
        found.append(sums)
        values = function(layer.function).value(sums) if layer.function else sums
    return found


def matched_indices(seen: Tensor, sums: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Which true value each seen one is, by its size alone; for who gives scores.

    Args:
        seen: axes (seen,); signs may have been laid over them.
        sums: the true values in their own order, one axis.
        tolerance: further from every true value is a dummy.

    Returns:
        Indices of `sums`, -1 for dummies; int64 of axes (seen,).
    """
    apart, nearest = (seen.abs()[:, None] - sums.abs()).abs().min(1)
    return torch.where(apart < tolerance, nearest, -1)
