"""What an attack that searches tried and chose, from its score to the table and the page."""

import json
import statistics

import pytest
from attack_grids import content, played, with_grid

from vfl.core.storage import read_json, read_lines
from vfl.experiments import write_results
from vfl.experiments.attack_tables import searches_table
from vfl.experiments.pages import build_report
from vfl.experiments.results import LoadedGrid, records_of, table_of

ADAPTIVE, PLAIN = "adaptive:at=cut+inputs,candidates=4", "logistic"
CONTENT = content(
    {
        "defenses": ["layer_norm"],
        "attacks": [ADAPTIVE, PLAIN],
        "baselines": ["scratch"],
        "leaks": [3],
        "draws": 2,
    },
    data={"rows": 300},
    train={"epochs": 1},
)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    return played(tmp_path_factory.mktemp("grid") / "searched", with_grid(CONTENT))


def test_the_report_lies_beside_each_score_of_the_search_alone(searched):
    records = LoadedGrid(searched).attacks
    assert {one.subject for one in records} == {ADAPTIVE, PLAIN}
    found = [one for one in records if one.report is not None]
    assert {(one.subject, one.draw) for one in found} == {(ADAPTIVE, 0), (ADAPTIVE, 1)}
    stored = [
        line["report"]
        for path in searched.cells_path.glob("*/attacks.jsonl")
        for line in read_lines(path)
        if line["attack"] == ADAPTIVE and line["bottom"] == "trained"
    ]
    assert sorted(map(json.dumps, stored)) == sorted(json.dumps(one.report) for one in found)
    assert all(len(one["compositions"]) == 4 for one in stored)


def test_the_table_the_page_and_the_json_show_it(searched):
    table = write_results(searched)[0]
    found = [one for one in LoadedGrid(searched).attacks if one.report is not None]
    lines = searches_table(LoadedGrid(searched).attacks).rows
    assert {line[0] for line in lines} == {"none", "layer_norm"}
    line = next(line for line in lines if line[0] == "none")
    reports = [one.report for one in found if one.training == "none"]
    held = statistics.mean(max(one["held_out"] for one in report["compositions"]
                               if one["folds"] == 3) for report in reports)  # fmt: skip
    assert list(line[:5]) == ["none", ADAPTIVE, "3", "2", "4"]
    assert line[7] == f"{100 * held:.1f} %"
    for shown in (table, build_report(searched.path).read_text()):
        assert "share of held-out labels that the best attack infers" in shown
        assert reports[0]["chosen"][0] in shown
    rows = read_json(searched.path / "results.json")["rows"]
    assert [one["report"] for one in rows if one["report"]] == [one.report for one in found]
    assert "report" not in table_of(records_of(searched.path)).columns
