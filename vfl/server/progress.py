"""What a session has done so far: counts, this epoch's measurements, past epochs' records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vfl.ledger import Ledger
from vfl.server.meter import Meter
from vfl.server.task import Task

EpochRecord = dict[str, Any]


class Progress:
    """Counts of the label party; they go into checkpoints, so a resumed run reports the whole.

    Args:
        task: what the outputs mean.
        ledger: where traffic is counted.
        on_epoch: told one record an epoch.

    Attributes:
        train_steps, train_rows, train_seconds: exchanges, rows and time of training.
        asked_steps, asked_rows: exchanges and rows of evaluations, those of a training included.
        history: one record an epoch.
    """

    def __init__(self, task: Task, ledger: Ledger, on_epoch: Callable[[EpochRecord], None]) -> None:
        self.train_steps = 0
        self.train_rows = 0
        self.train_seconds = 0.0
        self.asked_steps = 0
        self.asked_rows = 0
        self.history: list[EpochRecord] = []
        self._task = task
        self._ledger = ledger
        self._on_epoch = on_epoch
        self._meters: dict[str, Meter] = {}

    def trained(self, rows: int) -> None:
        """Count one training exchange."""
        self.train_steps += 1
        self.train_rows += rows

    def asked(self, rows: int) -> None:
        """Count one exchange of an evaluation."""
        self.asked_steps += 1
        self.asked_rows += rows

    def meter(self, phase: str) -> Meter:
        """What is measured of a phase in this epoch."""
        return self._meters.setdefault(phase, Meter(self._task, phase))

    def end_epoch(self, epoch: int, seconds: float, more: Mapping[str, Any]) -> None:
        """Make the record of an epoch from its measurements and `more`, and start anew."""
        record: EpochRecord = {"epoch": epoch, "steps": self.train_steps}
        for meter in self._meters.values():
            record |= meter.figures()
        record |= more
        record["seconds"] = round(seconds, 4)
        record["bytes_up"] = self._ledger.total_bytes("up")
        record["bytes_down"] = self._ledger.total_bytes("down")
        self._meters = {}
        self.history.append(record)
        self._on_epoch(record)

    def state(self) -> dict[str, Any]:
        """Everything counted so far, for a checkpoint."""
        return {
            "trained": [self.train_steps, self.train_rows, self.train_seconds],
            "asked": [self.asked_steps, self.asked_rows],
            "history": list(self.history),
            "meters": {phase: meter.state() for phase, meter in self._meters.items()},
            "traffic": self._ledger.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.train_steps, self.train_rows, self.train_seconds = state["trained"]
        self.asked_steps, self.asked_rows = state["asked"]
        self.history = list(state["history"])
        self._meters = {
            phase: Meter.restored(self._task, phase, kept)
            for phase, kept in state["meters"].items()
        }
        self._ledger.restore(state["traffic"])
