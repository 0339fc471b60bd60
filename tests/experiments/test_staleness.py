"""Cells whose rows or code are no more: marked wherever results are read, and kept."""

import json
import shutil

import pytest

from vfl.compression import CODECS
from vfl.core.storage import read_json, write_json
from vfl.experiments import GridFolder, staleness
from vfl.experiments.pages import build_report
from vfl.experiments.results import records_of, table_of
from vfl.experiments.scheduler import run_cells
from vfl.experiments.study import Results


@pytest.fixture
def copy(trained, tmp_path):
    """A comparison of which every cell is trained."""
    shutil.copytree(trained.path, tmp_path / "grid")
    return GridFolder(tmp_path / "grid")


def record_of(folder, cell):
    return folder.path / "made_of" / f"{cell.name}.json"


def changed(folder, cell, **what):
    write_json(record_of(folder, cell), read_json(record_of(folder, cell)) | what)


def test_nothing_is_stale_of_what_was_just_trained(copy):
    assert staleness.stale_cells(copy) == {}
    content = Results.of(copy.path).content
    assert (content["stale"], content["put_aside"]) == ([], [])
    assert set(table_of(records_of(copy.path)).stale) == {""}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"code": "another"}, staleness.CODE),
        ({"data": "others", "checked": ""}, staleness.ROWS),
        (None, staleness.UNKNOWN),
    ],
)
def test_a_stale_cell_is_in_no_mean_and_in_every_list(copy, what, why):
    cell = copy.cells()[0]  # none, seed 0
    before = {line["codec"]: line for line in Results.of(copy.path).content["codecs"]}
    if what is None:
        record_of(copy, cell).unlink()
    else:
        changed(copy, cell, **what)
    assert staleness.stale_cells(copy) == {cell.name: why}
    results = Results.of(copy.path)
    after = {line["codec"]: line for line in results.content["codecs"]}
    assert (before["none"]["repeats"], after["none"]["repeats"]) == (2, 1)
    other = copy.cells()[2]
    left = read_json(copy.cells_path / other.name / "summary.json")["test_accuracy"]
    assert after["none"]["accuracy"]["mean"] == left
    assert after["topk:k=2"]["accuracy"] == before["topk:k=2"]["accuracy"]
    assert {one["cell"] for one in results.content["stale"]} == {cell.name}
    assert why in results.text
    table = results.table
    assert set(table[table.cell == cell.name].stale) == {why}
    assert set(table[table.cell != cell.name].stale) == {""}
    page = build_report(copy.path).read_text()
    assert why in page[page.index("Stale results, whose rows or code have changed since") :]


def test_a_plug_in_that_cannot_be_loaded_any_more(copy, monkeypatch):
    monkeypatch.setattr(
        CODECS, "_members", {k: v for k, v in CODECS._members.items() if k != "topk"}
    )
    stale = staleness.stale_cells(copy)
    assert set(stale.values()) == {"code of the cell cannot be loaded: no codec is called 'topk'"}
    assert set(stale) == {one.name for one in copy.cells() if "topk" in one.title}


def test_what_is_put_aside_says_why(copy):
    cell = copy.cells()[0]
    weights = read_json(copy.cells_path / cell.name / "summary.json")["weights_sha256"]
    for number in (1, 2):
        changed(copy, cell, code=f"another {number}")
        assert run_cells(copy, [cell]) == []
        kept = copy.stale(cell) / str(number)
        assert read_json(kept / "summary.json")["weights_sha256"] == weights
        note = read_json(kept / staleness.NOTE)
        assert (note["why"], note["was"]["code"]) == (staleness.CODE, f"another {number}")
    assert staleness.put_aside(copy) == [copy.stale(cell) / "1", copy.stale(cell) / "2"]
    assert (
        "2 earlier trainings, with other rows or other code, are kept in stale/"
        in Results.of(copy.path).text
    )
    content = json.loads((copy.path / "results.json").read_text())
    assert content["put_aside"] == [f"stale/{cell.name}/{number}" for number in (1, 2)]
    assert content["stale"] == []
