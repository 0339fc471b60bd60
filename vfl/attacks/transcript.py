"""The transcript of one connection: all messages, and the values collected for each row.

Each epoch, or each repeated query, contains a row at most once. A `Transcript` contains all epochs
or queries. A transcript shows which values were sent about a row each time, in which message, and
so together with which other rows. The recorded cuts are outputs of the sender's bottom at the time
of sending.
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
        step: number of the exchange.
        epoch: number of the epoch; for repeated queries, the number of the repetition.
        rows: indices of the rows within their group, int64, axes (rows,).
        cuts: decoded cuts, axes (rows, width).
    """

    step: int
    epoch: int
    rows: Tensor
    cuts: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class RecordedExchange:
    """One recorded training exchange.

    Attributes:
        step, epoch: see `SentCuts`.
        rows: indices of the rows among targets and leaked rows; targets come first.
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
        """Join a message with its reply."""
        return cls(up.step, up.epoch, up.rows, lambda: up.cuts, gradients)


Message = TypeVar("Message", SentCuts, RecordedExchange)


@dataclass(frozen=True, eq=False, repr=False)
class Transcript(Generic[Message]):
    """All messages on one connection about some rows.

    Attributes:
        rows: number of rows of interest; rows with larger indices in messages are ignored.
        messages: all messages, in order.

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
        """Return the epochs, or repetitions of a query, in the transcript, ascending."""
        return sorted({one.epoch for one in self.messages})

    @cached_property
    def times(self) -> Tensor:
        """Return the number of messages that contain each row, int64, axes (rows,)."""
        count = torch.zeros(self.rows, dtype=torch.int64)
        for one in self.messages:
            count += one.rows[one.rows < self.rows].bincount(minlength=self.rows)
        return count

    def first(self, count: int) -> Transcript[Message]:
        """Return the transcript of the first `count` epochs; 0 selects all."""
        return self.of_epochs(self.epochs[:count] if count else self.epochs)

    def last(self, count: int) -> Transcript[Message]:
        """Return the epochs numbered above the newest epoch minus `count`; 0 selects all."""
        newest = max(self.epochs, default=0)
        return self.of_epochs([one for one in self.epochs if not count or one > newest - count])

    def each_epoch(self) -> list[Transcript[Message]]:
        """Return one transcript for each epoch."""
        return [self.of_epochs([epoch]) for epoch in self.epochs]

    def of_epochs(self, epochs: Sequence[int]) -> Transcript[Message]:
        """Return the transcript of some epochs."""
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
        """Return the mean of each row's values in every epoch, axes (rows, epochs, width)."""
        return torch.stack([one.mean(value) for one in self.each_epoch()], 1)


def at_scale(one: RecordedExchange) -> Tensor:
    """Divide the gradients of an exchange by their root mean square; zeros stay zeros."""
    size = one.gradients.square().mean().sqrt()
    return one.gradients / size.clamp_min(torch.finfo(size.dtype).tiny)
