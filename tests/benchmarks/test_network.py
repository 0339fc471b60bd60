import pytest

from benchmarks.emulation import Wan, why_not
from benchmarks.network import PATTERNS, bench_lines, modelled_s

LINE = Wan(mbps=80, round_trip_ms=40)


@pytest.mark.parametrize(
    ("pattern", "milliseconds"),
    [  # 256 kB take 25.6 ms at 10 MB a second, and a hop 20 ms
        ("there and back, 1 byte", 40.0002),
        ("one way, 256 kB", 45.6),
        ("both ways at once, 256 kB", 45.6),
        ("two to one, 256 kB each", 45.6),
        ("one to two, 256 kB each", 71.2),
        ("three hops, 64 kB each", 79.2),
        ("one way, 8 MB", 820),
    ],
)
def test_patterns_take_what_the_arithmetic_says(pattern, milliseconds):
    assert 1000 * modelled_s(PATTERNS[pattern], LINE) == pytest.approx(milliseconds)


def test_the_model_meets_the_limit_and_never_beats_it():
    rows = bench_lines(LINE, ["model"], turns=1)
    assert [row.pattern for row in rows] == list(PATTERNS)
    assert all(row.model_ms >= row.limit_ms - 1e-9 and row.ratio == 1 for row in rows)
    assert (
        sum(row.model_ms == pytest.approx(row.limit_ms, abs=0.001) for row in rows) == len(rows) - 1
    )


@pytest.mark.net
@pytest.mark.parametrize(
    "kind",
    [
        "proxy",
        pytest.param("tun", marks=pytest.mark.skipif(why_not() is not None, reason=str(why_not()))),
    ],
)
def test_processes_take_at_least_what_the_model_says(kind):
    wan, patterns = Wan(mbps=200, round_trip_ms=20), ["three hops, 64 kB each"]
    (row,) = bench_lines(wan, [kind], turns=3, pattern=patterns)
    assert row.ratio > 0.99
    assert 64_000 <= row.bytes_sent < 1.15 * 64_000
