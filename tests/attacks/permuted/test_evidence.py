"""The thesis' evidence against its definitions, and what it misses."""

import itertools

import pytest
import torch

from vfl.attacks.permuted import correlation, nearest, same_class


def by_the_definition(one, other):
    """V^2 of thesis eq 5-11, each mean over distinct rows (U-statistics)."""
    rows = range(len(one))

    def apart(values, i, j):
        return float((values[i] - values[j]).norm())

    def squared(x, y):
        pairs = list(itertools.permutations(rows, 2))
        triples = list(itertools.permutations(rows, 3))
        fours = list(itertools.permutations(rows, 4))
        same = sum(apart(x, i, j) * apart(y, i, j) for i, j in pairs) / len(pairs)
        none = sum(apart(x, i, j) * apart(y, k, m) for i, j, k, m in fours) / len(fours)
        half = sum(apart(x, i, j) * apart(y, i, k) for i, j, k in triples) / len(triples)
        return same + none - 2 * half

    return (squared(one, other) / (squared(one, one) * squared(other, other)) ** 0.5) ** 0.5


def test_correlation_is_that_of_the_definition(normal):
    one = normal(6, 3)
    other = one @ normal(3, 2, seed=2) + 0.1 * normal(6, 2, seed=3)
    assert correlation(one, other) == pytest.approx(by_the_definition(one, other), abs=1e-6)


def test_independent_vectors_of_many_numbers_are_near_0(normal):
    """Where the plain statistic of as many rows is above one half."""
    assert correlation(normal(60, 300), normal(60, 300, seed=2)) < 0.3
    assert correlation(normal(60, 300), -2 * normal(60, 300)) == pytest.approx(1)


def test_sorting_brings_back_what_a_permutation_of_each_row_takes(normal):
    sizes = normal(200, 1).abs() + 0.2
    inputs = normal(200, 20, seed=2) * sizes
    values = inputs @ normal(20, 64, seed=3)
    order = torch.rand(200, 64, generator=torch.Generator().manual_seed(4)).argsort(1)
    mixed = values.gather(1, order)
    assert correlation(values, inputs) > 0.9
    assert correlation(mixed.sort(1).values, sizes) > correlation(mixed, sizes) + 0.1


def test_neighbours_of_the_same_class(normal):
    classes = torch.arange(100) % 2
    apart = torch.nn.functional.one_hot(classes, 2) + 0.1 * normal(100, 2)
    assert same_class(apart, classes) == 1.0
    assert abs(same_class(normal(100, 2), classes) - 0.5) < 0.15
    assert not bool((nearest(apart, 3) == torch.arange(100)[:, None]).any())
