"""The figures of Table 6.1 that do not depend on a machine, and that all rows come out."""

import pytest

from benchmarks.decoder import bench_decoder, format_decoder


@pytest.fixture(scope="module")
def rows():
    found = bench_decoder([100_000], [64], prompts=4, turns=1)
    return {(row.what.split(",")[0], row.mode): row for row in found}


@pytest.mark.parametrize(
    ("what", "mode", "most_mib", "messages"),
    [
        ("gelu 100000", "fast", 0.80, 2),
        ("gelu 100000", "thesis", 1.15, 3),
        ("argmax 100000", "fast", 0.60, 3),
        ("argmax 100000", "thesis", 2.30, 4),
    ],
)
def test_bytes_and_messages_of_table_6_1(rows, what, mode, most_mib, messages):
    row = rows[what, mode]
    assert 0 < row.online_mib <= most_mib
    assert row.messages == messages
    assert row.error is None or row.error < 2e-4
    assert row.same in (None, 1)


@pytest.mark.parametrize(("mode", "messages"), [("fast", 12), ("thesis", 20)])
def test_a_layer_and_tokens(rows, mode, messages):
    layer, tokens = rows["layer 64", mode], rows["2 layers of 64", mode]
    assert layer.messages == messages
    assert layer.error < 5e-3
    assert tokens.same == tokens.of == 4
    assert tokens.error < 1e-2
    assert tokens.offline_mib > 0


def test_the_table(rows):
    assert len(format_decoder(list(rows.values())).splitlines()) == 2 + len(rows)
