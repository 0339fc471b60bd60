"""A recurrent network over the items of a session, as bottom."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from vfl.models.base import Bottom, Shape
from vfl.models.parts import (
    MOST_EMBEDDING,
    MOST_NUMBERS,
    check_dropout,
    check_size,
    sequence_steps,
    whole_numbers,
)


class GRU4RecBottom(Bottom):
    """Embedded items through one layer of gated recurrent units; the cut is its last state.

    Hidasi et al. 2016, "Session-based Recommendations with Recurrent Neural Networks", section 3,
    with an embedding in place of one unit an item, and the state after the last item as the cut.
    Zeros are padding wherever they stand and change nothing; a row of padding alone gives zeros.

    Args:
        items: the largest number an item has; they start at 1.
        embedding: numbers that stand for an item.
        dropout: probability for each of them, 0 to below 1.

    >>> module = GRU4RecBottom(items=9, embedding=4).build(shape=(5,), width=3)
    >>> sum(p.numel() for p in module.parameters())  # 10 * 4 + 3 * 3 * (4 + 3 + 2)
    121

    Raises:
        BadOptionError: an option out of range.
    """

    def __init__(self, items: int, embedding: int = 100, dropout: float = 0.0) -> None:
        self.items = check_size(items, "items", MOST_NUMBERS)
        self.embedding = check_size(embedding, "embedding", MOST_EMBEDDING)
        self.dropout = check_dropout(dropout)

    def build(self, shape: Shape, width: int) -> nn.Module:
        sequence_steps(shape, "gru4rec")
        return LastState(self.items, self.embedding, self.dropout, width)


class LastState(nn.Module):
    """What `GRU4RecBottom` builds, from axes (rows, steps) to axes (rows, width)."""

    def __init__(self, items: int, embedding: int, dropout: float, width: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, embedding, padding_idx=0)
        self.dropout = nn.Dropout(dropout)
        self.gru = nn.GRU(embedding, width, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        """Whole numbers as float32 in, the state after each row's last item out.

        Raises:
            SpecError: a number is no item's.
        """
        items = whole_numbers(rows, self.items.num_embeddings - 1, "gru4rec", "items")
        real = items > 0
        steps = real.sum(dim=1)
        together = items.gather(1, real.logical_not().to(torch.uint8).argsort(dim=1, stable=True))
        lengths = steps.clamp(min=1).cpu()  # where torch wants them
        vectors = self.dropout(self.items(together[:, : int(lengths.max())]))
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)
        state: Tensor = last[0] * (steps > 0)[:, None]
        return state
