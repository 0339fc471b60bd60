"""How the feature parties' cuts reach the label party: each by itself, or as their sum alone."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor

from vfl.exchange import DealerLine, LabelHalf, MaskedHalves
from vfl.ledger import Ledger
from vfl.session import Course, Exchange

#: Stands where a party's name does; no party has it, for it is longer than a name can be.
SUM = "the sum of the feature parties' cuts"


class Reception:
    """Takes the cuts of one exchange after the other.

    Args:
        halves: the label party's half of the exchange with every feature party.
        joint: takes the cuts as one sum, under masks; None takes each by itself.
        ledger: where time spent waiting is counted.
        course: says which answers are left to it.
    """

    def __init__(
        self,
        halves: Mapping[str, LabelHalf],
        joint: MaskedHalves | None,
        ledger: Ledger,
        course: Course,
    ) -> None:
        self._halves = halves
        self._joint = joint
        self._ledger = ledger
        self._course = course

    @property
    def masked(self) -> bool:
        """Whether only sums arrive."""
        return self._joint is not None

    @property
    def dealer(self) -> DealerLine | None:
        """The line to a third party that deals; None where there is no such party."""
        return None if self._joint is None else self._joint.dealer

    def begin(self) -> Mapping[str, int]:
        """A new attempt has begun; columns of each party's layer, where layers are shared."""
        return {} if self._joint is None else self._joint.begin()

    def relay(self, exchange: Exchange) -> None:
        """Carry what the feature parties say to each other before they send their cuts."""
        if self._joint is not None:
            started = time.perf_counter()
            self._joint.relay(exchange.step, len(exchange.rows), exchange.trains)
            for name in self._halves:
                self._waited(name, exchange, started)

    def cuts(self, exchange: Exchange) -> dict[str, Tensor]:
        """What arrived, by feature party, or under `SUM`; axes (rows, width) each."""
        if self._joint is None:
            return {name: self._one(name, half, exchange) for name, half in self._halves.items()}
        started = time.perf_counter()
        rows, step = len(exchange.rows), exchange.step
        if exchange.trains:
            total = self._joint.receive_cut(step, rows)
        else:
            total = self._joint.receive_query(step, rows)
            for half in self._halves.values():
                self._confirm(half, exchange)
        for name in self._halves:  # nobody's frame is worth anything before the last is here
            self._waited(name, exchange, started)
        return {SUM: total}

    def _one(self, name: str, half: LabelHalf, exchange: Exchange) -> Tensor:
        started, rows = time.perf_counter(), len(exchange.rows)
        if exchange.trains:
            cut = half.receive_cut(exchange.step, rows)
        else:
            cut = half.receive_query(exchange.step, rows)
            self._confirm(half, exchange)
        self._waited(name, exchange, started)
        return cut

    def _confirm(self, half: LabelHalf, exchange: Exchange) -> None:
        if not self._course.judges(exchange):
            half.confirm(exchange.step)

    def _waited(self, name: str, exchange: Exchange, started: float) -> None:
        phase = "train" if exchange.trains else "evaluate"
        self._ledger.waited(name, phase, time.perf_counter() - started)
