"""Texts as rows of numbers, by a vocabulary that saw the training rows only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts before they are numbered for a model.

    Attributes:
        words: the words of all texts, each once.
        numbers: of the words of all texts, one text after another; axes (words in all texts,).
        starts: where each text starts in `numbers`, and where the last one ends; axes (rows + 1,).
        length: words a row.
        vocabulary: at most so many different numbers a row may hold.
    """

    words: tuple[str, ...]
    numbers: np.ndarray
    starts: np.ndarray
    length: int
    vocabulary: int

    @classmethod
    def of(cls, texts: Iterable[str], length: int, vocabulary: int) -> Texts:
        """Texts cut into words: letters and digits, in lower case; apostrophes may join them."""
        known: dict[str, int] = {}
        numbered = [
            np.array(
                [known.setdefault(word, len(known)) for word in _WORD.findall(text.lower())],
                dtype=np.int32,
            )
            for text in texts
        ]
        starts = np.cumsum([0, *map(len, numbered)])
        numbers = np.concatenate([np.empty(0, np.int32), *numbered])
        return cls(tuple(known), numbers, starts, length, vocabulary)

    def rows(self, train: np.ndarray) -> np.ndarray:
        """All texts as a model takes them: float32, axes (rows, length).

        The words of the training rows get the numbers from 2 on, the most frequent first, those of
        one frequency in alphabetical order; 1 is any other word and 0 is padding at the end. Only
        the first `length` words of a text count. A float32 holds the numbers exactly.

        Args:
            train: the training rows.

        >>> texts = Texts.of(["to be or not to be", "to see"], length=4, vocabulary=5)
        >>> texts.rows(np.array([0])).tolist()
        [[1.0, 2.0, 4.0, 3.0], [1.0, 1.0, 0.0, 0.0]]
        """
        cut = [
            self.numbers[start : min(end, start + self.length)]
            for start, end in zip(self.starts[:-1], self.starts[1:], strict=True)
        ]
        renumbered = self._by_frequency([cut[row] for row in train.tolist()])
        result = np.full((len(cut), self.length), PADDING, dtype=np.float32)
        for row, numbers in enumerate(cut):
            result[row, : len(numbers)] = renumbered[numbers]
        return result

    def _by_frequency(self, texts: list[np.ndarray]) -> np.ndarray:
        """What each word's number becomes; axes (words,)."""
        together = np.concatenate([np.empty(0, np.int32), *texts])
        counts = np.bincount(together, minlength=len(self.words))
        seen = np.flatnonzero(counts).tolist()
        seen.sort(key=lambda number: (-counts[number], self.words[number]))
        kept = seen[: max(self.vocabulary - 2, 0)]
        renumbered = np.full(len(self.words), UNKNOWN, dtype=np.int64)
        renumbered[kept] = np.arange(len(kept)) + 2
        return renumbered
