"""The schedule: which rows every numbered exchange is about, computed alike by every party.

Nothing about the order travels. Exchanges are numbered from 0 through the whole session, training,
validation and test alike, so a step names its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vfl.seeds import permutation

Phase = Literal["train", "validation", "test", "predict"]
QUERY_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of a session.

    Attributes:
        step: its number.
        phase: training, or the rows it evaluates.
        epoch: from 1; the epoch just trained for an evaluation.
        rows: positions into the aligned rows, int64.
        last: whether this exchange ends its phase in this epoch.
    """

    step: int
    phase: Phase
    epoch: int
    rows: np.ndarray
    last: bool

    @property
    def trains(self) -> bool:
        """Whether a gradient comes back."""
        return self.phase == "train"


def batches(rows: np.ndarray, batch_rows: int) -> list[np.ndarray]:
    """Consecutive batches; a remainder of a single row is dropped, batch norm cannot use one.

    >>> [len(batch) for batch in batches(np.arange(9), 4)], len(batches(np.arange(10), 4))
    ([4, 4], 3)
    """
    cut = [rows[start : start + batch_rows] for start in range(0, len(rows), batch_rows)]
    return cut[:-1] if len(cut) > 1 and len(cut[-1]) == 1 < batch_rows else cut


def queries(rows: np.ndarray) -> list[np.ndarray]:
    """The rows of an evaluation in large batches; every row is in one."""
    return [rows[start : start + QUERY_ROWS] for start in range(0, len(rows), QUERY_ROWS)]


def training(
    seed: int,
    epochs: int,
    batch_rows: int,
    train: np.ndarray,
    validation: np.ndarray,
    test: np.ndarray,
) -> Iterator[Exchange]:
    """All exchanges of a training: each epoch's batches and validation rows, at the end the test.

    The seed and the epoch decide the order; `train`, `validation` and `test` are positions into
    the aligned rows.
    """
    step = 0
    for epoch in range(1, epochs + 1):
        order = train[permutation(seed, len(train), "order", epoch)]
        parts: list[tuple[Phase, list[np.ndarray]]] = [
            ("train", batches(order, batch_rows)),
            ("validation", queries(validation)),
        ]
        if epoch == epochs:
            parts.append(("test", queries(test)))
        for phase, groups in parts:
            for index, rows in enumerate(groups):
                yield Exchange(step, phase, epoch, rows, last=index == len(groups) - 1)
                step += 1


def one_epoch(
    seed: int, epoch: int, batch_rows: int, train: np.ndarray, step: int
) -> Iterator[Exchange]:
    """The training exchanges of one epoch alone, numbered from `step`; see `training`."""
    groups = batches(train[permutation(seed, len(train), "order", epoch)], batch_rows)
    for index, rows in enumerate(groups):
        yield Exchange(step + index, "train", epoch, rows, last=index == len(groups) - 1)


def asking(phase: Phase, rows: np.ndarray) -> Iterator[Exchange]:
    """The exchanges of an evaluation or a prediction alone."""
    groups = queries(rows)
    for step, part in enumerate(groups):
        yield Exchange(step, phase, 0, part, last=step == len(groups) - 1)


def steps_per_epoch(rows: int, batch_rows: int) -> int:
    """How many training exchanges an epoch has.

    >>> steps_per_epoch(9, 4), steps_per_epoch(10, 4)
    (2, 3)
    """
    return len(batches(np.empty(rows, dtype=np.int8), batch_rows))
