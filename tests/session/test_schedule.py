import itertools
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl.config import TrainSettings
from vfl.session import rules, schedule
from vfl.session.schedule import (
    QUERY_ROWS,
    asking,
    batches,
    queries,
    shuffled_in_blocks,
    steps_per_epoch,
    training,
)

SIZES = st.integers(0, 3000)


def parts_of(train, validation, test):
    """Disjoint positions, mixed as a split mixes them."""
    order = np.random.default_rng(0).permutation(train + validation + test)
    ends = np.cumsum([train, validation])
    return [np.sort(part) for part in np.split(order, ends)]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    epochs=st.integers(1, 3),
    batch_size=st.integers(1, 400),
    train=st.integers(1, 600),
    validation=SIZES,
    test=SIZES,
)
def test_a_training_goes_over_every_row(seed, epochs, batch_size, train, validation, test):
    parts = parts_of(train, validation, test)
    exchanges = list(training(seed, epochs, batch_size, *parts))
    assert [exchange.step for exchange in exchanges] == list(range(len(exchanges)))
    dropped = 1 if batch_size > 1 and train > 1 and train % batch_size == 1 else 0
    for epoch in range(1, epochs + 1):
        seen = {phase: [] for phase in ("train", "validation", "test")}
        for exchange in exchanges:
            if exchange.epoch == epoch:
                seen[exchange.phase].extend(exchange.rows.tolist())
        assert len(seen["train"]) == len(set(seen["train"])) == train - dropped
        assert set(seen["train"]) <= set(parts[0].tolist())
        assert seen["validation"] == parts[1].tolist()
        assert seen["test"] == (parts[2].tolist() if epoch == epochs else [])


@settings(max_examples=60)
@given(rows=st.integers(0, 500), batch_size=st.integers(1, 120))
def test_only_a_single_last_row_is_dropped(rows, batch_size):
    """A batch of one row stays where batches of one were asked for, or where there is no more."""
    lengths = [len(batch) for batch in batches(np.arange(rows), batch_size)]
    expected = [batch_size] * (rows // batch_size)
    remainder = rows % batch_size
    if remainder > 1 or (remainder == 1 and not expected):
        expected.append(remainder)
    assert lengths == expected
    assert steps_per_epoch(rows, batch_size) == len(expected)


def test_phases_end_where_they_say():
    parts = parts_of(100, QUERY_ROWS + 1, 5)
    exchanges = list(training(0, 2, 40, *parts))
    told = [(e.phase, e.epoch, len(e.rows), e.last, e.trains) for e in exchanges]
    epoch = [
        ("train", 1, 40, False, True),
        ("train", 1, 40, False, True),
        ("train", 1, 20, True, True),
        ("validation", 1, 1024, False, False),
        ("validation", 1, 1, True, False),
    ]
    second = [(phase, 2, *rest) for phase, _, *rest in epoch]
    assert told == [*epoch, *second, ("test", 2, 5, True, False)]


def test_every_epoch_has_an_order_of_its_own():
    parts = parts_of(64, 0, 0)
    first, second = (exchange.rows for exchange in training(0, 2, 64, *parts))
    other, _ = (exchange.rows for exchange in training(1, 2, 64, *parts))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert sorted(first) == sorted(second) == list(range(64))


def test_asking_goes_over_the_rows_in_order():
    rows = np.arange(QUERY_ROWS * 2 + 3)
    exchanges = list(asking("predict", rows))
    assert [len(e.rows) for e in exchanges] == [1024, 1024, 3] == [len(q) for q in queries(rows)]
    assert [(e.step, e.last, e.trains) for e in exchanges] == [
        (0, False, False),
        (1, False, False),
        (2, True, False),
    ]
    assert np.array_equal(np.concatenate([e.rows for e in exchanges]), rows)


def test_what_a_mode_goes_over(terms, data):
    split = data["lender"].split
    for mode, phase in [("evaluate", "test"), ("predict", "predict")]:
        asked = terms.model_copy(update={"mode": mode})
        (exchange,) = rules.schedule(asked, split)
        assert (exchange.phase, exchange.epoch) == (phase, 0)
        assert np.array_equal(exchange.rows, split.test)


def in_blocks(rows, batch_size=1, block_rows=2, window_blocks=2):
    settings = TrainSettings(
        batch_size=batch_size, shuffle="blocks", block_rows=block_rows, window_blocks=window_blocks
    )
    return lambda seed, epoch=1: list(shuffled_in_blocks(seed, epoch, settings, rows))


@settings(max_examples=60)
@given(
    rows=st.integers(0, 500),
    batch_size=st.integers(1, 120),
    block_rows=st.integers(1, 70),
    window_blocks=st.integers(1, 9),
)
def test_blocks_are_cut_into_the_same_batches(rows, batch_size, block_rows, window_blocks):
    """As many of the same sizes as of a full shuffle, and every row in one of them."""
    positions = 3 * np.arange(rows)
    found = in_blocks(positions, batch_size, block_rows, window_blocks)(seed=5)
    full = [len(batch) for batch in batches(positions, batch_size)]
    assert [len(batch) for batch in found] == full
    every = np.concatenate([positions[:0], *found]).tolist()
    assert len(set(every)) == len(every) == sum(full)
    assert set(every) <= set(positions.tolist())


def outcomes(monkeypatch):
    """Every order of 4 blocks of 2 rows in windows of 2 blocks, one for each draw there can be."""
    make = in_blocks(np.arange(8))
    for drawn in itertools.product(itertools.permutations(range(4)), repeat=3):
        left = map(np.array, drawn)
        monkeypatch.setattr(schedule, "permutation", lambda *_, left=left: next(left))
        yield np.concatenate(make(seed=0))


def test_the_law_of_blocks_is_what_is_said(monkeypatch):
    """Over all 24 x 24 x 24 draws: places as in a full shuffle, and who comes beside whom."""
    places, beside, count = np.zeros((8, 8), int), np.zeros((8, 8), int), 0
    for order in outcomes(monkeypatch):
        places[order, np.arange(8)] += 1
        beside[order[0], order[1]] += 1
        count += 1
    assert count == 24**3
    assert (places == count // 8).all()  # every row at every place alike
    of_one_block = sum(beside[row, row ^ 1] for row in range(8))
    assert Fraction(int(of_one_block), count) == Fraction(2 - 1, 2 * 2 - 1)  # (B - 1) / (W B - 1)
    assert len({beside[row, row ^ 1] for row in range(8)}) == 1


def test_an_epoch_in_blocks_has_an_order_of_its_own_and_is_repeated():
    make = in_blocks(np.arange(64), 64, 4, 4)
    (first,), (second,), (other,) = make(0, 1), make(0, 2), make(1, 1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert np.array_equal(first, make(0, 1)[0])
