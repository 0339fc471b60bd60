"""Bottoms for rows of integers: the items of a session, or the words of a text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from vfl.core.errors import WidthError
from vfl.models.base import (
    MOST_EMBEDDING,
    MOST_NUMBERS,
    Bottom,
    Shape,
    check_dropout,
    check_size,
    sequence_steps,
    whole_numbers,
)


class GRU4RecBottom(Bottom):
    """Embeds items and runs a layer of gated recurrent units; the cut is the last state.

    Hidasi et al. 2016, "Session-based Recommendations with Recurrent Neural Networks", section 3.
    In vfl, an embedding replaces the paper's one input unit per item, and the cut is the state
    after the last item. Item number 0 is padding, at any position, and has no effect; a row of
    zeros gives a cut of zeros.

    Args:
        items: largest item number; item numbers start at 1.
        embedding: width of an item's vector.
        dropout: dropout probability of each number in an item's vector, from 0 to below 1.

    >>> module = GRU4RecBottom(items=9, embedding=4).build(shape=(5,), width=3)
    >>> sum(p.numel() for p in module.parameters())  # 10 * 4 + 3 * 3 * (4 + 3 + 2)
    121

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, items: int, embedding: int = 100, dropout: float = 0.0) -> None:
        self.items = check_size(items, "items", MOST_NUMBERS)
        self.embedding = check_size(embedding, "embedding", MOST_EMBEDDING)
        self.dropout = check_dropout(dropout)

    def tokens_read(self, shape: Shape, width: int) -> int:
        return sequence_steps(shape, "gru4rec")

    def build(self, shape: Shape, width: int) -> nn.Module:
        sequence_steps(shape, "gru4rec")
        return LastState(self.items, self.embedding, self.dropout, width)


class LastState(nn.Module):
    """The module of `GRU4RecBottom`; maps item numbers (rows, steps) to states (rows, width)."""

    def __init__(self, items: int, embedding: int, dropout: float, width: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, embedding, padding_idx=0)
        self.dropout = nn.Dropout(dropout)
        self.gru = nn.GRU(embedding, width, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the state after each row's last item; item numbers are float32 integers.

        Raises:
            SpecError: a number is not an item number.
        """
        items = whole_numbers(rows, self.items.num_embeddings - 1, "gru4rec", "items")
        real = items > 0
        steps = real.sum(dim=1)
        places = torch.arange(rows.shape[1], device=rows.device)
        order = (real.logical_not() * rows.shape[1] + places).argsort(dim=1)  # items first
        together = items.gather(1, order)
        if torch.compiler.is_exporting():  # exported programs cannot pack sequences
            states, _ = self.gru(self.dropout(self.items(together)))
            ends = (steps - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[2])
            found: Tensor = states.gather(1, ends)[:, 0] * (steps > 0)[:, None]
            return found
        lengths = self._lengths(steps, rows.shape[1])
        vectors = self.dropout(self.items(together[:, : int(lengths.max())]))
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)
        state: Tensor = last[0] * (steps > 0)[:, None]
        return state

    @staticmethod
    def _lengths(steps: Tensor, most: int) -> Tensor:
        """Return each row's number of items, on the CPU; for meta tensors, the largest number."""
        if steps.is_meta:
            return torch.full(steps.shape, max(1, most), device="cpu")
        return steps.clamp(min=1).cpu()


_WORDS_AT_ONCE = (3, 4, 5)


class TextCNNBottom(Bottom):
    """Embeds words and applies filters over 3, 4 and 5 words, a maximum per filter, and ReLU.

    Kim 2014, "Convolutional Neural Networks for Sentence Classification", section 2, with learned
    word vectors. Each of the three filter sizes gives a third of the cut's columns.

    Args:
        words: number of different words, including the padding word (number 0).
        embedding: width of a word's vector.
        dropout: probability with which dropout zeroes each column of the cut (section 2.1), from 0
            to below 1.

    >>> module = TextCNNBottom(words=10, embedding=2).build(shape=(7,), width=6)
    >>> sum(p.numel() for p in module.parameters())  # 10 * 2 + 2 * ((3 + 4 + 5) * 2 + 3)
    74

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, words: int = 20_000, embedding: int = 100, dropout: float = 0.0) -> None:
        self.words = check_size(words, "words", MOST_NUMBERS)
        self.embedding = check_size(embedding, "embedding", MOST_EMBEDDING)
        self.dropout = check_dropout(dropout)

    def tokens_read(self, shape: Shape, width: int) -> int:
        return sequence_steps(shape, "textcnn")

    def build(self, shape: Shape, width: int) -> nn.Module:
        sequence_steps(shape, "textcnn")
        filters, rest = divmod(width, len(_WORDS_AT_ONCE))
        if rest:
            raise WidthError(
                "bottom 'textcnn' needs an equal number of filters of each of its three kinds",
                got=f"width {width}",
                want="a multiple of 3",
                fix=f"set width to {width - rest or width + 3 - rest}",
            )
        return LargestAnswers(self.words, self.embedding, self.dropout, filters)


class LargestAnswers(nn.Module):
    """The module of `TextCNNBottom`; maps word numbers (rows, steps) to (rows, 3 x filters)."""

    def __init__(self, words: int, embedding: int, dropout: float, filters: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, embedding, padding_idx=0)
        with torch.no_grad():  # torch's standard deviation 1 is too noisy
            self.words.weight.mul_(0.1)
        self.filters = nn.ModuleList(
            nn.Conv1d(embedding, filters, at_once) for at_once in _WORDS_AT_ONCE
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows: Tensor) -> Tensor:
        """Return each filter's largest output; word numbers are float32 integers.

        Raises:
            SpecError: a number is not a word number.
        """
        numbers = whole_numbers(rows, self.words.num_embeddings - 1, "textcnn", "words")
        vectors = self.words(numbers).transpose(1, 2)
        short = max(_WORDS_AT_ONCE) - vectors.shape[2]
        if short > 0:
            vectors = F.pad(vectors, (0, short))
        answers = [kind(vectors).max(dim=2).values for kind in self.filters]
        cut: Tensor = self.dropout(torch.relu(torch.cat(answers, dim=1)))
        return cut
