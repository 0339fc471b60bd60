import pytest

from benchmarks.emulation import Wan
from vfl.core.errors import BadOptionError


@pytest.mark.parametrize(
    ("text", "mbps", "round_trip_ms"),
    [
        ("80mbps,40ms", 80, 40),
        ("40ms, 80 Mbps", 80, 40),
        ("1.5gbps", 1500, 0),
        ("500us", None, 0.5),
        ("64kbps,1s", 0.064, 1000),
        ("80mbps,0ms", 80, 0),
    ],
)
def test_bandwidth_and_round_trip(text, mbps, round_trip_ms):
    assert Wan.parse(text) == Wan(mbps, round_trip_ms)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "''"),
        ("80", "'80'"),
        ("fast", "'fast'"),
        ("-5ms", "'-5ms'"),
        ("80mbps;40ms", "80mbps;40ms"),
        ("80mbits,40ms", "'80mbits'"),
        ("80mbps,90mbps", "states it twice"),
        ("0mbps,40ms", "0 mbps"),
    ],
)
def test_a_line_that_cannot_be_is_refused_with_what_was_said(text, told):
    with pytest.raises(BadOptionError) as refusal:
        Wan.parse(text)
    assert told in refusal.value.got
    assert refusal.value.want


def test_the_limit_is_bytes_over_bandwidth_and_half_a_round_trip_a_hop():
    wan = Wan(mbps=80, round_trip_ms=40)
    assert wan.limit_s(1_000_000, hops=3) == pytest.approx(0.1 + 0.06)
    assert Wan(round_trip_ms=40).limit_s(10**9, hops=2) == pytest.approx(0.04)
