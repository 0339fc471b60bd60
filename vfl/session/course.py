"""How long a training goes on and which weights it keeps: early stopping on the validation rows.

Only the label party can judge, so it tells the others one byte an epoch, in its answer to the last
validation query: whether the loss was the best so far, and whether to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import IntFlag
from typing import Any

from torch import Tensor

from vfl.config import TrainSettings
from vfl.errors import ProtocolError
from vfl.session.schedule import Exchange

State = Mapping[str, Tensor]


class Verdict(IntFlag):
    """What an epoch's validation led to."""

    NONE = 0
    BEST = 1
    STOP = 2


class Course:
    """One party's part in early stopping; the label party calls `judge`, the others `told`.

    Args:
        settings: `patience` and `keep` decide; without either nothing is judged or told.
        read, write: the party's own weights and states, and how they are put back.

    Attributes:
        best_epoch: epoch of the lowest validation loss so far; 0 before the first.
        stopped: epoch after which training stopped early; 0 while it goes on.
    """

    def __init__(
        self, settings: TrainSettings, read: Callable[[], State], write: Callable[[State], None]
    ) -> None:
        self.best_epoch = 0
        self.stopped = 0
        self._settings = settings
        self._read, self._write = read, write
        self._lowest = float("inf")
        self._best: dict[str, Tensor] | None = None

    def judges(self, exchange: Exchange) -> bool:
        """Whether this exchange's answer carries a verdict."""
        settings = self._settings
        asked = settings.patience > 0 or settings.keep == "best"
        return asked and exchange.phase == "validation" and exchange.last

    def judge(self, loss: float, exchange: Exchange) -> bytes:
        """Decide after an epoch's validation, at the label party; what the others are told."""
        verdict = Verdict.NONE
        if loss < self._lowest:
            self._lowest = loss
            verdict |= Verdict.BEST
        elif 0 < self._settings.patience <= exchange.epoch - self.best_epoch:
            verdict |= Verdict.STOP
        self._follow(verdict, exchange)
        return bytes([verdict])

    def told(self, answer: bytes, exchange: Exchange) -> None:
        """Do what the label party's answer to a query asks for.

        Raises:
            ProtocolError: the answer says something that was not agreed.
        """
        if not self.judges(exchange):
            wanted, fits = "nothing", not answer
        else:
            wanted, fits = "one byte from 0 to 2", len(answer) == 1 and answer[0] <= Verdict.STOP
        if not fits:
            raise ProtocolError(
                "the label party answered a query with something else than agreed",
                where=f"step {exchange.step}",
                got=f"{len(answer)} bytes",
                want=wanted,
            )
        if answer:
            self._follow(Verdict(answer[0]), exchange)

    def follow(self, schedule: Iterable[Exchange]) -> Iterator[Exchange]:
        """The exchanges to go through: after an early stop only the test rows are left."""
        for exchange in schedule:
            if not self.stopped or exchange.epoch <= self.stopped:
                yield exchange
            elif exchange.phase == "test":
                yield replace(exchange, epoch=self.stopped)

    def state(self) -> dict[str, Any]:
        """Everything decided so far, for a checkpoint."""
        return {
            "best_epoch": self.best_epoch,
            "stopped": self.stopped,
            "lowest": self._lowest,
            "best": self._best,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.best_epoch, self.stopped = state["best_epoch"], state["stopped"]
        self._lowest, self._best = state["lowest"], state["best"]

    def _follow(self, verdict: Verdict, exchange: Exchange) -> None:
        keeps = self._settings.keep == "best"
        if Verdict.BEST in verdict:
            self.best_epoch = exchange.epoch
            if keeps:
                self._best = {name: value.clone() for name, value in self._read().items()}
        if Verdict.STOP in verdict:
            self.stopped = exchange.epoch
        is_over = self.stopped or exchange.epoch == self._settings.epochs
        if is_over and self._best is not None:
            self._write(self._best)
            self._best = None
