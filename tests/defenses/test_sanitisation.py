"""SanText and CusText: how often each word becomes which, against the formula of its source."""

import math

import pytest
import torch
from torch import nn

from vfl.core.errors import SpecError
from vfl.core.seeds import Secret, generator
from vfl.defenses import make
from vfl.defenses.sanitisation import SanitisedBottom

WORDS = 9


class Words(nn.Module):
    """Gives the vectors of words side by side."""

    def __init__(self):
        super().__init__()
        table = torch.randn(WORDS, 2, generator=generator(0, "vectors"))
        self.embedding = nn.Embedding(WORDS, 2, _weight=table)

    def forward(self, rows):
        return self.embedding(rows.long()).flatten(1)


def sanitised(spec, rows, party="bank"):
    defense, bottom = make(spec), Words()
    wrapped = defense.wrap_bottom(bottom, 2 * rows.shape[1])
    assert isinstance(wrapped, SanitisedBottom)
    defense.fit(wrapped, rows, Secret.of_simulation(0, party))
    return wrapped, wrapped.sanitised(rows)


def texts(rows=400, length=60):
    """Rows that differ, of words 0 to 8."""
    return torch.randint(0, WORDS, (rows, length), generator=generator(0, "texts")).float()


def distance(one, other):
    vectors = Words().embedding.weight.detach().tolist()
    return math.dist(vectors[one], vectors[other])


def shares_of_santext(epsilon):
    for word in range(1, WORDS):
        weight = [math.exp(-epsilon * distance(word, other) / 2) for other in range(1, WORDS)]
        yield word, {other + 1: w / sum(weight) for other, w in enumerate(weight)}


def shares_of_custext(epsilon, size):
    left = list(range(1, WORDS))
    while left:
        first = left[0]
        members = sorted(left, key=lambda other: distance(first, other))[:size]
        left = [one for one in left if one not in members]
        for word in members:
            most = max(distance(word, other) for other in members)
            weight = [
                math.exp(epsilon * (1 - distance(word, other) / most) / 2) for other in members
            ]
            yield word, {one: w / sum(weight) for one, w in zip(members, weight, strict=True)}


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("santext:epsilon=2", shares_of_santext(2)),
        ("custext:epsilon=3,words=4", shares_of_custext(3, 4)),
    ],
)
def test_words_become_others_as_often_as_the_mechanism_says(spec, wanted):
    rows = texts()
    _, found = sanitised(spec, rows)
    assert torch.equal(found[rows == 0], rows[rows == 0]), "padding changed"
    for word, shares in wanted:
        made = found[rows == word].long().bincount(minlength=WORDS) / (rows == word).sum()
        for other in range(WORDS):
            assert made[other].item() == pytest.approx(shares.get(other, 0), abs=0.04)


@pytest.mark.parametrize("spec", ["santext", "custext:words=4"])
def test_a_text_is_sanitised_once_and_by_its_owner_alone(spec):
    rows = texts(8)
    wrapped, found = sanitised(spec, rows)
    assert torch.equal(wrapped.sanitised(rows.flip(0)).flip(0), found)
    assert torch.equal(wrapped(rows), Words()(found))
    assert not torch.equal(sanitised(spec, rows, "shop")[1], found)


def test_much_epsilon_keeps_the_words():
    rows = texts(8)
    assert torch.equal(sanitised("santext:epsilon=10000", rows)[1], rows)


def test_a_bottom_without_words_is_refused():
    with pytest.raises(SpecError, match="this bottom has none"):
        make("santext").wrap_bottom(nn.Linear(3, 2), 2)


def test_a_number_that_is_no_word_is_explained_by_the_vocabulary():
    with pytest.raises(SpecError, match="no word of the bottom's vocabulary") as refused:
        sanitised("custext:words=3", texts() + 1)
    assert "bottom with more words" in refused.value.fix
