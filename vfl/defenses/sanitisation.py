"""Defenses that randomly replace the words of texts before the bottom model reads them.

Both defenses of this file draw a substitute for each word of a text by an exponential mechanism. A
substitute is more likely if its vector in the bottom's embedding is near the vector of the word.
The same text always gets the same substitutes, so that an attacker cannot average over repeated
messages.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor, nn

from vfl.core.errors import SpecError
from vfl.core.registry import require_range
from vfl.core.seeds import SECRET_BYTES, Secret, fingerprint
from vfl.defenses.base import MOST_EPSILON, Defense
from vfl.models.base import whole_numbers
from vfl.privacy import PrivacyStatement

#: Largest vocabulary for which the defenses compute distances between word vectors.
_MOST_WORDS = 2**16
_MOST_SET = 1024
_AT_ONCE = 256


class SanitisedBottom(nn.Module):
    """A bottom that reads texts whose words were replaced; padding (word number 0) stays.

    Args:
        bottom: model that reads word numbers, axes (rows, words), through an embedding.
        law: the defense that draws the substitutes.

    Raises:
        SpecError: the bottom has no embedding, or its vocabulary is too large.
    """

    key: Tensor
    vectors: Tensor

    def __init__(self, bottom: nn.Module, law: Sanitisation) -> None:
        super().__init__()
        self.bottom, self._law = bottom, law
        words = _embedding(bottom)
        self.register_buffer("key", torch.zeros(SECRET_BYTES, dtype=torch.uint8))
        self.register_buffer("vectors", torch.zeros(words.num_embeddings, words.embedding_dim))
        law.register(self)

    def begin(self, secret: Secret) -> None:
        """Store the embedding's current word vectors, and the key for all random draws."""
        words = _embedding(self.bottom)
        with torch.no_grad():
            device = self.vectors.device
            self.vectors.copy_(words(torch.arange(len(self.vectors), device=device)))
            drawn = torch.frombuffer(bytearray(secret.key("sanitisation")), dtype=torch.uint8)
            self.key.copy_(drawn)
        self._law.begin(self)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the bottom's outputs for texts whose words are replaced by substitutes."""
        outputs: Tensor = self.bottom(rows if rows.is_meta else self.sanitised(rows))
        return outputs

    def sanitised(self, rows: Tensor) -> Tensor:
        """Return texts whose words are replaced, with the axes and the data type of `rows`."""
        assert self.key.any(), "`fit` comes first"
        try:
            numbers = whole_numbers(rows, len(self.vectors) - 1, "sanitisation", "words")
        except SpecError as problem:
            problem.what = "a row has a number that is no word of the bottom's vocabulary"
            problem.fix = "a bottom with more words, or inputs that are word numbers"
            raise
        secret = Secret(bytes(self.key.tolist()))
        draws = [secret.uniform((rows.shape[1],), "words", fingerprint(one)) for one in rows]
        drawn = torch.from_numpy(np.concatenate([np.empty(0), *draws])).to(rows.device)
        replaced = self._law.substitutes(self, numbers.flatten(), drawn).view_as(numbers)
        return torch.where(numbers == 0, numbers, replaced).to(rows)


class Sanitisation(Defense):
    """Base class of `SanText` and `CusText`.

    Args:
        epsilon: epsilon of the exponential mechanism.
    """

    side = "feature"
    rows_apart = True
    once = True
    of_words = True

    def __init__(self, epsilon: float) -> None:
        require_range("epsilon", epsilon, 0, MOST_EPSILON)
        self.epsilon = epsilon

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return SanitisedBottom(bottom, self)

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        for part in bottom.modules():
            if isinstance(part, SanitisedBottom) and part._law is self:
                part.begin(secret)

    def register(self, bottom: SanitisedBottom) -> None:
        """Register, in a bottom, the buffers that this defense needs."""

    def begin(self, bottom: SanitisedBottom) -> None:
        """Fill the buffers that `register` created."""

    @abstractmethod
    def substitutes(self, bottom: SanitisedBottom, words: Tensor, draws: Tensor) -> Tensor:
        """Return a substitute for each word, as word numbers, int64, axes (words,).

        Args:
            bottom: module that holds the word vectors.
            words: word numbers, int64, axes (words,).
            draws: uniform random numbers in [0, 1), float64, axes (words,).
        """


class SanText(Sanitisation):
    """Replaces a word by any word of the vocabulary; a word with a nearer vector is more likely.

    For words x, y with vectors v, P(y | x) is proportional to exp(-epsilon |v(x) - v(y)| / 2), over
    all words except padding. For one word this is metric local differential privacy: the privacy
    loss between two words is at most epsilon times their distance.

    Source: Yue et al. 2021, "Differential privacy for text analytics via natural text sanitization"
    (ACL Findings), SanText. vfl does not have the paper's SanText+, which keeps frequent words.

    Args:
        epsilon: bound of the privacy loss per unit of distance between two word vectors.

    >>> SanText(epsilon=8).side
    'feature'

    Raises:
        BadOptionError: epsilon is out of range.
    """

    def __init__(self, epsilon: float = 3.0) -> None:
        super().__init__(epsilon)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = (
            "the label party: metric differential privacy of one word, with epsilon = "
            f"{self.epsilon:g} x the distance of two words"
        )
        return (PrivacyStatement("inputs", against),)

    def substitutes(self, bottom: SanitisedBottom, words: Tensor, draws: Tensor) -> Tensor:
        order, vectors = words.argsort(stable=True), bottom.vectors.double()
        kinds, counts = torch.unique(words, return_counts=True)
        found, of_kind = torch.empty_like(words), torch.split(order, counts.tolist())
        for start in range(0, len(kinds), _AT_ONCE):
            distance = torch.cdist(vectors[kinds[start : start + _AT_ONCE]], vectors[1:])
            sums = (-self.epsilon * distance / 2).softmax(1).cumsum(1)
            for each, at in zip(sums, of_kind[start : start + _AT_ONCE], strict=True):
                drawn = torch.searchsorted(each, draws[at] * each[-1], right=True)
                found[at] = 1 + drawn.clamp(max=len(each) - 1)
        return found


class CusText(Sanitisation):
    """Replaces a word by one of the few words in a fixed set that contains it.

    The vocabulary is divided into disjoint sets. To form sets, the defense takes the words in the
    order of their numbers, so frequent words come first. A word that is in no set so far forms a
    set with the nearest words that also are in no set. Within a set, the probability P(y | x) of
    the substitute y is proportional to exp(epsilon u / 2). The utility u falls from 1 for x itself
    to 0 for the word farthest from x. So epsilon bounds how well an attacker can distinguish two
    words of one set; the substitute discloses the set.

    Source: Chen et al. 2023, "A customized text sanitization mechanism with differential privacy"
    (ACL Findings): its mapping and its sampling function.

    Args:
        epsilon: epsilon of the guarantee for two words of the same set.
        words: number of words in a set; the last set may have fewer.

    >>> CusText(epsilon=1, words=10).words
    10

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, epsilon: float = 3.0, words: int = 20) -> None:
        super().__init__(epsilon)
        require_range("words", words, 1, _MOST_SET)
        self.words = words

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = (
            f"the label party: epsilon {self.epsilon:g} of one word among {self.words} near words"
        )
        return (PrivacyStatement("inputs", against),)

    def register(self, bottom: SanitisedBottom) -> None:
        sets = -(-(len(bottom.vectors) - 1) // self.words)
        bottom.register_buffer("sets", torch.zeros(sets, self.words, dtype=torch.int64))
        bottom.register_buffer("set_of", torch.zeros(len(bottom.vectors), dtype=torch.int64))

    def begin(self, bottom: SanitisedBottom) -> None:
        sets, set_of = bottom.get_buffer("sets"), bottom.get_buffer("set_of")
        sets.zero_()
        left = torch.arange(1, len(bottom.vectors), device=sets.device)
        for each in range(len(sets)):
            vectors = bottom.vectors[left]
            near = (vectors - vectors[0]).norm(dim=1).argsort(stable=True)[: self.words]
            sets[each, : len(near)] = left[near]
            set_of[left[near]] = each
            left = left[torch.ones_like(left, dtype=torch.bool).scatter(0, near, False)]

    def substitutes(self, bottom: SanitisedBottom, words: Tensor, draws: Tensor) -> Tensor:
        members = bottom.get_buffer("sets")[bottom.get_buffer("set_of")[words]]
        away = (bottom.vectors[members] - bottom.vectors[words][:, None]).double().norm(dim=2)
        away = away.masked_fill(members == 0, 0)
        utility = 1 - away / away.amax(1, keepdim=True).clamp(min=1e-12)
        score = (self.epsilon * utility / 2).masked_fill(members == 0, -torch.inf)
        score[words == 0] = 0  # padding is not replaced
        sums = score.softmax(1).cumsum(1)
        drawn = torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True)
        return members.gather(1, drawn.clamp(max=self.words - 1))[:, 0]


def _embedding(bottom: nn.Module) -> nn.Embedding:
    """Return the word embedding of a bottom.

    Raises:
        SpecError: the bottom has no embedding, or its vocabulary is too large.
    """
    found = [one for one in bottom.modules() if hasattr(one, "num_embeddings")]
    if not found:
        raise SpecError(
            "words are sanitised by the vectors of a bottom's embedding, and this bottom has none",
            where="defense",
            want="a bottom that reads words, such as decoder_front",
        )
    words: nn.Embedding = found[0]  # type: ignore[assignment]  # or one of `vfl.models.lora`
    if words.num_embeddings > _MOST_WORDS:
        raise SpecError(
            "too many words to sanitise",
            where="defense",
            got=f"{words.num_embeddings} words",
            want=f"at most {_MOST_WORDS}",
            fix="a smaller data.vocabulary",
        )
    return words
