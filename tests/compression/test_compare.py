"""Codecs with modules on a saved cut, and the codecs measured unless told."""

import pytest
import torch

from vfl.compression import CODECS, make
from vfl.compression.compare import compare_codecs, default_specs, format_table
from vfl.core.frame import HEADER_BYTES
from vfl.core.registry import parse
from vfl.core.seeds import generator
from vfl.training.specs import check_codecs


@pytest.fixture(scope="module")
def cut():
    return torch.randn(50, 40, generator=generator(0, "test"))


def test_an_untrained_module_shows_sizes_and_no_error(cut):
    specs = ["size:k=4", "sign:width=11", "sign", "size:k=4,kind=mask", "rate"]
    rows = compare_codecs(cut, specs)
    assert all(row.untrained for row in rows)
    assert [row.record()["relative_error"] for row in rows] == [None] * 5
    sizes = [row.measure.wire_bytes - HEADER_BYTES for row in rows]
    assert sizes[:4] == [50 * 4 * 4, -(-50 * 11 // 8), 50 * 40 // 8, 50 * 4 * 4]
    table = format_table(rows)
    assert table.count("~") == len(rows) + 1
    assert "50 rows of 40, 8.00 kB as float32, in 1 frame" in table


def test_a_module_that_learns_nothing_shows_the_error_behind_it(cut):
    (row,) = compare_codecs(cut, ["relu:values=fp32,packer=bitmap"])
    assert not row.untrained
    assert row.record()["relative_error"] == 0
    values = int((cut > 0).sum())
    assert row.measure.wire_bytes == HEADER_BYTES + 50 * 40 // 8 + 4 * values


def test_untrained_modules_start_alike_and_leave_random_state_alone(cut):
    before = torch.random.get_rng_state()
    first, second = (compare_codecs(cut, ["rate"])[0].measure for _ in range(2))
    assert first.wire_bytes == second.wire_bytes
    assert torch.equal(before, torch.random.get_rng_state())


def test_unknown_figures_are_null():
    rows = compare_codecs(torch.zeros(3, 4), ["topk:k=1,values=4,packer=range", "relu"])
    assert rows[1].record()["entropy_bound_bytes"] == 0
    lines = format_table(rows).splitlines()
    assert lines[2].split()[-4] == lines[3].split()[-4] == "-"


@pytest.mark.parametrize("width", [1, 2, 128, 600, 5000, 65536])
def test_the_codecs_measured_unless_told_fit_every_width(width):
    specs = default_specs(width)
    check_codecs(specs, width, "--codec")
    names = {parse(spec)[0] for spec in specs}
    assert names == set(CODECS.names()) - {
        "l1", "rate", "error_feedback", "aqsgd", "c3sl", "splitfc", "bottlenet", "fedlite",
    }  # fmt: skip
    for spec in specs:
        make(spec)
