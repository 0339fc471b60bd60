"""Axes against what a person would draw, and what a chart says to who cannot see it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from importlib.resources import files

import pytest

from vfl.experiments.pages.charts import (
    Point,
    Series,
    enclosing,
    line_drawing,
    scatter_drawing,
    tick_step,
    ticks_inside,
)


def chart(*series: Series, **options) -> ET.Element:
    drawing = line_drawing("Title", "unit", series, "epoch", "What it shows", **options)
    return ET.fromstring(drawing.chart)


def paths(svg: ET.Element, kind: str) -> list[str]:
    return [p.get("d", "") for p in svg.iter("path") if p.get("class", "").startswith(kind)]


def words(svg: ET.Element, kind: str) -> list[str]:
    return [t.text or "" for t in svg.iter("text") if t.get("class") == kind]


def test_each_series_keeps_its_own_style_and_name():
    series = [Series("train", [(1, 1), (2, 2)], 1), Series("test", [(1, 2), (2, 1)], 3)]
    classes = {p.get("class") for p in chart(*series).iter("path")}
    assert classes == {"grid", "line s1", "line s3"}
    legend = line_drawing("Title", "unit", series, "epoch").legend
    assert [(name, re.findall(r"s\d", swatch)) for swatch, name in legend] == [
        ("train", ["s1"]), ("test", ["s3"]),
    ]  # fmt: skip


def test_a_chart_speaks_to_who_cannot_see_it_and_escapes_names():
    lines = [Series("<i>x</i>", [(0, 1), (1, 2)])]
    svg = ET.fromstring(line_drawing("<T>", "", lines, "<u>", "a & b").chart)
    assert svg.get("role") == "img"
    assert (svg.find("title").text, svg.find("desc").text) == ("<T>", "a & b")
    assert words(svg, "mid label") == ["<u>"]
    svg = ET.fromstring(line_drawing("<T>", "", lines, "<u>").chart)
    assert svg.find("desc").text == "<i>x</i> ends at 2."


def test_a_point_says_what_it_is_to_a_mouse_that_rests_on_it():
    lines = [Series("<i>", [(0, 0.25), (1, 2)], whiskers=[(1, 1.5, 2.5)])]
    dots = chart(*lines, x_ticks=[(0, "k = 1")]).iter("circle")
    assert [dot.find("title").text for dot in dots] == [
        "<i>, k = 1: 0.25",
        "<i>, 1: 2 (1.5 to 2.5)",
    ]
    points = [Point("1", 1, 2, what="none"), Point("", 2, 3)]
    svg = ET.fromstring(scatter_drawing("T", "", "", points, "x").chart)
    assert [dot.findtext("title") for dot in svg.iter("circle")] == ["none", None]


def test_whiskers_both_ways_are_as_long_as_their_intervals():
    points = [Point("", 1, 10, 3, x_half=1, y_half=4), Point("", 5, 20)]
    svg = ET.fromstring(scatter_drawing("T", "", "", points, "x", through=[(1, 10), (5, 20)]).chart)
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in svg.iter("circle")]
    across, down = ((b - a) / n for a, b, n in zip(*dots, (4, 10), strict=True))
    (path,) = paths(svg, "whisker")
    left, y, right, x, low, high = map(float, re.findall(r"[\d.]+", path))
    assert (x, y) == dots[0]
    assert right - left == pytest.approx(2 * across, abs=0.2)
    assert high - low == pytest.approx(8 * down, abs=0.2)
    (line,) = paths(svg, "line s2")
    assert [float(n) for n in re.findall(r"[\d.]+", line)] == [*dots[0], *dots[1]]


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


@pytest.mark.parametrize(("at", "anchor"), [(0, "end"), (10, ""), (5, "")])
def test_the_words_of_a_line_stand_where_no_point_is(at, anchor):
    points = [Point("1", at, 50.5), Point("2", 0, 90), Point("3", 10, 90)]
    svg = ET.fromstring(scatter_drawing("T", "", "", points, "x", lines=[(50, "guess")]).chart)
    words = next(one for one in svg.iter() if one.text == "guess")
    assert words.get("class") == anchor


def test_lines_of_a_chart_differ_without_colour():
    style = files("vfl.experiments.pages").joinpath("style.css").read_text()
    rules = re.findall(r"^\.line\.s\d \{(.*)\}$", style, re.MULTILINE)
    dashes = [re.findall(r"stroke-dasharray: ([^;]+);", rule) for rule in rules]
    assert len(rules) == len({tuple(one) for one in dashes}) == 8
