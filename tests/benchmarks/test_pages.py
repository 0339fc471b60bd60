"""Pages of results are what stored rows give, and a stale page is refused."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import columns, frontier, labels, leaderboard, trees_attacks
from benchmarks.pages import keep, written
from vfl.core.errors import DataError, VFLError

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STUDIES = {
    "columns": columns.bench_columns,
    "frontier": frontier.bench_frontier,
    "leaderboard": leaderboard.bench_leaderboard,
    "trees_attacks": trees_attacks.bench_trees_attacks,
}


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_of_a_study_is_what_its_rows_give(name, tmp_path):
    for file in RESULTS.glob("*.csv"):
        shutil.copy(file, tmp_path)
    page = tmp_path / f"{name}.md"
    shutil.copy(RESULTS / page.name, page)  # the page keeps its day
    STUDIES[name](page=page, redraw=True)
    made = [path for path in tmp_path.iterdir() if path.stem.startswith(name)]
    assert page in made
    for path in made:
        assert path.read_bytes() == (RESULTS / path.name).read_bytes(), path.name


def test_a_page_that_differs_is_refused(tmp_path):
    page = tmp_path / "page.md"
    keep(page, "new")
    keep(page, "new", check=True)
    with pytest.raises(VFLError, match="differs from the stored results"):
        keep(page, "newer", check=True)
    assert page.read_text() == "new"


def test_the_page_of_labels_is_what_its_rows_give(tmp_path):
    assert labels.bench_labels(check=True, folder=RESULTS)
    for file in RESULTS.glob("*.csv"):
        shutil.copy(file, tmp_path)
    shutil.copy(RESULTS / "labels.md", tmp_path)
    changed = tmp_path / "labels_mnist_128.csv"
    changed.write_text(changed.read_text().replace("0.9413", "0.9313"))
    with pytest.raises(VFLError, match="differs from the stored results"):
        labels.bench_labels(check=True, folder=tmp_path)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("mnist none accuracy", "97.6"),
        ("mnist potential:alpha=32 cost .2f", "4.88"),
        ("mnist none fine_tuning 5 ±", "89.7 ± 2.5"),
        ("mnist scratch fine_tuning 5", "66.9"),
        ("labels_mnist.csv?attack=kmeans&defense=none#guess*100 .2f", "11.35"),
    ],
)
def test_figures_of_the_page_of_labels(field, text):
    assert labels.text_of(field, RESULTS) == text


def test_a_figure_without_a_stored_row_is_refused():
    with pytest.raises(DataError, match="this stored row does not exist"):
        labels.text_of("mnist none fine_tuning 7", RESULTS)


@dataclass(frozen=True)
class Row:
    name: str
    share: float


def test_a_file_has_each_row_as_soon_as_it_exists(tmp_path):
    file, rows = tmp_path / "rows.csv", [Row("a", 0.12345), Row("=b", 1.0)]
    found = written(rows, file, digits=2)
    assert next(found) == rows[0]
    assert file.read_text() == "name,share\na,0.12\n"
    assert list(found) == rows[1:]
    assert file.read_text() == "name,share\na,0.12\n'=b,1.00\n"
    assert list(written(rows, None)) == rows
