"""The figures of a grid of attacks, from rows made by hand, and its numbers against loops."""

import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from made_records import attacked, utility

from vfl.experiments.attack_tables import shown, summary_table
from vfl.experiments.leaderboard import leaderboard
from vfl.experiments.pages.attack_page import (
    advantages,
    tradeoffs,
)
from vfl.experiments.pages.build import ENVIRONMENT
from vfl.experiments.pages.charts import Point, map_drawing, scatter_drawing
from vfl.experiments.pictures import BINS, angle_histograms, pictures_of, tsne

VALUES = {"none": (0.8, 0.9), "layer_norm": (0.9, 0.95), "potential": (0.3, 0.4)}


def row(defense, k, seed, value):
    baselines = {"scratch": 0.5, "raw": 0.5455 + 0.009 * seed}  # varies as the attack does
    return attacked(defense, "fine_tuning", k, seed, value + 0.01 * seed, baselines=baselines)


ROWS = [
    row(defense, k, seed, value)
    for defense, values in VALUES.items()
    for k, value in zip((1, 5), values, strict=True)
    for seed in (0, 1)
]
GOOD = [utility(defense, seed, 0.97) for defense in VALUES for seed in (0, 1)]
PLACES = leaderboard(ROWS + GOOD, 0.5)


def circles(chart):
    return [
        (float(one.get("cx")), float(one.get("cy")))
        for one in ET.fromstring(str(chart)).iter("circle")
    ]


def test_higher_in_the_drawing_is_worse():
    drawn = {one.title: one for one in tradeoffs(PLACES, ROWS, "accuracy")}
    assert list(drawn) == [
        "The worst attack at k = 1",
        "The worst attack at k = 5",
        "fine_tuning at k = 5",
    ]
    chart = str(drawn["fine_tuning at k = 5"].chart)
    potential, none, layer_norm = (height for _, height in circles(chart))
    assert potential > none > layer_norm  # pixels are counted from the top
    (area,) = re.findall(r'<rect class="safe" x="[\d.]+" y="([\d.]+)"', chart)
    assert none < float(area) < potential
    assert "potential 97.0 and 40.5" in chart


def test_a_line_for_each_defense_with_its_interval():
    (drawing,) = advantages(PLACES)
    assert [words for _, words in drawing.legend] == ["1 potential", "2 none", "3 layer_norm"]
    assert str(drawing.chart).count('class="whisker"') == 3
    assert "potential ends at -14.5" in str(drawing.chart)  # 40.5 less raw's 55


def test_a_tile_for_each_defense_and_k_is_tinted_by_its_verdict():
    shown = str(ENVIRONMENT.get_template("macros.html").module.standings(PLACES))
    lines = {
        line.find("th").text: [(one.get("class"), one.text) for one in line.iter("td")]
        for line in ET.fromstring(shown).find("tbody")
    }
    assert lines["1 potential"] == [("protected", "-24.5"), ("protected", "-14.5")]
    assert [verdict for verdict, _ in lines["2 none"] + lines["3 layer_norm"]] == ["leaks"] * 4
    assert 'title="leaks: fine_tuning reaches 80.5 %"' in shown


def test_a_name_cannot_break_out_of_its_drawing():
    chart = scatter_drawing("<b>", "", "&", [Point("<i>", 1, 1)], "<u>").chart
    assert "<b>" not in str(chart)
    ET.fromstring(str(chart))
    ET.fromstring(str(map_drawing("t", "w", [Point("", 1, 1)]).chart))


def test_angles_are_those_of_a_double_loop():
    cut = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % 3
    found = angle_histograms(cut, labels)
    slow = {True: [], False: []}
    for i in range(12):
        for j in range(i):
            one, other = cut[i].double().numpy(), cut[j].double().numpy()
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            slow[bool(labels[i] == labels[j])].append(math.acos(cosine))
    for name, same in (("same", True), ("different", False)):
        counts, _ = np.histogram(slow[same], BINS, (0, math.pi))
        assert found[name] == pytest.approx((counts / counts.sum()).tolist())
        assert found[f"{name}_mean"] == pytest.approx(np.mean(slow[same]))


def test_a_cut_that_collapsed_is_drawn_too():
    told = pictures_of(torch.ones(20, 4), torch.arange(20) % 2)
    assert told["same_mean"] == told["different_mean"] == 0
    assert all(math.isfinite(x) for place in told["map"] for x in place)
    assert (
        angle_histograms(torch.randn(3, 2), torch.zeros(3, dtype=torch.int64))["different_mean"]
        is None
    )


def test_rows_of_one_class_lie_together_on_the_map():
    labels = torch.arange(60) % 3
    cut = 20 * torch.eye(3, 4)[labels] + torch.randn(
        60, 4, generator=torch.Generator().manual_seed(0)
    )
    locations = torch.tensor(tsne(cut))
    nearest = torch.cdist(locations, locations).fill_diagonal_(math.inf).argmin(1)
    assert bool((labels[nearest] == labels).all())
    assert torch.equal(torch.tensor(tsne(cut)), locations)
    assert tsne(cut[:4]) == []


def test_a_table_of_one_run():
    table = summary_table(ROWS[:4])
    assert table.head[:4] == ["attack", "k", "draws", "measure"]
    assert table.rows[0][:4] == ["fine_tuning", "1", "2", "accuracy"]
    assert table.rows[0][4:] == ["80.5 %", "50.0 %", "55.0 %", "10.0 %"]
    assert shown([], "mse") == ""
