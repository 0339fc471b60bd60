"""The rules for connections without a credential: places, sources, a budget, numbers."""

import errno
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfl.transport import Front, FrontLimits
from vfl.transport.front import _Held, budget, whole_number

LONGEST_WAIT_S = 1


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def front(clock):
    limits = FrontLimits(
        per_second=10, burst=5, failure_cost=2, longest_wait_s=LONGEST_WAIT_S, sources=3
    )
    return Front(limits, clock=clock)


def allowed(front, address, times):
    return sum(front.allow(address) for _ in range(times))


def test_a_burst_then_the_steady_rate(front, clock):
    assert allowed(front, "10.0.0.1", 100) == 5
    clock.now += 0.25
    assert allowed(front, "10.0.0.1", 100) == 2
    clock.now += 1000
    assert allowed(front, "10.0.0.1", 100) == 5


def test_failures_slow_an_address_down(front, clock):
    """Ten tokens a second, three for each connection that fails: 3.3 a second."""
    seen = 0
    for _ in range(1000):
        clock.now += 0.01
        if front.allow("10.0.0.1"):
            seen += 1
            front.failed("10.0.0.1")
    assert seen == pytest.approx((10 * 10 + 5) / 3, abs=2)


def test_nobody_waits_longer_than_promised(front, clock):
    for _ in range(10_000):
        front.failed("10.0.0.1")
    assert not front.allow("10.0.0.1")
    clock.now += LONGEST_WAIT_S + 1e-6
    assert front.allow("10.0.0.1")


def test_the_table_is_bounded_and_forgets_the_quietest(front):
    allowed(front, "10.0.0.1", 100)
    allowed(front, "10.0.0.2", 100)
    front.allow("10.0.0.3")
    front.allow("10.0.0.1")
    front.allow("10.0.0.4")
    assert len(front._strangers) == 3
    assert not front.allow("10.0.0.1")
    assert front.allow("10.0.0.2")


def test_one_host_cannot_choose_among_its_ipv6_addresses(front):
    assert sum(front.allow(f"2001:db8::{host:x}") for host in range(100)) == 5
    assert front.allow("2001:db8:0:1::1")
    assert allowed(front, "fe80::1%eth0", 100) == 5


def test_an_ipv4_address_is_the_same_in_ipv6_clothes(front):
    assert allowed(front, "10.0.0.1", 3) + allowed(front, "::ffff:10.0.0.1", 100) == 5
    assert front.allow("::ffff:10.0.0.2")


# Places


@pytest.fixture
def held(monkeypatch):
    """All connections of this process: none yet, and room for ten."""
    fresh = _Held()
    monkeypatch.setattr("vfl.transport.front._HELD", fresh)
    monkeypatch.setattr("vfl.transport.front.budget", lambda: 10)
    return fresh


class Ended(list):
    """Names of connections, in the order in which they were ended."""

    def enter(self, front, address, name):
        return front.enter(address, lambda: self.append(name))


def test_a_crowd_makes_room_and_the_quiet_source_stays(held):
    front, ended = Front(FrontLimits(strangers=4)), Ended()
    ended.enter(front, "10.0.0.9", "quiet")
    for number in range(6):
        ended.enter(front, "10.0.0.1", number)
    assert ended == [0, 1, 2]


def test_who_has_shown_a_credential_makes_room_for_no_stranger(held):
    front, ended = Front(FrontLimits(strangers=2)), Ended()
    for number in range(9):
        visitor = ended.enter(front, "10.0.0.1", f"known {number}")
        visitor.welcome()
    for number in range(5):
        assert ended.enter(front, "10.0.0.2", number) is not None
    assert ended == [0, 1, 2, 3]


def test_a_spent_budget_is_shared_by_all_listeners(held):
    busy, calm, ended = Front(FrontLimits(strangers=4)), Front(), Ended()
    for number in range(4):
        ended.enter(busy, "10.0.0.1", number)
    for _ in range(6):
        ended.enter(calm, "10.0.0.2", "calm").welcome()
    assert ended.enter(calm, "10.0.0.3", "late") is not None
    assert ended == [0]


def test_without_strangers_an_idle_connection_makes_room_or_nobody(held):
    front, ended = Front(), Ended()
    visitors = [ended.enter(front, "10.0.0.1", number) for number in range(10)]
    for visitor in visitors:
        visitor.welcome()
    assert ended.enter(front, "10.0.0.1", "late") is None
    visitors[3].idle = True
    assert ended.enter(front, "10.0.0.1", "later") is not None
    assert ended == [3]


def test_places_are_free_again_when_a_connection_ends(held):
    front, ended = Front(FrontLimits(strangers=2)), Ended()
    for number in range(20):
        visitor = ended.enter(front, "10.0.0.1", number)
        if number % 2:
            visitor.welcome()
        visitor.leave()
        visitor.leave()
    assert ended == []


def test_connections_of_a_named_proxy_are_no_strangers(held):
    front, ended = Front(FrontLimits(strangers=2), trusted=["10.0.0.8"]), Ended()
    for address, number in itertools.product(("10.0.0.8", "::ffff:10.0.0.8"), range(2)):
        assert ended.enter(front, address, number).known
    assert front.trusts("10.0.0.8")
    assert not front.trusts("10.0.0.7")
    assert not Front().trusts("10.0.0.8")
    assert ended == []


def test_a_source_makes_so_many_connections_a_second(held, clock):
    limits = FrontLimits(connections_per_second=10, connections_burst=5)
    front, ended = Front(limits, trusted=["10.0.0.8"], clock=clock), Ended()

    def entered(address, times):
        made = [ended.enter(front, address, number) for number in range(times)]
        for visitor in filter(None, made):
            visitor.leave()
        return sum(visitor is not None for visitor in made)

    assert entered("10.0.0.1", 50) == 5
    assert entered("10.0.0.2", 1) == 1  # no other source pays for it
    assert entered("10.0.0.8", 10) == 10  # whoever stands behind a proxy is counted by requests
    clock.now += 0.35
    assert entered("10.0.0.1", 50) == 3


def test_connections_that_show_a_credential_are_not_counted(held, clock):
    front = Front(FrontLimits(connections_per_second=10, connections_burst=2), clock=clock)
    for _ in range(50):
        visitor = front.enter("10.0.0.1", lambda: None)
        visitor.welcome()
        visitor.welcome()
        visitor.leave()
    assert [front.enter("10.0.0.1", lambda: None) is None for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("number", "closed"), [(errno.EMFILE, [0]), (errno.ECONNABORTED, []), (None, [])]
)
def test_a_failed_accept_closes_a_connection_only_without_descriptors(held, number, closed):
    front, ended = Front(), Ended()
    ended.enter(front, "10.0.0.1", 0)
    front.make_room(OSError() if number is None else OSError(number, "accept"))
    assert ended == closed


@pytest.mark.parametrize("limit", [16, 256, 1024, 4096, 1 << 20])
def test_the_budget_leaves_descriptors_to_the_rest(monkeypatch, limit):
    monkeypatch.setattr("resource.getrlimit", lambda which: (limit, limit))
    assert 1 <= budget() <= max(1, limit - 64)


# Numbers and sources


@given(st.binary(max_size=30), st.integers(0, 2**64))
def test_a_number_is_read_whole_or_not_at_all(text, most):
    digits = bool(text) and all(each in b"0123456789" for each in text)
    found = whole_number(text, most)
    if not digits or int(text) > most:
        assert found is None
    else:
        assert found == int(text)


@pytest.mark.parametrize(
    "text",
    [b"1e5", b"+1", b"-1", b"0x10", "\u0661".encode(), b" 1", b"1 ", b"1_0", b"", b"9" * 5000],
)
def test_texts_that_other_parsers_take_for_numbers(text):
    assert whole_number(text, 10**9) is None
