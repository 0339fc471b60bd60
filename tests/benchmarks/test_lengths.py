"""What lengths of frames tell, measured on a small training."""

import pytest

from benchmarks.lengths import MIXED, ONE_CLASS, WIDTH, bench_lengths
from vfl.core.frame import HEADER_BYTES


@pytest.fixture(scope="module")
def rows():
    return {row.pad: row for row in bench_lengths("digits", ["relu:values=4"], epochs=2)}


def test_queries_tell_the_class_unless_their_length_is_that_of_their_shape(rows):
    assert rows["no"].single_auc > 0.6
    assert rows["no"].class_auc > 0.6
    assert (rows["query"].single_auc, rows["query"].class_auc) == (0.5, 0.5)
    for size, measured in (
        (1, rows["query"].single_bytes),
        (ONE_CLASS, rows["query"].class_bytes),
        (MIXED, rows["query"].mixed_bytes),
    ):
        assert measured == HEADER_BYTES + size * (2 + WIDTH // 2)  # a scale, and codes of 4 bits


def test_agreed_sizes_cost_less_than_a_fourth_root_of_two(rows):
    for name in ("single_bytes", "class_bytes", "mixed_bytes", "train_bytes"):
        plain, filled = (getattr(rows[pad], name) for pad in ("no", "sizes"))
        assert plain < filled < 2**0.25 * plain + 2
    assert rows["no"].train_bytes == rows["query"].train_bytes
