"""Pages of results are what stored rows give, and a stale page is refused."""

import shutil
from pathlib import Path

import pytest

from benchmarks import columns, frontier, leaderboard, trees_attacks
from benchmarks.pages import keep
from vfl.core.errors import VFLError

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
