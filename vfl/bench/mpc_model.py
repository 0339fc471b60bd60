"""A private workload on lines that are computed: exact bytes and hops, and the limit they set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import cast

import torch

from vfl.bench.network import LinkModel, Wan
from vfl.mpc import Rules, Trio
from vfl.mpc.channel import bytes_by_phase
from vfl.mpc.measure import Seat
from vfl.mpc.ring import matmul
from vfl.mpc.rules import NAMES, P1, P2, Mode
from vfl.mpc.workloads import Example, Workload
from vfl.transport import TransportLink

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Modelled:
    """One workload in one mode, while compute takes no time.

    Attributes:
        seconds: on the parties' clocks.
        limit_s: the least any protocol of these bytes and hops can take.
        hops: messages one after the other.
        bytes_setup, bytes_offline, bytes_online: of all parties, frame headers included.
        max_error: against float64 in clear.
    """

    seconds: float
    limit_s: float
    hops: int
    bytes_setup: int
    bytes_offline: int
    bytes_online: int
    max_error: float


def rules_of(workload: Workload, mode: Mode) -> Rules:
    """The mode's own rules; 1/sqrt is steep near 0 and has the bits of thesis mode in both."""
    return Rules(mode, bits=23 if workload.function == "rsqrt" else 0)


def modelled(workload: Workload, rules: Rules, wan: Wan, *, fresh: bool = False) -> Modelled:
    """Run it once in this process, with lines between the parties once all is prepared.

    Args:
        workload: what.
        rules: with the mode.
        wan: every party's line.
        fresh: inputs were not opened before.
    """
    example = Example.of(workload)
    with Trio(rules, {"workload": workload.name}) as trio:
        seats = [Seat(one, workload, None if one.role == P2 else example) for one in trio.parties]
        trio.run(lambda party: seats[party.role].prepare(inputs_opened=not fresh))
        before = bytes_by_phase(trio.traffic())
        trio.run(lambda party: seats[party.role].deal_ahead())
        model = _lines(trio, wan)
        outputs = trio.run(lambda party: seats[party.role].execute())
        seconds, hops, most = model.seconds, model.hops, max(model.bytes_sent().values())
        after = bytes_by_phase(trio.traffic())
        found = trio.run(lambda party: seats[party.role].results(outputs[party.role]))[P1]
    return Modelled(
        seconds,
        wan.limit_s(most, hops),
        hops,
        before["setup"],
        after["offline"] - before["offline"],
        after["online"] - before["online"],
        max(float((found[key] - value).abs().max()) for key, value in example.wanted.items()),
    )


def products(workload: Workload, mode: Mode) -> list[tuple[int, int, int]]:
    """Rows, inner width and columns of a holder's matrix products in an inference or a step.

    On shares a product is two of the ring at each holder, e (d + v) + u d; with inputs that fast
    mode leaves with their owner it is one, half of it X_i (W_i + D), half E V.
    """
    forward = [(workload.rows, one.inputs, one.outputs) for one in workload.layers]
    first, rest = forward[:1], forward[1:]
    if workload.training:
        first += [(inner, rows, columns) for rows, inner, columns in first]
        rest += [(inner, rows, columns) for rows, inner, columns in rest]
        rest += [(rows, columns, inner) for rows, inner, columns in forward[1:]]
    return first * (1 if mode == "fast" else 2) + rest * 2


def matmul_ms(shapes: Sequence[tuple[int, int, int]]) -> float:
    """What products alone take in the ring, one thread; the fastest of three tries."""
    pairs = [
        (torch.ones(rows, inner, dtype=torch.int64), torch.ones(inner, columns, dtype=torch.int64))
        for rows, inner, columns in shapes
    ]
    taken = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        for left, right in pairs:
            matmul(left, right)
        taken.append(time.perf_counter() - began)
    return 1000 * min(taken)


def _lines(trio: Trio, wan: Wan) -> LinkModel:
    """Put lines into all channels; nothing is on its way at this moment."""
    model = LinkModel(NAMES, wan)
    for one, other in combinations(trio.parties, 2):
        there, back = one.channels[other.role], other.channels[one.role]
        # A trio's links are those of `vfl.mpc.trio`, which can tell why they stop.
        ends = cast("tuple[TransportLink, TransportLink]", (there.link, back.link))
        there.link, back.link = model.between(NAMES[one.role], NAMES[other.role], ends)
    return model
