"""Texts as rows of numbers, by a vocabulary of the training rows only; and data sets of texts.

Positive and negative film reviews: polarity dataset 2.0 of Pang and Lee 2004. DBPedia Classes:
articles of 219 classes, by their first sentences.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from vfl.core.errors import BadOptionError, DataError
from vfl.datasets.sources.base import Bundled, DataSource, Request, first_rows, interleaved
from vfl.datasets.sources.files import data_folder, existing_file
from vfl.models.pretrained import TOKENIZER, existing_model, load_tokenizer

PADDING, UNKNOWN = 0, 1
TEXT_LENGTH = 256
VOCABULARY = 20_000
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")

REVIEWS = "review-polarity/review_polarity.tar.gz"
REVIEW_CLASSES = ("neg", "pos")
REVIEW_LENGTH = 400
REVIEW_LIMIT_BYTES = 2**20
_REVIEW = re.compile(r"(?:.*/)?(neg|pos)/(cv[^/]*\.txt)", re.ASCII)

DBPEDIA = "dbpedia-classes"
DBPEDIA_FILES = ("DBPEDIA_train.csv", "DBPEDIA_val.csv", "DBPEDIA_test.csv")
DBPEDIA_TEXT, DBPEDIA_CLASS = "text", "l3"  # the finest of the data set's three levels of classes
DBPEDIA_LENGTH = 100


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts as words, before a vocabulary numbers the words for a model.

    Attributes:
        words: the different words in all texts.
        numbers: the words of all texts, one text after another, as positions in `words`; axes
            (words in all texts,).
        starts: position in `numbers` where each text starts, and the position after the last text;
            axes (rows + 1,).
        length: number of words in a row.
        vocabulary: largest number of different word codes, including the codes for padding and
            unknown words.
    """

    words: tuple[str, ...]
    numbers: np.ndarray
    starts: np.ndarray
    length: int
    vocabulary: int

    @classmethod
    def of(cls, texts: Iterable[str], length: int, vocabulary: int) -> Texts:
        """Split texts into lower-case words of letters and digits, which apostrophes may join."""
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
        """Encode all texts for a model: float32, axes (rows, length).

        The words of the training rows are numbered from 2, the most frequent first, and words of
        equal frequency in alphabetical order. The code 1 means any other word, and 0 is padding at
        the end of a row. Only the first `length` words of a text are used. A float32 holds these
        numbers exactly.

        Args:
            train: positions of the training rows.

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
        """Return the code of each word in `words`; axes (words,)."""
        together = np.concatenate([np.empty(0, np.int32), *texts])
        counts = np.bincount(together, minlength=len(self.words))
        seen = np.flatnonzero(counts).tolist()
        seen.sort(key=lambda number: (-counts[number], self.words[number]))
        kept = seen[: max(self.vocabulary - 2, 0)]
        renumbered = np.full(len(self.words), UNKNOWN, dtype=np.int64)
        renumbered[kept] = np.arange(len(kept)) + 2
        return renumbered


@dataclass(frozen=True, eq=False)
class Tokens:
    """Texts as tokens of a pretrained model.

    Attributes:
        tokens: the tokens of each text.
        length: number of tokens in a row.
    """

    tokens: Sequence[Sequence[int]]
    length: int

    @classmethod
    def of(cls, texts: Iterable[str], length: int, tokenizer: str) -> Tokens:
        """Split texts into tokens with the tokenizer of a model on this machine.

        Raises:
            MissingPackageError: the extra "llm" is not installed.
            MissingDataError: the model does not exist, or has no tokenizer.
        """
        reader = load_tokenizer(existing_model(tokenizer))
        reader.no_padding()
        reader.enable_truncation(length)
        return cls([each.ids for each in reader.encode_batch(list(texts))], length)

    def rows(self, train: np.ndarray) -> np.ndarray:
        """Encode all texts for a model: float32, axes (rows, length).

        Token n gets the code n + 1, and 0 is padding at the end of a row. The training rows have no
        influence on this encoding.
        """
        result = np.full((len(self.tokens), self.length), PADDING, dtype=np.float32)
        for row, tokens in enumerate(self.tokens):
            result[row, : len(tokens)] = np.asarray(tokens) + 1
        return result


def tokenizer_digest(name: str) -> str:
    """Return the SHA-256 of the tokenizer file of a model on this machine.

    Raises:
        MissingDataError: the model does not exist, or has no tokenizer.
    """
    folder = existing_model(name)
    path = existing_file(folder / TOKENIZER, want=f"the tokenizer of the model '{name}'")
    return hashlib.sha256(path.read_bytes()).hexdigest()


class ReviewPolarity(DataSource):
    """Film reviews, 1,000 negative and 1,000 positive, as rows of words (Pang and Lee 2004)."""

    follows = ("length", "vocabulary", "tokenizer")

    def read(self, asked: Request) -> Bundled:
        """Read reviews in the order of their names, alternately negative (0) and positive (1).

        The folder of data sets (see `data_folder`) contains the file
        ``review-polarity/review_polarity.tar.gz`` as its authors publish it.

        Raises:
            MissingDataError: the file does not exist.
            DataError: the file is damaged or has another format.
        """
        path = existing_file(
            data_folder(asked.root) / REVIEWS, want="the polarity dataset 2.0 of Pang and Lee"
        )
        try:
            found = _reviews(path)
        except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
            raise DataError(
                "these reviews cannot be read", where=str(path), got=type(error).__name__
            ) from None
        names = sorted(found)
        labels = np.array([REVIEW_CLASSES.index(side) for side, _ in names], dtype=np.int64)
        if set(labels.tolist()) != {0, 1}:
            raise DataError(
                "these reviews do not have two classes", where=str(path), want="folders neg and pos"
            )
        order = interleaved(labels)[: asked.limit]
        return Bundled(
            cells=_asked_for([found[names[row]] for row in order.tolist()], asked, REVIEW_LENGTH),
            labels=labels[order],
            classes=REVIEW_CLASSES,
        )


class DBPediaClasses(DataSource):
    """First sentences of encyclopedia articles of 219 classes, as rows of words."""

    follows = ("length", "vocabulary", "tokenizer")
    own_parts = ("validation", "test")

    def read(self, asked: Request) -> Bundled:
        """Read articles in the order of the files, with the classes of the finest level.

        The folder of data sets (see `data_folder`) contains ``dbpedia-classes`` with the three csv
        files of the published data set.

        Raises:
            MissingDataError: a file does not exist.
            DataError: a file has another format.
        """
        folder = data_folder(asked.root) / DBPEDIA
        parts = [_read_articles(folder / name) for name in DBPEDIA_FILES]
        whole = pd.concat(parts, ignore_index=True)
        classes, labels = np.unique(whole[DBPEDIA_CLASS].to_numpy(dtype=str), return_inverse=True)
        kept, counts = first_rows([len(part) for part in parts], asked.limit)
        return Bundled(
            cells=_asked_for(whole[DBPEDIA_TEXT].iloc[kept].tolist(), asked, DBPEDIA_LENGTH),
            labels=labels.astype(np.int64)[kept],
            classes=tuple(classes.tolist()),
            train_rows=counts[0],
            validation_rows=counts[1],
        )


def _asked_for(texts: list[str], asked: Request, length: int) -> Texts | Tokens:
    form = asked.form
    if form.tokenizer is None:
        return Texts.of(texts, form.length or length, form.vocabulary or VOCABULARY)
    if form.vocabulary is not None:
        raise BadOptionError(
            "a tokenizer has its own vocabulary",
            where="data.vocabulary",
            fix="leave out data.vocabulary or data.tokenizer",
        )
    return Tokens.of(texts, form.length or length, form.tokenizer)


def _reviews(path: Path) -> dict[tuple[str, str], str]:
    """Read the reviews from the archive, by class and name, without unpacking it to disk."""
    found = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            named = _REVIEW.fullmatch(member.name)
            file = archive.extractfile(member) if named and member.isfile() else None
            if named and file:
                if member.size > REVIEW_LIMIT_BYTES:
                    raise ValueError("a review is too large")
                found[named[1], named[2]] = file.read().decode("latin-1")
    return found


def _read_articles(path: Path) -> pd.DataFrame:
    existing_file(
        path,
        want=f"{', '.join(DBPEDIA_FILES)} of the data set 'DBPedia Classes' (Kaggle)",
        first=f"put them in a folder '{DBPEDIA}' and ",
        folder=DBPEDIA,
    )
    try:
        return pd.read_csv(
            path, usecols=[DBPEDIA_TEXT, DBPEDIA_CLASS], dtype=str, keep_default_na=False
        )
    except (OSError, ValueError):
        raise DataError(
            "this file of articles cannot be read",
            where=str(path),
            want=f"a csv with the columns {DBPEDIA_TEXT} and {DBPEDIA_CLASS}",
        ) from None
