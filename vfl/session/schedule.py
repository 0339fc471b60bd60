"""The rows of every exchange, which all parties compute from the same seed, and early stopping.

No message contains the order of the training rows. All exchanges of a session (training,
validation, test) are numbered in one sequence from 0, so the number of an exchange (its step)
determines its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from vfl.config import TrainSettings
from vfl.config.experiment import FALLING
from vfl.core.errors import DataError, ProtocolError
from vfl.core.seeds import permutation

Phase = Literal["train", "validation", "test", "predict"]
QUERY_ROWS = 1024
#: Sizes in bytes of one row's position in a request of a service, and of the reason in a refusal.
ROW_BYTES, REFUSAL_BYTES = 4, 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of a session: each feature party sends a cut, and the label party answers.

    Attributes:
        step: number of the exchange in the session.
        phase: "train", or the kind of rows on which the model is evaluated, for example
            "validation".
        epoch: number of the epoch, from 1; for the test rows after a training, the number of the
            last trained epoch; 0 in a session without training.
        rows: positions of the exchange's rows among the aligned rows, int64.
        last: whether this exchange is the last one of its phase in this epoch.
        saves: whether parties with checkpoints save a checkpoint before this exchange.
        confirmed: whether the label party confirms the receipt of a query; in a service, the next
            request is the confirmation.
        trained: number of training exchanges of the session before this one.
    """

    step: int
    phase: Phase
    epoch: int
    rows: np.ndarray
    last: bool
    saves: bool = False
    confirmed: bool = True
    trained: int = 0

    @property
    def trains(self) -> bool:
        """Whether the label party returns a gradient in this exchange."""
        return self.phase == "train"


def own_rows(exchange: Exchange, held: np.ndarray) -> np.ndarray:
    """Return the indices of the rows of an exchange that a party has, int64, ascending.

    If the party has only one row of a training batch with several rows, the result is empty,
    because batch normalisation cannot use a single row.

    Args:
        exchange: an exchange, whose attribute `rows` names the rows.
        held: mask of the aligned rows that the party has, bool, axes (aligned rows,).

    >>> own_rows(Exchange(0, "train", 1, np.array([4, 0, 3]), last=False), np.arange(5) > 2)
    array([0, 2])
    """
    found = np.flatnonzero(held[exchange.rows])
    return found[:0] if exchange.trains and len(found) == 1 < len(exchange.rows) else found


def batches(rows: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Split rows into consecutive batches; drop a last batch of one row (batch norm cannot use it).

    >>> [len(batch) for batch in batches(np.arange(9), 4)], len(batches(np.arange(10), 4))
    ([4, 4], 3)
    """
    cut = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    return cut[:-1] if len(cut) > 1 and len(cut[-1]) == 1 < batch_size else cut


def shuffled_in_blocks(
    seed: int, epoch: int, settings: TrainSettings, rows: np.ndarray
) -> Iterator[np.ndarray]:
    """Shuffle the rows of an epoch in blocks, so that memory never holds all rows.

    Blocks of B consecutive rows are permuted first; then the rows of each window of W blocks are
    permuted. The following statements assume that all K blocks have equal size, and that W divides
    K. Every row then has the same probability for each position in the epoch, as in a full shuffle.
    The joint distribution of neighbouring positions differs from a full shuffle, because two rows
    of one block are always in the same window. Two neighbouring positions therefore contain rows of
    the same block with probability (B - 1) / (W B - 1), about 1 / W. In a full shuffle, the
    probability is (B - 1) / (K B - 1). Let r be the fraction of the rows' variance that is variance
    between the means of blocks. The mean of a batch of b rows then has a larger variance than in a
    full shuffle. The ratio of the two variances is about 1 + (b - 1) r (1 / W - 1 / K). If the
    order of the table is unrelated to the rows' values, this ratio is about 1.

    Args:
        seed: the run's public seed.
        epoch: number of the epoch, from 1.
        settings: settings whose `block_rows` is B and whose `window_blocks` is W; the last block
            and the last window may be shorter.
        rows: positions of the training rows, int64, ascending.

    Yields:
        Batches with the same sizes as the batches of `batches`; a batch may contain rows of two
        neighbouring windows.
    """
    size, block_rows = settings.batch_size, settings.block_rows
    order = permutation(seed, -(-len(rows) // block_rows), "blocks", epoch)
    left, sent = rows[:0], 0
    for start in range(0, len(order), settings.window_blocks):
        blocks = np.sort(order[start : start + settings.window_blocks]) * block_rows
        window = np.concatenate([rows[first : first + block_rows] for first in blocks])
        window = window[permutation(seed, len(window), "order", epoch, start)]
        left = np.concatenate([left, window])
        whole = len(left) // size * size
        yield from np.split(left[:whole], range(size, whole, size)) if whole else ()
        left, sent = left[whole:], sent + whole
    if len(left) > 1 or (len(left) and not sent):
        yield left


def queries(rows: np.ndarray) -> list[np.ndarray]:
    """Split the rows of an evaluation into large batches, each row in one batch."""
    return [rows[start : start + QUERY_ROWS] for start in range(0, len(rows), QUERY_ROWS)]


def training(
    seed: int,
    epochs: int,
    batch_size: int | Callable[[int], Iterable[np.ndarray]],
    train: np.ndarray,
    validation: np.ndarray,
    test: np.ndarray,
    checkpoint_every: int = 0,
) -> Iterator[Exchange]:
    """Yield all exchanges of a training: batches and validation rows of each epoch, then test rows.

    The seed and the epoch determine the order of rows; `train`, `validation` and `test` are
    positions in the aligned rows. Instead of a batch size, the caller may pass a function from an
    epoch's number to the epoch's batches. A checkpoint is saved before every `checkpoint_every`-th
    exchange; with 0, no checkpoint is saved.
    """
    step = trained = 0
    for epoch in range(1, epochs + 1):
        if isinstance(batch_size, int):
            order = train[permutation(seed, len(train), "order", epoch)]
            groups_of_rows: Iterable[np.ndarray] = batches(order, batch_size)
        else:
            groups_of_rows = batch_size(epoch)
        parts: list[tuple[Phase, Iterable[np.ndarray]]] = [
            ("train", groups_of_rows),
            ("validation", queries(validation)),
        ]
        if epoch == epochs:
            parts.append(("test", queries(test)))
        for phase, groups in parts:
            for rows, last in _and_last(groups):
                saves = step > 0 and checkpoint_every > 0 and step % checkpoint_every == 0
                yield Exchange(step, phase, epoch, rows, last, saves, trained=trained)
                step, trained = step + 1, trained + (phase == "train")


def _and_last(groups: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield each group of rows, and whether it is the last group."""
    waiting = None
    for group in groups:
        if waiting is not None:
            yield waiting, False
        waiting = group
    if waiting is not None:
        yield waiting, True


def one_epoch(
    seed: int, epoch: int, batch_size: int, train: np.ndarray, step: int
) -> Iterator[Exchange]:
    """Yield the training exchanges of one epoch only, numbered from `step`; see `training`."""
    groups = batches(train[permutation(seed, len(train), "order", epoch)], batch_size)
    before = (epoch - 1) * len(groups)
    for index, rows in enumerate(groups):
        last = index == len(groups) - 1
        yield Exchange(step + index, "train", epoch, rows, last, trained=before + index)


def starting(exchanges: Iterable[Exchange], step: int) -> Iterator[Exchange]:
    """Yield the exchanges whose number is at least `step`."""
    return (exchange for exchange in exchanges if exchange.step >= step)


def asking(phase: Phase, rows: np.ndarray) -> Iterator[Exchange]:
    """Yield the exchanges of an evaluation or a prediction without training."""
    groups = queries(rows)
    for step, part in enumerate(groups):
        yield Exchange(step, phase, 0, part, last=step == len(groups) - 1)


class Look(Protocol):
    """Callback that is called with the progress of a session."""

    def __call__(self, now: float, epoch: int, done: int, rows: int, *, is_over: bool) -> None:
        """Receive the clock's time in seconds, and the exchanges and rows done so far."""


def watched(
    schedule: Iterable[Exchange], look: Look, every_s: float, clock: Callable[[], float]
) -> Iterator[Exchange]:
    """Yield the same exchanges, and call `look` at the start, at intervals and at the end."""
    due, epoch, done, rows = -math.inf, 0, 0, 0
    for exchange in schedule:
        epoch, done = exchange.epoch, exchange.step
        if (now := clock()) >= due:
            due = now + every_s
            look(now, epoch, done, rows, is_over=False)
        rows += len(exchange.rows)
        done += 1
        yield exchange
    look(clock(), epoch, done, rows, is_over=True)


def steps_per_epoch(rows: int, batch_size: int) -> int:
    """Return the number of training exchanges per epoch.

    >>> steps_per_epoch(9, 4), steps_per_epoch(10, 4)
    (2, 3)
    """
    whole, left = divmod(rows, batch_size)
    return whole + (left > 1 or (left == 1 and not whole))


class Verdict(IntFlag):
    """Decision after a validation: whether the weights are the best, and whether to stop."""

    NONE = 0
    BEST = 1
    STOP = 2


class EarlyStopping:
    """One party's part in early stopping; with keep = "best", it stores the best weights.

    Only the label party can decide, because only it computes the validation metric. In its answer
    to the last validation query of an epoch, the label party sends the other parties one byte:
    whether the validation metric was the best so far, and whether to stop. The label party
    therefore calls `judge`, and the other parties call `obey`.

    Args:
        settings: settings with `patience`, `keep` and `measure`; if `patience` is 0 and `keep` is
            not "best", no decision is computed or sent.
        read, write: functions that return, and that restore, the party's weights and states.

    Attributes:
        best_epoch: epoch with the best validation metric so far; 0 before the first validation of
            the training.
        stopped: number of the epoch after which training stopped early; 0 if it has not.
    """

    def __init__(
        self,
        settings: TrainSettings,
        read: Callable[[], Mapping[str, Tensor]],
        write: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        self.best_epoch = 0
        self.stopped = 0
        self._settings = settings
        self._read, self._write = read, write
        self._lowest = float("inf")
        self._best: dict[str, Tensor] | None = None

    def judges(self, exchange: Exchange) -> bool:
        """Whether the label party's answer in this exchange decides about stopping."""
        settings = self._settings
        asked = settings.patience > 0 or settings.keep == "best"
        return asked and exchange.phase == "validation" and exchange.last

    def judge(self, figures: Mapping[str, float], exchange: Exchange) -> bytes:
        """At the label party, decide whether an epoch's weights are the best, and whether to stop.

        The result is the byte with this decision, which the label party sends to the other parties.

        Args:
            figures: metrics of the validation rows, by name.
            exchange: last exchange of the epoch's validation.

        Raises:
            DataError: the metric is undefined for these rows, for example AUC if a class has no
                row.
        """
        measure = self._settings.measure
        if (value := figures.get(f"validation_{measure}")) is None:
            raise DataError(
                "the metric for model selection is undefined for the validation rows",
                where=f"train.measure = '{measure}'",
                want=", ".join(name.removeprefix("validation_") for name in figures),
                fix="use another train.measure, or more validation rows: AUC needs rows of every "
                "class",
            )
        loss, verdict = value if measure in FALLING else -value, Verdict.NONE
        if loss < self._lowest:
            self._lowest = loss
            verdict |= Verdict.BEST
        elif 0 < self._settings.patience <= exchange.epoch - self.best_epoch:
            verdict |= Verdict.STOP
        self._follow(verdict, exchange)
        return bytes([verdict])

    def obey(self, answer: bytes, exchange: Exchange) -> None:
        """Follow the decision that the label party's answer to a query contains.

        Raises:
            ProtocolError: the answer has the wrong length or value.
        """
        if not self.judges(exchange):
            wanted, fits = "nothing", not answer
        else:
            wanted, fits = "one byte from 0 to 2", len(answer) == 1 and answer[0] <= Verdict.STOP
        if not fits:
            raise ProtocolError(
                "the label party's answer to a query does not have the agreed form",
                where=f"step {exchange.step}",
                got=f"{len(answer)} bytes",
                want=wanted,
            )
        if answer:
            self._follow(Verdict(answer[0]), exchange)

    def follow(self, schedule: Iterable[Exchange]) -> Iterator[Exchange]:
        """Yield the exchanges to run.

        After an early stop, yield only the exchanges with test rows.
        """
        for exchange in schedule:
            if not self.stopped or exchange.epoch <= self.stopped:
                yield exchange
            elif exchange.phase == "test":
                yield replace(exchange, epoch=self.stopped)

    def state(self) -> dict[str, Any]:
        """Return the decisions and the best weights so far, for a checkpoint."""
        return {
            "best_epoch": self.best_epoch,
            "stopped": self.stopped,
            "lowest": self._lowest,
            "best": self._best,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that the method `state` returned."""
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
