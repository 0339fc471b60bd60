"""The transcript of one connection: all messages, and the values collected for each row.

Unless batches are sampled, each epoch or repeated query contains a row at most once. A `Transcript`
contains all these epochs or repetitions. For each time that a value about a row was sent, the
transcript shows the value, its message, and the other rows in that message. A recorded cut is the
output of the sender's bottom with the weights at the time of sending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class SentCuts:
    """The cuts of one message.

    Attributes:
        step: number of the training exchange, in the order of the messages.
        epoch: number of the epoch; for repeated queries, the number of the repetition.
        rows: indices of the message's rows within the group that the transcript describes, int64,
            axes (rows,).
        cuts: decoded cuts of these rows, axes (rows, width).
    """

    step: int
    epoch: int
    rows: Tensor
    cuts: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class RecordedExchange:
    """One recorded training exchange: cuts that were sent, and the gradients that came back.

    Attributes:
        step, epoch: see `SentCuts`.
        rows: indices of the exchange's rows in the list of targets and then leaked rows; larger
            indices stand for other rows.
        cuts: function that returns the decoded cuts, axes (rows, width).
        gradients: decoded gradients, axes (rows, width).
    """

    step: int
    epoch: int
    rows: Tensor
    cuts: Callable[[], Tensor]
    gradients: Tensor

    @classmethod
    def of(cls, up: SentCuts, gradients: Tensor) -> RecordedExchange:
        """Join a message with cuts and the gradients that answered it."""
        return cls(up.step, up.epoch, up.rows, lambda: up.cuts, gradients)


Message = TypeVar("Message", SentCuts, RecordedExchange)


@dataclass(frozen=True, eq=False, repr=False)
class Transcript(Generic[Message]):
    """All messages on one connection, for a group of rows.

    Attributes:
        rows: number of rows in the group; a message's rows with larger indices are ignored.
        messages: all messages, in the order of sending.

    >>> one, two = torch.tensor([0, 2]), torch.tensor([2, 1])
    >>> sent = [SentCuts(1, 1, one, torch.tensor([[1.0], [5.0]])),
    ...         SentCuts(2, 2, two, torch.tensor([[7.0], [4.0]]))]
    >>> seen = Transcript(3, sent)
    >>> seen.mean(lambda message: message.cuts)[:, 0].tolist()
    [1.0, 4.0, 6.0]
    >>> seen.times.tolist()
    [1, 1, 2]
    """

    rows: int
    messages: Sequence[Message]

    @cached_property
    def epochs(self) -> list[int]:
        """Return the numbers of the transcript's epochs (or repetitions of a query), ascending."""
        return sorted({one.epoch for one in self.messages})

    @cached_property
    def times(self) -> Tensor:
        """Return how many messages contain each row, int64, axes (rows,)."""
        count = torch.zeros(self.rows, dtype=torch.int64)
        for one in self.messages:
            count += one.rows[one.rows < self.rows].bincount(minlength=self.rows)
        return count

    def first(self, count: int) -> Transcript[Message]:
        """Return the transcript of the first `count` epochs; 0 selects all."""
        return self.of_epochs(self.epochs[:count] if count else self.epochs)

    def last(self, count: int) -> Transcript[Message]:
        """Return epochs numbered above the newest epoch's number minus `count`; 0 selects all."""
        newest = max(self.epochs, default=0)
        return self.of_epochs([one for one in self.epochs if not count or one > newest - count])

    def each_epoch(self) -> list[Transcript[Message]]:
        """Return one transcript for each epoch."""
        return [self.of_epochs([epoch]) for epoch in self.epochs]

    def of_epochs(self, epochs: Sequence[int]) -> Transcript[Message]:
        """Return the transcript of the epochs with these numbers."""
        return Transcript(self.rows, [one for one in self.messages if one.epoch in set(epochs)])

    def mean(self, value: Callable[[Message], Tensor]) -> Tensor:
        """Return the mean of each row's values over all messages; 0 for a row without messages.

        Args:
            value: function that returns the value of each row in a message, axes (rows of the
                message, width).

        Returns:
            The means, float32, axes (rows, width).
        """
        total, count = torch.zeros(0), torch.zeros(self.rows, 1)
        for one in self.messages:
            known, values = one.rows < self.rows, value(one)
            if not len(total):
                total = torch.zeros(self.rows, values.shape[1])
            total.index_add_(0, one.rows[known], values[known])
            count.index_add_(0, one.rows[known], torch.ones(int(known.sum()), 1))
        return total / count.clamp(min=1)

    def by_epoch(self, value: Callable[[Message], Tensor]) -> Tensor:
        """Return the mean of each row's values within each epoch, axes (rows, epochs, width)."""
        return torch.stack([one.mean(value) for one in self.each_epoch()], 1)


def at_scale(one: RecordedExchange) -> Tensor:
    """Divide the gradients of an exchange by their root mean square; zeros stay zeros."""
    size = one.gradients.square().mean().sqrt()
    return one.gradients / size.clamp_min(torch.finfo(size.dtype).tiny)
