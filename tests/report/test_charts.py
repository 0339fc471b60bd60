"""Coordinates against a hand computation, and axes against what a person would draw."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from vfl.report.axes import enclosing, thinned, tick_step, tick_text, ticks_inside, widened
from vfl.report.bars import Bar, bar_chart
from vfl.report.charts import Series, line_chart


def chart(*series: Series, **options) -> ET.Element:
    return ET.fromstring(line_chart("k", "Title", "What it shows", series, "epoch", **options))


def paths(svg: ET.Element, kind: str) -> list[str]:
    return [p.get("d", "") for p in svg.iter("path") if p.get("class", "").startswith(kind)]


def words(svg: ET.Element, kind: str) -> list[str]:
    return [t.text or "" for t in svg.iter("text") if t.get("class") == kind]


def test_points_lie_where_a_hand_computation_puts_them():
    """The plot is x 44..428, y 212..34: 384 and 178 pixels; 0..10 on both axes."""
    svg = chart(Series("a", [(0, 0), (5, 10), (10, 2.5)]))
    line = paths(svg, "line")[0]
    assert line == "M44.0 212.0L236.0 34.0L428.0 167.5"
    assert [(c.get("cx"), c.get("cy")) for c in svg.iter("circle")] == [
        ("44.0", "212.0"),
        ("236.0", "34.0"),
        ("428.0", "167.5"),
    ]
    assert words(svg, "end") == ["0", "2", "4", "6", "8", "10"]
    assert words(svg, "mid") == ["0", "2", "4", "6", "8", "10"]


def test_grid_lines_are_evenly_spaced():
    grid = paths(chart(Series("a", [(0, 0), (10, 10)])), "grid")[0]
    heights = [float(y) for y in re.findall(r"M44 ([\d.]+)H428", grid)]
    assert heights == pytest.approx([212 - 178 * n / 5 for n in range(6)], abs=0.05)


def test_each_series_keeps_its_own_style_and_name():
    svg = chart(Series("train", [(1, 1), (2, 2)], 1), Series("test", [(1, 2), (2, 1)], 3))
    assert {p.get("class") for p in svg.iter("path")} == {"grid", "line s1", "line s3"}
    assert words(svg, "label") == ["train", "test"]


def test_a_single_point_is_a_dot_in_the_middle():
    svg = chart(Series("a", [(1, 0.5)]), whole_x=True)
    assert paths(svg, "line") == []
    assert [c.get("cx") for c in svg.iter("circle")] == ["236.0", "62"]  # plot, legend
    assert words(svg, "mid") == ["1"]


def test_an_axis_may_begin_before_its_first_point():
    svg = chart(Series("a", [(5, 0), (10, 10)]), x_from=0)
    assert paths(svg, "line")[0] == "M236.0 212.0L428.0 34.0"


def test_a_chart_speaks_to_who_cannot_see_it_and_escapes_names():
    text = line_chart("k", "<T>", "a & b", [Series("<i>x</i>", [(0, 1), (1, 2)])], "x")
    svg = ET.fromstring(text)
    assert svg.get("role") == "img"
    assert svg.get("aria-labelledby") == "k-title k-desc"
    assert (svg.find("title").text, svg.find("desc").text) == ("<T>", "a & b")
    assert words(svg, "label") == ["<i>x</i>"]


def test_a_series_without_points_is_left_out():
    svg = chart(Series("a", [(0, 1), (1, 2)]), Series("b", []))
    assert words(svg, "label") == ["a"]


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 7.3, 1e12])
@pytest.mark.parametrize("low", [-3.0, 0.0, 0.999])
def test_every_point_is_inside_the_plot_whatever_its_magnitude(scale, low):
    points = [(n, scale * (low + n / 7)) for n in range(12)]
    numbers = re.findall(r"[\d.]+", paths(chart(Series("a", points)), "line")[0])
    xs, ys = [float(x) for x in numbers[::2]], [float(y) for y in numbers[1::2]]
    assert 44 <= min(xs) <= max(xs) <= 428
    assert 34 <= min(ys) <= max(ys) <= 212


def test_steps_are_round_and_give_few_ticks():
    for low, high in [(0, 1), (0.3, 0.31), (-5, 17), (1, 1500), (0, 9.99e6)]:
        step = tick_step(low, high)
        assert f"{step:e}"[0] in "125"
        first, last = enclosing(low, high, step)
        assert first <= low < high <= last
        assert 3 <= len(ticks_inside(first, last, step)) <= 8
    assert tick_step(1, 3, whole=True) == 1


def test_ticks_have_the_decimals_their_step_needs():
    assert [tick_text(0.05 * n, 0.05) for n in range(4)] == ["0.00", "0.05", "0.10", "0.15"]
    assert tick_text(-1e-17, 0.5) == "0.0"


def test_an_empty_range_gets_room():
    assert widened(0.0, 0.0) == (-0.5, 0.5)
    low, high = widened(-4.0, -4.0)
    assert low < -4 < high


def test_thinning_keeps_the_ends_of_the_range_and_the_order():
    points = [(n, 1.0) for n in range(5000)]
    points[1234] = (1234, 99.0)
    points[4321] = (4321, -7.0)
    kept = thinned(points, most=100)
    assert len(kept) <= 100
    assert (1234, 99.0) in kept
    assert (4321, -7.0) in kept
    assert kept == sorted(kept)


def test_bars_share_one_scale():
    text = bar_chart("k", "T", "D", [Bar("left", (30, 10), "40"), Bar("r" * 50, (10, 10), "20")])
    svg = ET.fromstring(text)
    boxes = [(float(r.get("x")), float(r.get("width"))) for r in svg.iter("rect")]
    assert boxes == [(4, 324), (328, 108), (4, 108), (112, 108)]  # 432 pixels for 40
    assert words(svg, "label") == ["left", "r" * 35 + "…"]


def test_bars_without_length_are_drawn_flat():
    svg = ET.fromstring(bar_chart("k", "T", "D", [Bar("left", (0, 0), "nothing")]))
    assert [r.get("width") for r in svg.iter("rect")] == ["0.0", "0.0"]
