"""The buckets of addresses, by a clock of our own."""

import pytest

from vfl.transport.knocks import KnockLimits, Knocks

LIMITS = KnockLimits(per_second=10, burst=5, failure_cost=2, longest_wait_s=1, addresses=3)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def knocks(clock):
    return Knocks(LIMITS, clock)


def allowed(knocks, address, times):
    return sum(knocks.allow(address) for _ in range(times))


def test_a_burst_then_the_steady_rate(knocks, clock):
    assert allowed(knocks, "10.0.0.1", 100) == 5
    clock.now += 0.25
    assert allowed(knocks, "10.0.0.1", 100) == 2
    clock.now += 1000
    assert allowed(knocks, "10.0.0.1", 100) == 5


def test_addresses_do_not_share(knocks):
    allowed(knocks, "10.0.0.1", 100)
    assert allowed(knocks, "10.0.0.2", 100) == 5


def test_failures_slow_an_address_down(knocks, clock):
    """Ten tokens a second, three for each connection that fails: 3.3 a second."""
    seen = 0
    for _ in range(1000):
        clock.now += 0.01
        if knocks.allow("10.0.0.1"):
            seen += 1
            knocks.failed("10.0.0.1")
    assert seen == pytest.approx((10 * 10 + 5) / 3, abs=2)


def test_nobody_waits_longer_than_promised(knocks, clock):
    for _ in range(10_000):
        knocks.failed("10.0.0.1")
    assert not knocks.allow("10.0.0.1")
    clock.now += LIMITS.longest_wait_s + 1e-6
    assert knocks.allow("10.0.0.1")


def test_the_table_is_bounded_and_forgets_the_quietest(knocks):
    allowed(knocks, "10.0.0.1", 100)
    allowed(knocks, "10.0.0.2", 100)
    knocks.allow("10.0.0.3")
    knocks.allow("10.0.0.1")
    knocks.allow("10.0.0.4")
    assert len(knocks) == 3
    assert not knocks.allow("10.0.0.1")
    assert knocks.allow("10.0.0.2")


def test_one_host_cannot_choose_among_its_ipv6_addresses(knocks):
    assert sum(knocks.allow(f"2001:db8::{host:x}") for host in range(100)) == 5
    assert knocks.allow("2001:db8:0:1::1")
    assert allowed(knocks, "fe80::1%eth0", 100) == 5


def test_an_ipv4_address_is_the_same_in_ipv6_clothes(knocks):
    assert allowed(knocks, "10.0.0.1", 3) + allowed(knocks, "::ffff:10.0.0.1", 100) == 5
    assert knocks.allow("::ffff:10.0.0.2")
