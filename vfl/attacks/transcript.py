"""The transcript of one link: every message, and the evidence by row collected from them.

An epoch, or a repeated query, contains each row once. A `Transcript` contains all of them: the
values sent about a row each time, in which message, and thus with which other rows. The recorded
cuts are the outputs of the sender's bottom at that time.
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
        step: its number.
        epoch: number of its epoch; for repeated queries, the number of the repetition.
        rows: indices of the rows in their group, int64, axes (rows,).
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
        rows: positions among the targets; leaked rows follow after them.
        cuts: returns the decoded cuts, axes (rows, width).
        gradients: decoded gradients, axes (rows, width).
    """

    step: int
    epoch: int
    rows: Tensor
    cuts: Callable[[], Tensor]
    gradients: Tensor

    @classmethod
    def of(cls, up: SentCuts, gradients: Tensor) -> RecordedExchange:
        """Return a message together with its reply."""
        return cls(up.step, up.epoch, up.rows, lambda: up.cuts, gradients)


Message = TypeVar("Message", SentCuts, RecordedExchange)


@dataclass(frozen=True, eq=False, repr=False)
class Transcript(Generic[Message]):
    """All messages of one link about some rows.

    Attributes:
        rows: number of rows of interest: the first rows that messages name.
        messages: messages of the link, in order.

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
        """Epochs or queries that the transcript covers, ascending."""
        return sorted({one.epoch for one in self.messages})

    @cached_property
    def times(self) -> Tensor:
        """Number of messages that contain each row, int64, axes (rows,)."""
        count = torch.zeros(self.rows, dtype=torch.int64)
        for one in self.messages:
            count += one.rows[one.rows < self.rows].bincount(minlength=self.rows)
        return count

    def first(self, count: int) -> Transcript[Message]:
        """Return its first `count` epochs; all for 0."""
        return self.of_epochs(self.epochs[:count] if count else self.epochs)

    def last(self, count: int) -> Transcript[Message]:
        """Return its last `count` epochs, by number; all for 0."""
        newest = max(self.epochs, default=0)
        return self.of_epochs([one for one in self.epochs if not count or one > newest - count])

    def each_epoch(self) -> list[Transcript[Message]]:
        """Return one transcript per epoch."""
        return [self.of_epochs([epoch]) for epoch in self.epochs]

    def of_epochs(self, epochs: Sequence[int]) -> Transcript[Message]:
        """Return the messages of some epochs."""
        return Transcript(self.rows, [one for one in self.messages if one.epoch in set(epochs)])

    def mean(self, value: Callable[[Message], Tensor]) -> Tensor:
        """Return the mean of each row's value over all messages; 0 for a row without messages.

        Args:
            value: returns the value of each row of a message, axes (rows of the message, width).

        Returns:
            float32, axes (rows, width).
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
        """Return the mean of a value of each row in every epoch, axes (rows, epochs, width)."""
        return torch.stack([one.mean(value) for one in self.each_epoch()], 1)


def at_scale(one: RecordedExchange) -> Tensor:
    """Divide the gradients of an exchange by their root mean square; zeros stay zeros."""
    size = one.gradients.square().mean().sqrt()
    return one.gradients / size.clamp_min(torch.finfo(size.dtype).tiny)
