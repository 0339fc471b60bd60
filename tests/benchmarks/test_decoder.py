"""The figures of Table 6.1 that do not depend on a machine, and that all rows come out."""

import pytest

from benchmarks.decoder import _six_billion, bench_decoder
from benchmarks.emulation import Wan
from vfl.llm.two_party import Form


@pytest.fixture(scope="module")
def rows():
    found = bench_decoder([100_000], [64], prompts=4, turns=1, wan=Wan.parse("1000mbps,2ms"))
    return {(row.what.split(",")[0], row.mode): row for row in found}


@pytest.mark.parametrize(
    ("what", "mode", "most_mib", "messages"),
    [
        ("gelu 100000", "fast", 0.80, 2),
        ("gelu 100000", "thesis", 1.15, 3),
        ("argmax 100000", "fast", 0.60, 3),
        ("argmax 100000", "thesis", 2.30, 4),
        ("gelu 100000", "thesis, insecure floats", 1.15, 3),
    ],
)
def test_bytes_and_messages_of_table_6_1(rows, what, mode, most_mib, messages):
    row = rows[what, mode]
    assert 0 < row.online_mib <= most_mib
    assert row.messages == messages
    assert row.error is None or row.error < 2e-4
    assert row.same in (None, 1)
    assert row.wan_s >= messages * 0.001 + row.online_mib * 2**20 * 8 / 1e9


@pytest.mark.parametrize(("mode", "messages"), [("fast", 10), ("fast, 6 bits", 10), ("thesis", 20)])
def test_a_layer_and_tokens(rows, mode, messages):
    layer, tokens = rows["layer 64", mode], rows["2 layers of 64", mode]
    assert layer.messages == messages
    assert layer.error < 2e-2
    assert layer.ring_s > 0
    # Both begin the step together: nothing of it is under way before. As printed, messages of
    # one party go together, and no fewer than ten wait for one another.
    assert layer.wan_s >= 10 * 0.001 + layer.online_mib * 2**20 * 8 / 1e9
    assert tokens.offline_s > 0
    assert tokens.same == tokens.of == 4
    assert tokens.error < 2e-2
    assert tokens.offline_mib > 0


def test_a_model_of_6_billion_is_computed_from_a_layer(rows):
    """28 layers, both ends, and a line's width and delay."""
    layer = rows["layer 64", "fast"].model_copy(
        update={"online_mib": 0.25, "messages": 10, "cpu_s": 0.1}
    )
    slow, quick = _six_billion(layer, Form())
    ends = (130_528 * (34 + 24 + 1) + 4096 * (26 + 40)) / 8
    assert slow.online_mib == pytest.approx(28 * 0.25 + ends / 2**20)
    assert slow.messages == 286
    line = slow.online_mib * 2**20 * 8 / 1e8 + 286 * 0.01
    assert slow.computed_wan_s == pytest.approx(slow.cpu_s + line, rel=1e-6)
    assert slow.cpu_s == pytest.approx(0.1 * (28 + 5.31), rel=1e-3)
    assert quick.computed_wan_s < slow.computed_wan_s
