"""The advice for slow links against rates measured and modelled for 40 ms and 80 Mbps."""

import math

import pytest

from vfl.session.advice import LinkCost, advise

# Two parties with cuts of 32 float32; bottom 0.61 ms, top 0.38 ms; 80 Mbit/s at the label party.
WAN = LinkCost(0.040, 0.00099, row_bytes=2 * 128, bytes_per_second=10e6)
MANY = 60_000


@pytest.mark.parametrize(
    ("in_flight", "exchanges_per_second"), [(1, 23), (5, 113), (9, 203), (17, 384)]
)
def test_the_rates_of_the_model(in_flight, exchanges_per_second):
    assert round(1 / WAN.period_s(64, in_flight)) == exchanges_per_second


def test_the_default_rule():
    """min(5, ceil(cycle / max(compute, bytes))) with small batches, at most 2 with large ones."""
    assert WAN.useful_in_flight(64) == min(5, math.ceil(44.27 / 1.64)) == 5
    heavy = LinkCost(0.040, 0.030, row_bytes=256, bytes_per_second=10e6)
    assert heavy.useful_in_flight(64) == math.ceil(73.28 / 30) == 3
    assert WAN.useful_in_flight(256) == WAN.useful_in_flight(1024) == 2
    endless = LinkCost(0.040, 0.001, row_bytes=256)
    assert endless.useful_in_flight(64) == 5


def test_a_larger_batch_comes_first_then_depth():
    large, deep = advise(WAN, 64, 1, MANY)
    assert (large.batch_size, large.in_flight, large.rate_factor) == (1024, 2, 4.0)
    assert (deep.batch_size, deep.in_flight, deep.rate_factor) == (64, 5, 1.0)
    assert deep.speedup == pytest.approx(5, rel=0.01)
    assert large.speedup > deep.speedup


def test_nothing_to_gain_is_no_advice():
    near = LinkCost(0.010, 0.00099, row_bytes=256, bytes_per_second=10e6)
    assert advise(near, 64, 1, MANY) == []
    assert advise(WAN, 1024, 2, MANY) == []
    assert [choice.batch_size for choice in advise(WAN, 64, 5, MANY)] == [1024]
