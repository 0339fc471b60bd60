"""The page of printed numbers: what it says, and that stored results give it."""

import csv
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.pages import Figure, read_figure
from benchmarks.published import (
    Printed,
    bench_published,
    joined,
    state_of,
)
from vfl.core.errors import DataError, VFLError

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def rows():
    return joined(RESULTS)


def printed(**other):
    fields = dict.fromkeys(Printed.__dataclass_fields__, "")
    return Printed(**fields | {"printed": "90.0", "unit": "%", "better": "higher"} | other)


def test_the_page_is_what_stored_results_give():
    assert bench_published(check=True, folder=RESULTS)


def test_a_stale_page_is_refused(tmp_path):
    for file in RESULTS.iterdir():
        if file.suffix in (".csv", ".jsonl"):
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "published.md").write_text("old")
    with pytest.raises(VFLError, match="stored results"):
        bench_published(check=True, folder=tmp_path)


def test_nine_of_ten_numbers_have_one_of_ours_and_half_are_reached(rows):
    states = Counter(row.state for row in rows)
    assert states["not run"] <= 0.1 * len(rows)
    assert states["equal"] + states["better"] >= 0.5 * len(rows)


@pytest.mark.parametrize(
    ("source", "numbers"),
    [
        # 63 accuracies and 58 shares of bytes.
        *(("Table 3.2", 121), ("Table 5.1", 8), ("Table 5.2", 48), ("Table 5.3", 48)),
        *(("Table 6.1", 60), ("Table 6.2", 30)),
        *(("running times of protocol 1", 24), ("table of aggregations", 12)),
    ],
)
def test_tables_are_whole(rows, source, numbers):
    assert sum(row.printed.source == source for row in rows) == numbers


def test_every_number_stands_once(rows):
    said = Counter((it.source, it.what, it.setting) for it in (row.printed for row in rows))
    assert not [where for where, times in said.items() if times > 1]


@pytest.mark.parametrize(
    ("ours", "other", "state"),
    [
        (None, {}, "not run"),
        (Figure(50.0), {"data": "digits"}, "other data"),
        (Figure(90.04), {}, "equal"),
        (Figure(90.2), {}, "better"),
        (Figure(90.2), {"better": "lower"}, "worse"),
        (Figure(89.0, noise=1.0), {}, "equal"),
        (Figure(89.0), {"spread": "1.2"}, "equal"),
        (Figure(89.0), {"within": "1"}, "equal"),
        (Figure(94.0), {"better": "lower", "unit": "ms"}, "equal"),
        (Figure(95.0), {"better": "lower", "unit": "ms"}, "worse"),
        (Figure(91.0), {"better": "near"}, "worse"),
    ],
)
def test_states(ours, other, state):
    assert state_of(printed(**other), ours) == state


def test_seeds_are_averaged_with_their_interval(tmp_path):
    with (tmp_path / "two.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("seed", "codec", "score"), (0, "a", 0.4), (1, "a", 0.6)])
    found = read_figure("two.csv?codec=a#score*100", tmp_path)
    assert found.value == pytest.approx(50)
    assert found.noise == pytest.approx(2 * 10 * 2**0.5 / 2**0.5)
    assert read_figure("100 - two.csv?seed=0#score*100", tmp_path).value == pytest.approx(60)
    ratio = read_figure("two.csv?seed=1#score / two.csv?seed=0#score", tmp_path)
    assert ratio.value == pytest.approx(1.5)


@pytest.mark.parametrize("link", ["none.csv?a=b#c", "published_ours.csv?key=none#value", "words"])
def test_links_that_lead_nowhere(link):
    with pytest.raises(DataError, match="this stored"):
        read_figure(link, RESULTS)


def test_a_number_without_result_or_reason_is_refused(tmp_path):
    with (tmp_path / "published.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Printed.__dataclass_fields__))
        writer.writeheader()
        writer.writerow({"paper": "a", "source": "Table 1", "printed": "1"})
    with pytest.raises(DataError, match="neither a result nor a reason"):
        joined(tmp_path)
