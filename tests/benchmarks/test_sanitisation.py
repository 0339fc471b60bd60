"""The measurement of sanitised words, on texts that are made up."""

import numpy as np
import torch

from benchmarks.sanitisation import measure, read
from vfl.core.seeds import generator
from vfl.datasets import Split


def test_the_attacker_names_the_word_that_stood_behind_a_substitute_most_often():
    texts = torch.tensor([[1.0, 1, 2, 0], [3, 3, 3, 0], [1, 2, 2, 3], [0, 0, 0, 1]])
    sent = torch.tensor([[4.0, 4, 4, 0], [5, 5, 4, 0], [4, 4, 5, 5], [0, 0, 0, 4]])
    # Behind 4: two of word 1, one of 2, one of 3; behind 5: word 3. Of five, 1, 3 and 1 are named.
    assert read(texts, sent) == 3 / 5


def test_more_epsilon_keeps_more_words_and_more_of_the_task():
    draw = generator(0, "reviews")
    labels = torch.arange(120) % 2
    # Words 1 to 4 belong to class 0, words 5 to 8 to class 1; a few come from the other class.
    other = (torch.rand(120, 12, generator=draw) < 0.2).long()
    texts = 1 + torch.randint(4, (120, 12), generator=draw) + 4 * (labels[:, None] ^ other)
    table = torch.cat([torch.zeros(1, 3), torch.randn(8, 3, generator=draw)])
    split = Split(np.arange(80), np.arange(80, 80), np.arange(80, 120))
    specs = ("santext:epsilon=0", "santext:epsilon=20")
    none, noise, near = measure(specs, texts.float(), labels, split, table)
    assert (none.kept, none.read) == (1, 1)
    assert noise.kept < 0.2 < 0.9 < near.kept
    assert abs(noise.read - noise.guess) < 0.15
    assert near.read > 0.9
    assert noise.words < 0.8 < near.words
