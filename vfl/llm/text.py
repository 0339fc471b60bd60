"""Conversion between text and tokens at the user, and an answer's text as tokens arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from vfl.core.errors import DataError, VFLError
from vfl.core.storage import write_text
from vfl.models.pretrained import TOKENIZER, load_tokenizer

_PIECE = re.compile(r" ?\S+|\s+")
_MOST_PIECES = 1 << 16


class Tokenizer(Protocol):
    """Converts text to token numbers, and token numbers to text."""

    def encode(self, text: str) -> list[int]:
        """Return the token numbers of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token numbers; incomplete bytes of a character become U+FFFD."""


class BytePairs:
    """Byte-pair encoding (Sennrich et al. 2016) of words; without merges, each byte is a token.

    Args:
        merges: pairs of token numbers; the first pair is merged to token 256, the second to token
            257, and so on.

    >>> pairs = BytePairs([(104, 105)])
    >>> pairs.encode("hi é"), pairs.decode([256, 32])
    ([256, 32, 195, 169], 'hi ')
    """

    def __init__(self, merges: Sequence[tuple[int, int]] = ()) -> None:
        self._merges = [(int(one), int(two)) for one, two in merges]
        self._ranks = {pair: 256 + rank for rank, pair in enumerate(self._merges)}
        self._bytes = [bytes([value]) for value in range(256)]
        for one, two in self._merges:
            self._bytes.append(self._bytes[one] + self._bytes[two])
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        return [token for piece in self.pieces(text) for token in self._encoded(piece)]

    def decode(self, tokens: Sequence[int]) -> str:
        whole = b"".join(self._bytes[each] for each in tokens if each < len(self._bytes))
        return whole.decode(errors="replace")

    @staticmethod
    def pieces(text: str) -> list[str]:
        """Split a text into words; a word includes the space before it."""
        return _PIECE.findall(text)

    @staticmethod
    def join(tokens: list[int], pair: tuple[int, int], joined: int) -> None:
        """Replace a pair of adjacent tokens by one token wherever the pair occurs, in place."""
        place = 0
        while place < len(tokens) - 1:
            if (tokens[place], tokens[place + 1]) == pair:
                tokens[place : place + 2] = [joined]
            place += 1

    def save(self, folder: Path) -> None:
        """Write the merges to a file in a folder."""
        write_text(folder / TOKENIZER, json.dumps({"merges": self._merges}) + "\n")

    def _encoded(self, piece: str) -> list[int]:
        if piece not in self._known:
            tokens = list(piece.encode())
            while found := [
                (self._ranks[pair], pair) for pair in pairwise(tokens) if pair in self._ranks
            ]:
                rank, pair = min(found)
                self.join(tokens, pair, rank)
            if len(self._known) >= _MOST_PIECES:
                self._known.clear()
            self._known[piece] = tokens
        return self._known[piece]


class OfPackage:
    """A tokenizer of the package `tokenizers` (extra "llm"), with the interface of `Tokenizer`."""

    def __init__(self, folder: Path) -> None:
        self._made = load_tokenizer(folder)

    def encode(self, text: str) -> list[int]:
        return list(self._made.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._made.decode(list(tokens)))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer in a model's folder; if there is none, each byte of UTF-8 is a token.

    Raises:
        DataError: the file is not a tokenizer.
        MissingPackageError: the file needs the package `tokenizers`, which is not installed.
    """
    path = folder / TOKENIZER
    if not path.exists():
        return BytePairs()
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and "merges" not in found and "model" in found:
            return OfPackage(folder)
        return BytePairs(found["merges"])
    except VFLError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise DataError("this is not a tokenizer", where=str(path)) from None


class Streamed:
    """An answer while its tokens arrive: its final text so far, and whether a stop text occurred.

    Args:
        tokenizer: tokenizer of the user.
        stop: texts that end the answer and are not part of it.
        end_tokens: tokens that end the answer, besides the stop texts.

    >>> answer = Streamed(BytePairs(), ["."])
    >>> [answer.add(token) for token in b"a."], answer.text
    ([('a', False), ('', True)], 'a')
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), end_tokens: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._stop = tokenizer, [each for each in stop if each]
        self._ends = end_tokens
        self._tokens: list[int] = []
        self.count = self._shown = 0
        self.text = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text that a new token adds, and whether the answer ends with this token."""
        self.count += 1
        if token in self._ends:
            return self.finish(), True
        self._tokens.append(token)
        self.text = self._tokenizer.decode(self._tokens)
        found = [at for each in self._stop if (at := self.text.find(each)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            return self.finish(), True
        return self._until(len(self.text) - self._open()), False

    def finish(self) -> str:
        """Return the rest of the answer's text after its last token."""
        return self._until(len(self.text))

    def _open(self) -> int:
        """Return the number of last characters that may still change or begin a stop text."""
        broken = len(self.text) - len(self.text.rstrip("\ufffd"))
        begun = [
            size
            for each in self._stop
            for size in range(1, len(each))
            if self.text.endswith(each[:size])
        ]
        return max([broken, *begun])

    def _until(self, end: int) -> str:
        new = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return new
