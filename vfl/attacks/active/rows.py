"""Memory of a tampering feature party: stores vectors of training rows by the rows' positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.attacks.view import View
from vfl.compression import StepContext
from vfl.core.errors import DataError


def positions_of(context: StepContext, count: int) -> list[int]:
    """Return the positions of a training batch's rows in the run's table."""
    return [int(row) for row in context.positions(count)]


def require_known(view: View, target: int) -> None:
    """Refuse a backdoor whose party knows no row of the target class.

    Raises:
        DataError: the party knows no row of class `target`.
    """
    if not bool((view.leaked.labels == target).any()):
        raise DataError(
            "none of the leaked rows has the backdoor's class",
            got=f"{view.leaked.rows} leaked rows",
            want=f"at least one of class {target}",
        )


class RowTable:
    """Stores the newest vector of each row, and how many vectors were recorded for the row."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._values: list[Tensor] = []
        self._counts: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def record(self, rows: list[int], values: Tensor) -> None:
        """Store the vectors of a batch, axes (rows, width)."""
        for row, value in zip(rows, values.detach().clone(), strict=True):
            slot = self._slots.setdefault(row, len(self._slots))
            if slot == len(self._values):
                self._values.append(value)
                self._counts.append(1)
            else:
                self._values[slot], self._counts[slot] = value, self._counts[slot] + 1

    def of(self, row: int) -> Tensor | None:
        """Return the newest vector of a row, axes (width,)."""
        slot = self._slots.get(row)
        return None if slot is None else self._values[slot]

    @property
    def rows(self) -> list[int]:
        """Return all rows that have a vector, in the order in which they were first recorded."""
        return list(self._slots)

    @property
    def values(self) -> Tensor:
        """Return the newest vectors of the rows in `rows`, axes (rows, width)."""
        return torch.stack(self._values)

    def seen(self, times: int, rows: int) -> bool:
        """Return whether at least 95 % of the rows have enough recorded vectors.

        The share is below 100 % because a schedule may skip some rows.

        Args:
            times: smallest number of recorded vectors that a row needs.
            rows: number of all rows.
        """
        often = sum(count >= times for count in self._counts)
        return often >= 0.95 * rows

    def state(self) -> dict[str, Tensor]:
        """Return the stored vectors and their counts as tensors."""
        return {
            "rows": torch.tensor(self.rows, dtype=torch.int64),
            "counts": torch.tensor(self._counts, dtype=torch.int64),
            "values": self.values if self._values else torch.zeros(0, 0),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state` returned."""
        self._slots = {row: slot for slot, row in enumerate(state["rows"].tolist())}
        self._counts = state["counts"].tolist()
        self._values = list(state["values"].clone())


class KnownRows:
    """Training rows with labels that a feature party knows; it recognises them by their inputs.

    Args:
        view: view that grants leaked labels and inputs.
        target: class of which the party must know at least one row; None requires no such row.

    Raises:
        DataError: the party knows no row of class `target`.
    """

    def __init__(self, view: View, target: int | None = None) -> None:
        if target is not None:
            require_known(view, target)
        inputs, labels = view.leaked.inputs, view.leaked.labels
        self._labels = {_key(row): int(label) for row, label in zip(inputs, labels, strict=True)}
        self.labels: dict[int, int] = {}

    def look(self, inputs: Tensor, context: StepContext) -> list[int]:
        """Store the labels of a batch's known rows in `labels`; return all its rows' positions."""
        rows = positions_of(context, len(inputs))
        for row, values in zip(rows, inputs, strict=True):
            label = self._labels.get(_key(values))
            if label is not None:
                self.labels[row] = label
        return rows

    def mean(self, label: int, table: RowTable) -> Tensor | None:
        """Return the mean vector of a class's known rows, axes (width,); None without vectors."""
        vectors = (table.of(row) for row, found in self.labels.items() if found == label)
        present = [vector for vector in vectors if vector is not None]
        return torch.stack(present).mean(0) if present else None

    def state(self) -> dict[str, Tensor]:
        """Return, as tensors, the known rows that were found so far."""
        return {"known": torch.tensor(list(self.labels.items()), dtype=torch.int64).reshape(-1, 2)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.labels = dict(map(tuple, state["known"].tolist()))


def _key(values: Tensor) -> bytes:
    return np.ascontiguousarray(values.numpy()).tobytes()
