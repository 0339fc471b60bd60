"""The figures of a comparison, from lines made by hand."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from vfl.core.storage import stamp, write_json
from vfl.experiments import Line, LoadedRun
from vfl.experiments.pages.comparison_page import (
    alpha_drawings,
    beside_method,
    curves,
    families,
    frontiers,
    panels,
)

#: Figures of a cell by subject and measure.
FIGURES = {
    ("test rows", "accuracy"): 0.5,
    ("training rows", "accuracy"): 0.7,
    ("training", "loss"): 1.0,
    ("training", "wire_ratio_up"): 0.1,
    ("training", "wire_ratio_down"): 0.1,
    ("all parties", "nonzeros"): 2.0,
    ("all parties", "units"): 4,
    ("all parties", "never_sent"): 1,
}
#: Accuracy, loss and bytes of both directions of each epoch.
EPOCHS = ((0.25, 2.0, 1000), (0.5, 1.0, 4000))


@pytest.fixture
def line(tmp_path):
    """Makes a line with run folders of its repeats, each with changes of what is above."""

    def make(codec, *repeats, method=None, level="", variant="", epochs=EPOCHS):
        about = {"variant": variant, "method": method or codec, "codec": codec, "level": level}
        runs, figures = {}, {}
        for number, changes in enumerate(repeats or [{}]):
            path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            write_json(path / "run.json", stamp())
            runs[f"seed={number}"] = LoadedRun(path)
            own = changes.pop("epochs", epochs)
            (path / "metrics.jsonl").write_text(
                "".join(
                    f"{json.dumps(dict(zip(NAMES, (place, *one, 0), strict=True)))}\n"
                    for place, one in enumerate(own, 1)
                )
            )
            party = {"usage": [5, 10, 0, 5], "rows": 10}
            write_json(path / "codec.json", stamp() | {"parties": {"client": party}})
            for name, value in (FIGURES | changes).items():
                figures.setdefault(name, {})[f"seed={number}"] = value
        return Line(about, list(runs), runs, figures)

    return make


NAMES = ("epoch", "validation_accuracy", "train_loss", "bytes_up", "bytes_down")
SCORE = "test rows", "accuracy"


def beside(*lines):
    return beside_method(lines, lines[0].about["method"])


def drawings(*lines):
    return {one.title: one for one in curves(beside(*lines), "accuracy")}


def heights(drawing):
    """y of the first line's points in the words of its axis, which has even steps."""
    svg = ET.fromstring(drawing.chart)
    ticks = [text for text in svg.iter("text") if text.get("class") == "end"]
    ends = [(float(text.get("y")) - 4, float(text.text)) for text in (ticks[0], ticks[-1])]
    (low_y, low), (high_y, high) = ends
    line = next(p.get("d") for p in svg.iter("path") if p.get("class", "").startswith("line"))
    locations = [float(pair.split()[1]) for pair in re.split("[ML]", line)[1:]]
    return [low + (y - low_y) / (high_y - low_y) * (high - low) for y in locations]


def test_curves_are_means_over_repeats(line):
    second = ((0.35, 2.0, 1000), (0.7, 1.0, 4000))
    found = drawings(line("topk:k=2", {}, {"epochs": second}))
    by_epoch = found["Accuracy by epoch"]
    assert heights(by_epoch) == pytest.approx([30, 60], abs=0.5)
    assert [words for _, words in by_epoch.legend] == ["topk:k=2"]
    by_bytes = ET.fromstring(found["Accuracy by bytes"].chart)
    ticks = [text.text for text in by_bytes.iter("text") if text.get("class") == "mid"]
    assert ticks == ["1\u00a0kB", "2\u00a0kB"]


def test_units_in_order_of_use(line):
    found = drawings(line("topk:k=2"))["How often each unit is sent"]
    assert heights(found) == pytest.approx([100, 50, 50, 0], abs=0.5)
    assert [words for _, words in found.legend] == ["topk:k=2, 1 of 4 never"]


def test_a_chart_a_level_with_those_that_have_none(line):
    matched = [
        line(f"topk:k={k}", method="topk:k=?", level=level) for k, level in ((1, "5"), (2, "10"))
    ]
    found = panels(beside(line("none"), *matched))
    assert [scene.words for scene in found] == ["at 5 %", "at 10 %"]
    assert [[one.about["codec"] for one, _ in scene.lines] for scene in found] == [
        ["none", "topk:k=1"],
        ["none", "topk:k=2"],
    ]
    assert found[0].lines[1][1] == found[1].lines[1][1], "a method looks alike in all charts"
    plain = [line("none", variant=variant) for variant in ("a", "b")]
    assert [scene.words for scene in panels(beside(*plain))] == ["a", "b"]


def test_families_differ_in_alpha_alone(line):
    codecs = [
        "topk:k=2",
        "topk:k=3",
        "topk:k=2,values=4",
        "randtopk:k=2",
        "randtopk:k=2,alpha=0.3",
        "randtopk:k=2,values=4,alpha=0.3",
        "randtopk:k=5,alpha=0.3",
        "size:k=2",
    ]
    found = families(beside(*map(line, codecs)))
    members = {
        one.name: {alpha: own.about["codec"] for alpha, own in one.members.items()} for one in found
    }
    assert members == {
        "k=2": {0.0: "topk:k=2", 0.1: "randtopk:k=2", 0.3: "randtopk:k=2,alpha=0.3"},
        "k=2, values=4": {0.0: "topk:k=2,values=4", 0.3: "randtopk:k=2,values=4,alpha=0.3"},
    }


def test_score_loss_and_gap_by_alpha(line):
    found = [
        line(f"randtopk:k=2,alpha={alpha}", {SCORE: score}, {SCORE: score})
        for alpha, score in ((0.1, 0.4), (0.3, 0.6))
    ]
    score, loss, gap, loss_by_epoch = alpha_drawings(beside(*found), "accuracy")
    assert (score.title, loss.title, gap.title) == (
        "Accuracy by alpha",
        "Training loss by alpha",
        "Generalisation gap by alpha",
    )
    assert loss_by_epoch.title == "Training loss by epoch, k=2"
    assert [words for _, words in loss_by_epoch.legend] == ["alpha = 0.1", "alpha = 0.3"]
    assert heights(loss_by_epoch) == pytest.approx([2, 1], abs=0.01)
    assert heights(score) == pytest.approx([40, 60], abs=0.2)
    assert heights(gap) == pytest.approx([30, 10], abs=0.2)
    whiskers = [p for p in ET.fromstring(score.chart).iter("path") if p.get("class") == "whisker"]
    assert whiskers[0].get("d").count("M") == 2
    assert list(alpha_drawings(beside(line("none")), "accuracy")) == []


def test_nothing_that_sends_less_is_better_than_a_numbered_codec(line):
    def codec(name, up, score, down=None):
        ratios = {"wire_ratio_up": up, "wire_ratio_down": down or up}
        return line(name, {("training", key): one for key, one in ratios.items()} | {SCORE: score})

    found = beside(
        codec("none", 1.0, 0.90),
        codec("topk:k=9", 0.04, 0.88),
        codec("size:k=3", 0.02, 0.80),
        codec("topk:k=3", 0.02, 0.85, down=0.01),
        codec("topk:k=2", 0.03, 0.85),
        codec("size:k=1", 0.01, 0.20),
    )
    (drawing,) = frontiers(found, "accuracy")
    assert [words for _, words in drawing.legend] == [
        "topk:k=3: 85.0 % at 1.50 %",
        "topk:k=9: 88.0 % at 4.00 %",
        "none: 90.0 % at 100.00 %",
    ]
    numbers = re.findall(r'class="mid inside"[^>]*>(\d*)<', drawing.chart)
    assert numbers == ["1", "2", "3"]
    assert drawing.chart.count('r="3"') == 2
    assert not list(frontiers(found, "log_loss"))
    assert not list(frontiers(found[:1], "accuracy"))
