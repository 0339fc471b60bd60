"""Words of film reviews that sanitised texts still disclose, and the accuracy that remains.

    vfl model add glove.6B.50d.txt glove
    python -m benchmarks.sanitisation --out docs/results/sanitisation.csv

The benchmark uses the first 300 tokens of each review that are among the 9,999 most frequent words
of GloVe. The attacker knows half of the texts together with their sanitised form. For each
substitute word in the other half, the attacker names the word that this substitute replaced most
often. The attacker's guess without the sanitised texts is the most frequent word. The task is the
polarity of a review, predicted by logistic regressions on the mean word vector and on the set of
words; both are trained and tested on sanitised texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.pages import written
from vfl.config import Experiment
from vfl.core.seeds import Secret
from vfl.datasets import Split
from vfl.defenses import make
from vfl.defenses.sanitisation import SanitisedBottom
from vfl.models.pretrained import embedding_rows, existing_model
from vfl.training.run import load_data

SPECS = (
    *(f"santext:epsilon={epsilon}" for epsilon in (1, 2, 3)),
    *(f"custext:epsilon={epsilon}" for epsilon in (1, 3, 10)),
)
WORDS, LENGTH = 10_000, 300


@dataclass(frozen=True)
class Sanitised:
    """Results of one defense: fractions of words, and accuracies on test reviews.

    Attributes:
        defense: spec of the defense; "none" sends the words themselves.
        kept: fraction of words that the defense left unchanged.
        read: fraction of words that the attacker infers.
        guess: fraction of words that equal the most frequent word, the attacker's guess without the
            texts.
        mean_vector, words: accuracy of the regression on mean vectors, and on sets of words.
    """

    defense: str
    kept: float
    read: float
    guess: float
    mean_vector: float
    words: float


class WordVectors(nn.Module):
    """Layer that concatenates the vectors of a row's words.

    Args:
        table: vectors by word index, axes (words, width).
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(table), table.shape[1], _weight=table.clone())

    def forward(self, rows: Tensor) -> Tensor:
        """Map word indices, axes (rows, words), to vectors, axes (rows, words x width)."""
        vectors: Tensor = self.embedding(rows.long())
        return vectors.flatten(1)


def reviews() -> tuple[Tensor, Tensor, Split]:
    """Return reviews as word indices, axes (rows, words), their labels, and the split."""
    data = {"source": "review_polarity", "tokenizer": "glove", "length": LENGTH}
    experiment = Experiment.model_validate(
        {
            "data": data | {"split": "shuffled"},
            "parties": {"user": {"width": 8, "bottom": "identity"}},
            "label": {"party": "owner"},
        }
    )
    found = load_data(experiment)
    inputs, labels = found["user"].inputs, found["owner"].labels
    assert inputs is not None
    assert labels is not None
    return torch.where(inputs < WORDS, inputs, torch.zeros(())), labels, found["owner"].split


def vectors() -> Tensor:
    """Return the vectors of the most frequent words, axes (words, width); index 0 is padding."""
    found, count = [], 1
    for some in embedding_rows(existing_model("glove")):
        found.append(some)
        count += len(some)
        if count >= WORDS:
            break
    table = torch.cat(found)[: WORDS - 1].float()
    return torch.cat([torch.zeros(1, table.shape[1]), table])


def measure(
    specs: Iterable[str], texts: Tensor, labels: Tensor, split: Split, table: Tensor
) -> Iterator[Sanitised]:
    """Yield a result for each defense; the first is without a defense."""
    yield Sanitised("none", 1.0, 1.0, _guess(texts), *_accuracies(texts, labels, split, table))
    for spec in specs:
        defense = make(spec)
        bottom = defense.wrap_bottom(WordVectors(table), texts.shape[1] * table.shape[1])
        defense.fit(bottom, texts, Secret.of_simulation(0, "user"))
        assert isinstance(bottom, SanitisedBottom)
        sent = bottom.sanitised(texts)
        kept = (sent == texts)[texts > 0].double().mean().item()
        accuracies = _accuracies(sent, labels, split, table)
        yield Sanitised(spec, kept, read(texts, sent), _guess(texts), *accuracies)


def read(texts: Tensor, sent: Tensor) -> float:
    """Return the fraction of words in the second half that the attacker infers; see the module."""
    half, most = len(texts) // 2, 1 + int(max(texts.max(), sent.max()))
    known, asked = texts[:half] > 0, texts[half:] > 0
    pairs = sent[:half][known].long() * most + texts[:half][known].long()
    kinds, counts = torch.unique(pairs, return_counts=True)
    behind = torch.zeros(most, dtype=torch.int64)
    # The most frequent pair of substitute and word comes last, so it overwrites the rarer pairs.
    for kind in kinds[counts.argsort(stable=True)].tolist():
        behind[kind // most] = kind % most
    named = behind[sent[half:][asked].long()] == texts[half:][asked].long()
    return named.double().mean().item()


def _guess(texts: Tensor) -> float:
    half = len(texts) // 2
    first, second = (part[part > 0].long() for part in (texts[:half], texts[half:]))
    return (second == first.bincount().argmax()).double().mean().item()


def _accuracies(texts: Tensor, labels: Tensor, split: Split, table: Tensor) -> tuple[float, float]:
    """Return the accuracy by mean vectors, and by sets of words."""
    numbers, there = texts.long(), (texts > 0).float()
    mean = (table[numbers] * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
    rows = np.repeat(np.arange(len(numbers)), numbers.shape[1])
    ones = np.ones(numbers.numel())
    sets = csr_matrix((ones, (rows, numbers.flatten().numpy())), (len(numbers), len(table))).sign()
    truth = labels.numpy()

    def accuracy(features: object, strength: float) -> float:
        model = LogisticRegression(max_iter=2000, C=strength)
        model.fit(features[split.train], truth[split.train])  # type: ignore[index]
        return float(model.score(features[split.test], truth[split.test]))  # type: ignore[index]

    return accuracy(mean.numpy(), 10), accuracy(sets[:, 1:], 0.1)


def bench_sanitisation(out: Path = Path("sanitisation.csv")) -> list[Sanitised]:
    """Measure what sanitised words disclose, and what accuracy remains.

    Args:
        out: CSV file for the results; each result is written as soon as it is measured.
    """
    return list(written(measure(SPECS, *reviews(), vectors()), out, digits=3))


TABLE = harness.table(
    ("defense", "<22", "defense"),
    ("kept", ">8.3f", "kept"),
    ("read", ">8.3f", "read"),
    ("guess", ">8.3f", "guess"),
    ("mean vector", ">13.3f", "mean_vector"),
    ("words", ">8.3f", "words"),
)


main = harness.command(bench_sanitisation, TABLE)


if __name__ == "__main__":
    main()
